//! Divides the quota of the engine.
//!
//! ```text
//! quota = in use (others' keys, last snapshot, log) + not yet written + next snapshot
//!       + overhead of what is not yet written + reserve
//! ```
//!
//! Invariant: the log must never take the space of the next snapshot. Only a snapshot lets the
//! leader truncate the log, so without that space a full engine would stay full for ever.

use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::Notify;

use crate::engine::Status;
use crate::head::Head;
use crate::{limits, space};

/// The use of the engine, in bytes.
#[derive(Debug, Default)]
pub(in crate::leader) struct Space {
    quota: AtomicU64,
    /// In use in the engine: the size that it reported last, and the writes of this leader that
    /// this size may not contain.
    used: AtomicU64,
    /// Written by this leader since the last report.
    unreported: AtomicU64,
    /// Wakes the task that asks the engine for its size, because much was written since.
    report_due: Notify,
    /// Appended and not yet in the engine.
    waiting: AtomicU64,
    /// What the engine must still take before the next snapshot is complete. Appended bytes count
    /// until the state was measured again.
    next: AtomicU64,
    /// What the running snapshot, or the last one, replaces.
    replaced: AtomicU64,
}

impl Space {
    /// The space at the beginning of a leadership, until the engine reports its size.
    pub(super) fn new(quota_bytes: u64, log_bytes: u64, head: &Head) -> Self {
        let snapshot_bytes = head.snapshot.map_or(0, |it| it.bytes);
        Self {
            quota: AtomicU64::new(quota_bytes),
            used: AtomicU64::new(log_bytes + snapshot_bytes),
            next: AtomicU64::new(snapshot_bytes),
            ..Self::default()
        }
    }

    pub(super) fn appended(&self, bytes: u64) {
        self.waiting.fetch_add(bytes, Ordering::Relaxed);
        self.next.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Of the appended bytes, so many are in the engine.
    pub(super) fn decided(&self, bytes: u64) {
        self.waiting.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// A transaction has put so many bytes in the engine.
    pub(super) fn written(&self, bytes: u64) {
        self.used.fetch_add(bytes, Ordering::Relaxed);
        let unreported = self.unreported.fetch_add(bytes, Ordering::Relaxed) + bytes;
        if unreported >= self.quota_bytes() / limits::REPORTED_QUOTA_PART {
            self.report_due.notify_one();
        }
    }

    /// Waits until much was written since the last report.
    pub(super) async fn report_due(&self) {
        self.report_due.notified().await;
    }

    /// The engine reports its size, and its quota if it knows it. etcd counts a write when it
    /// commits its file, which may be [`limits::REPORT_PACE`] later, so the writes since the last
    /// report count again.
    pub(super) fn reported(&self, status: &Status) {
        let unreported = self.unreported.swap(0, Ordering::Relaxed);
        self.used
            .store(status.bytes + unreported, Ordering::Relaxed);
        if let Some(quota) = status.quota_bytes {
            self.quota.store(quota, Ordering::Relaxed);
        }
    }

    /// The state was measured: the engine must still take so many bytes of a snapshot.
    pub(super) fn needs(&self, bytes: u64) {
        self.next.store(bytes, Ordering::Relaxed);
    }

    pub(super) fn waiting_bytes(&self) -> u64 {
        self.waiting.load(Ordering::Relaxed)
    }

    pub(super) fn quota_bytes(&self) -> u64 {
        self.quota.load(Ordering::Relaxed)
    }

    /// Whether state may grow.
    pub(super) fn has_room(&self) -> bool {
        self.leaves(self.reserve())
    }

    /// Whether state may still grow after so many bytes were appended.
    pub(super) fn fits(&self, bytes: u64) -> bool {
        // They count twice: they are not yet written, and may be a part of the next snapshot.
        let bytes = bytes.saturating_mul(2);
        let overhead = bytes / limits::OVERHEAD_PART;
        let reserve = self.reserve();
        self.leaves(reserve.saturating_add(bytes).saturating_add(overhead))
    }

    /// Whether a snapshot and a compaction should make room, before state may not grow.
    pub(super) fn is_tight(&self) -> bool {
        !self.leaves(2 * self.reserve())
    }

    /// The running snapshot will replace so many bytes.
    pub(super) fn replaces(&self, bytes: u64) {
        self.replaced.store(bytes, Ordering::Relaxed);
    }

    /// Whether clients that write should wait for the running snapshot: it makes room, and without
    /// that they would soon be refused.
    pub(super) fn is_short(&self) -> bool {
        let replaced = self.replaced.load(Ordering::Relaxed);
        self.is_tight() && self.leaves_without(replaced, 2 * self.reserve())
    }

    /// Whether a snapshot may begin. Removals have used a part of the reserve.
    pub(super) fn fits_snapshot(&self) -> bool {
        self.leaves(self.reserve() / 2)
    }

    /// Whether a snapshot that has begun may continue.
    pub(super) fn fits_rest(&self) -> bool {
        self.leaves(self.reserve() / 4)
    }

    fn reserve(&self) -> u64 {
        space::reserve(self.quota_bytes())
    }

    /// Whether the next snapshot leaves so many bytes of the quota.
    fn leaves(&self, bytes: u64) -> bool {
        self.leaves_without(0, bytes)
    }

    /// Like [`leaves`](Self::leaves), after so many bytes were removed.
    fn leaves_without(&self, removed: u64, bytes: u64) -> bool {
        let [used, waiting, next] =
            [&self.used, &self.waiting, &self.next].map(|it| it.load(Ordering::Relaxed));
        let used = used.saturating_sub(removed);
        let unwritten = waiting.saturating_add(next);
        space::filled(used, unwritten).saturating_add(bytes) <= self.quota_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Id, LogPosition, SnapshotInfo};

    const QUOTA: u64 = 800;

    fn space(used_bytes: u64, next_bytes: u64) -> Space {
        let space = Space::new(QUOTA, used_bytes, &Head::first(Id([1; 16]), 0));
        space.needs(next_bytes);
        space
    }

    fn status(bytes: u64) -> Status {
        Status {
            bytes,
            file_bytes: bytes,
            ..Status::default()
        }
    }

    #[test]
    fn next_snapshot_is_never_without_space() {
        // A snapshot begins first, then growth is refused, then no snapshot may begin.
        for (used, expected) in [
            (375, [true, false, true, true]),
            (376, [true, true, true, true]),
            (475, [true, true, true, true]),
            (476, [false, true, true, true]),
            (526, [false, true, false, true]),
            (551, [false, true, false, false]),
        ] {
            let it = space(used, 200);
            let found = [
                it.has_room(),
                it.is_tight(),
                it.fits_snapshot(),
                it.fits_rest(),
            ];
            assert_eq!(found, expected, "{used} bytes in use");
        }
    }

    #[test]
    fn writers_wait_for_a_snapshot_only_if_it_makes_room() {
        let space = space(376, 200);
        assert!(!space.is_short());
        space.replaces(1);
        assert!(space.is_short());
        space.appended(1);
        assert!(!space.is_short(), "it would not suffice");
        space.replaces(4);
        assert!(space.is_short());
    }

    #[test]
    fn appended_bytes_count_in_the_log_and_in_the_next_snapshot() {
        let space = space(275, 200);
        assert!(space.fits(89) && !space.fits(90));
        space.appended(89);
        assert!(space.has_room());
        space.appended(1);
        assert!(!space.has_room());
        space.decided(90);
        space.written(90);
        space.appended(10);
        assert!(!space.has_room());
        // The record removed a key.
        space.needs(50);
        assert!(space.has_room());
    }

    #[test]
    fn writes_count_again_until_the_second_report_after_them() {
        let space = space(0, 0);
        space.reported(&status(500));
        space.written(200);
        assert!(space.has_room());
        // The engine may not have counted them.
        space.reported(&status(600));
        assert!(!space.has_room());
        space.reported(&status(600));
        assert!(space.has_room());
    }

    #[test]
    fn leader_knows_its_log_size_before_the_engine_reports_one() {
        let mut head = Head::first(Id([1; 16]), 0);
        head.snapshot = Some(SnapshotInfo {
            id: 1,
            first_seq: 2,
            first_position: LogPosition(2),
            previous: head.chain,
            pieces: 1,
            bytes: 300,
            hash: [0; 32],
        });
        assert!(Space::new(QUOTA, 63, &head).has_room());
        assert!(!Space::new(QUOTA, 64, &head).has_room());
    }
}
