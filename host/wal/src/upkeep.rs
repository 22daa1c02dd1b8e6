//! Upkeep of the log: preparing segments, taking snapshots, removing history.
//!
//! Input is the time and the blocks of a snapshot; output is files. An error here is not a failure
//! of the log, unless it leaves the content of the directory unknown.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::budget::{Budget, disk_bytes};
use crate::catalogue::{Catalogue, create_filled};
use crate::disk::Disk;
use crate::error::Error;
use crate::figures::Space;
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
    /// The log may grow.
    Plenty,
    /// The log has almost filled the room that the next snapshot leaves, and a snapshot would free
    /// some. Requests that add data should wait for that snapshot.
    Tight,
    /// The disk is almost full. Only requests that free space should be written.
    Reserve,
    /// The disk is full. Nothing should be written.
    None,
}

/// A snapshot in progress. Dropping it cancels it.
pub struct Snapshot {
    writer: Writer,
    position: u64,
    created_ms: u64,
    at_bytes: u64,
    /// The size of the state when the snapshot began.
    state_bytes: Option<u64>,
    /// Ensures that there is only one snapshot at a time. It must be the last field, so that the
    /// file is closed before it is removed.
    running: Running,
}

/// Removes the temporary file when a snapshot ends early: the file may be what filled the disk.
struct Running {
    disk: Arc<dyn Disk>,
    snapshotting: Arc<AtomicBool>,
    temporary_bytes: Arc<AtomicU64>,
    /// True once the file has its final name.
    finished: bool,
}

impl Drop for Running {
    fn drop(&mut self) {
        if !self.finished {
            // If the removal fails, the next snapshot or the next start replaces or removes the
            // file.
            let _ = self.disk.remove(files::SNAPSHOT_TEMPORARY);
            self.temporary_bytes.store(0, Ordering::Release);
        }
        // Must be last: from here on another snapshot may own the file.
        self.snapshotting.store(false, Ordering::Release);
    }
}

impl Snapshot {
    /// The position at which the snapshot began. Its blocks hold every effect up to here, and
    /// possibly later ones.
    #[must_use]
    pub fn position(&self) -> LogPosition {
        LogPosition(self.position)
    }

    /// Adds a block. If it fails, the caller should drop the snapshot.
    pub fn block(&mut self, block: &[u8]) -> Result<(), Error> {
        self.writer.block(block, files::SNAPSHOT_TEMPORARY)
    }

    pub(crate) fn write_blocks(
        &mut self,
        source: &mut dyn Source,
        paced: &mut Paced<'_>,
    ) -> Result<(), Error> {
        snapshot::write_blocks(source, &mut self.writer, files::SNAPSHOT_TEMPORARY, paced)
    }
}

impl Log {
    /// How much the log can still take. It only reads counters, so it is cheap enough for every
    /// request.
    #[must_use]
    pub fn room(&self) -> Room {
        if self.waits_for_room() {
            return Room::None;
        }
        let appended = self.appended_bytes.load(Ordering::Acquire);
        let refuses = self.is_short.load(Ordering::Acquire)
            || appended >= self.refuse_at_bytes.load(Ordering::Acquire);
        if !refuses {
            return match self.is_tight() && self.has_grown() {
                true => Room::Tight,
                false => Room::Plenty,
            };
        }
        let tail = self.tail_bytes.load(Ordering::Acquire);
        if self.spare_bytes.load(Ordering::Acquire) > 0
            || self.free_bytes.load(Ordering::Acquire) >= self.options.segment_bytes
            || tail.saturating_sub(self.unwritten_bytes() as u64) >= limits::ROOM_BYTES_MIN
        {
            Room::Reserve
        } else {
            Room::None
        }
    }

    /// Whether the log has almost filled the room that the next snapshot leaves.
    fn is_tight(&self) -> bool {
        let appended = self.appended_bytes.load(Ordering::Acquire);
        appended >= self.wait_at_bytes.load(Ordering::Acquire)
    }

    /// Whether a snapshot would free any room. If not, the last segment alone may fill the log: one
    /// that was made for a long record. Only another record begins a segment after it, so a client
    /// that waited would wait for itself.
    fn has_grown(&self) -> bool {
        self.unwritten_bytes() > 0 || self.since_snapshot_bytes() > 0
    }

    /// Bytes that were written since the newest snapshot began.
    fn since_snapshot_bytes(&self) -> u64 {
        let written = self.written_bytes.load(Ordering::Acquire);
        written.saturating_sub(self.snapshot_at_bytes.load(Ordering::Acquire))
    }

    /// Whether this many bytes can be appended before [`Room::Reserve`].
    #[must_use]
    pub fn fits(&self, bytes: u64) -> bool {
        let appended = self.appended_bytes.load(Ordering::Acquire);
        let after = appended.saturating_add(bytes);
        !self.waits_for_room()
            && !self.is_short.load(Ordering::Acquire)
            && after < self.refuse_at_bytes.load(Ordering::Acquire)
    }

    /// The current use of the disk and the expected size of the next snapshot.
    fn budget(&self) -> Budget {
        let catalogue = locked(&self.catalogue);
        let segment = self.options.segment_bytes;
        let space = Space::of(&catalogue);
        // A renamed segment counts as used until the directory is synced and it becomes a spare.
        let ready = (catalogue.spares.len() + catalogue.recycled.len()) as u64 * segment;
        let severed = catalogue.severed_bytes();
        drop(catalogue);
        let (next_min, next_max) = self.next_snapshot_bytes();
        let taken = self.temporary_bytes.load(Ordering::Acquire);
        let held = space.log + space.history + space.snapshot + severed + ready + taken;
        Budget {
            disk: held.saturating_add(self.free_bytes.load(Ordering::Acquire)),
            base: space.snapshot,
            log: space.log + self.unwritten_bytes() as u64,
            spares: ready,
            next_min,
            next_max,
            segment,
        }
    }

    /// The least and the greatest expected size of the next snapshot, estimated from the last one
    /// and from the size that the source reports.
    fn next_snapshot_bytes(&self) -> (u64, u64) {
        let last = self.snapshot_bytes.load(Ordering::Acquire);
        let state = *locked(&self.state_bytes);
        let since = self.appended_bytes.load(Ordering::Acquire) - state.asked_at;
        match (state.now, state.at_snapshot) {
            (None, _) => (last, last),
            (Some(now), None) => (now.min(last), now.max(last) + since),
            (Some(now), Some(then)) if now >= then => (last, last + (now - then) + since),
            (Some(now), Some(then)) => {
                // Cannot truncate: the result is less than the size of the last snapshot.
                let less = (u128::from(last) * u128::from(now) / u128::from(then)) as u64;
                (less, less + since)
            }
        }
    }

    pub(crate) fn note_state(&self, bytes: impl FnOnce() -> Option<u64>) {
        let asked_at = self.appended_bytes.load(Ordering::Acquire);
        let Some(now) = bytes() else { return };
        let newest = locked(&self.catalogue).snapshots.back().copied();
        let mut state = locked(&self.state_bytes);
        (state.now, state.asked_at) = (Some(now), asked_at);
        // If nothing was appended since the newest snapshot began, that snapshot holds the whole
        // state.
        if newest.is_some_and(|newest| newest.position == self.appended().0) {
            state.at_snapshot = Some(now);
        }
    }

    /// Reads the free bytes of the disk and recomputes the budget. A disk that refused a segment
    /// counts as full, even if it reports free bytes.
    pub(crate) fn divide(&self, full: bool) -> Result<Budget, Error> {
        let free = self
            .disk
            .free_bytes()
            .map_err(Error::io("ask for free space in", "the data directory"));
        let disk_free_bytes = *free.as_ref().unwrap_or(&0);
        self.disk_free_bytes
            .store(disk_free_bytes, Ordering::Release);
        let free_bytes = if full { 0 } else { disk_free_bytes };
        self.free_bytes.store(free_bytes, Ordering::Release);
        // Read before the files are counted: bytes that are appended in between then count twice
        // rather than never.
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

    /// Whether the log after the last snapshot is long enough for another one.
    #[must_use]
    pub fn snapshot_due(&self) -> bool {
        let since = self.since_snapshot_bytes();
        // While only removals are accepted, the log hardly grows, and only a snapshot frees space.
        // It cannot be finished while a group waits for room.
        !self.waits_for_room()
            && (since > self.snapshot_after_bytes() || since > 0 && self.is_short())
    }

    /// Whether a group waits for free space. It gets the space of the spares, because no other record
    /// can be written before it. The budget, which counts it, gives it that of the history.
    pub(crate) fn waits_for_room(&self) -> bool {
        self.waits_for_room.load(Ordering::Acquire)
    }

    /// Whether only a snapshot or removals can free space.
    pub(crate) fn is_short(&self) -> bool {
        self.is_tight() || self.room() != Room::Plenty
    }

    /// Length of the log after a snapshot at which the next snapshot is due.
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

    /// Expected length of the log when the next snapshot is finished: it may double while the
    /// snapshot is written.
    pub(crate) fn log_expected_bytes(&self) -> u64 {
        let after = self.snapshot_after_bytes();
        after.saturating_mul(2) + 2 * self.options.segment_bytes
    }

    /// How many spares to prepare.
    fn spares_min(&self, budget: &Budget) -> usize {
        match self.waits_for_room() {
            true => 0,
            false => budget.spares_min(),
        }
    }

    /// How many spares to keep next to this number of segments: those that will soon be reused, or
    /// else what the log will need until the next snapshot.
    pub(crate) fn spares_max(
        &self,
        catalogue: &Catalogue,
        segments: usize,
        budget: &Budget,
    ) -> usize {
        let left = budget.log_max();
        if self.is_short() || left <= budget.log {
            return self.spares_min(budget);
        }
        let in_segments = |bytes: u64| bytes / self.options.segment_bytes;
        // Cannot truncate: there are at most about a hundred thousand.
        let most = in_segments(limits::SPARE_BYTES_MAX.min(left - budget.log)) as usize;
        let again = catalogue.used_again(segments);
        let again = again.unwrap_or_else(|| in_segments(self.snapshot_after_bytes()) as usize);
        limits::SPARE_SEGMENTS + again.min(most)
    }

    /// Begins a snapshot. The caller then adds blocks, each captured after this call. Returns
    /// `None` if nothing was appended since the last snapshot began. Fails with [`Error::Busy`]
    /// during another snapshot.
    pub fn begin_snapshot(&self, now_ms: u64) -> Result<Option<Snapshot>, Error> {
        self.begin_snapshot_at(self.appended(), None, now_ms)
    }

    /// Begins a snapshot that was captured elsewhere and began at a position of the past. `bytes`
    /// is its size, if that is known. Returns `None` if the log has a snapshot of this position or
    /// a later one. Fails with [`Error::Busy`] during another snapshot.
    pub fn begin_snapshot_at(
        &self,
        LogPosition(position): LogPosition,
        bytes: Option<u64>,
        now_ms: u64,
    ) -> Result<Option<Snapshot>, Error> {
        self.check()?;
        let at_bytes = self.written_bytes.load(Ordering::Acquire);
        if locked(&self.catalogue)
            .snapshots
            .back()
            .is_some_and(|last| last.position >= position)
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
        let (least, most) = match bytes {
            Some(bytes) => (bytes, bytes),
            None => self.next_snapshot_bytes(),
        };
        let first = locked(&self.state_bytes).at_snapshot.is_none();
        let allocate = |bytes| file.allocate(bytes).map(|can| if can { bytes } else { 0 });
        let retried = |error: io::Error| match crate::error::is_full(&error) {
            true => allocate(least),
            false => Err(error),
        };
        let taken = match allocate(most).or_else(retried) {
            // The first estimate of a process is usually too high, so the snapshot is attempted
            // anyway.
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

    /// Finishes a snapshot: waits until every effect that its blocks may hold is durable, then
    /// renames the file to its final name. Fails with [`Error::Io`] if the snapshot could not be
    /// written; the log continues without it. Fails with [`Error::Failed`] if the log failed.
    pub fn finish_snapshot(&self, snapshot: Snapshot) -> Result<LogPosition, Error> {
        let complete = self.appended();
        self.finish_snapshot_at(snapshot, complete)
    }

    /// Like [`Self::finish_snapshot`]. The log must have all records up to `complete`, and no block
    /// may hold an effect of a later one.
    pub fn finish_snapshot_at(
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

    /// Removes history, prepares segments and reads the free bytes of the disk. Must be called
    /// regularly, and after each change of segment. Fails with the first operation that failed; the
    /// log itself is unaffected.
    pub fn maintain(&self, now_ms: u64) -> Result<(), Error> {
        self.check()?;
        self.check_place()?;
        let (snapshot_bytes, noted) = {
            let mut catalogue = locked(&self.catalogue);
            catalogue.now_ms = catalogue.now_ms.max(now_ms);
            // The note only repeats that records are durable, so it does not matter when it reaches
            // the disk.
            let noted = match &mut catalogue.newest {
                Some(newest) => newest.note(self.durable().0),
                None => Ok(()),
            };
            let bytes = catalogue.snapshots.back().map_or(0, |last| last.bytes);
            (bytes, noted.map_err(Error::io("write", files::NEWEST)))
        };
        self.snapshot_bytes.store(snapshot_bytes, Ordering::Release);
        let budget = self.divide(false)?;
        // A group that waits gets the spares first.
        let trimmed = match self.waits_for_room() {
            true => self.trim(&budget),
            false => Ok(()),
        };
        let retired = trimmed
            .and_then(|()| self.retire(now_ms, &budget))
            .and_then(|()| self.trim(&budget));
        let prepared = self.prepare(self.spares_min(&budget));
        let spares = locked(&self.catalogue).spares.len() as u64;
        self.spare_bytes
            .store(spares * self.options.segment_bytes, Ordering::Release);
        // A snapshot in progress takes room only temporarily.
        let full = prepared.as_ref().is_err_and(Error::is_full)
            && !self.snapshotting.load(Ordering::Acquire);
        self.note_inodes(full || self.waits_for_room());
        self.divide(full)?;
        retired.and(prepared).and(noted)
    }

    /// Finds out whether the disk is `full` for lack of inodes. Only then: some file systems always
    /// report that none is free.
    fn note_inodes(&self, full: bool) {
        let no_inodes = full && self.disk.has_free_inodes().is_ok_and(|has| !has);
        if !self.no_free_inodes.swap(no_inodes, Ordering::AcqRel) && no_inodes {
            tracing::error!(
                "the file system of the data directory has no free inodes: the log can create no file there, whatever the free bytes are. Remove files"
            );
        }
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

    /// Removes spare segments if their room is needed elsewhere or the log is no longer being
    /// written.
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
                // The file still exists and can be used as a spare.
                locked(&self.catalogue).spares.push(name);
                return Err(error);
            }
        }
        Ok(())
    }

    /// Creates a log whose first record is the one after `position`. Unless that is the first one,
    /// recovery refuses the log before it has a snapshot of `position`. So what an interrupted
    /// restore leaves never opens as an empty store. Fails with [`Error::NotEmpty`] if the
    /// directory already holds a log ([`has_log`]).
    pub fn create(
        disk: Arc<dyn Disk>,
        options: crate::Options,
        position: LogPosition,
        now_ms: u64,
    ) -> Result<Self, Error> {
        let found = find_log_file(&*disk).map_err(Error::io("list", "the data directory"))?;
        if let Some(file) = found {
            return Err(Error::NotEmpty { file });
        }
        let store = StoreId(disk.entropy(), disk.entropy());
        let options = options.fitted(disk_bytes(&*disk)?);
        Self::begin(disk, options, store, position.0, now_ms)
    }
}

/// Whether a directory holds any file of a log.
pub fn has_log(disk: &dyn Disk) -> std::io::Result<bool> {
    find_log_file(disk).map(|file| file.is_some())
}

fn find_log_file(disk: &dyn Disk) -> std::io::Result<Option<String>> {
    let is_part = |name: &String| {
        !matches!(
            files::kind(name),
            files::Kind::Lock | files::Kind::Temporary | files::Kind::Spare(_) | files::Kind::Other
        )
    };
    Ok(disk.list()?.into_iter().find(is_part))
}
