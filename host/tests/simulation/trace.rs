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
    "changes followed",
    "changes sent again to a follower",
    "canaries begun",
    "canaries ended",
    "clean stops",
    "connections cut",
    "connections with MQTT 3.1.1",
    "connections that a takeover ended",
    "DISCONNECT packets",
    "disk errors",
    "duplicate PUBLISH packets",
    "duplicates answered",
    "expired keys removed",
    "expired sessions",
    "failed starts",
    "full disks",
    "GET hits",
    "hidden keys recovered",
    "kills",
    "losses of the link",
    "messages at QoS 0",
    "messages at QoS 1",
    "messages at QoS 2",
    "notifications",
    "policies missing at a start",
    "policies rolled back by the guard",
    "policy failures",
    "policy rollbacks",
    "policy swaps",
    "power cuts",
    "records lost in a crash",
    "recovered states compared",
    "redeliveries after the retention",
    "redeliveries of acknowledged requests",
    "redeliveries that only memory answers",
    "refused by the quota of a client",
    "refused for a full disk",
    "reports of absent clients",
    "requests handled by another policy",
    "requests not renotified",
    "requests redelivered after a crash",
    "requests redelivered without a second effect",
    "requests renotified",
    "responses seen twice",
    "retained messages checked",
    "retained messages removed",
    "routes removed",
    "routes set",
    "runs behind a foreign broker",
    "runs in interval mode",
    "sessions resumed",
    "sessions resumed after a crash",
    "snapshots",
    "snapshots over several steps",
    "starts from a snapshot",
    "starts from an older snapshot",
    "steps of the clock",
    "torn tails",
    "users of transient sessions recorded",
    "watches resumed from a version",
    "watches refused after a gap",
    "watchers notified before an acknowledgement",
    "watchers notified of expirations",
    "watches recovered by a start",
    "wills after a delay",
    "wills at once",
    "wills cancelled by DISCONNECT",
    "wills cancelled by a new connection",
    "write-ahead log syncs",
];

impl Tally {
    pub(crate) fn count(&mut self, what: &'static str) {
        self.add_to(what, 1);
    }

    pub(crate) fn add_to(&mut self, what: &'static str, times: u64) {
        if times > 0 {
            *self.0.entry(what).or_default() += times;
        }
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
    lines: Option<Vec<String>>,
}

impl Trace {
    pub(crate) fn new(traced: bool) -> Self {
        Self {
            lines: traced.then(Vec::new),
        }
    }

    pub(crate) fn add(&mut self, line: impl FnOnce() -> String) {
        if let Some(lines) = &mut self.lines {
            lines.push(line());
        }
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for line in self.lines.iter().flatten() {
                eprintln!("  {line}");
            }
        }
    }
}
