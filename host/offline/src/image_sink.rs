//! Rebuilds the state from the snapshots and records of a data directory.

use statehouse_core::log::Image;
use statehouse_protocol::LogPosition;
use statehouse_wal::Sink;

/// Applies the blocks and records that the log delivers to an image.
pub struct ImageSink<'a>(pub &'a mut Image);

impl Sink for ImageSink<'_> {
    fn reset(&mut self) {
        self.0.reset();
    }

    fn block(&mut self, block: &[u8]) -> Result<(), String> {
        self.0.block(block).map_err(|error| error.to_string())
    }

    fn record(&mut self, _: LogPosition, record: &[u8]) -> Result<(), String> {
        self.0.record(record).map_err(|error| error.to_string())
    }
}
