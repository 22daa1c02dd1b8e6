//! Divides the space on the disk.
//!
//! Input is the free bytes of the file system, the bytes of the files of the log, and the size of
//! the next snapshot. Output is how far the log may grow, how much history may be kept, and whether
//! state may grow.
//!
//! ```text
//! disk = newest snapshot + next snapshot + log after the newest + reserve + history + extra spares
//! ```
//!
//! Invariant: the log must never take the space of the next snapshot. Only a snapshot frees space,
//! so without it a full disk would stay full for ever.

use std::io;

use crate::disk::Disk;
use crate::error::Error;
use crate::files::{self, Kind};
use crate::limits;

/// The use of the disk, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Budget {
    /// Free bytes of the file system plus the files of the log.
    pub(crate) disk: u64,
    /// The newest snapshot.
    pub(crate) base: u64,
    /// Segments that recovery needs after the newest snapshot, plus unwritten bytes.
    pub(crate) log: u64,
    /// Spare segments.
    pub(crate) spares: u64,
    /// The least expected size of the next snapshot.
    pub(crate) next_min: u64,
    /// The greatest expected size of the next snapshot.
    pub(crate) next_max: u64,
    /// Length of a segment.
    pub(crate) segment: u64,
}

impl Budget {
    /// Space that only removals, acknowledgements and the end of a snapshot may use.
    pub(crate) fn reserve(&self) -> u64 {
        (self.disk / limits::RESERVE_DISK_PART)
            .min(limits::RESERVE_BYTES_MAX)
            .max(2 * self.segment)
    }

    /// The greatest length of the log after the newest snapshot. When the next snapshot is
    /// finished, the log appended in the meantime must leave space for the one after it.
    pub(crate) fn log_max(&self) -> u64 {
        let taken = self.base.max(self.next_max) + self.next_max + self.reserve();
        self.disk.saturating_sub(taken)
    }

    /// The length of the log from which clients that write wait for a snapshot. The snapshot then
    /// has a quarter of the space of the log in which to finish.
    pub(crate) fn log_soft(&self) -> u64 {
        self.log_max() / 4 * 3
    }

    /// The length of the log from which a snapshot is due, regardless of other rules.
    pub(crate) fn snapshot_after_max(&self) -> u64 {
        self.log_max() / 2
    }

    /// Whether state may not grow, because a snapshot would leave too little space for the log, or
    /// because there is no space for the snapshot. `before` is the previous result: leaving the
    /// state requires more free space than entering it, so that the result does not change with
    /// every request.
    pub(crate) fn is_short(&self, before: bool) -> bool {
        let margin = if before { 2 * self.segment } else { 0 };
        let log_min = limits::LOG_SEGMENTS_MIN * self.segment;
        2 * self.next_min + self.reserve() + log_min + margin > self.disk
            || self.base + self.log + self.next_min + margin > self.disk
    }

    /// Bytes that may be appended before the next snapshot hardly fits. After that, even clients
    /// that waited are refused.
    pub(crate) fn refuse_after(&self) -> u64 {
        let taken = self.base + self.log + self.next_min + self.segment;
        self.disk.saturating_sub(taken)
    }

    /// Whether growth is refused now.
    pub(crate) fn refuses(&self) -> bool {
        self.is_short(false) || self.wait_after(0).max(self.refuse_after()) == 0
    }

    /// How many spare segments to keep: none if the next snapshot needs their space.
    pub(crate) fn spares_min(&self) -> usize {
        let spares = limits::SPARE_SEGMENTS as u64 * self.segment;
        let left = self.disk.checked_sub(self.base + self.log + self.next_max);
        match left.is_some_and(|left| left < spares) && self.next_max > 0 {
            true => 0,
            false => limits::SPARE_SEGMENTS,
        }
    }

    /// Bytes that may be appended before clients must wait, given `tail` free bytes in the last
    /// segment. The last segment already counts as full. Appended bytes may also be part of the
    /// next snapshot, so the log gets half of the rest.
    pub(crate) fn wait_after(&self, tail: u64) -> u64 {
        match self.log_soft().checked_sub(self.log) {
            Some(left) => tail.max((tail + left) / 2),
            None => 0,
        }
    }

    /// Bytes of history that may be kept if the log needs `log` until the next snapshot is
    /// finished.
    pub(crate) fn history_max(&self, log: u64) -> u64 {
        let log = log.max(self.log);
        self.log_max()
            .saturating_sub(log + self.spares)
            .min(self.disk / limits::HISTORY_DISK_PART)
    }
}

/// The space available to a log in a directory: the free bytes of the file system plus the files of
/// the log. Fails if the file system does not report them.
pub fn disk_bytes(disk: &dyn Disk) -> Result<u64, Error> {
    let directory = "the data directory";
    let free = disk.free_bytes();
    let mut bytes = free.map_err(Error::io("ask for free space in", directory))?;
    for name in disk.list().map_err(Error::io("list", directory))? {
        if matches!(files::kind(&name), Kind::Other | Kind::Lock) {
            continue;
        }
        match disk.open_read_only(&name).and_then(|file| file.bytes()) {
            Ok(held) => bytes = bytes.saturating_add(held),
            // The file was removed after it was listed.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(Error::io("open", &name)(error)),
        }
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// A disk with this much live state after a snapshot.
    fn after_snapshot(disk: u64, live: u64) -> Budget {
        Budget {
            disk,
            base: live,
            log: disk / 32,
            spares: disk / 16,
            next_min: live,
            next_max: live,
            segment: disk / 32,
        }
    }

    #[test]
    fn state_of_a_third_of_the_disk_leaves_room_for_a_log() {
        for disk in [24 * MIB, 48 * MIB, 64 * MIB, 256 * MIB, 16 << 30] {
            // Includes the largest dedup table that such a disk may hold.
            let live = disk / 3 + disk / 32;
            let budget = after_snapshot(disk, live);
            assert!(
                !budget.is_short(false) && !budget.is_short(true),
                "{budget:?}"
            );
            assert!(
                budget.log_max() > 6 * (disk / 32).min(4 * MIB),
                "{budget:?}"
            );
        }
    }

    #[test]
    fn growing_state_leaves_room_for_two_snapshots() {
        let live = 20 * MIB;
        let budget = Budget {
            base: 0,
            ..after_snapshot(64 * MIB, live)
        };
        assert_eq!(budget.log_max(), after_snapshot(64 * MIB, live).log_max());
    }

    #[test]
    fn spares_yield_to_the_next_snapshot() {
        let mut budget = after_snapshot(64 * MIB, 20 * MIB);
        assert_eq!(budget.spares_min(), limits::SPARE_SEGMENTS);
        budget.log = 22 * MIB;
        assert_eq!(budget.spares_min(), 0);
    }

    #[test]
    fn state_of_half_the_disk_is_short() {
        let budget = after_snapshot(64 * MIB, 32 * MIB);
        assert!(budget.is_short(false));
        assert_eq!(budget.log_max(), 0);
    }

    #[test]
    fn history_gets_what_log_and_snapshot_leave() {
        let budget = after_snapshot(64 * MIB, MIB);
        assert_eq!(budget.history_max(8 * MIB), 16 * MIB);
        let budget = after_snapshot(64 * MIB, 20 * MIB);
        let left = budget.log_max() - budget.spares - 10 * MIB;
        assert_eq!(budget.history_max(10 * MIB), left);
        assert_eq!(budget.history_max(64 * MIB), 0);
        let taken = budget.base + budget.next_max + budget.reserve() + budget.spares;
        assert_eq!(taken + 10 * MIB + left, budget.disk);
    }
}
