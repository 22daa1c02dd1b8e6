//! The state that all connections of one run share.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use super::Plan;
use super::pace::Schedule;
use super::tally::Tally;
use super::work::{Catalogue, Job, Request, Verb};

pub(super) struct Run {
    pub(super) schedule: Schedule,
    pub(super) catalogue: Arc<Catalogue>,
    pub(super) timeout: Duration,
    /// Whether a single error ends the run. Without all keys, a measurement is meaningless. A fill
    /// or a removal lasts until its last key, so it would wait for a lost answer for up to
    /// [`LOAD_DURATION_MAX`](crate::limits::LOAD_DURATION_MAX).
    strict: bool,
    aborted: AtomicBool,
    /// When the run was stopped before the end of its schedule.
    stopped: OnceLock<Instant>,
    /// For each watched key, how often it was set during the watch.
    sets: Vec<AtomicU64>,
    /// Connections that still send requests.
    senders: AtomicUsize,
    /// Correct answers so far, for the progress display.
    pub(super) answered: AtomicU64,
    /// Errors so far, for the progress display.
    pub(super) failed: AtomicU64,
}

impl Run {
    /// The run of a plan whose clients are all connected.
    pub(super) fn new(plan: &Plan, schedule: Schedule) -> Self {
        let keys = usize::try_from(plan.keys).unwrap_or(usize::MAX);
        let watched = keys.min(plan.watchers);
        Self {
            schedule,
            catalogue: plan.catalogue.clone(),
            timeout: plan.timeout,
            strict: matches!(plan.job, Job::Fill | Job::Clean),
            aborted: AtomicBool::new(false),
            stopped: OnceLock::new(),
            sets: (0..watched).map(|_| AtomicU64::new(0)).collect(),
            senders: AtomicUsize::new(plan.connections),
            answered: AtomicU64::new(0),
            failed: AtomicU64::new(0),
        }
    }

    pub(super) fn succeed(&self, request: Request) {
        self.answered.fetch_add(1, Ordering::Relaxed);
        if request.verb == Verb::Set
            && let Some(sets) = self.sets_of(request.key)
        {
            sets.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Records an error. `since` is the time from which the latency of a failed request counts, and
    /// `None` if the error belongs to no request.
    pub(super) fn fail(&self, tally: &mut Tally, why: &str, since: Option<Instant>) {
        tally.errors.note(why, 1);
        if since.is_some_and(|since| self.schedule.has(since)) {
            tally.failed += 1;
        }
        self.failed.fetch_add(1, Ordering::Relaxed);
        if self.strict {
            self.aborted.store(true, Ordering::Relaxed);
        }
    }

    /// Whether an error has ended the run early.
    pub(super) fn is_aborted(&self) -> bool {
        self.aborted.load(Ordering::Relaxed)
    }

    /// Ends the run: from now on no request is due. Those in flight are waited for, and in an open
    /// loop, those that were due before are still sent.
    pub(super) fn stop(&self) {
        // Fails if the run is stopped already.
        let _ = self.stopped.set(Instant::now());
    }

    /// The time from which on no request is due.
    pub(super) fn until(&self) -> Instant {
        let until = self.schedule.until;
        self.stopped.get().map_or(until, |it| until.min(*it))
    }

    /// How many notifications a watcher of this key must have received for the sets so far.
    pub(super) fn expected_notifications(&self, key: u64) -> u64 {
        self.sets_of(key)
            .map_or(0, |sets| sets.load(Ordering::Relaxed))
    }

    fn sets_of(&self, key: u64) -> Option<&AtomicU64> {
        self.sets.get(usize::try_from(key).ok()?)
    }

    /// Records that a connection sends no more requests.
    pub(super) fn connection_ended(&self) {
        self.senders.fetch_sub(1, Ordering::Release);
    }

    /// Whether all connections have ended. The number of expected notifications is final then.
    pub(super) fn is_over(&self) -> bool {
        self.senders.load(Ordering::Acquire) == 0
    }
}
