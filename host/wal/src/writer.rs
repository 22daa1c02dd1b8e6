//! The threads around the log: one writes and syncs, one notifies of released positions, one does
//! the upkeep.
//!
//! Input is groups of records from any thread. Output is calls of [`Callbacks::released`], in order
//! and one at a time, and requests for blocks of a snapshot.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::error::{Error, Failure};
use crate::figures::LogFigures;
use crate::limits;
use crate::log::{Log, locked};
use crate::notifier::Notifier;
use crate::options::Durability;
use crate::snapshot::Source;
use crate::upkeep::Room;
use statehouse_protocol::LogPosition;

/// The functions that a [`WriteAheadLog`] calls.
pub struct Callbacks {
    /// Called whenever [`WriteAheadLog::released`] advanced because records became durable. Positions rise,
    /// and one thread of the log calls it at a time. It may be slow, take locks that callers hold
    /// while they append, and append. It must not take snapshots or close the log.
    pub released: Box<dyn Fn(LogPosition) + Send>,
    /// Called once when the log fails, on any thread that works on the log. It should only start
    /// the shutdown of the process.
    pub failed: Box<dyn Fn(&Failure) + Send + Sync>,
    /// Provides the blocks of snapshots.
    pub source: Box<dyn Source>,
    /// The wall clock in milliseconds since 1970.
    pub now_ms: Box<dyn Fn() -> u64 + Send>,
}

/// A log with the threads that drive it.
pub struct WriteAheadLog {
    pub(crate) log: Arc<Log>,
    notifier: Arc<Notifier>,
    chores: Arc<Chores>,
    /// In the order of their start: writer, notifier, upkeep.
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// Wakes the upkeep thread.
#[derive(Default)]
struct Chores {
    state: Mutex<ChoresState>,
    changed: Condvar,
    /// The value of [`Log::segments`] after the last commit.
    segments: AtomicU64,
}

#[derive(Default)]
struct ChoresState {
    woken: bool,
    closing: bool,
}

impl WriteAheadLog {
    /// Starts the threads of a log. Fails if a thread cannot be started.
    pub fn start(log: Log, callbacks: Callbacks) -> Result<Self, Error> {
        let Callbacks {
            released,
            failed,
            source,
            now_ms,
        } = callbacks;
        let wal = Self::begin(log, released, failed)?;
        let notifier = Arc::clone(&wal.notifier);
        let (log, chores) = (Arc::clone(&wal.log), Arc::clone(&wal.chores));
        wal.spawn("wal-upkeep", move || {
            upkeep_loop(&log, &chores, &notifier, source, &*now_ms)
        })?;
        Ok(wal)
    }

    /// Starts the writer and the notifier thread only, which suffice to commit records.
    pub(crate) fn begin(
        log: Log,
        released: Box<dyn Fn(LogPosition) + Send>,
        failed: Box<dyn Fn(&Failure) + Send + Sync>,
    ) -> Result<Self, Error> {
        let log = Arc::new(log);
        let notifier = Arc::new(Notifier::new(released, log.released()));
        let chores = Arc::new(Chores::default());
        // The cell is empty, because the log was passed by value and was never started before.
        let _ = log.on_failure.set(failed);
        let wal = Self {
            log,
            notifier,
            chores,
            threads: Mutex::default(),
        };
        let (log, chores) = (Arc::clone(&wal.log), Arc::clone(&wal.chores));
        let notifier = Arc::clone(&wal.notifier);
        wal.spawn("wal-write", move || write_loop(&log, &chores, &notifier))?;
        let notifier = Arc::clone(&wal.notifier);
        wal.spawn("wal-notify", move || notifier.run())?;
        Ok(wal)
    }

    fn spawn(&self, name: &'static str, run: impl FnOnce() + Send + 'static) -> Result<(), Error> {
        let guard = PanicGuard {
            log: Arc::clone(&self.log),
            name,
        };
        let thread = thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || {
                let _guard = guard;
                run();
            })
            .map_err(Error::io("start", name))?;
        locked(&self.threads).push(thread);
        Ok(())
    }

    /// See [`Log::append`].
    pub fn append(&self, records: &[&[u8]]) -> Result<LogPosition, Error> {
        self.log.append(records)
    }

    /// See [`Log::append_urgent`].
    pub fn append_urgent(&self, records: &[&[u8]]) -> Result<LogPosition, Error> {
        self.log.append_urgent(records)
    }

    /// See [`Log::released`].
    #[must_use]
    pub fn released(&self) -> LogPosition {
        self.log.released()
    }

    /// See [`Log::figures`].
    #[must_use]
    pub fn figures(&self) -> LogFigures {
        self.log.figures()
    }

    /// See [`Log::room`].
    #[must_use]
    pub fn room(&self) -> Room {
        self.log.room()
    }

    /// See [`Log::fits`].
    #[must_use]
    pub fn fits(&self, bytes: u64) -> bool {
        self.log.fits(bytes)
    }

    /// Whether a caller that appends should wait before it appends more, without holding a lock.
    /// This is the case if too much is unwritten ([`Log::is_behind`]) or a snapshot must free space
    /// first ([`Room::Tight`]).
    #[must_use]
    pub fn is_behind(&self) -> bool {
        self.log.is_behind() || self.log.room() == Room::Tight
    }

    /// Writes and syncs everything, sends the last notification, ends the threads and records the
    /// clean close. Fails with [`Error::Failed`] if the log failed; the close is not recorded in
    /// this case.
    pub fn close(&self) -> Result<(), Error> {
        self.stop();
        self.log.close()
    }

    fn stop(&self) {
        locked(&self.chores.state).closing = true;
        self.chores.changed.notify_all();
        self.log.pending().closing = true;
        self.log.work.notify_all();
        // The notifier ends last, when no other thread can release records. The upkeep thread is
        // absent if its start failed.
        let mut threads = std::mem::take(&mut *locked(&self.threads));
        let notifier_thread = (threads.len() > 1).then(|| threads.remove(1));
        for thread in threads {
            join(thread);
        }
        self.notifier.close(self.log.released());
        if let Some(notifier_thread) = notifier_thread {
            join(notifier_thread);
        }
    }
}

/// Without [`WriteAheadLog::close`] everything that was appended is still written, but no clean
/// close is recorded.
impl Drop for WriteAheadLog {
    fn drop(&mut self) {
        if !locked(&self.threads).is_empty() {
            self.stop();
        }
    }
}

/// Fails the log if one of its threads panics. Without the writer the log would block for ever, and
/// without the upkeep thread it would fill the disk.
struct PanicGuard {
    log: Arc<Log>,
    name: &'static str,
}

impl Drop for PanicGuard {
    fn drop(&mut self) {
        if thread::panicking() {
            self.log.fail_by_panic(self.name);
        }
    }
}

fn join(thread: JoinHandle<()>) {
    if thread.thread().id() != thread::current().id() && thread.join().is_err() {
        tracing::error!("a thread of the write-ahead log panicked");
    }
}

fn write_loop(log: &Log, chores: &Chores, notifier: &Notifier) {
    let interval = match log.options.durability {
        Durability::Always => Duration::ZERO,
        Durability::Interval(interval) => interval,
    };
    // The time by which written bytes must be synced.
    let mut due: Option<Instant> = None;
    let mut notified = log.durable();
    let mut is_full_logged = false;
    loop {
        let (closing, urgent) = wait_for_work(log, due);
        if !log.options.commit_delay.is_zero() && !closing && !urgent {
            thread::sleep(log.options.commit_delay);
        } else {
            gather(log);
        }
        let written = log.write();
        let now = Instant::now();
        let due_at = *due.get_or_insert(now + interval);
        // Urgent groups may have been appended after the wait. The write included them, so they are
        // synced now.
        let urgent = !log.pending().urgent.is_empty();
        if closing || urgent || now >= due_at {
            if log.sync().is_err() {
                return;
            }
            due = None;
        }
        // A full segment may have been synced without a call of `sync`. Its urgent records must not
        // wait for the interval.
        if log.durable() > notified {
            notified = log.durable();
            notifier.notify(log);
        }
        if chores.segments.swap(log.segments(), Ordering::AcqRel) != log.segments() {
            locked(&chores.state).woken = true;
            chores.changed.notify_all();
        }
        match written {
            Ok(()) if closing && log.pending().is_empty() => return,
            Ok(()) => is_full_logged = false,
            Err(Error::Failed(_)) => return,
            Err(error) => {
                if !std::mem::replace(&mut is_full_logged, true) {
                    tracing::error!(%error, "the log waits for room; writes are acknowledged once there is some");
                }
                if closing {
                    return;
                }
                thread::sleep(Duration::from_millis(limits::FULL_RETRY_MS));
            }
        }
    }
}

/// Waits until there is something to write or the sync is due. Returns whether the log is
/// closing and whether an urgent group is pending.
fn wait_for_work(log: &Log, due: Option<Instant>) -> (bool, bool) {
    let mut pending = log.pending();
    while pending.is_empty() && !pending.closing && !pending.failed {
        pending.idle = true;
        pending = match due.map(|due| due.saturating_duration_since(Instant::now())) {
            Some(Duration::ZERO) => break,
            Some(wait) => {
                log.work
                    .wait_timeout(pending, wait)
                    .unwrap_or_else(PoisonError::into_inner)
                    .0
            }
            None => log
                .work
                .wait(pending)
                .unwrap_or_else(PoisonError::into_inner),
        };
    }
    pending.idle = false;
    (pending.closing, !pending.urgent.is_empty())
}

/// Lets threads that are ready to append do so before the flush. On a busy machine the first
/// appender has only begun to process its input, and one flush for all is cheaper than one each. If
/// no thread is ready, this costs a microsecond.
fn gather(log: &Log) {
    let mut appended = log.appended();
    for _ in 0..limits::GATHER_YIELDS_MAX {
        thread::yield_now();
        let now = log.appended();
        if now == appended {
            return;
        }
        appended = now;
    }
}

fn upkeep_loop(
    log: &Log,
    chores: &Chores,
    notifier: &Notifier,
    mut source: Box<dyn Source>,
    now_ms: &dyn Fn() -> u64,
) {
    let mut retry = Instant::now();
    // Each is logged once for as long as it lasts.
    let mut logged_error = String::new();
    let mut logged_snapshot_error: Option<String> = None;
    loop {
        if source.ready() {
            log.note_state(|| source.bytes());
        }
        match log.maintain(now_ms()) {
            Ok(()) => logged_error.clear(),
            Err(error) => {
                let error = error.to_string();
                if logged_error != error {
                    tracing::warn!(error, room = ?log.room(), "upkeep of the write-ahead log failed; it is retried");
                    logged_error = error;
                }
            }
        }
        if locked(&chores.state).closing {
            return;
        }
        if log.snapshot_due() && Instant::now() >= retry && source.ready() {
            let outcome = take_snapshot(log, chores, notifier, &mut *source, now_ms);
            if locked(&chores.state).closing {
                // The close has cancelled it, which is no failure. If it is complete, the next
                // start does the rest.
                return;
            }
            let full = outcome.as_ref().is_err_and(Error::is_full);
            let failed = outcome.err().map(|error| error.to_string());
            if let Some(error) = &failed
                && failed != logged_snapshot_error
            {
                tracing::warn!(
                    error,
                    "the snapshot failed; the log is kept and the snapshot is retried"
                );
            }
            log.note_state(|| source.bytes());
            // Remove the history that the new snapshot replaces.
            if let Err(error) = log.maintain(now_ms()) {
                tracing::debug!(%error, "upkeep after a snapshot failed");
            }
            // On a full disk a later snapshot may be smaller, and only a snapshot frees space.
            // `full` covers the case that the snapshot itself did not fit, which the log does not
            // notice.
            if full || matches!(log.room(), Room::Reserve | Room::None) {
                retry = Instant::now() + Duration::from_millis(limits::SNAPSHOT_SHORT_MS);
            } else if failed.is_some() {
                retry = Instant::now() + Duration::from_millis(limits::SNAPSHOT_RETRY_MS);
            }
            logged_snapshot_error = failed;
        }
        let wait = Duration::from_millis(limits::MAINTENANCE_MS);
        let idle = |state: &mut ChoresState| !state.woken && !state.closing;
        let waited = (chores.changed).wait_timeout_while(locked(&chores.state), wait, idle);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        state.woken = false;
    }
}

fn take_snapshot(
    log: &Log,
    chores: &Chores,
    notifier: &Notifier,
    source: &mut dyn Source,
    now_ms: &dyn Fn() -> u64,
) -> Result<LogPosition, Error> {
    let Some(mut snapshot) = log.begin_snapshot(now_ms())? else {
        return Ok(log.appended());
    };
    let (begun, rate) = (Instant::now(), log.options.snapshot_bytes_per_second);
    snapshot.write_blocks(source, &mut |bytes, source| {
        log.temporary_bytes.fetch_max(bytes, Ordering::AcqRel);
        let earned = Duration::from_secs_f64(bytes as f64 / rate as f64);
        loop {
            let mut state = locked(&chores.state);
            if state.closing {
                return Err(Error::GivenUp("the log is closing".to_owned()));
            }
            if std::mem::take(&mut state.woken) {
                drop(state);
                log.note_state(|| source.bytes());
                // If the upkeep fails here, the upkeep after the snapshot reports it.
                let _ = log.maintain(now_ms());
                continue;
            }
            let wait = earned.saturating_sub(begun.elapsed());
            // Clients wait for this snapshot if there is little room.
            if wait.is_zero() || log.is_short() {
                return Ok(());
            }
            drop(
                chores
                    .changed
                    .wait_timeout(state, wait)
                    .unwrap_or_else(PoisonError::into_inner),
            );
        }
    })?;
    let complete = log.appended();
    if log.durable() < complete {
        let committed = log.commit();
        // Notify even if the disk became full during the commit, because a part of it may be
        // durable.
        notifier.wake(log.released());
        committed?;
    }
    let finished = log.finish_snapshot_at(snapshot, complete)?;
    locked(&log.times).snapshots.record(begun.elapsed());
    Ok(finished)
}
