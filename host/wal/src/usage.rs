//! What a journal takes of its disk, seen from outside.
//!
//! Input: the files of a directory and the free bytes of its file system. Output: how these bytes
//! are used, and whether a log there refuses growth. It decides that as the log does, by a
//! [`Budget`].

use crate::budget::Budget;
use crate::disk::Disk;
use crate::error::Error;
use crate::files::Kind;
use crate::inspect::{FileReport, Verdict};
use crate::options::Options;

/// What a journal takes of its disk, in bytes, as its files and the file system show it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskUse {
    /// Segments that recovery needs, with the room in them that is not used yet.
    pub log: u64,
    /// Older segments and snapshots.
    pub history: u64,
    /// The newest snapshot.
    pub snapshot: u64,
    /// Segments that are ready for use.
    pub spares: u64,
    /// Files that are not finished, such as a snapshot that is being written.
    pub temporary: u64,
    /// What the file system has free.
    pub free: u64,
    /// Whether a store refuses growth with these figures. A store that refuses it already waits for
    /// a little more room.
    pub refuses_writes: bool,
}

impl DiskUse {
    /// Adds up the files of a [`Report`](crate::Report), which are sorted by name.
    ///
    /// # Errors
    /// If the file system does not say what is free.
    pub fn of(disk: &dyn Disk, files: &[FileReport]) -> Result<Self, Error> {
        let free = disk
            .free_bytes()
            .map_err(Error::io("ask for free space in", "the data directory"))?;
        let is_whole = |file: &&FileReport| {
            matches!(file.kind, Kind::Snapshot(_)) && file.verdict == Verdict::Clean
        };
        let newest = files.iter().rfind(is_whole);
        let kept = newest.and_then(|it| it.first).map_or(0, |it| it.0);
        let mut used = Self {
            free,
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
            // As a start does until it has asked how large the state is.
            next_min: self.snapshot,
            next_max: self.snapshot,
            segment: segment.unwrap_or(Options::default().fitted(disk).segment_bytes),
        }
    }
}
