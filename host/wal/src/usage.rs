//! The disk space that a log uses, determined from its files.
//!
//! Input is the files of a directory and the free bytes of the file system. The result includes
//! whether a log with these figures refuses growth, according to the same [`Budget`] that the log
//! uses.

use crate::budget::Budget;
use crate::disk::Disk;
use crate::error::Error;
use crate::files::Kind;
use crate::inspect::{FileReport, Verdict};
use crate::options::Options;

/// The disk space that a log uses. Sizes are in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskUse {
    /// Segments that recovery needs, including their unused part.
    pub log: u64,
    /// Older segments and snapshots.
    pub history: u64,
    /// The newest snapshot.
    pub snapshot: u64,
    /// Segments that are ready for use.
    pub spares: u64,
    /// Incomplete files, such as a snapshot in progress.
    pub temporary: u64,
    /// Free bytes of the file system.
    pub free: u64,
    /// Whether the file system has no free inodes, so that no file can be created.
    pub no_free_inodes: bool,
    /// Whether the file system is mounted read-only, so that a start fails.
    pub read_only: bool,
    /// Whether a store refuses growth with these figures. A store that already refuses it continues
    /// to do so until slightly more is free.
    pub refuses_writes: bool,
}

impl DiskUse {
    /// Adds up the files of a [`Report`](crate::Report), which are sorted by name. Fails if the
    /// free space cannot be determined.
    pub fn of(disk: &dyn Disk, files: &[FileReport]) -> Result<Self, Error> {
        let free = disk
            .free_bytes()
            .map_err(Error::io("ask for free space in", "the data directory"))?;
        // A file system that does not report inodes counts as one with free inodes.
        let no_free_inodes = disk.has_free_inodes().is_ok_and(|has| !has);
        let read_only = disk.is_read_only().unwrap_or(false);
        let is_whole = |file: &&FileReport| {
            matches!(file.kind, Kind::Snapshot(_)) && file.verdict == Verdict::Clean
        };
        let newest = files.iter().rfind(is_whole);
        let kept = newest.and_then(|it| it.first).map_or(0, |it| it.0);
        let mut used = Self {
            free,
            no_free_inodes,
            read_only,
            snapshot: newest.map_or(0, |it| it.bytes),
            ..Self::default()
        };
        let is_segment = |file: &&FileReport| matches!(file.kind, Kind::Segment(_));
        let mut ends = files.iter().filter(is_segment).skip(1).map(|it| it.first);
        for file in files {
            let sum = match file.kind {
                Kind::Segment(_) => match ends.next().flatten() {
                    Some(end) if end.0 <= kept.saturating_add(1) => &mut used.history,
                    _ => &mut used.log,
                },
                Kind::Snapshot(_) if newest.is_none_or(|it| it.name != file.name) => {
                    &mut used.history
                }
                Kind::Spare(_) => &mut used.spares,
                Kind::Temporary => &mut used.temporary,
                _ => continue,
            };
            *sum += file.bytes;
        }
        let segment = files.iter().rfind(is_segment).map(|it| it.bytes);
        used.refuses_writes = used.budget(segment).refuses();
        Ok(used)
    }

    fn budget(&self, segment: Option<u64>) -> Budget {
        let held = self.log + self.history + self.snapshot + self.spares + self.temporary;
        let disk = self.free.saturating_add(held);
        Budget {
            disk,
            base: self.snapshot,
            log: self.log,
            spares: self.spares,
            // A start makes the same assumption until it has asked for the size of the state.
            next_min: self.snapshot,
            next_max: self.snapshot,
            segment: segment.unwrap_or(Options::default().fitted(disk).segment_bytes),
        }
    }
}
