//! What a policy has done since the host knows it: requests, fuel, failures.
//!
//! What enters: the end of each call. What leaves: sums, for whoever lists policies or asks for metrics.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use serde::Serialize;

use super::budget::Failure;

/// Sums of one policy. They are counted under the store's lock and read without it.
#[derive(Debug, Default)]
pub struct Work {
    requests: AtomicU64,
    fuel: AtomicU64,
    fuel_max: AtomicU64,
    failures: [AtomicU64; 4],
    /// By the number that an outcome names, as long as that is one of the description's.
    commands: Vec<AtomicU64>,
    duplicates_different: AtomicU64,
    impure: AtomicU64,
}

/// Failed calls, by what went wrong.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Failures {
    /// It used up its fuel.
    pub fuel: u64,
    /// The machine was too slow.
    pub watchdog: u64,
    /// It trapped.
    pub trap: u64,
    /// It returned nonsense.
    pub malformed: u64,
}

impl Failures {
    /// All of them.
    pub fn total(&self) -> u64 {
        self.fuel + self.watchdog + self.trap + self.malformed
    }
}

/// The sums at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Done {
    /// Requests that it was given.
    pub requests: u64,
    /// Those it failed at, telling of changes included.
    pub failures: Failures,
    /// What a request burnt, on average.
    pub fuel_mean: u64,
    /// What the costliest one burnt.
    pub fuel_max: u64,
    /// Duplicates that it answered otherwise than the first time.
    pub duplicates_different: u64,
    /// Sampled requests that it answered otherwise on a fresh instance: it keeps something to itself.
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

    /// Forgets everything: what a trial did is nobody's request.
    pub fn clear(&self) {
        let sums = [&self.requests, &self.fuel, &self.fuel_max];
        let sums = sums.into_iter().chain(&self.failures).chain(&self.commands);
        for sum in sums {
            sum.store(0, Relaxed);
        }
    }

    /// A request ended.
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

    /// A call failed.
    pub fn failure(&self, failure: &Failure) {
        let kind = match failure {
            Failure::Fuel => 0,
            Failure::Watchdog => 1,
            Failure::Trap(_) => 2,
            Failure::Malformed(_) => 3,
        };
        self.failures[kind].fetch_add(1, Relaxed);
    }

    /// A duplicate was answered otherwise than the first time.
    pub fn different(&self) {
        self.duplicates_different.fetch_add(1, Relaxed);
    }

    /// A fresh instance answered otherwise than the one that is used.
    pub fn impure(&self) {
        self.impure.fetch_add(1, Relaxed);
    }

    /// The sums.
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
            fuel_mean: self.fuel.load(Relaxed).checked_div(requests).unwrap_or(0),
            fuel_max: self.fuel_max.load(Relaxed),
            duplicates_different: self.duplicates_different.load(Relaxed),
            impure: self.impure.load(Relaxed),
        }
    }

    /// Requests by the number of their command.
    pub fn commands(&self) -> impl Iterator<Item = u64> {
        self.commands.iter().map(|count| count.load(Relaxed))
    }
}
