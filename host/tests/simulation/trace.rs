//! The trace of a run, printed if the run fails, and the tally of all runs, printed at the end.

use std::collections::{BTreeMap, VecDeque};

/// The last events of a run. A panic prints them.
pub(crate) struct Trace {
    seed: u64,
    /// The first line, which describes the parameters of the run.
    header: String,
    lines: VecDeque<String>,
}

const LINES_MAX: usize = 60;

impl Trace {
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            seed,
            header: String::new(),
            lines: VecDeque::new(),
        }
    }

    pub(crate) fn record(&mut self, line: String) {
        if self.header.is_empty() {
            self.header = line;
            return;
        }
        if self.lines.len() == LINES_MAX {
            self.lines.pop_front();
        }
        self.lines.push_back(line);
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the last events of seed {}: {}", self.seed, self.header);
            for line in &self.lines {
                eprintln!("  {line}");
            }
        }
    }
}

/// How often each kind of event occurred. A set of runs in which some fault never occurred would
/// prove nothing about that fault.
#[derive(Debug, Default)]
pub(crate) struct Tally(BTreeMap<&'static str, u64>);

impl Tally {
    pub(crate) fn count(&mut self, event: &'static str) {
        self.add_to(event, 1);
    }

    pub(crate) fn add_to(&mut self, event: &'static str, count: u64) {
        if count > 0 {
            *self.0.entry(event).or_default() += count;
        }
    }

    pub(crate) fn add(&mut self, other: &Self) {
        for (event, count) in &other.0 {
            *self.0.entry(event).or_default() += count;
        }
    }

    pub(crate) fn assert_every_case_occurred(&self) {
        for event in [
            "requests",
            "duplicates re-executed",
            "duplicates answered from the record",
            "requests lost in a crash and executed as new",
            "policy failures",
            "policy swaps",
            "policy rollbacks",
            "canaries begun",
            "canaries ended",
            "routes set",
            "routes removed",
            "requests handled by a canary or a route",
            "sweeps",
            "removals of hidden keys",
            "notifications",
            "power cuts",
            "kills",
            "clean restarts",
            "disk failures",
            "failed starts",
            "full disks",
            "requests refused on a full disk",
            "requests refused by the quota of a client",
            "crashes that lost records",
            "torn log ends",
            "starts from a snapshot",
            "starts from an older snapshot",
            "snapshots over several steps",
            "ended sessions",
            "runs behind a foreign broker",
            "losses of the link",
            "reports of absent clients",
            "watches recovered by a start",
            "redeliveries of acknowledged requests",
            "requests of an earlier run that were renotified",
            "requests that could not be renotified",
            "redeliveries after the retention",
            "expirations renotified by a start",
            "watchers notified of expirations",
            "watchers notified before the acknowledgement",
        ] {
            assert!(self.0.contains_key(event), "never occurred: {event}");
        }
    }
}
