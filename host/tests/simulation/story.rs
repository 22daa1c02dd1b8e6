//! What a run tells: its last events where it fails, and at its end what happened how often.

use std::collections::{BTreeMap, VecDeque};

/// The last events of a run.
pub(crate) struct Story {
    seed: u64,
    /// The first line says what kind of run it is.
    first: String,
    lines: VecDeque<String>,
}

const LINES: usize = 60;

impl Story {
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            seed,
            first: String::new(),
            lines: VecDeque::new(),
        }
    }

    pub(crate) fn tell(&mut self, line: String) {
        if self.first.is_empty() {
            self.first = line;
            return;
        }
        if self.lines.len() == LINES {
            self.lines.pop_front();
        }
        self.lines.push_back(line);
    }
}

impl Drop for Story {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the last events of seed {}: {}", self.seed, self.first);
            for line in &self.lines {
                eprintln!("  {line}");
            }
        }
    }
}

/// How often something happened: runs in which nothing goes wrong prove nothing.
#[derive(Debug, Default)]
pub(crate) struct Tally(BTreeMap<&'static str, u64>);

impl Tally {
    pub(crate) fn count(&mut self, what: &'static str) {
        self.add_to(what, 1);
    }

    pub(crate) fn add_to(&mut self, what: &'static str, count: u64) {
        if count > 0 {
            *self.0.entry(what).or_default() += count;
        }
    }

    pub(crate) fn add(&mut self, other: &Self) {
        for (what, count) in &other.0 {
            *self.0.entry(what).or_default() += count;
        }
    }

    pub(crate) fn assert_everything_happened(&self) {
        for what in [
            "requests",
            "duplicates run again",
            "duplicates answered from the record",
            "requests run anew after a crash",
            "policies that failed",
            "policy swaps",
            "rollbacks",
            "canaries",
            "ends of canaries",
            "routes",
            "ends of routes",
            "requests of a canary or a route",
            "sweeps",
            "removals of hidden keys",
            "notifications",
            "power cuts",
            "kills",
            "clean restarts",
            "disks that failed",
            "starts that failed",
            "full disks",
            "refused for a full disk",
            "refused for the part of a client",
            "crashes that lost records",
            "torn ends",
            "starts from a snapshot",
            "starts from an older snapshot",
            "snapshots over several steps",
            "ended sessions",
            "runs behind a foreign broker",
            "losses of the link",
            "signs of presence",
            "watches found by a start",
            "acknowledged requests that came again",
            "requests of an earlier run that were told of again",
            "requests that could not be told of again",
            "requests that came again after their time",
            "ends that a start told again",
            "watchers told of ends",
            "watchers told before the acknowledgement",
        ] {
            assert!(self.0.contains_key(what), "never happened: {what}");
        }
    }
}
