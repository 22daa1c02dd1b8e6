//! Makes what steps did durable, in their order.
//!
//! What enters: what a step did. What leaves: a position, and how far everything may leave the host. A
//! record holds effects and what they were decided on, so that recovery runs no policy and a replay can.
//! What records mean is said here; files, frames and flushes belong to the implementation of [`Journal`].

mod codec;
mod entries;
mod image;
pub mod record;
mod recorder;
mod records;
mod snapshot;
mod unreleased;

pub use codec::Malformed;
pub use entries::Entries;
pub use image::{Forgotten, Image};
pub use recorder::Recorder;
pub use records::Records;
pub use snapshot::{Block, Meta, Progress, module_block, read_block, sessions as sessions_block};
pub use statehouse_protocol::LogPosition;

/// Where records are kept.
pub trait Journal: Send + Sync {
    /// Whether anything is kept at all.
    fn keeps(&self) -> bool;
    /// Appends records, all of them or none; returns the position of the last. An urgent one is on disk
    /// before it counts as released. It never waits for a disk.
    fn append(&self, records: &[&[u8]], urgent: bool) -> LogPosition;
    /// What was decided up to here may leave the host.
    fn released(&self) -> LogPosition;
    /// Where a write is when its answer leaves, in the word that the answer says.
    fn persisted(&self, urgent: bool) -> &'static str;
    /// Whether there is room for more than removals.
    fn has_room(&self) -> bool;
    /// What a start says about it: one line for the operator.
    fn promise(&self) -> String;
}

/// Keeps nothing: everything may leave at once.
#[derive(Clone, Copy, Debug, Default)]
pub struct Memory;

impl Journal for Memory {
    fn keeps(&self) -> bool {
        false
    }

    fn append(&self, _records: &[&[u8]], _urgent: bool) -> LogPosition {
        LogPosition(0)
    }

    fn released(&self) -> LogPosition {
        LogPosition(0)
    }

    fn persisted(&self, _urgent: bool) -> &'static str {
        "memory"
    }

    fn has_room(&self) -> bool {
        true
    }

    fn promise(&self) -> String {
        "the store is in memory: a restart forgets everything".into()
    }
}
