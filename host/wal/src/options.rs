//! How a journal is kept.

use std::time::Duration;

use crate::limits;

/// When an append counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// What is released is on disk.
    Always,
    /// What is appended is released at once, urgent groups excepted, and reaches the disk within this time.
    Interval(Duration),
}

/// How a journal is kept. Numbers out of their bounds are brought into them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// When an append counts. Default: [`Durability::Always`].
    pub durability: Durability,
    /// How long a commit waits for company. It saves flash: a commit of one small record costs a
    /// whole block. Default: none; at most [`limits::COMMIT_DELAY_MS_MAX`].
    pub commit_delay: Duration,
    /// Length of a segment: at most a thirty-second of the disk. Default: 4 MiB.
    pub segment_bytes: u64,
    /// A snapshot is due when the log behind the last one is longer than this, or than what history keeps anyway
    /// ([`limits::SNAPSHOT_AFTER_BYTES_MAX`]) … Default: 8 MiB.
    pub snapshot_min_bytes: u64,
    /// … and longer than this many times the last snapshot. Default: 2.
    pub snapshot_factor: u64,
    /// How fast a snapshot is written. Default: 32 MiB/s; at least 64 KiB/s.
    pub snapshot_bytes_per_second: u64,
    /// How much log and how many snapshots are kept beyond what recovery needs, at most a quarter of the disk, and none
    /// where the room is needed. Default: 256 MiB.
    pub history_bytes: u64,
    /// How old they may be. Default: a week.
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
    /// With segments that fit a disk of this size.
    pub(crate) fn fitted(mut self, disk_bytes: u64) -> Self {
        let part = disk_bytes / limits::SEGMENT_DISK_PART;
        let whole = part - part % limits::SEGMENT_BYTES_MIN;
        self.segment_bytes = self.segment_bytes.min(whole.max(limits::SEGMENT_BYTES_MIN));
        self
    }

    pub(crate) fn bounded(mut self) -> Self {
        self.commit_delay = self
            .commit_delay
            .min(Duration::from_millis(limits::COMMIT_DELAY_MS_MAX));
        self.segment_bytes = self
            .segment_bytes
            .clamp(limits::SEGMENT_BYTES_MIN, limits::SEGMENT_BYTES_MAX);
        self.snapshot_bytes_per_second = self
            .snapshot_bytes_per_second
            .max(limits::SNAPSHOT_BYTES_PER_SECOND_MIN);
        self
    }
}
