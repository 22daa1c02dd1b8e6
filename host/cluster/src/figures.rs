//! Figures of a host for operators. Nothing is decided on them, so each is read on its own.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use statehouse_protocol::{Histogram, LogPosition};

use crate::engine::EngineError;
use crate::head::Head;

/// The bounds of the buckets of [`Figures::appends`]: a commit on a fast disk and network takes
/// 1 ms, and an election in etcd some seconds.
static APPEND_BOUNDS: [Duration; 13] = [
    Duration::from_micros(500),
    Duration::from_millis(1),
    Duration::from_micros(2_500),
    Duration::from_millis(5),
    Duration::from_millis(10),
    Duration::from_millis(25),
    Duration::from_millis(50),
    Duration::from_millis(100),
    Duration::from_millis(250),
    Duration::from_millis(500),
    Duration::from_secs(1),
    Duration::from_millis(2_500),
    Duration::from_secs(10),
];

/// How the leadership before this host's ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum After {
    /// Its leader handed over.
    Handover = 0,
    /// It was a leadership of an earlier process of this host.
    Restart = 1,
    /// Its leader was silent.
    Silence = 2,
}

/// What a process counted since its start, and what it knows of the log.
#[derive(Debug)]
pub struct Figures {
    takeovers: [AtomicU64; 3],
    /// Times from append to commit.
    appends: Mutex<Histogram>,
    /// Whether the engine answered the last call that needs its majority.
    is_answered: AtomicBool,
    /// The number of the newest leadership.
    epoch: AtomicU64,
    /// The last record that this host applied, and that of the newest head.
    applied: AtomicU64,
    head: AtomicU64,
    /// The first record after the newest snapshot. 0 without a snapshot.
    after_snapshot: AtomicU64,
    snapshot_ms: AtomicU64,
    log_bytes: AtomicU64,
}

impl Default for Figures {
    fn default() -> Self {
        Self {
            takeovers: Default::default(),
            appends: Mutex::new(Histogram::new(&APPEND_BOUNDS)),
            is_answered: AtomicBool::default(),
            epoch: AtomicU64::default(),
            applied: AtomicU64::default(),
            head: AtomicU64::default(),
            after_snapshot: AtomicU64::default(),
            snapshot_ms: AtomicU64::default(),
            log_bytes: AtomicU64::default(),
        }
    }
}

impl Figures {
    /// The leaderships that this process took over. The first one of a cluster does not count.
    #[must_use]
    pub fn takeovers(&self, after: After) -> u64 {
        self.takeovers[after as usize].load(Relaxed)
    }

    /// The times from the append of groups of records to their commit, while this process led.
    #[must_use]
    pub fn appends(&self) -> Histogram {
        self.lock().clone()
    }

    /// Whether the engine answered the last call of this host that needs its majority.
    #[must_use]
    pub fn reaches_log(&self) -> bool {
        self.is_answered.load(Relaxed)
    }

    /// The number of the newest leadership that this host knows.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.epoch.load(Relaxed)
    }

    /// The last record that this host applied, or committed while it led.
    #[must_use]
    pub fn position(&self) -> LogPosition {
        LogPosition(self.applied.load(Relaxed))
    }

    /// Records of the newest head that this host has not applied.
    #[must_use]
    pub fn lag(&self) -> u64 {
        let applied = self.applied.load(Relaxed);
        self.head.load(Relaxed).saturating_sub(applied)
    }

    /// Records since the newest snapshot began.
    #[must_use]
    pub fn log_records(&self) -> u64 {
        let first = self.after_snapshot.load(Relaxed).max(1);
        (self.head.load(Relaxed) + 1).saturating_sub(first)
    }

    /// Bytes of frames since the newest snapshot. A follower that saw the snapshot become complete
    /// does not count frames that were written during the snapshot.
    #[must_use]
    pub fn log_bytes(&self) -> u64 {
        self.log_bytes.load(Relaxed)
    }

    /// The leader's wall clock in milliseconds since 1970 when the newest snapshot was complete, or
    /// when it began if that was before this process. `None` without a snapshot.
    #[must_use]
    pub fn snapshot_ms(&self) -> Option<u64> {
        let has_snapshot = self.after_snapshot.load(Relaxed) > 0;
        has_snapshot.then(|| self.snapshot_ms.load(Relaxed))
    }

    pub(crate) fn answered<T>(&self, result: &Result<T, EngineError>) {
        let is_lost = matches!(
            result,
            Err(EngineError::NotApplied(_) | EngineError::Unknown(_))
        );
        self.is_answered.store(!is_lost, Relaxed);
    }

    pub(crate) fn took_over(&self, after: After) {
        self.takeovers[after as usize].fetch_add(1, Relaxed);
    }

    pub(crate) fn committed(&self, time: Duration) {
        self.lock().record(time);
    }

    fn lock(&self) -> MutexGuard<'_, Histogram> {
        // A poisoned lock only means that a thread panicked between two complete updates.
        self.appends.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The host reads the log from a snapshot or from its beginning.
    pub(crate) fn joins(&self, head: &Head, position: LogPosition) {
        self.applied(position, 0);
        self.after_snapshot.store(0, Relaxed);
        self.saw(head, 0);
    }

    /// The host knows a newer head.
    pub(crate) fn saw(&self, head: &Head, log_bytes: u64) {
        self.epoch.store(head.epoch, Relaxed);
        self.head.store(head.position.0, Relaxed);
        self.log_bytes.store(log_bytes, Relaxed);
        let first = head.snapshot.map_or(0, |it| it.first_position.0);
        if self.after_snapshot.swap(first, Relaxed) != first {
            self.snapshot_ms.store(head.now_ms, Relaxed);
        }
    }

    /// The host applied a frame.
    pub(crate) fn applied(&self, position: LogPosition, log_bytes: u64) {
        self.applied.store(position.0, Relaxed);
        self.log_bytes.store(log_bytes, Relaxed);
    }

    /// The first frame after the newest snapshot was written at this time.
    pub(crate) fn snapshot_began(&self, now_ms: u64) {
        self.snapshot_ms.store(now_ms, Relaxed);
    }
}
