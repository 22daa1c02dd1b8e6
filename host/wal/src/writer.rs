//! The threads around the log: one writes and syncs, one tells what is released, one keeps house.
//!
//! Enters: groups of records from any thread. Leaves: calls of the listener, in order and one at a
//! time, and blocks asked of the snapshot source.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::error::{Error, Failure};
use crate::limits;
use crate::log::{Log, locked};
use crate::options::Durability;
use crate::snapshot::Source;
use crate::teller::Teller;
use crate::upkeep::Room;
use statehouse_protocol::LogPosition;

/// What the journal calls.
pub struct Callbacks {
    /// Told each time that [`Journal::released`] moved because something became durable: rising
    /// positions, one call at a time, from one of the journal's threads. It may be slow, take locks that
    /// are held around appends, and append; it may not take snapshots or close.
    pub released: Box<dyn Fn(LogPosition) + Send>,
    /// Told once when the log fails. It may run on any thread that works on the log, and should only
    /// begin the end of the process.
    pub failed: Box<dyn Fn(&Failure) + Send + Sync>,
    /// Gives the blocks of snapshots.
    pub source: Box<dyn Source>,
    /// The wall clock in ms since 1970.
    pub now_ms: Box<dyn Fn() -> u64 + Send>,
}

impl std::fmt::Debug for Callbacks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Callbacks").finish_non_exhaustive()
    }
}

/// A log with threads that drive it.
#[derive(Debug)]
pub struct Journal {
    pub(crate) log: Arc<Log>,
    teller: Arc<Teller>,
    chores: Arc<Chores>,
    /// In the order in which they start: writing, telling, keeping house.
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// Where the housekeeping thread waits.
#[derive(Debug, Default)]
struct Chores {
    state: Mutex<ChoresState>,
    changed: Condvar,
    /// How many segments were written to, as of the last commit.
    segments: AtomicU64,
}

#[derive(Debug, Default)]
struct ChoresState {
    woken: bool,
    closing: bool,
}

impl Journal {
    /// Starts the threads of a log.
    ///
    /// # Errors
    /// [`Error::Io`] where the system gives no thread.
    pub fn start(log: Log, callbacks: Callbacks) -> Result<Self, Error> {
        let Callbacks {
            released,
            failed,
            source,
            now_ms,
        } = callbacks;
        let journal = Self::begin(log, released, failed)?;
        let teller = Arc::clone(&journal.teller);
        let (log, chores) = (Arc::clone(&journal.log), Arc::clone(&journal.chores));
        journal.spawn("journal-keep", move || {
            keep_loop(&log, &chores, &teller, source, &*now_ms)
        })?;
        Ok(journal)
    }

    /// The first two threads, which are enough to write and to tell.
    pub(crate) fn begin(
        log: Log,
        released: Box<dyn Fn(LogPosition) + Send>,
        failed: Box<dyn Fn(&Failure) + Send + Sync>,
    ) -> Result<Self, Error> {
        let log = Arc::new(log);
        let teller = Arc::new(Teller::new(released, log.released()));
        let chores = Arc::new(Chores::default());
        // It was empty: the log came by value and has not been started before.
        let _ = log.on_failure.set(failed);
        let journal = Self {
            log,
            teller,
            chores,
            threads: Mutex::default(),
        };
        let (log, chores) = (Arc::clone(&journal.log), Arc::clone(&journal.chores));
        let teller = Arc::clone(&journal.teller);
        journal.spawn("journal-write", move || write_loop(&log, &chores, &teller))?;
        let teller = Arc::clone(&journal.teller);
        journal.spawn("journal-tell", move || teller.run())?;
        Ok(journal)
    }

    fn spawn(&self, name: &'static str, run: impl FnOnce() + Send + 'static) -> Result<(), Error> {
        let watch = Watch {
            log: Arc::clone(&self.log),
            name,
        };
        let thread = thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || {
                let _watch = watch;
                run();
            })
            .map_err(Error::io("start", name))?;
        locked(&self.threads).push(thread);
        Ok(())
    }

    /// See [`Log::append`].
    ///
    /// # Errors
    /// [`Error::TooLarge`].
    pub fn append(&self, records: &[&[u8]]) -> Result<LogPosition, Error> {
        self.log.append(records)
    }

    /// See [`Log::append_urgent`].
    ///
    /// # Errors
    /// [`Error::TooLarge`].
    pub fn append_urgent(&self, records: &[&[u8]]) -> Result<LogPosition, Error> {
        self.log.append_urgent(records)
    }

    /// See [`Log::released`].
    #[must_use]
    pub fn released(&self) -> LogPosition {
        self.log.released()
    }

    /// See [`Log::room`].
    #[must_use]
    pub fn room(&self) -> Room {
        self.log.room()
    }

    /// Whether a caller that adds to the log should wait, outside of every lock, before it adds
    /// more: too much is unwritten ([`Log::is_behind`]), or a snapshot has to make room first
    /// ([`Room::Tight`]).
    #[must_use]
    pub fn is_behind(&self) -> bool {
        self.log.is_behind() || self.log.room() == Room::Tight
    }

    /// Writes and syncs everything, tells the listener, ends the threads and marks the journal closed.
    ///
    /// # Errors
    /// [`Error::Failed`] where the log failed; then it is not marked.
    pub fn close(&self) -> Result<(), Error> {
        self.stop();
        self.log.close()
    }

    fn stop(&self) {
        locked(&self.chores.state).closing = true;
        self.chores.changed.notify_all();
        self.log.pending().closing = true;
        self.log.work.notify_all();
        // The telling thread ends last, when nobody can release anything any more. The one behind it may never
        // have started.
        let mut threads = std::mem::take(&mut *locked(&self.threads));
        let tell = (threads.len() > 1).then(|| threads.remove(1));
        for thread in threads {
            join(thread);
        }
        self.teller.close(self.log.released());
        if let Some(tell) = tell {
            join(tell);
        }
    }
}

/// Without [`Journal::close`] everything appended is still written, but the journal is not marked closed.
impl Drop for Journal {
    fn drop(&mut self) {
        if !locked(&self.threads).is_empty() {
            self.stop();
        }
    }
}

/// A thread that panics takes the log with it: the journal without one of them would wait for ever, or fill the disk.
struct Watch {
    log: Arc<Log>,
    name: &'static str,
}

impl Drop for Watch {
    fn drop(&mut self) {
        if thread::panicking() {
            self.log.fail_by_panic(self.name);
        }
    }
}

fn join(thread: JoinHandle<()>) {
    if thread.thread().id() != thread::current().id() && thread.join().is_err() {
        tracing::error!("a thread of the journal panicked");
    }
}

fn write_loop(log: &Log, chores: &Chores, teller: &Teller) {
    let interval = match log.options.durability {
        Durability::Always => Duration::ZERO,
        Durability::Interval(interval) => interval,
    };
    // When what is written has to be synced at the latest.
    let mut due: Option<Instant> = None;
    let mut told = log.durable();
    let mut waits = false;
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
        // Urgent groups may have come since; the write has them, so their sync is now.
        let urgent = !log.pending().urgent.is_empty();
        if closing || urgent || now >= due_at {
            if log.sync().is_err() {
                return;
            }
            due = None;
        }
        // Also where a full segment was synced on the way: what is urgent does not wait for the interval then.
        if log.durable() > told {
            told = log.durable();
            teller.tell(log);
        }
        if chores.segments.swap(log.segments(), Ordering::AcqRel) != log.segments() {
            locked(&chores.state).woken = true;
            chores.changed.notify_all();
        }
        match written {
            Ok(()) if closing && log.pending().is_empty() => return,
            Ok(()) => waits = false,
            Err(Error::Failed(_)) => return,
            Err(error) => {
                if !std::mem::replace(&mut waits, true) {
                    tracing::error!(%error, "the log waits for room on the disk; writes are acknowledged once there is room");
                }
                if closing {
                    return;
                }
                thread::sleep(Duration::from_millis(limits::FULL_RETRY_MS));
            }
        }
    }
}

/// Waits until there is something to write or the sync is due. Whether the journal is closing, and whether something
/// urgent waits.
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

/// Lets threads that are ready to append do so first: on a busy machine the one that appended first has only
/// just begun with what its sockets brought, and one flush for all of it is cheaper than one for each. Where
/// nobody is ready this costs a microsecond.
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

fn keep_loop(
    log: &Log,
    chores: &Chores,
    teller: &Teller,
    mut source: Box<dyn Source>,
    now_ms: &dyn Fn() -> u64,
) {
    let mut retry = Instant::now();
    // Both said once for as long as they last.
    let mut trouble = String::new();
    let mut no_snapshot: Option<String> = None;
    loop {
        if source.ready() {
            log.note_state(|| source.bytes());
        }
        match log.maintain(now_ms()) {
            Ok(()) => trouble.clear(),
            Err(error) => {
                let error = error.to_string();
                if trouble != error {
                    tracing::warn!(error, room = ?log.room(), "upkeep of the journal");
                    trouble = error;
                }
            }
        }
        if locked(&chores.state).closing {
            return;
        }
        if log.snapshot_due() && Instant::now() >= retry && source.ready() {
            let outcome = take_snapshot(log, chores, teller, &mut *source, now_ms);
            let full = outcome.as_ref().is_err_and(Error::is_full);
            let failed = outcome.err().map(|error| error.to_string());
            if let Some(error) = &failed
                && failed != no_snapshot
            {
                tracing::warn!(error, "no snapshot was taken");
            }
            log.note_state(|| source.bytes());
            // The history that it makes superfluous goes now.
            if let Err(error) = log.maintain(now_ms()) {
                tracing::debug!(%error, "upkeep behind a snapshot");
            }
            // On a full disk a later one may be smaller, and is what makes room. The log did not know that it is full where the
            // snapshot itself was too much.
            if full || matches!(log.room(), Room::Reserve | Room::None) {
                retry = Instant::now() + Duration::from_millis(limits::SNAPSHOT_SHORT_MS);
            } else if failed.is_some() {
                retry = Instant::now() + Duration::from_millis(limits::SNAPSHOT_RETRY_MS);
            }
            no_snapshot = failed;
        }
        let mut state = locked(&chores.state);
        if !state.woken && !state.closing {
            let wait = Duration::from_millis(limits::MAINTENANCE_MS);
            state = chores
                .changed
                .wait_timeout(state, wait)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        state.woken = false;
    }
}

fn take_snapshot(
    log: &Log,
    chores: &Chores,
    teller: &Teller,
    source: &mut dyn Source,
    now_ms: &dyn Fn() -> u64,
) -> Result<LogPosition, Error> {
    let Some(mut snapshot) = log.begin_snapshot(now_ms())? else {
        return Ok(log.appended());
    };
    let (begun, rate) = (Instant::now(), log.options.snapshot_bytes_per_second);
    snapshot.pour(source, &mut |bytes, source| {
        log.temporary_bytes.fetch_max(bytes, Ordering::AcqRel);
        let earned = Duration::from_secs_f64(bytes as f64 / rate as f64);
        loop {
            let mut state = locked(&chores.state);
            if state.closing {
                return Err(Error::GivenUp("the journal is closing".to_owned()));
            }
            if std::mem::take(&mut state.woken) {
                drop(state);
                log.note_state(|| source.bytes());
                // What cannot be done now is said behind the snapshot.
                let _ = log.maintain(now_ms());
                continue;
            }
            let wait = earned.saturating_sub(begun.elapsed());
            // Clients wait for it if there is little room.
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
        // Also where the disk was full half way: what became durable is told.
        teller.ring(log.released());
        committed?;
    }
    log.finish_snapshot_at(snapshot, complete)
}
