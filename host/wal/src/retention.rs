//! Decides which history is kept and removes the rest.
//!
//! Input is the list of files and the time. Files are removed oldest first and one at a time; some
//! segments become spares.
//!
//! Invariant: files that recovery needs must never be removed.

use std::io;

use crate::budget::Budget;
use crate::catalogue::{Catalogue, Severed};
use crate::disk::Disk;
use crate::error::Error;
use crate::files;
use crate::limits;
use crate::log::{Log, locked};
use crate::options::Options;
use crate::survey::{Link, SnapshotInfo};

/// A file that is not needed any more.
#[derive(Clone, Debug)]
enum Retired {
    Snapshot(SnapshotInfo),
    Damaged(u64),
    Segment(Link),
    Severed(Severed),
}

impl Retired {
    fn name(&self) -> String {
        match self {
            Self::Snapshot(info) => files::snapshot(info.position),
            Self::Damaged(position) => files::damaged_snapshot(*position),
            Self::Segment(link) => files::segment(link.header.number),
            Self::Severed(file) => file.name.clone(),
        }
    }
}

impl Log {
    /// Removes or recycles every file that is not needed any more. A file that cannot be removed
    /// stays in the catalogue, and the next call tries it first.
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
            catalogue.drop_entry(&next);
            catalogue.recycled.extend(spare);
            catalogue.unsynced = true;
        }
    }

    /// Makes the last removal durable before the next one, so that a crash never leaves a gap in
    /// the files. A recycled segment becomes a spare here.
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

    /// The new name of a file that can serve as a spare, if a spare is wanted.
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

    /// Renames a file. Returns false if the file does not exist, because another program removed
    /// it.
    fn renamed(&self, name: &str, to: &str) -> Result<bool, Error> {
        match self.disk.rename(name, to) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(Error::io("recycle", name)(error)),
        }
    }

    /// Removes a file. A file that does not exist is not an error.
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
    /// snapshot counts as history. It is kept while it fits, because it can replace a damaged
    /// newest one.
    fn next_retired(&self, options: &Options, bytes_max: u64, now_ms: u64) -> Option<Retired> {
        let newest = self.snapshots.back().map_or(0, |newest| newest.position);
        if self.bytes_before(newest) + self.severed_bytes() > bytes_max {
            return self.retired(1, bytes_max, u64::MAX, now_ms);
        }
        let bytes = options.history_bytes.min(bytes_max);
        self.retired(2, bytes, options.history_ms, now_ms)
    }

    /// Removes history until a full disk has room for the next segments. It is called before the
    /// log continues.
    pub(crate) fn make_room(&mut self, disk: &dyn Disk, segment_bytes: u64) -> io::Result<()> {
        let wanted = limits::SPARE_SEGMENTS as u64 * segment_bytes;
        while disk.free_bytes()? + self.spares.len() as u64 * segment_bytes < wanted
            && let Some(next) = self.retired(1, 0, u64::MAX, self.now_ms)
        {
            match disk.remove(&next.name()) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => self.drop_entry(&next),
            }
            // A crash must not leave a gap in the files.
            disk.sync_directory()?;
        }
        Ok(())
    }

    /// The oldest file that is not needed any more.
    ///
    /// History consists of units: a base, which is a snapshot or the empty beginning, and the
    /// segments up to the next base. Before them are the files that a break in the chain of
    /// segments severed; they count as one unit. The newest `bases_kept` bases and all segments
    /// from the oldest of them on are always kept.
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
        let kept = self.snapshots.len().checked_sub(bases_kept);
        let kept = kept.and_then(|kept| self.snapshots.get(kept));
        let history = kept.map_or(0, |kept| self.bytes_before(kept.position));
        let is_old = |next: &SnapshotInfo| now_ms.saturating_sub(next.created_ms) > history_ms;
        let is_too_long = history + self.severed_bytes() > history_bytes;
        if let Some(file) = self.severed.first()
            && (is_old(&first) || is_too_long)
        {
            return Some(Retired::Severed(file.clone()));
        }
        // No base begins in or before this segment.
        if !from_the_beginning && self.ends_by(first.position) {
            return oldest_link.map(Retired::Segment);
        }
        let bases = self.snapshots.len() + usize::from(from_the_beginning);
        if bases <= bases_kept {
            return None;
        }
        let kept = kept?.position;
        let next = self.snapshots.get(usize::from(!from_the_beginning))?;
        if !is_old(next) && !is_too_long {
            return None;
        }
        if from_the_beginning && self.ends_by(first.position) {
            // Without its first segment, the empty beginning is not a base any more.
            return oldest_link.map(Retired::Segment);
        }
        // If a remaining snapshot still needs the first segment, removing it gains nothing yet.
        (first.position < kept).then_some(Retired::Snapshot(first))
    }

    fn drop_entry(&mut self, retired: &Retired) {
        match retired {
            Retired::Snapshot(removed) => {
                self.snapshots.retain(|it| it.position != removed.position)
            }
            Retired::Damaged(removed) => self.damaged.retain(|it| it != removed),
            Retired::Segment(removed) => self
                .segments
                .retain(|it| it.header.number != removed.header.number),
            Retired::Severed(removed) => self.severed.retain(|it| it.name != removed.name),
        }
    }

    /// Bytes of the files before a break in the chain of segments.
    pub(crate) fn severed_bytes(&self) -> u64 {
        self.severed.iter().map(|file| file.bytes).sum()
    }

    /// Whether all records of the first segment are at or before a position.
    fn ends_by(&self, position: u64) -> bool {
        self.segments
            .get(1)
            .is_some_and(|second| second.header.position <= position.saturating_add(1))
    }

    /// Bytes of the snapshots and segments that only history needs.
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
