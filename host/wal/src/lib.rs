//! The write-ahead log: a durable log of opaque records with group commit, recycled segments,
//! snapshots and recovery. `host/docs/journal-format.md` describes the files.
//!
//! The crate does not interpret records. The path of a record:
//!
//! ```text
//! append ─ pending ── log ─────── segment ─ disk
//!          a copy     a frame,    a file    a directory,
//!          under a    one write,  of        or a simulated
//!          leaf lock  one sync    frames    one
//! ```
//!
//! * `pending` holds records that are appended and not yet written. It does no I/O.
//! * [`Log`] writes them as one `frame`, syncs and publishes the position. It has no threads, so
//!   that tests and the copy of another log can drive it.
//! * [`WriteAheadLog`] is a log with its threads, which commit once per wake-up. Appenders never
//!   wait for the disk; a caller that appends much must first ask whether the log is behind.
//! * `notifier` reports positions that became durable.
//! * `upkeep` prepares spare segments and takes snapshots. `retention` removes history. `budget`
//!   divides the disk.
//! * `newest` records which segment is the newest, so that a missing one is recognized.
//! * `figures` reports space and times to operators.
//! * `survey` and `recovery` read the newest intact snapshot and the log after it, or fail with a
//!   reason. `reading` does the same for tools while another process writes: see [`read`]. `reopen`
//!   makes durable what was read.
//! * `backup` writes a state to one file of its own, and reads it.
//! * [`inspect`] examines every file. [`DiskUse`] adds up the space that the files take.
//! * [`Disk`] and [`File`] are the interface to the file system.
//!
//! Invariants:
//!
//! * Records that were reported durable must survive every crash unchanged, and the surviving
//!   records are a prefix of the appended ones.
//! * A log whose durable records cannot all be read must refuse to open.
//! * An error of a write or a sync is final. Nothing may be reported durable after it.
#![forbid(unsafe_code)]

mod backup;
mod budget;
mod catalogue;
mod disk;
mod error;
mod figures;
mod files;
mod frame;
mod inspect;
pub mod limits;
mod log;
mod newest;
mod notifier;
mod options;
mod pending;
mod probe;
mod reading;
mod recovery;
mod reopen;
mod retention;
mod segment;
#[cfg(any(test, feature = "simulation"))]
pub mod simulation;
mod snapshot;
mod survey;

#[cfg(test)]
mod tests;
mod upkeep;
mod usage;
mod writer;

pub use backup::{Backup, read_snapshot_file, write_snapshot_file};
pub use budget::disk_bytes;
pub use disk::{Directory, Disk, File};
pub use error::{Damage, Error, Failure, LaterFormat};
pub use figures::{LogFigures, LogTimes};
pub use files::{Kind, LOCK};
pub use inspect::{FileReport, Report, Verdict, inspect};
pub use log::{Log, Opened};
pub use options::{Durability, Options};
pub use probe::{Probed, probe, probe_leftovers, probe_lock, probe_room};
pub use reading::read;
pub use recovery::{Base, Discard, Range, Sink};
pub use snapshot::Source;
pub use statehouse_protocol::LogPosition;
pub use upkeep::{Room, Snapshot, has_log};
pub use usage::DiskUse;
pub use writer::{Callbacks, WriteAheadLog};
