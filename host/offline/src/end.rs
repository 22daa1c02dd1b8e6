//! The end of a log.

use statehouse_wal::{Base, LogPosition, Sink};

use super::{Past, PastError};
use crate::replay::time_of;
use statehouse_core::log::{Block, read_block, record};

impl Past {
    /// The last record, and the store's time there in milliseconds since 1970. Reads the newest
    /// snapshot and the log after it. Fails if they cannot be read.
    pub fn end(&self) -> Result<(LogPosition, u64), PastError> {
        let mut clock = Clock::default();
        let range = self.read(Base::Newest, LogPosition::END, &mut clock)?;
        Ok((range.end, clock.0))
    }
}

/// The latest time that was read, in milliseconds.
#[derive(Default)]
struct Clock(u64);

impl Sink for Clock {
    fn reset(&mut self) {
        *self = Self::default();
    }

    fn block(&mut self, block: &[u8]) -> Result<(), String> {
        if let Block::Meta(meta) = read_block(block).map_err(|error| error.to_string())? {
            self.0 = self.0.max(meta.now_ms);
        }
        Ok(())
    }

    fn record(&mut self, _: LogPosition, record: &[u8]) -> Result<(), String> {
        let record = record::read(record).map_err(|error| error.to_string())?;
        self.0 = self.0.max(time_of(&record).unwrap_or_default());
        Ok(())
    }
}
