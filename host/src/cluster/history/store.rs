//! A copy of a cluster's log in a write-ahead log below the data directory.
//!
//! The mark of the data directory names the copy that tools read. A copy that starts over is made
//! in another directory, and named when it is complete. The copy before is then removed. One that
//! is damaged must never be removed at once, since it may be all that is left: it is then moved to
//! [`DAMAGED`], until the next one is.

use std::fs;
use std::io::ErrorKind;
use std::mem;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use data_encoding::HEXLOWER;
use statehouse_cluster::{Chain, CopyError, CopyStore, LogPoint, Resumed, SnapshotInfo, Stop};
use statehouse_files::atomic;
use statehouse_offline::{ClusterMark, CopyMark};
use statehouse_protocol::LogPosition;
use statehouse_wal::{Directory, Error, Log, Options, Room, Sink, Snapshot};

use statehouse_config::limits;
use statehouse_core::clock::wall_ms;

/// The directory of a copy that was damaged, below the data directory.
const DAMAGED: &str = "damaged-history";

/// The copies below a data directory.
pub(super) struct CopyDirectory {
    directory: PathBuf,
    mark: ClusterMark,
    options: Options,
    /// Whether the copy that the mark names is damaged.
    is_damaged: bool,
    /// The copy that is being written, and its number.
    number: u64,
    copy: Option<Copy>,
    /// The last record that tools can read, or 0 while the copy that they read has not caught up
    /// with the log since the start, or does not follow it.
    position: Arc<AtomicU64>,
}

struct Copy {
    // Dropped before the log: its file is in the directory that the log locks.
    snapshot: Option<Snapshot>,
    log: Log,
    /// Records that the log has, and that are passed again.
    tail: Option<Tail>,
    /// Whether it begins after some record and has no snapshot of it yet.
    lacks_base: bool,
    synced_at: Instant,
    maintained_at: Instant,
    marked_at: Instant,
    unmarked_bytes: u64,
}

/// The records of a log behind the place that its mark names.
#[derive(Default)]
struct Tail {
    from: LogPosition,
    end: LogPosition,
    hasher: blake3::Hasher,
    /// The hash of all of them.
    expected: Option<blake3::Hash>,
}

impl Tail {
    fn add(&mut self, record: &[u8]) {
        self.hasher.update(&(record.len() as u64).to_le_bytes());
        self.hasher.update(record);
    }
}

impl Sink for Tail {
    fn reset(&mut self) {
        self.hasher = blake3::Hasher::new();
    }

    fn block(&mut self, _: &[u8]) -> Result<(), String> {
        Ok(())
    }

    fn record(&mut self, position: LogPosition, record: &[u8]) -> Result<(), String> {
        if position > self.from {
            self.add(record);
        }
        Ok(())
    }
}

fn failed(error: impl std::fmt::Display) -> CopyError {
    CopyError::Store(error.to_string())
}

fn io(path: &Path) -> impl FnOnce(std::io::Error) -> CopyError {
    move |error| CopyError::Store(format!("{}: {error}", path.display()))
}

/// The place up to which this host has certainly copied the log.
pub fn copied(mark: &ClusterMark) -> Option<LogPoint> {
    let mark = mark.copy.as_ref()?;
    let chain = HEXLOWER.decode(mark.chain.as_bytes()).ok()?;
    Some(LogPoint {
        seq: mark.frame,
        chain: Chain(chain.try_into().ok()?),
        position: LogPosition(mark.record),
    })
}

impl Copy {
    fn new(log: Log, tail: Option<Tail>, lacks_base: bool) -> Self {
        let now = Instant::now();
        Self {
            snapshot: None,
            log,
            tail,
            lacks_base,
            synced_at: now,
            maintained_at: now,
            marked_at: now,
            unmarked_bytes: 0,
        }
    }

    /// Adds records, and compares those that the log has with them.
    fn add(&mut self, first: LogPosition, mut records: &[&[u8]]) -> Result<(), CopyError> {
        if let Some(tail) = &mut self.tail {
            let known = usize::try_from(tail.end.0 + 1 - first.0).unwrap_or(usize::MAX);
            let (again, new) = records.split_at(known.min(records.len()));
            again.iter().for_each(|record| tail.add(record));
            if again.len() == known && Some(tail.hasher.finalize()) != tail.expected {
                return Err(Stop::CopyIsAhead(tail.end).into());
            }
            if again.len() == known {
                self.tail = None;
            }
            records = new;
        }
        self.unmarked_bytes += records.iter().map(|it| it.len() as u64).sum::<u64>();
        self.log.append(records).map_err(failed)?;
        self.log.write().map_err(failed)
    }

    /// Removes old history, and prepares segments.
    fn maintain(&mut self) -> Result<(), CopyError> {
        self.maintained_at = Instant::now();
        self.log.maintain(wall_ms()).map_err(failed)?;
        match self.log.room() {
            Room::Plenty | Room::Tight => Ok(()),
            Room::Reserve | Room::None => Err(failed("the disk is almost full")),
        }
    }

    fn sync(&mut self) -> Result<(), CopyError> {
        self.log.sync().map_err(failed)?;
        self.synced_at = Instant::now();
        Ok(())
    }
}

impl CopyDirectory {
    /// Reads the mark, and removes copies that it does not name.
    pub(super) fn open(
        directory: &Path,
        options: Options,
        position: Arc<AtomicU64>,
    ) -> Result<Self, CopyError> {
        let mark = ClusterMark::of(directory).map_err(failed)?;
        let mark = mark.ok_or_else(|| failed("the data directory has lost its mark"))?;
        let named = mark.copy.as_ref().map(|it| it.number);
        for entry in fs::read_dir(directory).map_err(io(directory))? {
            let entry = entry.map_err(io(directory))?;
            let number = entry
                .file_name()
                .to_str()
                .and_then(ClusterMark::copy_number);
            if number.is_some() && number != named {
                remove(&entry.path())?;
            }
        }
        Ok(Self {
            directory: directory.to_owned(),
            mark,
            options,
            is_damaged: false,
            number: named.unwrap_or(0),
            copy: None,
            position,
        })
    }

    /// Removes the copy, because no history is wanted.
    pub(super) fn remove(&mut self) -> Result<(), CopyError> {
        let Some(copy) = self.mark.copy.take() else {
            return Ok(());
        };
        self.write_mark()?;
        remove(&ClusterMark::copy_path(&self.directory, copy.number))
    }

    /// Opens the copy that the mark names, if it can be continued. Tools go on reading one that is
    /// damaged until another one is named.
    pub(super) fn resume(&mut self) -> Result<Option<Resumed>, CopyError> {
        let Some(point) = copied(&self.mark) else {
            return Ok(None);
        };
        let path = ClusterMark::copy_path(&self.directory, self.number);
        if !path.exists() {
            return Ok(None);
        }
        let disk = Arc::new(Directory::open(&path).map_err(failed)?);
        let mut tail = Tail {
            from: point.position,
            ..Tail::default()
        };
        let (log, opened) = match Log::open(disk, self.options.clone(), wall_ms(), &mut tail) {
            Ok(opened) => opened,
            Err(Error::Damaged(damage)) => {
                // Its advice is that for the store of a single host.
                self.start_over(&damage.place());
                return Ok(None);
            }
            Err(error) if error.is_of_later_version() => {
                return Err(CopyError::LaterVersion(error.to_string()));
            }
            Err(error) => return Err(failed(error)),
        };
        if opened.position < point.position {
            let (end, expected) = (opened.position, point.position);
            let why = format!("it ends with record {end}, and had record {expected}");
            self.start_over(&why);
            return Ok(None);
        }
        tail.end = opened.position;
        tail.expected = Some(mem::take(&mut tail.hasher).finalize());
        let tail = (tail.end > tail.from).then_some(tail);
        self.copy = Some(Copy::new(log, tail, false));
        Ok(Some(Resumed {
            point,
            end: opened.position,
            snapshot: opened.base,
        }))
    }

    /// The copy that the mark names is damaged, and is set aside when another one is complete.
    fn start_over(&mut self, why: &str) {
        self.is_damaged = true;
        let place = self.directory.join(DAMAGED);
        tracing::warn!(
            "the history of this host is damaged, so it starts over: {why}. When the new history is complete, the damaged one is moved to {}",
            place.display()
        );
    }

    /// Moves the copy at this path, so that it can still be salvaged. Replaces the one that was set
    /// aside before.
    fn set_aside(&self, path: &Path) -> Result<(), CopyError> {
        // An operator may have removed it.
        if !path.exists() {
            return Ok(());
        }
        let place = self.directory.join(DAMAGED);
        remove(&place)?;
        fs::rename(path, &place).map_err(io(path))?;
        // A salvage finds the policies through it. Without it, the backup lacks them.
        _ = symlink("../policies", place.join("policies"));
        let place = place.display();
        tracing::warn!(
            "the damaged history of this host is in {place}, until the next damage. Save what can be read of it with `statehouse doctor {place} --salvage FILE`, then remove that directory"
        );
        Ok(())
    }

    fn copy(&mut self) -> Result<&mut Copy, CopyError> {
        self.copy
            .as_mut()
            .ok_or_else(|| failed("no copy was begun"))
    }

    fn is_named(&self) -> bool {
        self.mark.copy.as_ref().map(|it| it.number) == Some(self.number)
    }

    /// Names the copy, with a place up to which it is durable.
    fn name(&mut self, point: LogPoint) -> Result<(), CopyError> {
        let copy = self.copy()?;
        copy.sync()?;
        copy.marked_at = Instant::now();
        copy.unmarked_bytes = 0;
        let before = self.mark.copy.replace(CopyMark {
            number: self.number,
            frame: point.seq,
            chain: HEXLOWER.encode(&point.chain.0),
            record: point.position.0,
        });
        let Some(before) = before.filter(|it| it.number != self.number) else {
            return self.write_mark();
        };
        let path = ClusterMark::copy_path(&self.directory, before.number);
        if mem::take(&mut self.is_damaged) {
            // Before the mark is written: a start removes copies that the mark does not name.
            self.set_aside(&path)?;
        }
        self.write_mark()?;
        remove(&path)
    }

    fn write_mark(&self) -> Result<(), CopyError> {
        write_mark(&self.directory, &self.mark).map_err(io(&ClusterMark::path(&self.directory)))
    }
}

/// Writes the mark of a data directory, and makes it durable.
pub fn write_mark(directory: &Path, mark: &ClusterMark) -> std::io::Result<()> {
    let path = ClusterMark::path(directory);
    let bytes = serde_json::to_vec(mark)?;
    atomic::replace_with(&path, &bytes, 0o600, fs::File::sync_all)?;
    atomic::sync_name(&path)
}

fn remove(path: &Path) -> Result<(), CopyError> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(io(path)(error)),
        _ => Ok(()),
    }
}

impl CopyStore for CopyDirectory {
    fn begin(&mut self, after: LogPosition) -> Result<(), CopyError> {
        self.copy = None;
        // Tools read the copy before this one, which ends here, until this one is complete.
        self.position.store(0, Relaxed);
        if !self.is_named() {
            remove(&ClusterMark::copy_path(&self.directory, self.number))?;
        }
        self.number += 1;
        let path = ClusterMark::copy_path(&self.directory, self.number);
        let disk = Arc::new(Directory::open(&path).map_err(failed)?);
        let log = Log::create(disk, self.options.clone(), after, wall_ms()).map_err(failed)?;
        self.copy = Some(Copy::new(log, None, after > LogPosition::NONE));
        self.copy()?.maintain()
    }

    fn records(&mut self, first: LogPosition, records: &[&[u8]]) -> Result<(), CopyError> {
        self.copy()?.add(first, records)
    }

    fn begin_snapshot(&mut self, snapshot: &SnapshotInfo, now_ms: u64) -> Result<(), CopyError> {
        let copy = self.copy()?;
        let (after, bytes) = (snapshot.begins_after(), Some(snapshot.bytes));
        let now_ms = match now_ms {
            0 => wall_ms(),
            _ => now_ms,
        };
        let begun = copy.log.begin_snapshot_at(after, bytes, now_ms);
        copy.snapshot = begun.map_err(failed)?;
        Ok(())
    }

    fn block(&mut self, block: &[u8]) -> Result<(), CopyError> {
        match &mut self.copy()?.snapshot {
            Some(snapshot) => snapshot.block(block).map_err(failed),
            None => Ok(()),
        }
    }

    fn end_snapshot(&mut self, complete: LogPosition, point: LogPoint) -> Result<(), CopyError> {
        // A restart compares the records behind the mark, so none of them may be before the newest
        // snapshot.
        if self.is_named() {
            self.name(point)?;
        }
        let copy = self.copy()?;
        copy.sync()?;
        if let Some(snapshot) = copy.snapshot.take() {
            let finished = copy.log.finish_snapshot_at(snapshot, complete);
            finished.map_err(failed)?;
            copy.lacks_base = false;
        }
        copy.maintain()?;
        match self.is_named() {
            true => Ok(()),
            false => self.name(point),
        }
    }

    fn cancel_snapshot(&mut self) {
        if let Some(copy) = &mut self.copy {
            copy.snapshot = None;
        }
    }

    fn flush(&mut self, point: Option<LogPoint>) -> Result<Duration, CopyError> {
        let is_named = self.is_named();
        let copy = self.copy()?;
        let end = copy.log.appended();
        let is_due = |at: Instant, after| at.elapsed() >= after;
        let is_dirty = end > copy.log.durable();
        let maintenance = match is_dirty {
            true => limits::CLUSTER_HISTORY_SYNC,
            false => limits::CLUSTER_HISTORY_IDLE,
        };
        if is_due(copy.maintained_at, maintenance) {
            copy.maintain()?;
        }
        if is_dirty && is_due(copy.synced_at, limits::CLUSTER_HISTORY_SYNC) {
            copy.sync()?;
        }
        let is_dirty = end > copy.log.durable();
        let is_marked_late = copy.unmarked_bytes > limits::CLUSTER_HISTORY_UNMARKED_BYTES_MAX
            || is_due(copy.marked_at, limits::CLUSTER_HISTORY_IDLE);
        let is_unmarked = copy.unmarked_bytes > 0 && copy.tail.is_none();
        if let Some(point) = point {
            let is_first = !is_named && !copy.lacks_base;
            if is_first || is_named && is_unmarked && is_marked_late {
                self.name(point)?;
            }
        }
        if self.is_named() {
            self.position.store(end.0, Relaxed);
        }
        Ok(match is_dirty {
            true => limits::CLUSTER_HISTORY_SYNC,
            false => limits::CLUSTER_HISTORY_IDLE,
        })
    }

    fn close(&mut self, point: Option<LogPoint>) -> Result<(), CopyError> {
        let Some(copy) = &mut self.copy else {
            return Ok(());
        };
        copy.snapshot = None;
        copy.log.close().map_err(failed)?;
        let is_read_again = copy.tail.is_some();
        match point {
            Some(point) if self.is_named() && !is_read_again => self.name(point),
            _ => Ok(()),
        }
    }
}
