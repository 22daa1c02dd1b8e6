//! The replicated log of a cluster, on an existing consensus engine.
#![forbid(unsafe_code)]

mod clock;
mod codec;
mod embedder;
mod engine;
mod error;
mod follower;
mod frame;
mod head;
mod host;
mod keys;
mod leader;
pub mod limits;
mod member;
mod options;
#[cfg(any(test, feature = "simulation"))]
pub mod simulated;

#[cfg(test)]
mod tests;

pub use clock::{Clock, MachineClock};
pub use codec::Malformed;
pub use embedder::{Embedder, Ended, Takeover};
pub use engine::{
    Call, Change, Condition, Engine, EngineError, KeyRange, Outcome, Page, Revision, Status,
    Transaction, Value, Watch,
};
pub use error::Stop;
pub use frame::{Assembler, FRAME_FORMAT, FRAME_HEADER_BYTES, Frame, Kind, chain, records};
pub use head::{Chain, HEAD_FORMAT, Head, Id, SnapshotInfo};
pub use leader::{LeaderLog, NotLeading, TooLarge};
pub use member::{Member, create};
#[cfg(any(test, feature = "simulation"))]
pub use options::Broken;
pub use options::{Options, Reads, Sizes, Timing};
pub use statehouse_protocol::LogPosition;
