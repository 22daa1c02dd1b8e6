//! The log without its threads: append, write, sync, publish.
//!
//! The threads of [`crate::WriteAheadLog`], a copy of another log, or a test drive it. Input is
//! groups of records; output is log positions and bytes on the disk.
//!
//! Invariants:
//!
//! * Locks must be taken in the order tail, catalogue, pending. Appenders take only the last one.
//!   Another order can deadlock.
//! * The log must never sync or call a callback while it holds the pending lock, because appenders
//!   would then wait for the disk.

mod opening;
mod tail;

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

use crate::catalogue::Catalogue;
use crate::disk::Disk;
use crate::error::{Error, Failure};
use crate::figures::{LogTimes, Space};
use crate::files;
use crate::limits;
use crate::options::{Durability, Options};
use crate::pending::Pending;
use crate::segment::{Header, Magic, StoreId};
use statehouse_protocol::LogPosition;

pub use opening::Opened;
use tail::Tail;

/// A callback that may run on any thread.
pub(crate) type Hook<T> = Box<dyn Fn(&T) + Send + Sync>;

/// A log of records on a disk. All methods take `&self`, so that threads can share it.
pub struct Log {
    pub(crate) disk: Arc<dyn Disk>,
    pub(crate) options: Options,
    pub(crate) store: StoreId,
    tail: Mutex<Tail>,
    /// Held while files are created, renamed and removed.
    pub(crate) catalogue: Mutex<Catalogue>,
    /// The space of its files when [`Self::figures`] last saw it.
    pub(crate) space: Mutex<Space>,
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
    /// True while a group waits for a segment that a full disk refused. Spares do not help: the
    /// group may be longer than they are, and later groups are written after it.
    pub(crate) waits_for_room: AtomicBool,
    /// Length of the log at which the disk budget requires a snapshot.
    pub(crate) snapshot_after_max: AtomicU64,
    /// Bytes that the snapshot in progress has taken from the disk.
    pub(crate) temporary_bytes: Arc<AtomicU64>,
    pub(crate) state_bytes: Mutex<StateBytes>,
    durable: AtomicU64,
    released: AtomicU64,
    /// Free bytes in the current segment.
    pub(crate) tail_bytes: AtomicU64,
    /// Free bytes for the budget of the log: 0 if the disk refused a segment.
    pub(crate) free_bytes: AtomicU64,
    /// Free bytes of the disk when they were last read.
    pub(crate) disk_free_bytes: AtomicU64,
    /// Whether the disk refused a segment because it has no free inodes.
    pub(crate) no_free_inodes: AtomicBool,
    /// Bytes of the spare segments.
    pub(crate) spare_bytes: AtomicU64,
    /// Length of the newest snapshot.
    pub(crate) snapshot_bytes: AtomicU64,
    /// Bytes of frames that this process has written, in total and when the newest snapshot began.
    pub(crate) written_bytes: AtomicU64,
    pub(crate) snapshot_at_bytes: AtomicU64,
    pub(crate) snapshotting: Arc<AtomicBool>,
    segments: AtomicU64,
    pub(crate) times: Mutex<LogTimes>,
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

impl Log {
    /// Appends a group of records and returns the position of its last record. Either the whole
    /// group survives a crash or none of it.
    ///
    /// The method does no I/O and never waits, because callers hold locks that other clients need.
    /// A caller that appends much must call [`Log::is_behind`] before it takes those locks. Fails
    /// with [`Error::TooLarge`] or [`Error::TooMany`]; nothing was appended in this case.
    pub fn append(&self, records: &[&[u8]]) -> Result<LogPosition, Error> {
        self.push(records, false)
    }

    /// Like [`Log::append`], but the group is not released before it is durable, in any durability
    /// mode.
    pub fn append_urgent(&self, records: &[&[u8]]) -> Result<LogPosition, Error> {
        self.push(records, true)
    }

    fn push(&self, records: &[&[u8]], urgent: bool) -> Result<LogPosition, Error> {
        let bytes = records.iter().fold(0usize, |bytes, record| {
            bytes.saturating_add(record.len()).saturating_add(4)
        });
        let largest = records.iter().map(|record| record.len()).max().unwrap_or(0);
        Error::check_size(largest, limits::RECORD_BYTES_MAX)?;
        Error::check_size(bytes, limits::GROUP_BYTES_MAX)?;
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

    /// Returns the failure if the log has failed. Nothing is written after a failure.
    pub(crate) fn check(&self) -> Result<(), Error> {
        self.failure
            .get()
            .map_or(Ok(()), |failure| Err(Error::Failed(failure.clone())))
    }

    /// Fails permanently if the directory was removed, replaced or unlocked, or cannot be looked
    /// at.
    pub(crate) fn check_place(&self) -> Result<(), Error> {
        let directory = "the data directory";
        match self.disk.displaced() {
            Ok(None) => Ok(()),
            Ok(Some(reason)) => {
                let reason = format!("{reason} while this process used it");
                Err(self.fail("write to", directory.to_owned(), &io::Error::other(reason)))
            }
            Err(error) => Err(self.fail("look at", directory.to_owned(), &error)),
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
    /// Fails as [`Log::commit`].
    pub fn close(&self) -> Result<(), Error> {
        let position = self.commit()?.0;
        let header = Header::new(self.store, 0, position, locked(&self.catalogue).now_ms);
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

impl std::fmt::Debug for Log {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Log")
            .field("appended", &self.appended())
            .field("durable", &self.durable())
            .field("failure", &self.failure.get())
            .finish_non_exhaustive()
    }
}
