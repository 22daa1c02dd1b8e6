//! The log without its threads: append, write, sync, publish.
//!
//! The threads of [`crate::WriteAheadLog`], or a test, drive it. Input is groups of records; output
//! is log positions and bytes on the disk.
//!
//! Invariants:
//!
//! * Locks must be taken in the order tail, catalogue, pending. Appenders take only the last one.
//!   Another order can deadlock.
//! * The log must never sync or call a callback while it holds the pending lock, because appenders
//!   would then wait for the disk.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

use crate::budget::disk_bytes;
use crate::catalogue::Catalogue;
use crate::disk::{Disk, File};
use crate::error::{Error, Failure};
use crate::files;
use crate::frame;
use crate::limits;
use crate::options::{Durability, Options};
use crate::pending::Pending;
use crate::recovery::{self, Recovered, Sink};
use crate::reopen;
use crate::segment::{HEADER_BYTES, Header, Magic, StoreId};
use statehouse_protocol::LogPosition;

/// What [`Log::open`] found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Opened {
    /// True if the directory held no log, so that a new one was created.
    pub fresh: bool,
    /// The position of the last record.
    pub position: LogPosition,
    /// The position of the snapshot that was read, or [`LogPosition::NONE`] if there was none.
    pub base: LogPosition,
    /// Number of records that were replayed after the snapshot.
    pub records: u64,
    /// Bytes of frames that were replayed after the snapshot.
    pub bytes: u64,
    /// True if the previous process closed the log with [`Log::close`].
    pub clean: bool,
    /// True if the log ended in an incomplete write. It was never acknowledged and was dropped.
    pub torn: bool,
    /// Damaged snapshots, which were renamed, with the reason for each.
    pub damaged_snapshots: Vec<(LogPosition, String)>,
}

/// A callback that may run on any thread.
pub(crate) type Hook<T> = Box<dyn Fn(&T) + Send + Sync>;

/// A log of records on a disk. All methods take `&self`, so that threads can share it.
pub struct Log {
    pub(crate) disk: Arc<dyn Disk>,
    pub(crate) options: Options,
    pub(crate) store: StoreId,
    tail: Mutex<Tail>,
    pub(crate) catalogue: Mutex<Catalogue>,
    pending: Mutex<Pending>,
    /// Signalled when there are records to write or the log is closing.
    pub(crate) work: Condvar,
    /// Bytes that are appended and not yet written.
    unwritten_bytes: AtomicUsize,
    appended: AtomicU64,
    /// Bytes of records that this process has appended.
    pub(crate) appended_bytes: AtomicU64,
    /// Values of `appended_bytes` from which clients that write should wait (`wait_at_bytes`) or
    /// must be refused (`refuse_at_bytes`). See [`crate::Room`].
    pub(crate) wait_at_bytes: AtomicU64,
    pub(crate) refuse_at_bytes: AtomicU64,
    /// True if the disk is too small for more state, regardless of the length of the log.
    pub(crate) is_short: AtomicBool,
    /// Length of the log at which the disk budget requires a snapshot.
    pub(crate) snapshot_after_max: AtomicU64,
    /// Bytes that the snapshot in progress has taken from the disk.
    pub(crate) temporary_bytes: Arc<AtomicU64>,
    pub(crate) state_bytes: Mutex<StateBytes>,
    durable: AtomicU64,
    released: AtomicU64,
    /// Free bytes in the current segment.
    pub(crate) tail_bytes: AtomicU64,
    /// Free bytes of the disk when they were last read.
    pub(crate) free_bytes: AtomicU64,
    /// Bytes of the spare segments.
    pub(crate) spare_bytes: AtomicU64,
    /// Length of the newest snapshot.
    pub(crate) snapshot_bytes: AtomicU64,
    /// Bytes of frames that this process has written, in total and when the newest snapshot began.
    pub(crate) written_bytes: AtomicU64,
    pub(crate) snapshot_at_bytes: AtomicU64,
    pub(crate) snapshotting: Arc<AtomicBool>,
    segments: AtomicU64,
    failure: OnceLock<Failure>,
    pub(crate) on_failure: OnceLock<Hook<Failure>>,
}

/// The size of the state, as reported by the snapshot source.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct StateBytes {
    pub(crate) now: Option<u64>,
    /// The value of `appended_bytes` when the source was asked.
    pub(crate) asked_at: u64,
    /// The size of the state when the newest snapshot of this process began.
    pub(crate) at_snapshot: Option<u64>,
}

/// The segment that is being written.
struct Tail {
    file: Arc<dyn File>,
    header: Header,
    bytes: u64,
    offset: u64,
    /// The last position that was written.
    written: u64,
    /// True if there are written bytes that are not synced.
    dirty: bool,
    /// An empty buffer that replaces the appenders' buffer at the next write.
    spare: Vec<u8>,
}

pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic under any of these locks leaves no state half changed, so poisoning is ignored.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Checks that a group fits one frame. A group must not span frames, and readers reject a frame
/// with more records. Frames of several groups hold fewer records: each takes at least 4 bytes of a
/// segment, and segments have at most [`limits::SEGMENT_BYTES_MAX`] bytes.
pub(crate) fn check_count(records: usize) -> Result<(), Error> {
    if records > limits::FRAME_RECORDS_MAX as usize {
        return Err(Error::TooMany {
            records,
            records_max: limits::FRAME_RECORDS_MAX,
        });
    }
    Ok(())
}

/// The outcome of an attempt to write.
enum Step {
    Done,
    Rotate(u64),
}

impl Log {
    /// Opens the log, or creates it if the directory holds none, and passes its state to `sink`.
    ///
    /// # Errors
    /// [`Error::Damaged`] if data is missing that was durable before. Nothing is changed in this
    /// case.
    pub fn open(
        disk: Arc<dyn Disk>,
        options: Options,
        now_ms: u64,
        sink: &mut dyn Sink,
    ) -> Result<(Self, Opened), Error> {
        let options = options.bounded().fitted(disk_bytes(&*disk)?);
        let recovered = recovery::recover(&*disk, sink)?;
        // The previous process may have renamed files without a sync of the directory.
        disk.sync_directory()
            .map_err(Error::io("sync", "the data directory"))?;
        let Some(recovered) = recovered else {
            let store = StoreId(disk.entropy(), disk.entropy());
            let log = Self::begin(disk, options, store, 0, now_ms)?;
            return Ok((log, Opened::fresh()));
        };
        let opened = Opened::of(&recovered);
        let mut catalogue = reopen::prepare(&*disk, options.segment_bytes, now_ms, &recovered)?;
        // A last segment without records is replaced, so that repeated starts do not add files.
        let empty = recovered.end_offset == HEADER_BYTES;
        if empty {
            catalogue.segments.pop_back();
        }
        let last = recovered.links.last().map_or(0, |link| link.header.number);
        let number = if empty { last } else { last + 1 };
        let end = recovered.range.end.0;
        let log = Self::assemble(
            disk,
            options,
            recovered.store,
            catalogue,
            number,
            end,
            now_ms,
        )?;
        log.written_bytes.store(recovered.bytes, Ordering::Release);
        Ok((log, opened))
    }

    /// Creates a log whose first record is the one after `position`.
    pub(crate) fn begin(
        disk: Arc<dyn Disk>,
        options: Options,
        store: StoreId,
        position: u64,
        now_ms: u64,
    ) -> Result<Self, Error> {
        // A crash during an earlier creation can leave only spares and temporary files.
        let catalogue = Catalogue::cleared(&*disk, options.segment_bytes, now_ms)?;
        Self::assemble(disk, options, store, catalogue, 1, position, now_ms)
    }

    fn assemble(
        disk: Arc<dyn Disk>,
        options: Options,
        store: StoreId,
        mut catalogue: Catalogue,
        number: u64,
        position: u64,
        now_ms: u64,
    ) -> Result<Self, Error> {
        let header = Header {
            store,
            number,
            position: position + 1,
            created_ms: now_ms,
            bytes: 0,
        };
        catalogue
            .make_room(&*disk, options.segment_bytes)
            .map_err(Error::io("make room in", "the data directory"))?;
        let mut activate = |bytes| catalogue.activate(&*disk, header, bytes, bytes);
        let (file, header) = match activate(options.segment_bytes) {
            Err(error) if error.is_full() => {
                activate(options.segment_bytes.min(limits::SEGMENT_BYTES_FULL))?
            }
            other => other?,
        };
        let bytes = header.bytes;
        let spare_bytes = catalogue.spares.len() as u64 * options.segment_bytes;
        let snapshot_bytes = catalogue.snapshots.back().map_or(0, |last| last.bytes);
        let log = Self {
            disk,
            options,
            store,
            tail: Mutex::new(Tail {
                file,
                header,
                bytes,
                offset: HEADER_BYTES as u64,
                written: position,
                dirty: false,
                spare: Vec::new(),
            }),
            catalogue: Mutex::new(catalogue),
            pending: Mutex::new(Pending::new(position)),
            work: Condvar::new(),
            unwritten_bytes: AtomicUsize::new(0),
            appended: AtomicU64::new(position),
            appended_bytes: AtomicU64::new(0),
            wait_at_bytes: AtomicU64::new(u64::MAX),
            refuse_at_bytes: AtomicU64::new(u64::MAX),
            is_short: AtomicBool::new(false),
            snapshot_after_max: AtomicU64::new(u64::MAX),
            temporary_bytes: Arc::default(),
            state_bytes: Mutex::default(),
            durable: AtomicU64::new(position),
            released: AtomicU64::new(position),
            tail_bytes: AtomicU64::new(bytes - HEADER_BYTES as u64),
            free_bytes: AtomicU64::new(0),
            spare_bytes: AtomicU64::new(spare_bytes),
            snapshot_bytes: AtomicU64::new(snapshot_bytes),
            written_bytes: AtomicU64::new(0),
            snapshot_at_bytes: AtomicU64::new(0),
            snapshotting: Arc::default(),
            segments: AtomicU64::new(0),
            failure: OnceLock::new(),
            on_failure: OnceLock::new(),
        };
        log.divide(false)?;
        Ok(log)
    }

    /// Appends a group of records and returns the position of its last record. Either the whole
    /// group survives a crash or none of it.
    ///
    /// The method does no I/O and never waits, because callers hold locks that other clients need.
    /// A caller that appends much must call [`Log::is_behind`] before it takes those locks.
    ///
    /// # Errors
    /// [`Error::TooLarge`] or [`Error::TooMany`]; nothing was appended in this case.
    pub fn append(&self, records: &[&[u8]]) -> Result<LogPosition, Error> {
        self.push(records, false)
    }

    /// Like [`Log::append`], but the group is not released before it is durable, in any durability
    /// mode.
    ///
    /// # Errors
    /// [`Error::TooLarge`] or [`Error::TooMany`]; nothing was appended in this case.
    pub fn append_urgent(&self, records: &[&[u8]]) -> Result<LogPosition, Error> {
        self.push(records, true)
    }

    fn push(&self, records: &[&[u8]], urgent: bool) -> Result<LogPosition, Error> {
        let bytes = records.iter().fold(0usize, |bytes, record| {
            bytes.saturating_add(record.len()).saturating_add(4)
        });
        let largest = records.iter().map(|record| record.len()).max().unwrap_or(0);
        if largest > limits::RECORD_BYTES_MAX {
            return Err(Error::TooLarge {
                bytes: largest,
                bytes_max: limits::RECORD_BYTES_MAX,
            });
        }
        if bytes > limits::GROUP_BYTES_MAX {
            return Err(Error::TooLarge {
                bytes,
                bytes_max: limits::GROUP_BYTES_MAX,
            });
        }
        check_count(records.len())?;
        let mut pending = locked(&self.pending);
        if records.is_empty() {
            return Ok(LogPosition(pending.appended));
        }
        let last = pending.push(records, urgent);
        self.appended.store(last, Ordering::Release);
        self.unwritten_bytes
            .store(pending.bytes(), Ordering::Release);
        self.appended_bytes
            .fetch_add(bytes as u64, Ordering::AcqRel);
        if matches!(self.options.durability, Durability::Interval(_)) && !pending.failed {
            self.released.store(pending.released(), Ordering::Release);
        }
        let wake = std::mem::take(&mut pending.idle);
        drop(pending);
        if wake {
            self.work.notify_one();
        }
        Ok(LogPosition(last))
    }

    /// The position of the last appended record.
    #[must_use]
    pub fn appended(&self) -> LogPosition {
        LogPosition(self.appended.load(Ordering::Acquire))
    }

    /// The last durable position.
    #[must_use]
    pub fn durable(&self) -> LogPosition {
        LogPosition(self.durable.load(Ordering::Acquire))
    }

    /// The last released position: the effects of records up to here may be sent to clients.
    #[must_use]
    pub fn released(&self) -> LogPosition {
        LogPosition(self.released.load(Ordering::Acquire))
    }

    /// The failure that ended the log, if any. Nothing becomes durable after it.
    #[must_use]
    pub fn failure(&self) -> Option<&Failure> {
        self.failure.get()
    }

    /// Writes everything that is appended, without a sync.
    ///
    /// # Errors
    /// If the disk is full ([`Error::is_full`]), the log is unchanged and the caller may retry. Any
    /// other error is final.
    pub fn write(&self) -> Result<(), Error> {
        self.write_tail(&mut locked(&self.tail))
    }

    /// Makes everything that is written durable, and publishes the new position.
    ///
    /// # Errors
    /// Every error is final, because it is unknown what is on the disk.
    pub fn sync(&self) -> Result<LogPosition, Error> {
        let mut tail = locked(&self.tail);
        self.sync_tail(&mut tail)?;
        Ok(self.durable())
    }

    /// Writes and syncs everything that is appended.
    ///
    /// # Errors
    /// As [`Log::write`] and [`Log::sync`].
    pub fn commit(&self) -> Result<LogPosition, Error> {
        let mut tail = locked(&self.tail);
        let written = self.write_tail(&mut tail);
        self.sync_tail(&mut tail)?;
        written.map(|()| self.durable())
    }

    fn write_tail(&self, tail: &mut Tail) -> Result<(), Error> {
        loop {
            match self.write_step(tail)? {
                Step::Done => return Ok(()),
                Step::Rotate(bytes) => self.rotate(tail, bytes)?,
            }
        }
    }

    /// Writes as many pending groups as fit the current segment.
    fn write_step(&self, tail: &mut Tail) -> Result<Step, Error> {
        self.check()?;
        let room = tail.bytes.saturating_sub(tail.offset);
        let (taken, more) = {
            let mut pending = locked(&self.pending);
            match pending.next_frame_bytes() {
                None => return Ok(Step::Done),
                Some(bytes) if bytes > room => return Ok(Step::Rotate(bytes)),
                Some(_) => {}
            }
            let taken = pending.take(room, std::mem::take(&mut tail.spare));
            self.unwritten_bytes
                .store(pending.bytes(), Ordering::Release);
            (taken, pending.next_frame_bytes())
        };
        let Some(mut taken) = taken else {
            return Ok(Step::Done);
        };
        let place = tail.header.place(tail.offset as usize);
        // Cannot truncate: every record takes at least 4 bytes of the frame.
        let count = (taken.last - taken.first + 1) as u32;
        frame::seal(
            &mut taken.frame,
            place,
            taken.first,
            self.durable().0,
            count,
        );
        tail.dirty = true;
        let name = || files::segment(tail.header.number);
        tail.file
            .write_at(&taken.frame, tail.offset)
            .map_err(|error| self.fail("write", name(), &error))?;
        tail.offset += taken.frame.len() as u64;
        tail.written = taken.last;
        self.tail_bytes
            .store(tail.bytes - tail.offset, Ordering::Release);
        self.written_bytes
            .fetch_add(taken.frame.len() as u64, Ordering::AcqRel);
        taken.frame.clear();
        taken.frame.shrink_to(limits::BUFFER_KEPT_BYTES_MAX);
        tail.spare = taken.frame;
        // The remaining groups did not fit the segment.
        Ok(more.map_or(Step::Done, Step::Rotate))
    }

    /// Continues in another segment that has room for a frame of `bytes`.
    fn rotate(&self, tail: &mut Tail, bytes: u64) -> Result<(), Error> {
        self.check_place()?;
        // The header of a segment states that everything before it is durable.
        self.sync_tail(tail)?;
        let mut catalogue = locked(&self.catalogue);
        let header = Header {
            store: self.store,
            number: tail.header.number + 1,
            position: tail.written + 1,
            created_ms: catalogue.now_ms,
            bytes: 0,
        };
        let activated = catalogue.activate(
            &*self.disk,
            header,
            self.options.segment_bytes,
            bytes + HEADER_BYTES as u64,
        );
        let spares = catalogue.spares.len() as u64;
        drop(catalogue);
        self.spare_bytes
            .store(spares * self.options.segment_bytes, Ordering::Release);
        let (file, header) = match activated {
            Ok(activated) => activated,
            Err(error) if error.is_full() => {
                self.free_bytes.store(0, Ordering::Release);
                return Err(error);
            }
            Err(Error::Io {
                operation,
                file,
                source,
            }) => return Err(self.fail(operation, file, &source)),
            Err(error) => return Err(error),
        };
        self.segments.fetch_add(1, Ordering::AcqRel);
        tail.file = file;
        tail.header = header;
        tail.bytes = header.bytes;
        tail.offset = HEADER_BYTES as u64;
        self.tail_bytes
            .store(tail.bytes - tail.offset, Ordering::Release);
        Ok(())
    }

    fn sync_tail(&self, tail: &mut Tail) -> Result<(), Error> {
        self.check()?;
        if tail.dirty {
            let name = || files::segment(tail.header.number);
            tail.file
                .sync()
                .map_err(|error| self.fail("sync", name(), &error))?;
            // Records in a file without a name would be lost with its handle, so they must not be
            // acknowledged.
            let is_linked = tail.file.is_linked();
            if !is_linked.map_err(|error| self.fail("look at", name(), &error))? {
                let removed = "the file was removed or replaced while this process wrote to it";
                return Err(self.fail("write to", name(), &io::Error::other(removed)));
            }
            tail.dirty = false;
            self.publish(tail.written);
        }
        Ok(())
    }

    fn publish(&self, durable: u64) {
        let mut pending = locked(&self.pending);
        pending.drop_durable(durable);
        self.durable.store(durable, Ordering::Release);
        let released = match self.options.durability {
            Durability::Always => durable,
            Durability::Interval(_) => pending.released(),
        };
        self.released.store(released, Ordering::Release);
    }

    /// Returns the failure if the log has failed. Nothing is written after a failure.
    pub(crate) fn check(&self) -> Result<(), Error> {
        self.failure
            .get()
            .map_or(Ok(()), |failure| Err(Error::Failed(failure.clone())))
    }

    /// Fails permanently if the directory was removed, replaced or unlocked.
    pub(crate) fn check_place(&self) -> Result<(), Error> {
        let directory = "the data directory";
        match self.disk.displaced() {
            Ok(None) => Ok(()),
            Ok(Some(reason)) => {
                let reason = format!("{reason} while this process used it");
                Err(self.fail("write to", directory.to_owned(), &io::Error::other(reason)))
            }
            Err(error) => Err(Error::io("look at", directory)(error)),
        }
    }

    /// Fails permanently and calls the failure callback.
    pub(crate) fn fail(&self, operation: &'static str, file: String, error: &io::Error) -> Error {
        self.fail_for(Failure {
            operation,
            file,
            message: error.to_string(),
            panicked: false,
        })
    }

    /// Fails permanently because a thread of the log panicked.
    pub(crate) fn fail_by_panic(&self, thread: &str) {
        self.fail_for(Failure {
            operation: "run",
            file: thread.to_owned(),
            message: "it panicked".to_owned(),
            panicked: true,
        });
    }

    fn fail_for(&self, failure: Failure) -> Error {
        if self.failure.set(failure.clone()).is_ok() {
            tracing::error!(%failure, "the write-ahead log failed; nothing becomes durable any more");
            locked(&self.pending).fail();
            self.unwritten_bytes.store(0, Ordering::Release);
            self.work.notify_all();
            if let Some(on_failure) = self.on_failure.get() {
                on_failure(&failure);
            }
        }
        Error::Failed(self.failure.get().cloned().unwrap_or(failure))
    }

    pub(crate) fn unwritten_bytes(&self) -> usize {
        self.unwritten_bytes.load(Ordering::Acquire)
    }

    /// Whether more than [`limits::BUFFERED_BYTES_MAX`] bytes are unwritten. A caller that appends
    /// should then wait for the disk, without holding a lock.
    #[must_use]
    pub fn is_behind(&self) -> bool {
        self.unwritten_bytes() > limits::BUFFERED_BYTES_MAX
    }

    /// How many segments this process has started since it opened the log.
    pub(crate) fn segments(&self) -> u64 {
        self.segments.load(Ordering::Acquire)
    }

    pub(crate) fn pending(&self) -> MutexGuard<'_, Pending> {
        locked(&self.pending)
    }

    /// Writes and syncs everything, then records the clean close. At the next start, a log that
    /// ends before this position is recognized as damaged. Nothing should be appended afterwards.
    ///
    /// # Errors
    /// As [`Log::commit`].
    pub fn close(&self) -> Result<(), Error> {
        let position = self.commit()?.0;
        let header = Header {
            store: self.store,
            number: 0,
            position,
            created_ms: locked(&self.catalogue).now_ms,
            bytes: 0,
        };
        let write = || {
            let file = self.disk.create(files::CLOSED_TEMPORARY)?;
            file.write_at(&header.encode(Magic::Closed), 0)?;
            file.sync()?;
            self.disk.rename(files::CLOSED_TEMPORARY, files::CLOSED)?;
            self.disk.sync_directory()
        };
        // An error here is not a failure of the log: all records are durable, only the extra check
        // is missing.
        write().map_err(Error::io("write", files::CLOSED))
    }
}

impl Opened {
    fn fresh() -> Self {
        Self {
            fresh: true,
            position: LogPosition::NONE,
            base: LogPosition::NONE,
            records: 0,
            bytes: 0,
            clean: true,
            torn: false,
            damaged_snapshots: Vec::new(),
        }
    }

    fn of(recovered: &Recovered) -> Self {
        Self {
            fresh: false,
            position: recovered.range.end,
            base: recovered.range.base,
            records: recovered.records,
            bytes: recovered.bytes,
            clean: recovered.closed == Some(recovered.range.end.0),
            torn: recovered.torn,
            damaged_snapshots: recovered
                .damaged
                .iter()
                .map(|(at, why)| (LogPosition(*at), why.clone()))
                .collect(),
        }
    }
}

impl std::fmt::Debug for Log {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Log")
            .field("appended", &self.appended())
            .field("durable", &self.durable())
            .field("failure", &self.failure.get())
            .finish_non_exhaustive()
    }
}
