//! A log in memory, for tests.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use super::{Journal, JournalRoom, LogPosition};

/// Keeps records in memory and releases them at once, until a test calls [`Records::hold`].
#[derive(Debug, Default)]
pub struct Records {
    records: Mutex<Vec<Vec<u8>>>,
    urgent: AtomicU64,
    held: AtomicBool,
    old_readers: AtomicBool,
}

impl Records {
    /// All records, in order.
    pub fn all(&self) -> Vec<Vec<u8>> {
        let records = self.records.lock();
        records.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// How often urgent records were appended.
    pub fn urgent(&self) -> u64 {
        self.urgent.load(Ordering::Acquire)
    }

    /// Releases no more records, like a disk that hangs.
    pub fn hold(&self) {
        self.held.store(true, Ordering::Release);
    }

    /// Hosts of version 0.1.0 read the records from now on.
    pub fn add_old_readers(&self) {
        self.old_readers.store(true, Ordering::Release);
    }
}

impl Journal for Records {
    fn keeps(&self) -> bool {
        true
    }

    fn append(&self, records: &[&[u8]], urgent: bool) -> LogPosition {
        self.urgent.fetch_add(urgent.into(), Ordering::AcqRel);
        let mut all = (self.records.lock()).unwrap_or_else(PoisonError::into_inner);
        all.extend(records.iter().map(|record| record.to_vec()));
        LogPosition(all.len() as u64)
    }

    fn released(&self) -> LogPosition {
        match self.held.load(Ordering::Acquire) {
            true => LogPosition(0),
            false => LogPosition(u64::MAX),
        }
    }

    fn persisted(&self, _urgent: bool) -> &'static str {
        "memory"
    }

    fn room(&self) -> JournalRoom {
        JournalRoom::Growth
    }

    fn knows_deadlines(&self) -> bool {
        !self.old_readers.load(Ordering::Acquire)
    }

    fn promise(&self) -> String {
        String::new()
    }
}
