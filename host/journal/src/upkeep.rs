//! What is done behind the log: segments made ready, snapshots taken, history let go.
//!
//! Enters: the time, and blocks of a snapshot. Leaves: files in their place. A failure here is no
//! failure of the log, unless it leaves open what the directory holds.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::catalogue::{Catalogue, create_filled};
use crate::disk::Disk;
use crate::error::Error;
use crate::files;
use crate::limits;
use crate::log::{Log, locked};
use crate::position::Position;
use crate::segment::StoreId;
use crate::snapshot::{self, Source, Writer};
use crate::survey::SnapshotInfo;

/// How much the log can still take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Room {
    /// No end in sight.
    Plenty,
    /// The disk is nearly full: only what makes room should still be written.
    Reserve,
    /// Nothing more should be written.
    None,
}

/// A snapshot that is being taken. Dropping it gives it up.
pub struct Snapshot {
    writer: Writer,
    position: u64,
    created_ms: u64,
    at_bytes: u64,
    /// Only one at a time. It stands last, so that the file is closed when it is removed.
    running: Running,
}

/// Whatever ends a snapshot early, its file goes: it may be what filled the disk.
struct Running {
    disk: Arc<dyn Disk>,
    snapshotting: Arc<AtomicBool>,
    /// It has its name.
    finished: bool,
}

impl Drop for Running {
    fn drop(&mut self) {
        if !self.finished {
            // Where it cannot be removed now, the next snapshot or the next start does.
            let _ = self.disk.remove(files::SNAPSHOT_TEMPORARY);
        }
        // Last: from here on the file may be another snapshot's.
        self.snapshotting.store(false, Ordering::Release);
    }
}

impl std::fmt::Debug for Snapshot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Snapshot")
            .field("position", &self.position)
            .finish_non_exhaustive()
    }
}

impl Snapshot {
    /// Where it begins: its blocks hold every effect up to here, and perhaps later ones.
    #[must_use]
    pub fn position(&self) -> Position {
        Position(self.position)
    }

    /// Adds a block.
    ///
    /// # Errors
    /// [`Error::TooLarge`], [`Error::Io`]: the snapshot is best dropped then.
    pub fn block(&mut self, block: &[u8]) -> Result<(), Error> {
        self.writer.block(block, files::SNAPSHOT_TEMPORARY)
    }

    pub(crate) fn pour(
        &mut self,
        source: &mut dyn Source,
        paced: &mut dyn FnMut(u64) -> Result<(), Error>,
    ) -> Result<(), Error> {
        snapshot::pour(source, &mut self.writer, files::SNAPSHOT_TEMPORARY, paced)
    }
}

impl Log {
    /// How much the log can still take. It looks at numbers only, so every request may ask.
    #[must_use]
    pub fn room(&self) -> Room {
        let free = self.free_bytes.load(Ordering::Acquire);
        let spares = self.spare_bytes.load(Ordering::Acquire);
        let segment = self.options.segment_bytes;
        // Two segments, some of them made ready perhaps, and the next snapshot beside the last ones.
        let snapshot = self.snapshot_bytes.load(Ordering::Acquire);
        if free >= snapshot && free + spares >= 2 * segment + snapshot {
            Room::Plenty
        } else if spares > 0
            || free >= segment
            || self.tail_bytes.load(Ordering::Acquire) >= limits::ROOM_BYTES_MIN
        {
            Room::Reserve
        } else {
            Room::None
        }
    }

    /// Whether the log behind the last snapshot is long enough for another.
    #[must_use]
    pub fn snapshot_due(&self) -> bool {
        let written = self.written_bytes.load(Ordering::Acquire);
        let since = written.saturating_sub(self.snapshot_at_bytes.load(Ordering::Acquire));
        // Where only removals are taken the log hardly grows, and a snapshot is what makes room.
        since > self.snapshot_after_bytes() || since > 0 && self.is_short()
    }

    /// Whether the disk is so full that history has to go.
    pub(crate) fn is_short(&self) -> bool {
        self.room() != Room::Plenty
    }

    /// How long the log behind a snapshot grows before the next.
    pub(crate) fn snapshot_after_bytes(&self) -> u64 {
        let last = self.snapshot_bytes.load(Ordering::Acquire);
        let kept_anyway = match self.options.history_ms {
            0 => 0,
            _ => limits::SNAPSHOT_AFTER_BYTES_MAX
                .min(self.options.history_bytes / 4)
                .min(self.free_bytes.load(Ordering::Acquire) / 8),
        };
        self.options
            .snapshot_min_bytes
            .max(kept_anyway)
            .max(self.options.snapshot_factor.saturating_mul(last))
    }

    /// How many spares are worth keeping beside so many segments: what will be used again soon, else what the log grows by
    /// until the next snapshot.
    pub(crate) fn spares_max(&self, catalogue: &Catalogue, segments: usize) -> usize {
        if self.is_short() {
            return limits::SPARE_SEGMENTS;
        }
        let in_segments = |bytes: u64| bytes / self.options.segment_bytes;
        // Cannot truncate: a hundred thousand at most.
        let most = in_segments(limits::SPARE_BYTES_MAX) as usize;
        let again = catalogue.used_again(segments);
        let again = again.unwrap_or_else(|| in_segments(self.snapshot_after_bytes()) as usize);
        limits::SPARE_SEGMENTS + again.min(most)
    }

    /// Begins a snapshot: the caller then gives it blocks, each taken from now on. `None` where the
    /// last one has everything.
    ///
    /// # Errors
    /// [`Error::Busy`], [`Error::Io`].
    pub fn begin_snapshot(&self, now_ms: u64) -> Result<Option<Snapshot>, Error> {
        self.check()?;
        let at_bytes = self.written_bytes.load(Ordering::Acquire);
        let position = self.appended().0;
        if locked(&self.catalogue)
            .snapshots
            .back()
            .is_some_and(|last| last.position == position)
        {
            return Ok(None);
        }
        if self.snapshotting.swap(true, Ordering::AcqRel) {
            return Err(Error::Busy);
        }
        let running = Running {
            disk: Arc::clone(&self.disk),
            snapshotting: Arc::clone(&self.snapshotting),
            finished: false,
        };
        let name = files::SNAPSHOT_TEMPORARY;
        let file = self.disk.create(name).map_err(Error::io("create", name))?;
        let writer = Writer::new(file, self.store, position, now_ms);
        Ok(Some(Snapshot {
            writer,
            position,
            created_ms: now_ms,
            at_bytes,
            running,
        }))
    }

    /// Ends a snapshot: waits until everything that its blocks may hold is durable, and then gives
    /// it its name.
    ///
    /// # Errors
    /// [`Error::Io`] where the snapshot could not be written: the log goes on without it.
    /// [`Error::Failed`] where the log failed.
    pub fn finish_snapshot(&self, snapshot: Snapshot) -> Result<Position, Error> {
        let complete = self.appended();
        self.finish_snapshot_at(snapshot, complete)
    }

    /// `complete` is not before the last block was taken.
    pub(crate) fn finish_snapshot_at(
        &self,
        snapshot: Snapshot,
        Position(complete): Position,
    ) -> Result<Position, Error> {
        let Snapshot {
            writer,
            position,
            created_ms,
            at_bytes,
            mut running,
        } = snapshot;
        if self.durable().0 < complete {
            self.commit()?;
        }
        self.check_place()?;
        let (from, to) = (files::SNAPSHOT_TEMPORARY, files::snapshot(position));
        let bytes = writer.finish(complete).map_err(Error::io("write", from))?;
        self.disk
            .rename(from, &to)
            .map_err(Error::io("rename", from))?;
        running.finished = true;
        self.disk
            .sync_directory()
            .map_err(|error| self.fail("sync the directory for", to, &error))?;
        let mut catalogue = locked(&self.catalogue);
        catalogue.snapshots.push_back(SnapshotInfo {
            position,
            complete,
            created_ms,
            bytes,
        });
        catalogue.note_peak();
        drop(catalogue);
        self.snapshot_bytes.store(bytes, Ordering::Release);
        self.snapshot_at_bytes.store(at_bytes, Ordering::Release);
        Ok(Position(position))
    }

    /// Lets history go, makes segments ready, and asks what the disk has free. To be called from
    /// time to time, and after a segment was taken into use.
    ///
    /// # Errors
    /// The first thing that could not be done; the log is not hurt by it.
    pub fn maintain(&self, now_ms: u64) -> Result<(), Error> {
        self.check()?;
        self.check_place()?;
        let (snapshot_bytes, noted) = {
            let mut catalogue = locked(&self.catalogue);
            catalogue.now_ms = catalogue.now_ms.max(now_ms);
            // A claim about what is durable already: when it reaches the disk does not matter.
            let noted = match &mut catalogue.newest {
                Some(newest) => newest.note(self.durable().0),
                None => Ok(()),
            };
            let bytes = catalogue.snapshots.back().map_or(0, |last| last.bytes);
            (bytes, noted.map_err(Error::io("write", files::NEWEST)))
        };
        self.snapshot_bytes.store(snapshot_bytes, Ordering::Release);
        let retired = self.retire(now_ms).and_then(|()| self.trim());
        let prepared = self.prepare();
        let spares = locked(&self.catalogue).spares.len() as u64;
        self.spare_bytes
            .store(spares * self.options.segment_bytes, Ordering::Release);
        let free = self
            .disk
            .free_bytes()
            .map_err(Error::io("ask for free space in", "the data directory"));
        // A disk that has no room for a segment is full, whatever it says.
        let full = prepared.as_ref().is_err_and(Error::is_full);
        self.free_bytes.store(
            if full {
                0
            } else {
                *free.as_ref().unwrap_or(&0)
            },
            Ordering::Release,
        );
        free?;
        retired.and(prepared).and(noted)
    }

    fn prepare(&self) -> Result<(), Error> {
        loop {
            let number = {
                let mut catalogue = locked(&self.catalogue);
                if catalogue.spares.len() >= limits::SPARE_SEGMENTS {
                    return Ok(());
                }
                catalogue.next_spare += 1;
                catalogue.next_spare
            };
            let (from, to) = (files::SPARE_TEMPORARY, files::spare(number));
            let file = create_filled(&*self.disk, from, self.options.segment_bytes)?;
            file.sync().map_err(Error::io("sync", from))?;
            self.disk
                .rename(from, &to)
                .map_err(Error::io("rename", from))?;
            locked(&self.catalogue).spares.push(to);
        }
    }

    /// Removes segments that were kept for use, where their room is needed more, or nobody writes any more.
    fn trim(&self) -> Result<(), Error> {
        loop {
            let mut catalogue = locked(&self.catalogue);
            let spares_max = self.spares_max(&catalogue, catalogue.segments.len());
            if catalogue.spares.len() <= spares_max {
                break;
            }
            let Some(name) = catalogue.spares.pop() else {
                break;
            };
            drop(catalogue);
            if let Err(error) = self.removed(&name) {
                // It is still there, and whoever writes can use it.
                locked(&self.catalogue).spares.push(name);
                return Err(error);
            }
        }
        Ok(())
    }
}

/// Begins a journal in an empty directory with a state that a source gives: what restores a backup.
/// The first record is the one behind `position`.
///
/// # Errors
/// [`Error::NotEmpty`] where there is a journal already ([`has_journal`]).
pub fn create_from_snapshot(
    disk: Arc<dyn Disk>,
    options: crate::Options,
    position: Position,
    now_ms: u64,
    source: &mut dyn Source,
) -> Result<(), Error> {
    let found = part_of_a_journal(&*disk).map_err(Error::io("list", "the data directory"))?;
    if let Some(file) = found {
        return Err(Error::NotEmpty { file });
    }
    let store = StoreId(disk.entropy(), disk.entropy());
    // The log comes first: without its snapshot it is refused, so a restore that ends half way
    // leaves no store that opens empty.
    let log = Log::begin(disk, options.bounded(), store, position.0, now_ms)?;
    if let Some(mut snapshot) = log.begin_snapshot(now_ms)? {
        snapshot.pour(source, &mut |_| Ok(()))?;
        log.finish_snapshot(snapshot)?;
    }
    log.close()
}

/// Whether there is anything of a journal in a directory.
///
/// # Errors
/// Where it cannot be listed.
pub fn has_journal(disk: &dyn Disk) -> std::io::Result<bool> {
    part_of_a_journal(disk).map(|file| file.is_some())
}

fn part_of_a_journal(disk: &dyn Disk) -> std::io::Result<Option<String>> {
    let means_something = |name: &String| {
        !matches!(
            files::kind(name),
            files::Kind::Lock | files::Kind::Temporary | files::Kind::Spare(_) | files::Kind::Other
        )
    };
    Ok(disk.list()?.into_iter().find(means_something))
}
