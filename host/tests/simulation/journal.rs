//! The log as the store and the broker use it, as `host/src/data_directory/disk.rs` does it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use statehouse_core::log::{Journal, JournalRoom, record};
use statehouse_mqtt::Persistence;
use statehouse_wal::{Log, LogPosition, Room};

/// The log, and the bytes appended to it.
pub(crate) struct LogJournal(pub(crate) Arc<Log>, AtomicU64);

impl LogJournal {
    pub(crate) fn new(log: Arc<Log>) -> Self {
        Self(log, AtomicU64::new(0))
    }
}

impl Journal for LogJournal {
    fn keeps(&self) -> bool {
        true
    }

    fn append(&self, records: &[&[u8]], urgent: bool) -> LogPosition {
        let bytes: usize = records.iter().map(|it| it.len()).sum();
        self.1.fetch_add(bytes as u64, Ordering::Relaxed);
        let appended = match urgent {
            true => self.0.append_urgent(records),
            false => self.0.append(records),
        };
        appended.expect("small records")
    }

    fn released(&self) -> LogPosition {
        self.0.released()
    }

    fn persisted(&self, _urgent: bool) -> &'static str {
        "disk"
    }

    fn room(&self) -> JournalRoom {
        match self.0.room() {
            Room::Plenty | Room::Tight => JournalRoom::Growth,
            // Removals are not refused here, and wait for the disk: the oracle knows one kind of full
            // disk.
            Room::Reserve | Room::None => JournalRoom::Removals,
        }
    }

    fn promise(&self) -> String {
        String::new()
    }
}

impl Persistence for LogJournal {
    fn append(&self, changes: &[u8]) -> LogPosition {
        let mut record = Vec::new();
        record::sessions(&mut record, changes);
        Journal::append(self, &[&record], false)
    }

    fn released(&self) -> LogPosition {
        self.0.released()
    }

    fn has_room(&self) -> bool {
        Journal::has_room(self)
    }

    fn appended_here(&self) -> u64 {
        self.1.load(Ordering::Relaxed)
    }
}
