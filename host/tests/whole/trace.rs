//! What happened in a run, for the reader of a failure, and how often what happened in all runs.

use std::collections::BTreeMap;
use std::fmt;

/// How often each situation happened.
#[derive(Default)]
pub(crate) struct Tally(BTreeMap<&'static str, u64>);

/// Situations that the quick seeds must reach, or the simulation checks less than it claims.
const REQUIRED: &[&str] = &[
    "a QoS 2 request",
    "acknowledged writes before a crash",
    "connections cut",
    "connections that a takeover ended",
    "DISCONNECT packets",
    "duplicate PUBLISH packets",
    "expired sessions",
    "full disks",
    "GET hits",
    "kills",
    "messages at QoS 0",
    "messages at QoS 1",
    "messages at QoS 2",
    "notifications",
    "power cuts",
    "records lost in a crash",
    "refused for a full disk",
    "requests redelivered after a crash",
    "requests redelivered without a second effect",
    "responses seen twice",
    "retained messages checked",
    "retained messages removed",
    "sessions resumed",
    "sessions resumed after a crash",
    "snapshots",
    "starts from a snapshot",
    "steps of the clock",
    "sync errors",
    "torn tails",
    "wills after a delay",
    "wills at once",
    "wills cancelled by DISCONNECT",
    "wills cancelled by a new connection",
    "write-ahead log syncs",
];

impl Tally {
    pub(crate) fn count(&mut self, what: &'static str) {
        *self.0.entry(what).or_default() += 1;
    }

    pub(crate) fn add(&mut self, other: &Self) {
        for (what, times) in &other.0 {
            *self.0.entry(what).or_default() += times;
        }
    }

    pub(crate) fn assert_everything_happened(&self) {
        let missing = REQUIRED.iter().filter(|it| !self.0.contains_key(*it));
        let missing: Vec<_> = missing.collect();
        assert!(missing.is_empty(), "never happened: {missing:?}");
    }
}

impl fmt::Debug for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(&self.0).finish()
    }
}

/// The events of a run. Printed if the run panics.
pub(crate) struct Trace {
    seed: u64,
    lines: Vec<String>,
}

impl Trace {
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            seed,
            lines: Vec::new(),
        }
    }

    pub(crate) fn add(&mut self, line: impl FnOnce() -> String) {
        self.lines.push(line());
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("trace of seed {}:", self.seed);
            let skipped = self.lines.len().saturating_sub(2_000);
            for line in &self.lines[skipped..] {
                eprintln!("  {line}");
            }
        }
    }
}
