//! What history is kept, and how the rest goes.
//!
//! Enters: the list of files and the time. Leaves: fewer files, oldest first and one by one, some of them as
//! spares. What recovery needs never goes.

use std::io;

use crate::budget::Budget;
use crate::catalogue::Catalogue;
use crate::disk::Disk;
use crate::error::Error;
use crate::files;
use crate::limits;
use crate::log::{Log, locked};
use crate::options::Options;
use crate::survey::{Link, SnapshotInfo};

/// A file that is needed no more.
#[derive(Clone, Copy, Debug)]
enum Retired {
    Snapshot(SnapshotInfo),
    Damaged(u64),
    Segment(Link),
}

impl Retired {
    fn name(&self) -> String {
        match self {
            Self::Snapshot(info) => files::snapshot(info.position),
            Self::Damaged(position) => files::damaged_snapshot(*position),
            Self::Segment(link) => files::segment(link.header.number),
        }
    }
}

impl Log {
    /// Removes or recycles every file that is needed no more. What could not be removed stays on the list and is
    /// tried again by the next call, before anything newer.
    pub(crate) fn retire(&self, now_ms: u64, budget: &Budget) -> Result<(), Error> {
        let bytes_max = budget.history_max(self.log_expected_bytes());
        loop {
            self.sync_retired()?;
            let next = locked(&self.catalogue).next_retired(&self.options, bytes_max, now_ms);
            let Some(next) = next else { return Ok(()) };
            let name = next.name();
            let spare = match self.spare_name(&next, budget) {
                Some(spare) if self.renamed(&name, &spare)? => Some(spare),
                Some(_) => None,
                None => {
                    self.removed(&name)?;
                    None
                }
            };
            let mut catalogue = locked(&self.catalogue);
            catalogue.forget(&next);
            catalogue.recycled.extend(spare);
            catalogue.unsynced = true;
        }
    }

    /// What went is gone on the disk before anything else goes: what a crash leaves has no gap. A recycled segment
    /// is a spare from here on.
    fn sync_retired(&self) -> Result<(), Error> {
        if !locked(&self.catalogue).unsynced {
            return Ok(());
        }
        self.disk
            .sync_directory()
            .map_err(Error::io("sync", "the data directory"))?;
        let mut catalogue = locked(&self.catalogue);
        catalogue.unsynced = false;
        let recycled = std::mem::take(&mut catalogue.recycled);
        catalogue.spares.extend(recycled);
        Ok(())
    }

    /// Under which name a file can serve again, if it can and one is wanted.
    fn spare_name(&self, retired: &Retired, budget: &Budget) -> Option<String> {
        let Retired::Segment(link) = retired else {
            return None;
        };
        let mut catalogue = locked(&self.catalogue);
        let others = catalogue.segments.len().saturating_sub(1);
        let wanted = catalogue.spares.len() < self.spares_max(&catalogue, others, budget);
        (wanted && link.bytes == self.options.segment_bytes).then(|| {
            catalogue.next_spare += 1;
            files::spare(catalogue.next_spare)
        })
    }

    /// False where somebody else removed it.
    fn renamed(&self, name: &str, to: &str) -> Result<bool, Error> {
        match self.disk.rename(name, to) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(Error::io("recycle", name)(error)),
        }
    }

    /// Removes a file; it is as well if somebody else did.
    pub(crate) fn removed(&self, name: &str) -> Result<(), Error> {
        match self.disk.remove(name) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(Error::io("remove", name)(error))
            }
            _ => Ok(()),
        }
    }
}

impl Catalogue {
    /// The oldest file to remove so that history takes at most `bytes_max`. The second newest
    /// snapshot is history too, but is kept while it fits, because it can replace a damaged newest
    /// one.
    fn next_retired(&self, options: &Options, bytes_max: u64, now_ms: u64) -> Option<Retired> {
        let newest = self.snapshots.back().map_or(0, |newest| newest.position);
        if self.bytes_before(newest) > bytes_max {
            return self.retired(1, bytes_max, u64::MAX, now_ms);
        }
        let bytes = options.history_bytes.min(bytes_max);
        self.retired(2, bytes, options.history_ms, now_ms)
    }

    /// Removes history until there is room for the next segments: before the log of a full disk goes on.
    ///
    /// # Errors
    /// If an operation of the disk fails.
    pub(crate) fn make_room(&mut self, disk: &dyn Disk, segment_bytes: u64) -> io::Result<()> {
        let wanted = limits::SPARE_SEGMENTS as u64 * segment_bytes;
        while disk.free_bytes()? + self.spares.len() as u64 * segment_bytes < wanted
            && let Some(next) = self.retired(1, 0, u64::MAX, self.now_ms)
        {
            match disk.remove(&next.name()) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => self.forget(&next),
            }
            // What a crash leaves has no gap.
            disk.sync_directory()?;
        }
        Ok(())
    }

    /// The oldest file that is not needed any more.
    ///
    /// The unit of history is a base, a snapshot or the empty beginning, with the segments up to the
    /// next base. The newest `bases_kept` and all log from the oldest of them on always stay.
    fn retired(
        &self,
        bases_kept: usize,
        history_bytes: u64,
        history_ms: u64,
        now_ms: u64,
    ) -> Option<Retired> {
        let oldest_link = self.segments.front().copied();
        let from_the_beginning = oldest_link.is_some_and(|link| link.header.position == 1);
        let first = *self.snapshots.front()?;
        let oldest = if from_the_beginning {
            0
        } else {
            first.position
        };
        if let Some(&at) = self.damaged.iter().find(|&&position| position < oldest) {
            return Some(Retired::Damaged(at));
        }
        // A segment that no base begins in or before.
        if !from_the_beginning && self.ends_by(first.position) {
            return oldest_link.map(Retired::Segment);
        }
        let bases = self.snapshots.len() + usize::from(from_the_beginning);
        if bases <= bases_kept {
            return None;
        }
        let kept = self.snapshots.len().checked_sub(bases_kept)?;
        let kept = self.snapshots.get(kept)?.position;
        let next = self.snapshots.get(usize::from(!from_the_beginning))?;
        let old = now_ms.saturating_sub(next.created_ms) > history_ms;
        if !old && self.bytes_before(kept) <= history_bytes {
            return None;
        }
        if from_the_beginning && self.ends_by(first.position) {
            // Without its first segment the beginning is no base any more.
            return oldest_link.map(Retired::Segment);
        }
        // Where the first segment is still needed by a snapshot that stays, there is nothing to gain yet.
        (first.position < kept).then_some(Retired::Snapshot(first))
    }

    /// Takes a file that is gone off the list.
    fn forget(&mut self, retired: &Retired) {
        match retired {
            Retired::Snapshot(gone) => self.snapshots.retain(|it| it.position != gone.position),
            Retired::Damaged(gone) => self.damaged.retain(|it| it != gone),
            Retired::Segment(gone) => self
                .segments
                .retain(|it| it.header.number != gone.header.number),
        }
    }

    /// Whether all records of the first segment are at or before a position.
    fn ends_by(&self, position: u64) -> bool {
        self.segments
            .get(1)
            .is_some_and(|second| second.header.position <= position.saturating_add(1))
    }

    /// Bytes of snapshots and segments that only history needs.
    pub(crate) fn bytes_before(&self, kept: u64) -> u64 {
        let snapshots = self
            .snapshots
            .iter()
            .filter(|info| info.position < kept)
            .map(|info| info.bytes);
        let ends = self
            .segments
            .iter()
            .skip(1)
            .map(|next| next.header.position);
        let segments = self
            .segments
            .iter()
            .zip(ends)
            .filter(|(_, next)| *next <= kept.saturating_add(1));
        snapshots.sum::<u64>() + segments.map(|(segment, _)| segment.bytes).sum::<u64>()
    }
}
