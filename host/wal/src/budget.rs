//! How the room on the disk is divided.
//!
//! Input: the free bytes of the file system, the bytes of the journal's files, and the size of the
//! next snapshot. Output: how far the log may grow, how much history may be kept, and whether state
//! may grow at all.
//!
//! ```text
//! disk = newest snapshot + next snapshot + log behind the newest + reserve + history and extra spares
//! ```
//!
//! Invariant: the log must never take the room of the next snapshot. Only a snapshot makes room, so without it a full
//! disk would stay full for ever.

use std::io;

use crate::disk::Disk;
use crate::error::Error;
use crate::files::{self, Kind};
use crate::limits;

/// What is on the disk, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Budget {
    /// What the file system has free, and what files of the journal take.
    pub(crate) disk: u64,
    /// The newest snapshot.
    pub(crate) base: u64,
    /// Segments that recovery needs behind it, and what is not written yet.
    pub(crate) log: u64,
    /// Segments that are ready for use.
    pub(crate) spares: u64,
    /// What the next snapshot takes at least …
    pub(crate) next_min: u64,
    /// … and at most.
    pub(crate) next_max: u64,
    /// Length of a segment.
    pub(crate) segment: u64,
}

impl Budget {
    /// Room that only removals, acknowledgements and the end of a snapshot may use.
    pub(crate) fn reserve(&self) -> u64 {
        (self.disk / limits::RESERVE_DISK_PART)
            .min(limits::RESERVE_BYTES_MAX)
            .max(2 * self.segment)
    }

    /// How far the log behind the newest snapshot may grow. Once the next snapshot is finished it
    /// is the newest, and the log that was appended during it must leave room for the one after it.
    pub(crate) fn log_max(&self) -> u64 {
        let taken = self.base.max(self.next_max) + self.next_max + self.reserve();
        self.disk.saturating_sub(taken)
    }

    /// From where on clients that write have to wait for a snapshot, which then has a quarter of the log's room left to
    /// be finished in.
    pub(crate) fn log_soft(&self) -> u64 {
        self.log_max() / 4 * 3
    }

    /// From this length of the log on a snapshot is due, even if no other rule asks for one.
    pub(crate) fn snapshot_after_max(&self) -> u64 {
        self.log_max() / 2
    }

    /// Whether state may not grow: a snapshot would leave no room for a useful log, or there is none for the snapshot.
    /// Where it was so before, more has to be free again, so that it does not change with every request.
    pub(crate) fn is_short(&self, before: bool) -> bool {
        let margin = if before { 2 * self.segment } else { 0 };
        let log_min = limits::LOG_SEGMENTS_MIN * self.segment;
        2 * self.next_min + self.reserve() + log_min + margin > self.disk
            || self.base + self.log + self.next_min + margin > self.disk
    }

    /// How much may be appended before the next snapshot has hardly room: from there on even clients that have waited are
    /// refused.
    pub(crate) fn refuse_after(&self) -> u64 {
        let taken = self.base + self.log + self.next_min + self.segment;
        self.disk.saturating_sub(taken)
    }

    /// Whether growth is refused before another byte is appended.
    pub(crate) fn refuses(&self) -> bool {
        self.is_short(false) || self.wait_after(0).max(self.refuse_after()) == 0
    }

    /// How many segments may be ready for use: none where the next snapshot needs their room.
    pub(crate) fn spares_min(&self) -> usize {
        let spares = limits::SPARE_SEGMENTS as u64 * self.segment;
        let left = self.disk.checked_sub(self.base + self.log + self.next_max);
        match left.is_some_and(|left| left < spares) && self.next_max > 0 {
            true => 0,
            false => limits::SPARE_SEGMENTS,
        }
    }

    /// How much may be appended before clients have to wait, with so much room in the last segment. The last segment counts
    /// as full already; and what is appended may be in the next snapshot too, so half of the rest is for the log.
    pub(crate) fn wait_after(&self, tail: u64) -> u64 {
        match self.log_soft().checked_sub(self.log) {
            Some(left) => tail.max((tail + left) / 2),
            None => 0,
        }
    }

    /// How much history may be kept where the log needs `log` until the next snapshot is finished.
    pub(crate) fn history_max(&self, log: u64) -> u64 {
        let log = log.max(self.log);
        self.log_max()
            .saturating_sub(log + self.spares)
            .min(self.disk / limits::HISTORY_DISK_PART)
    }
}

/// The room of a directory for a journal: the free bytes of its file system and those of the
/// journal's files.
///
/// # Errors
/// Where the file system does not say.
pub fn disk_bytes(disk: &dyn Disk) -> Result<u64, Error> {
    measure(disk).map_err(Error::io("ask for free space in", "the data directory"))
}

fn measure(disk: &dyn Disk) -> io::Result<u64> {
    let mut bytes = disk.free_bytes()?;
    for name in disk.list()? {
        if matches!(files::kind(&name), Kind::Other | Kind::Lock) {
            continue;
        }
        match disk.open_read_only(&name).and_then(|file| file.bytes()) {
            Ok(held) => bytes = bytes.saturating_add(held),
            // Removed after it was listed.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// A disk with this much live state, as it is after a snapshot.
    fn settled(disk: u64, live: u64) -> Budget {
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
    fn a_third_of_the_disk_leaves_room_for_a_log() {
        for disk in [24 * MIB, 48 * MIB, 64 * MIB, 256 * MIB, 16 << 30] {
            // With as many remembered requests as such a disk may hold.
            let live = disk / 3 + disk / 32;
            let budget = settled(disk, live);
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
    fn a_growing_state_leaves_room_for_the_snapshot_after_the_next() {
        let live = 20 * MIB;
        let budget = Budget {
            base: 0,
            ..settled(64 * MIB, live)
        };
        assert_eq!(budget.log_max(), settled(64 * MIB, live).log_max());
    }

    #[test]
    fn spares_give_way_to_the_next_snapshot() {
        let mut budget = settled(64 * MIB, 20 * MIB);
        assert_eq!(budget.spares_min(), limits::SPARE_SEGMENTS);
        budget.log = 22 * MIB;
        assert_eq!(budget.spares_min(), 0);
    }

    #[test]
    fn half_of_the_disk_is_too_much() {
        let budget = settled(64 * MIB, 32 * MIB);
        assert!(budget.is_short(false));
        assert_eq!(budget.log_max(), 0);
    }

    #[test]
    fn history_has_what_the_log_and_the_next_snapshot_leave() {
        let budget = settled(64 * MIB, MIB);
        assert_eq!(budget.history_max(8 * MIB), 16 * MIB);
        let budget = settled(64 * MIB, 20 * MIB);
        let left = budget.log_max() - budget.spares - 10 * MIB;
        assert_eq!(budget.history_max(10 * MIB), left);
        assert_eq!(budget.history_max(64 * MIB), 0);
        let taken = budget.base + budget.next_max + budget.reserve() + budget.spares;
        assert_eq!(taken + 10 * MIB + left, budget.disk);
    }
}
