//! Figures of a log for operators: its disk space and its times. Nothing is decided on them.

use std::sync::TryLockError;
use std::sync::atomic::Ordering;
use std::time::Duration;

use statehouse_protocol::Histogram;

use crate::catalogue::Catalogue;
use crate::log::{Log, locked};

/// The bounds of the times of a flush: an NVMe disk with a power-safe cache takes 50 µs, an SD card
/// some hundred milliseconds, and a failing disk seconds.
static FLUSH_BOUNDS: [Duration; 12] = [
    Duration::from_micros(50),
    Duration::from_micros(100),
    Duration::from_micros(250),
    Duration::from_micros(500),
    Duration::from_millis(1),
    Duration::from_micros(2_500),
    Duration::from_millis(5),
    Duration::from_millis(10),
    Duration::from_millis(25),
    Duration::from_millis(100),
    Duration::from_secs(1),
    Duration::from_secs(10),
];

/// The bounds of the times of a snapshot, which is paced.
static SNAPSHOT_BOUNDS: [Duration; 9] = [
    Duration::from_millis(10),
    Duration::from_millis(50),
    Duration::from_millis(250),
    Duration::from_secs(1),
    Duration::from_secs(5),
    Duration::from_secs(15),
    Duration::from_secs(60),
    Duration::from_secs(300),
    Duration::from_secs(1_800),
];

/// How long flushes and snapshots took.
#[derive(Clone, Debug)]
pub struct LogTimes {
    /// Flushes of a segment.
    pub flushes: Histogram,
    /// Snapshots that became complete.
    pub snapshots: Histogram,
}

impl Default for LogTimes {
    fn default() -> Self {
        Self {
            flushes: Histogram::new(&FLUSH_BOUNDS),
            snapshots: Histogram::new(&SNAPSHOT_BOUNDS),
        }
    }
}

/// What a log holds, in bytes. Upkeep notes the space about once a second.
#[derive(Clone, Debug)]
pub struct LogFigures {
    /// Free bytes of the file system.
    pub free: u64,
    /// Whether the file system has no free inodes, so that no file can be created.
    pub no_free_inodes: bool,
    /// Segments that recovery needs, including their unused part.
    pub log: u64,
    /// Older segments and snapshots.
    pub history: u64,
    /// The newest snapshot.
    pub snapshot: u64,
    /// Segments that are ready for use.
    pub spares: u64,
    /// A snapshot in progress.
    pub temporary: u64,
    /// Records that are appended and not yet written.
    pub unwritten: u64,
    /// Records that can still be appended until growth is refused.
    pub room: u64,
    /// How long flushes and snapshots took.
    pub times: LogTimes,
}

/// The space on disk of files that the catalogue lists, in bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Space {
    pub(crate) log: u64,
    pub(crate) history: u64,
    pub(crate) snapshot: u64,
}

impl Space {
    pub(crate) fn of(catalogue: &Catalogue) -> Self {
        let newest = catalogue.snapshots.back();
        let snapshot = newest.map_or(0, |newest| newest.bytes);
        let history = newest.map_or(0, |newest| catalogue.bytes_before(newest.position));
        let all: u64 = catalogue.segments.iter().map(|link| link.bytes).sum();
        let snapshots: u64 = catalogue.snapshots.iter().map(|info| info.bytes).sum();
        Self {
            log: all + snapshots - history - snapshot,
            history,
            snapshot,
        }
    }
}

impl Log {
    /// The figures of this log. Never waits for the disk: its space is that of the last call while
    /// the catalogue is in use.
    #[must_use]
    pub fn figures(&self) -> LogFigures {
        let mut space = locked(&self.space);
        match self.catalogue.try_lock() {
            Ok(catalogue) => *space = Space::of(&catalogue),
            Err(TryLockError::Poisoned(poisoned)) => *space = Space::of(&poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => {}
        }
        let Space {
            log,
            history,
            snapshot,
        } = *space;
        drop(space);
        let load = |it: &std::sync::atomic::AtomicU64| it.load(Ordering::Acquire);
        let room = load(&self.refuse_at_bytes).saturating_sub(load(&self.appended_bytes));
        LogFigures {
            free: load(&self.disk_free_bytes),
            no_free_inodes: self.no_free_inodes.load(Ordering::Acquire),
            log,
            history,
            snapshot,
            spares: load(&self.spare_bytes),
            temporary: load(&self.temporary_bytes),
            unwritten: self.unwritten_bytes() as u64,
            room: match self.is_short.load(Ordering::Acquire) {
                true => 0,
                false => room,
            },
            times: locked(&self.times).clone(),
        }
    }
}
