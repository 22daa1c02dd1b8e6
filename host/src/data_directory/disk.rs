//! The log of a data directory, as the store ([`Journal`]) and the broker ([`Persistence`]) use
//! it.
//!
//! If an append fails, the process must end: the state is ahead of the log by then.

use std::sync::Arc;

use statehouse_mqtt::Persistence;
use statehouse_wal::{LogPosition, Room};

use super::appended;
use statehouse_config::Durability;
use statehouse_core::log::{Journal, JournalRoom, record};
use statehouse_server::logging;

/// Writes the records of the store and of the broker to the log.
pub struct Disk {
    log: statehouse_wal::WriteAheadLog,
    durability: Durability,
    place: String,
}

impl Disk {
    /// Uses a running log with this durability. `place` is its directory, for messages.
    pub fn new(
        log: statehouse_wal::WriteAheadLog,
        durability: Durability,
        place: String,
    ) -> Arc<Self> {
        Arc::new(Self {
            log,
            durability,
            place,
        })
    }

    /// The underlying log.
    pub fn log(&self) -> &statehouse_wal::WriteAheadLog {
        &self.log
    }
}

impl Journal for Disk {
    fn keeps(&self) -> bool {
        true
    }

    fn append(&self, records: &[&[u8]], urgent: bool) -> LogPosition {
        appended::add(records);
        let appended = if urgent {
            self.log.append_urgent(records)
        } else {
            self.log.append(records)
        };
        appended.unwrap_or_else(|error| {
            // The limit of a record is far below that of the log, so this is a bug. The state
            // is ahead of the log now: the store would answer from state that a restart loses.
            tracing::error!(%error, "a record cannot be appended to the write-ahead log; stopping");
            logging::exit(statehouse_server::EXIT_STATE_LOST)
        })
    }

    fn released(&self) -> LogPosition {
        self.log.released()
    }

    fn persisted(&self, urgent: bool) -> &'static str {
        match self.durability {
            Durability::Interval if !urgent => "interval",
            _ => "disk",
        }
    }

    fn room(&self) -> JournalRoom {
        match self.log.room() {
            Room::Plenty | Room::Tight => JournalRoom::Growth,
            Room::Reserve => JournalRoom::Removals,
            Room::None => JournalRoom::Nothing,
        }
    }

    fn fits(&self, bytes: u64) -> bool {
        self.log.fits(bytes)
    }

    fn promise(&self) -> String {
        match self.durability {
            Durability::Interval => format!(
                "the store is in {}: a write is on disk some time after its answer (--durability interval)",
                self.place
            ),
            _ => format!(
                "the store is in {}: a write is on disk before its answer",
                self.place
            ),
        }
    }
}

impl Persistence for Disk {
    fn append(&self, changes: &[u8]) -> LogPosition {
        let mut record = Vec::with_capacity(changes.len() + 1);
        record::sessions(&mut record, changes);
        Journal::append(self, &[&record], false)
    }

    fn released(&self) -> LogPosition {
        self.log.released()
    }

    fn has_room(&self) -> bool {
        Journal::has_room(self)
    }

    fn is_behind(&self) -> bool {
        self.log.is_behind()
    }

    fn appended_here(&self) -> u64 {
        appended::here()
    }
}
