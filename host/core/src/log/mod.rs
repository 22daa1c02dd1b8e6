//! The record format, and the trait of the log that stores records.
//!
//! A record holds the effects of a step and everything that they depended on, so that recovery runs
//! no policy and a replay can. Files, frames and flushes belong to the implementation of
//! [`Journal`].

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

use crate::limits;

/// The time up to which a start after a crash skips versions, if the disk or the wall clock shows a
/// version of `version_ms` and a time of `now_ms`. Clients refuse versions that are much later than
/// the time, so it has an upper limit.
///
/// An answer with a version of this time or later must wait for the disk, or a start could assign
/// the version again. Neither argument may make the result smaller when it rises: the start may
/// know more than the recorder did.
fn skipped_to_ms(version_ms: u64, now_ms: u64) -> u64 {
    let ahead_ms = limits::UNRECORDED_AHEAD_MS_MAX + 1;
    let skipped_to = version_ms.max(now_ms).saturating_add(ahead_ms);
    let latest = version_ms.max(now_ms.saturating_add(limits::SKEW_MS_MAX));
    skipped_to.min(latest)
}

/// What may be appended to a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JournalRoom {
    /// Everything.
    Growth,
    /// Only what removes something: the disk is full but for a reserve.
    Removals,
    /// Nothing. Records would wait for the disk, and responses would wait for them.
    Nothing,
}

/// A log of records.
pub trait Journal: Send + Sync {
    /// Whether records are stored at all.
    fn keeps(&self) -> bool;
    /// Appends all records or none, and returns the position of the last one. An urgent record is
    /// flushed to disk before its position counts as released. Must never wait for the disk,
    /// because the store's lock is held.
    fn append(&self, records: &[&[u8]], urgent: bool) -> LogPosition;
    /// The position up to which effects may be sent to clients.
    fn released(&self) -> LogPosition;
    /// The durability of a write when its answer is sent, as the text of the answer's `persisted`
    /// property.
    fn persisted(&self, urgent: bool) -> &'static str;
    /// What may still be appended.
    fn room(&self) -> JournalRoom;
    /// Whether there is room for more than removals.
    fn has_room(&self) -> bool {
        self.room() == JournalRoom::Growth
    }
    /// Whether there is room for this many bytes of records besides what removals need. A log that
    /// does not count them says whether there is room at all.
    fn fits(&self, _bytes: u64) -> bool {
        self.has_room()
    }
    /// Whether every program that reads the log knows records of new deadlines. Version 0.1.0 does
    /// not, and its hosts may read the log of a cluster.
    fn knows_deadlines(&self) -> bool {
        true
    }
    /// What is full if there is no room, what still works, and what to do.
    fn shortage(&self) -> &'static str {
        match self.room() {
            JournalRoom::Nothing => {
                "there is no room on the disk for the next records: all writes are refused. Free disk space"
            }
            _ => "the disk is full: writes are refused, reads and removals are not",
        }
    }
    /// The durability guarantee: one line for the operator at a start.
    fn promise(&self) -> String;
}

/// Stores nothing, so all effects may be sent at once.
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

    fn room(&self) -> JournalRoom {
        JournalRoom::Growth
    }

    fn promise(&self) -> String {
        "the store is in memory: a restart forgets everything".into()
    }
}
