//! Definitions that all parts of a state store share, on both sides of the wire and of the sandbox.
//!
//! * [`Histogram`]: times, for metrics.
//! * [`pattern`]: key patterns, as SCAN reads them.
//! * [`LogPosition`]: the number of a log record. [`SessionId`], [`ConnectionId`]: numbers of MQTT
//!   sessions and connections.
//! * [`topics`]: where requests and notifications go.
//! * [`Peer`]: the connection behind a request.
//! * [`rights`]: the rights of a client to keys.
//! * [`Shown`]: keys, topics and names as text for people.
//! * [`ProgramVersion`]: the version of this program, and of the one that wrote a file.
//!
//! This crate depends on no other crate of the workspace and does no I/O.
#![no_std]
#![forbid(unsafe_code)]

#[cfg(test)]
extern crate std;

extern crate alloc;

mod histogram;
mod ids;
pub mod pattern;
mod peer;
mod program;
pub mod rights;
mod text;
pub mod topics;

pub use histogram::{Histogram, TimeBucket};
pub use ids::{ConnectionId, LogPosition, SessionId};
pub use peer::{OPERATOR_CLIENT, Peer};
pub use program::{ProgramVersion, WrittenBy};
pub use text::Shown;
