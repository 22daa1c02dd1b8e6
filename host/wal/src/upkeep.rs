//! What is done behind the log: segments made ready, snapshots taken, history let go.
//!
//! Enters: the time, and blocks of a snapshot. Leaves: files in their place. A failure here is no
//! failure of the log, unless it leaves open what the directory holds.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::budget::{Budget, disk_bytes};
use crate::catalogue::{Catalogue, create_filled};
use crate::disk::Disk;
use crate::error::Error;
use crate::files;
use crate::limits;
use crate::log::{Log, locked};
use crate::segment::StoreId;
use crate::snapshot::{self, Paced, Source, Writer};
use crate::survey::SnapshotInfo;
use statehouse_protocol::LogPosition;

/// How much the log can still take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Room {
    /// No end in sight.
    Plenty,
    /// The log has nearly all the room that the next snapshot leaves it: growth should wait for
    /// that snapshot.
    Tight,
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
    /// How large the state was when it began.
    state_bytes: Option<u64>,
    /// Only one at a time. It stands last, so that the file is closed when it is removed.
    running: Running,
}

/// Whatever ends a snapshot early, its file goes: it may be what filled the disk.
struct Running {
    disk: Arc<dyn Disk>,
    snapshotting: Arc<AtomicBool>,
    temporary_bytes: Arc<AtomicU64>,
    /// It has its name.
    finished: bool,
}

impl Drop for Running {
    fn drop(&mut self) {
        if !self.finished {
            // Where it cannot be removed now, the next snapshot or the next start does.
            let _ = self.disk.remove(files::SNAPSHOT_TEMPORARY);
            self.temporary_bytes.store(0, Ordering::Release);
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
    pub fn position(&self) -> LogPosition {
        LogPosition(self.position)
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
        paced: &mut Paced<'_>,
    ) -> Result<(), Error> {
        snapshot::pour(source, &mut self.writer, files::SNAPSHOT_TEMPORARY, paced)
    }
}

impl Log {
    /// How much the log can still take. It looks at numbers only, so every request may ask.
    #[must_use]
    pub fn room(&self) -> Room {
        let appended = self.appended_bytes.load(Ordering::Acquire);
        let refuses = self.is_short.load(Ordering::Acquire)
            || appended >= self.refuse_at_bytes.load(Ordering::Acquire);
        if !refuses {
            return match appended >= self.wait_at_bytes.load(Ordering::Acquire) {
                true => Room::Tight,
                false => Room::Plenty,
            };
        }
        if self.spare_bytes.load(Ordering::Acquire) > 0
            || self.free_bytes.load(Ordering::Acquire) >= self.options.segment_bytes
            || self.tail_bytes.load(Ordering::Acquire) >= limits::ROOM_BYTES_MIN
        {
            Room::Reserve
        } else {
            Room::None
        }
    }

    /// What there is on the disk, and what the next snapshot takes.
    fn budget(&self) -> Budget {
        let catalogue = locked(&self.catalogue);
        let segment = self.options.segment_bytes;
        let newest = catalogue.snapshots.back();
        let base = newest.map_or(0, |newest| newest.bytes);
        let all: u64 = catalogue.segments.iter().map(|link| link.bytes).sum();
        let snapshots: u64 = catalogue.snapshots.iter().map(|info| info.bytes).sum();
        let history = newest.map_or(0, |newest| catalogue.bytes_before(newest.position));
        // What was renamed counts as taken until it is a spare.
        let ready = (catalogue.spares.len() + catalogue.recycled.len()) as u64 * segment;
        drop(catalogue);
        let (next_min, next_max) = self.next_snapshot_bytes();
        let held = all + snapshots + ready + self.temporary_bytes.load(Ordering::Acquire);
        Budget {
            disk: held.saturating_add(self.free_bytes.load(Ordering::Acquire)),
            base,
            log: (all + snapshots - history - base) + self.unwritten_bytes() as u64,
            spares: ready,
            next_min,
            next_max,
            segment,
        }
    }

    /// Of how many bytes the next snapshot will be, at least and at most, as far as the last one and the source can say.
    fn next_snapshot_bytes(&self) -> (u64, u64) {
        let last = self.snapshot_bytes.load(Ordering::Acquire);
        let state = *locked(&self.state_bytes);
        let since = self.appended_bytes.load(Ordering::Acquire) - state.asked_at;
        match (state.now, state.at_snapshot) {
            (None, _) => (last, last),
            (Some(now), None) => (now.min(last), now.max(last) + since),
            (Some(now), Some(then)) if now >= then => (last, last + (now - then) + since),
            (Some(now), Some(then)) => {
                // Cannot truncate: it is less than the last snapshot.
                let less = (u128::from(last) * u128::from(now) / u128::from(then)) as u64;
                (less, less + since)
            }
        }
    }

    /// Takes note of how large the state is by now.
    pub(crate) fn note_state(&self, bytes: impl FnOnce() -> Option<u64>) {
        let asked_at = self.appended_bytes.load(Ordering::Acquire);
        let Some(now) = bytes() else { return };
        let newest = locked(&self.catalogue).snapshots.back().copied();
        let mut state = locked(&self.state_bytes);
        (state.now, state.asked_at) = (Some(now), asked_at);
        // The newest snapshot has all of it, also what was added while it was written.
        if newest.is_some_and(|newest| newest.position == self.appended().0) {
            state.at_snapshot = Some(now);
        }
    }

    /// Reads the free bytes of the disk and divides the room again. A disk that refused a segment
    /// is full, even if it reports free bytes.
    pub(crate) fn divide(&self, full: bool) -> Result<Budget, Error> {
        let free = self
            .disk
            .free_bytes()
            .map_err(Error::io("ask for free space in", "the data directory"));
        let free_bytes = if full {
            0
        } else {
            *free.as_ref().unwrap_or(&0)
        };
        self.free_bytes.store(free_bytes, Ordering::Release);
        // Before the look at the files: bytes that are appended during it count twice instead of
        // never.
        let appended = self.appended_bytes.load(Ordering::Acquire);
        let budget = self.budget();
        let tail = self.tail_bytes.load(Ordering::Acquire);
        let tail = tail.saturating_sub(self.unwritten_bytes() as u64);
        let wait_at = appended.saturating_add(budget.wait_after(tail));
        self.wait_at_bytes.store(wait_at, Ordering::Release);
        let refuse_at = wait_at.max(appended.saturating_add(budget.refuse_after()));
        self.refuse_at_bytes.store(refuse_at, Ordering::Release);
        let before = self.is_short.load(Ordering::Acquire);
        let is_short = budget.is_short(before);
        self.is_short.store(is_short, Ordering::Release);
        self.snapshot_after_max
            .store(budget.snapshot_after_max(), Ordering::Release);
        free.map(|_| budget)
    }

    /// Whether the log behind the last snapshot is long enough for another.
    #[must_use]
    pub fn snapshot_due(&self) -> bool {
        let written = self.written_bytes.load(Ordering::Acquire);
        let since = written.saturating_sub(self.snapshot_at_bytes.load(Ordering::Acquire));
        // Where only removals are taken the log hardly grows, and a snapshot is what makes room.
        since > self.snapshot_after_bytes() || since > 0 && self.is_short()
    }

    /// Whether only a snapshot or removals make room.
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
            .min(self.snapshot_after_max.load(Ordering::Acquire))
    }

    /// How long the log may be when the next snapshot is finished: as much again may come while it is written.
    pub(crate) fn log_expected_bytes(&self) -> u64 {
        let after = self.snapshot_after_bytes();
        after.saturating_mul(2) + 2 * self.options.segment_bytes
    }

    /// How many spares are worth keeping beside so many segments: what will be used again soon, else what the log grows by
    /// until the next snapshot.
    pub(crate) fn spares_max(
        &self,
        catalogue: &Catalogue,
        segments: usize,
        budget: &Budget,
    ) -> usize {
        let left = budget.log_max();
        if self.is_short() || left <= budget.log {
            return budget.spares_min();
        }
        let in_segments = |bytes: u64| bytes / self.options.segment_bytes;
        // Cannot truncate: a hundred thousand at most.
        let most = in_segments(limits::SPARE_BYTES_MAX.min(left - budget.log)) as usize;
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
            temporary_bytes: Arc::clone(&self.temporary_bytes),
            finished: false,
        };
        let name = files::SNAPSHOT_TEMPORARY;
        let file = self.disk.create(name).map_err(Error::io("create", name))?;
        let (least, most) = self.next_snapshot_bytes();
        let first = locked(&self.state_bytes).at_snapshot.is_none();
        let allocate = |bytes| file.allocate(bytes).map(|can| if can { bytes } else { 0 });
        let retried = |error: io::Error| match crate::error::is_full(&error) {
            true => allocate(least),
            false => Err(error),
        };
        let taken = match allocate(most).or_else(retried) {
            // The first estimate of a process is too high mostly, so it is tried all the same.
            Err(error) if first && crate::error::is_full(&error) => 0,
            other => other.map_err(Error::io("allocate", name))?,
        };
        self.temporary_bytes.store(taken, Ordering::Release);
        let state_bytes = locked(&self.state_bytes).now;
        let writer = Writer::new(file, self.store, position, now_ms);
        Ok(Some(Snapshot {
            writer,
            position,
            created_ms: now_ms,
            at_bytes,
            state_bytes,
            running,
        }))
    }

    /// Ends a snapshot: waits until everything that its blocks may hold is durable, and then gives
    /// it its name.
    ///
    /// # Errors
    /// [`Error::Io`] where the snapshot could not be written: the log goes on without it.
    /// [`Error::Failed`] where the log failed.
    pub fn finish_snapshot(&self, snapshot: Snapshot) -> Result<LogPosition, Error> {
        let complete = self.appended();
        self.finish_snapshot_at(snapshot, complete)
    }

    /// `complete` is not before the last block was taken.
    pub(crate) fn finish_snapshot_at(
        &self,
        snapshot: Snapshot,
        LogPosition(complete): LogPosition,
    ) -> Result<LogPosition, Error> {
        let Snapshot {
            writer,
            position,
            created_ms,
            at_bytes,
            state_bytes,
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
        self.temporary_bytes.store(0, Ordering::Release);
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
        locked(&self.state_bytes).at_snapshot = state_bytes;
        Ok(LogPosition(position))
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
        let budget = self.divide(false)?;
        let retired = self
            .retire(now_ms, &budget)
            .and_then(|()| self.trim(&budget));
        let prepared = self.prepare(budget.spares_min());
        let spares = locked(&self.catalogue).spares.len() as u64;
        self.spare_bytes
            .store(spares * self.options.segment_bytes, Ordering::Release);
        // A snapshot that is being written takes room for a while.
        let full = prepared.as_ref().is_err_and(Error::is_full)
            && !self.snapshotting.load(Ordering::Acquire);
        self.divide(full)?;
        retired.and(prepared).and(noted)
    }

    fn prepare(&self, spares: usize) -> Result<(), Error> {
        loop {
            let number = {
                let mut catalogue = locked(&self.catalogue);
                if catalogue.spares.len() >= spares {
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
    fn trim(&self, budget: &Budget) -> Result<(), Error> {
        loop {
            let mut catalogue = locked(&self.catalogue);
            let spares_max = self.spares_max(&catalogue, catalogue.segments.len(), budget);
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
    position: LogPosition,
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
    let options = options.bounded().fitted(disk_bytes(&*disk)?);
    let log = Log::begin(disk, options, store, position.0, now_ms)?;
    if let Some(mut snapshot) = log.begin_snapshot(now_ms)? {
        snapshot.pour(source, &mut |_, _| Ok(()))?;
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
