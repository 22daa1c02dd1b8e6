//! Statistics of a policy since it was loaded: requests, fuel, failures.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use serde::Serialize;

use super::budget::Failure;
use super::locked;

/// Statistics of one policy. Written under the store's lock, read without it.
#[derive(Debug, Default)]
pub struct Work {
    requests: AtomicU64,
    fuel: AtomicU64,
    fuel_max: AtomicU64,
    failures: [AtomicU64; 4],
    last_failure: Mutex<Option<LastFailure>>,
    /// Requests by command number, for the commands in the policy's description.
    commands: Vec<AtomicU64>,
    duplicates_different: AtomicU64,
    impure: AtomicU64,
}

/// Failed calls by cause.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Failures {
    /// Out of fuel.
    pub fuel: u64,
    /// Stopped by the watchdog.
    pub watchdog: u64,
    /// Trapped, or the machine lacked a resource.
    pub trap: u64,
    /// Returned a malformed result.
    pub malformed: u64,
}

impl Failures {
    /// The sum of all causes.
    pub fn total(&self) -> u64 {
        self.fuel + self.watchdog + self.trap + self.malformed
    }
}

/// The most recent failed call of a policy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LastFailure {
    /// The store's time, in milliseconds since 1970.
    pub at_ms: u64,
    /// The cause, on one line.
    pub why: String,
}

/// A snapshot of the statistics.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Done {
    /// Requests that it handled.
    pub requests: u64,
    /// Failed calls, including notifications.
    pub failures: Failures,
    /// The most recent one, if any.
    pub last_failure: Option<LastFailure>,
    /// Mean fuel of a request.
    pub fuel_mean: u64,
    /// Highest fuel of a request.
    pub fuel_max: u64,
    /// Redelivered requests with a different answer than the original.
    pub duplicates_different: u64,
    /// Sampled requests with a different answer on a fresh instance: the policy has hidden state.
    pub impure: u64,
}

impl Work {
    pub(super) fn of(commands: usize) -> Self {
        let commands = (0..commands).map(|_| AtomicU64::new(0)).collect();
        Self {
            commands,
            ..Self::default()
        }
    }

    /// Resets the statistics after a trial, which handled no client's request.
    pub fn clear(&self) {
        let sums = [&self.requests, &self.fuel, &self.fuel_max];
        let sums = sums.into_iter().chain(&self.failures).chain(&self.commands);
        for sum in sums {
            sum.store(0, Relaxed);
        }
        *locked(&self.last_failure) = None;
    }

    /// Counts a request.
    pub fn request(&self, fuel: u64, command: Option<u16>) {
        self.requests.fetch_add(1, Relaxed);
        self.fuel.fetch_add(fuel, Relaxed);
        if fuel > self.fuel_max.load(Relaxed) {
            self.fuel_max.fetch_max(fuel, Relaxed);
        }
        if let Some(count) = command.and_then(|it| self.commands.get(usize::from(it))) {
            count.fetch_add(1, Relaxed);
        }
    }

    /// Counts a failed call.
    pub fn failure(&self, failure: &Failure, now_ms: u64) {
        let kind = match failure {
            Failure::Fuel => 0,
            Failure::Watchdog => 1,
            Failure::Trap(_) | Failure::Machine(_) => 2,
            Failure::Malformed(_) => 3,
        };
        self.failures[kind].fetch_add(1, Relaxed);
        *locked(&self.last_failure) = Some(LastFailure {
            at_ms: now_ms,
            why: failure.to_string(),
        });
    }

    /// Counts a redelivered request with a different answer.
    pub fn different(&self) {
        self.duplicates_different.fetch_add(1, Relaxed);
    }

    /// Counts a sampled request with a different answer on a fresh instance.
    pub fn impure(&self) {
        self.impure.fetch_add(1, Relaxed);
    }

    /// A snapshot of the statistics.
    pub fn done(&self) -> Done {
        let requests = self.requests.load(Relaxed);
        let [fuel, watchdog, trap, malformed] = &self.failures;
        Done {
            requests,
            failures: Failures {
                fuel: fuel.load(Relaxed),
                watchdog: watchdog.load(Relaxed),
                trap: trap.load(Relaxed),
                malformed: malformed.load(Relaxed),
            },
            last_failure: locked(&self.last_failure).clone(),
            fuel_mean: self.fuel.load(Relaxed).checked_div(requests).unwrap_or(0),
            fuel_max: self.fuel_max.load(Relaxed),
            duplicates_different: self.duplicates_different.load(Relaxed),
            impure: self.impure.load(Relaxed),
        }
    }

    /// Requests by command number.
    pub fn commands(&self) -> impl Iterator<Item = u64> {
        self.commands.iter().map(|count| count.load(Relaxed))
    }
}
