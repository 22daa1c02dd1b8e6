//! What all connections of one run share.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::pace::Schedule;
use super::tally::Tally;
use super::work::{Catalogue, Job, Request, Verb};

/// One run.
pub(super) struct Run {
    pub(super) schedule: Schedule,
    pub(super) catalogue: Arc<Catalogue>,
    pub(super) timeout: Duration,
    /// Whether a single error ends it: of keys that are missing nothing can be measured.
    strict: bool,
    given_up: AtomicBool,
    /// Of each watched key, how often it was set since it is watched.
    told: Vec<AtomicU64>,
    /// Connections that still ask.
    asking: AtomicUsize,
    /// For the eye: what was answered so far, and what was not.
    pub(super) answered: AtomicU64,
    pub(super) failed: AtomicU64,
}

impl Run {
    /// So many keys, the first ones, are watched.
    pub(super) fn new(
        schedule: Schedule,
        catalogue: Arc<Catalogue>,
        timeout: Duration,
        watched: usize,
        job: Job,
    ) -> Self {
        Self {
            schedule,
            catalogue,
            timeout,
            strict: job == Job::Fill,
            given_up: AtomicBool::new(false),
            told: (0..watched).map(|_| AtomicU64::new(0)).collect(),
            asking: AtomicUsize::new(0),
            answered: AtomicU64::new(0),
            failed: AtomicU64::new(0),
        }
    }

    /// A request was answered rightly.
    pub(super) fn succeed(&self, request: Request) {
        self.answered.fetch_add(1, Ordering::Relaxed);
        let watched = usize::try_from(request.key)
            .ok()
            .and_then(|key| self.told.get(key));
        if request.verb == Verb::Set
            && let Some(told) = watched
        {
            told.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// An error. Of a request: since when that counts.
    pub(super) fn fail(&self, tally: &mut Tally, why: &str, since: Option<Instant>) {
        tally.errors.note(why, 1);
        if since.is_some_and(|since| self.schedule.has(since)) {
            tally.failed += 1;
        }
        self.failed.fetch_add(1, Ordering::Relaxed);
        if self.strict {
            self.given_up.store(true, Ordering::Relaxed);
        }
    }

    /// Whether it makes no sense to go on.
    pub(super) fn is_given_up(&self) -> bool {
        self.given_up.load(Ordering::Relaxed)
    }

    /// How many notifications of a key whoever watches it is owed so far.
    pub(super) fn told(&self, key: u64) -> u64 {
        let told = usize::try_from(key).ok().and_then(|key| self.told.get(key));
        told.map_or(0, |told| told.load(Ordering::Relaxed))
    }

    /// A connection begins to ask.
    pub(super) fn asks(&self) {
        self.asking.fetch_add(1, Ordering::Release);
    }

    /// It has asked all.
    pub(super) fn has_asked(&self) {
        self.asking.fetch_sub(1, Ordering::Release);
    }

    /// Whether nothing more is asked, so that what is owed to watchers stays what it is.
    pub(super) fn is_over(&self) -> bool {
        self.asking.load(Ordering::Acquire) == 0
    }
}
