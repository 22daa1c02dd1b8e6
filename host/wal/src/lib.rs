//! A durable log of opaque records: group commit, recycled segments, snapshots, recovery.
//!
//! Records go in, positions come out; what a record means is for others to know. The path of a record:
//!
//! ```text
//! append ─ pending ── log ─────── segment ─ disk
//!          a copy     a frame,    a file    a directory,
//!          under a    one write,  of        or a simulated
//!          leaf lock  one sync    frames    one
//! ```
//!
//! * `pending`: what is appended and not yet written. It does no I/O.
//! * [`Log`]: writes it as one `frame`, syncs, publishes. No threads: a test can drive it.
//! * [`Journal`]: a log with its threads. One commit per wake-up. Appenders never wait for the
//!   disk; a caller that adds much asks first whether the log is behind.
//! * `upkeep`: spare segments made ready, snapshots taken; `retention`: history let go; `budget`:
//!   how the disk is divided.
//! * `newest`: which segment is the newest, so that a missing one is recognized.
//! * `survey` and `recovery`: the newest whole snapshot and the log behind it, or a refusal in words; [`read`] does the
//!   same for tools, beside a process that writes. `settle` makes durable what was read.
//! * [`inspect`]: looks at every file and judges it. [`DiskUse`]: adds up what the files take.
//! * [`Disk`] and [`File`]: the seam to the file system.
//!
//! What was reported durable is there after any crash, byte for byte, and the records that survive
//! are a prefix of those appended. What was durable and cannot be read refuses to open. An error of a
//! write or a sync is final.
#![forbid(unsafe_code)]

mod budget;
mod catalogue;
mod disk;
mod error;
mod files;
mod frame;
mod inspect;
pub mod limits;
mod log;
mod newest;
mod options;
mod pending;
mod recovery;
mod retention;
mod segment;
mod settle;
#[cfg(any(test, feature = "simulation"))]
pub mod simulation;
mod snapshot;
mod survey;
mod teller;
#[cfg(test)]
mod tests;
mod upkeep;
mod usage;
mod writer;

pub use budget::disk_bytes;
pub use disk::{Directory, Disk, File};
pub use error::{Damage, Error, Failure};
pub use files::Kind;
pub use inspect::{FileReport, Report, Verdict, inspect};
pub use log::{Log, Opened};
pub use options::{Durability, Options};
pub use recovery::{Base, Range, Sink, read};
pub use snapshot::{Source, read_snapshot_file, write_snapshot_file};
pub use statehouse_protocol::LogPosition;
pub use upkeep::{Room, Snapshot, create_from_snapshot, has_journal};
pub use usage::DiskUse;
pub use writer::{Callbacks, Journal};
