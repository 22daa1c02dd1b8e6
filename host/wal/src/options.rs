//! The configuration of a log.

use std::time::Duration;

use crate::limits;

/// When a record is released, so that its effects may be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// A record is released when it is durable.
    Always,
    /// A record is released when it is appended and becomes durable within this time. Urgent groups
    /// are released when they are durable.
    Interval(Duration),
}

/// The configuration of a log. Values outside their limits are clamped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// When records are released. Default: [`Durability::Always`].
    pub durability: Durability,
    /// How long a commit waits for more records. A delay reduces flash wear: a commit of one small
    /// record writes a whole block. Default: none; at most [`limits::COMMIT_DELAY_MS_MAX`].
    pub commit_delay: Duration,
    /// Length of a segment, at most 1/32 of the disk. Default: 4 MiB.
    pub segment_bytes: u64,
    /// A snapshot is due when the log after the last one is longer than this and than
    /// `snapshot_factor` allows. If history is kept, the minimum is higher
    /// ([`limits::SNAPSHOT_AFTER_BYTES_MAX`]). Default: 8 MiB.
    pub snapshot_min_bytes: u64,
    /// Before a snapshot is due, the log must also be longer than this multiple of the last
    /// snapshot. Default: 2.
    pub snapshot_factor: u64,
    /// Bytes of a snapshot that are written per second. Default: 32 MiB; at least 64 KiB.
    pub snapshot_bytes_per_second: u64,
    /// Bytes of segments and snapshots that are kept beyond what recovery needs: at most a quarter
    /// of the disk, and none if the space is needed. Default: 256 MiB.
    pub history_bytes: u64,
    /// Age up to which history is kept. Default: a week.
    pub history_ms: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            durability: Durability::Always,
            commit_delay: Duration::ZERO,
            segment_bytes: 4 << 20,
            snapshot_min_bytes: 8 << 20,
            snapshot_factor: 2,
            snapshot_bytes_per_second: 32 << 20,
            history_bytes: 256 << 20,
            history_ms: 7 * 24 * 3_600_000,
        }
    }
}

impl Options {
    /// Clamps the values to their limits, and the length of segments to a disk of this size.
    pub(crate) fn fitted(mut self, disk_bytes: u64) -> Self {
        let part = disk_bytes / limits::SEGMENT_DISK_PART;
        let whole = part - part % limits::SEGMENT_BYTES_MIN;
        let bytes_max = whole.clamp(limits::SEGMENT_BYTES_MIN, limits::SEGMENT_BYTES_MAX);
        self.segment_bytes = (self.segment_bytes).clamp(limits::SEGMENT_BYTES_MIN, bytes_max);
        let delay_max = Duration::from_millis(limits::COMMIT_DELAY_MS_MAX);
        self.commit_delay = self.commit_delay.min(delay_max);
        self.snapshot_bytes_per_second = self
            .snapshot_bytes_per_second
            .max(limits::SNAPSHOT_BYTES_PER_SECOND_MIN);
        self
    }
}
