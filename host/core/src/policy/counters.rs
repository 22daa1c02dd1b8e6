//! The counters and log lines of a policy, and the rate limit of log lines about it.
//!
//! Names and numbers come from the guest, so everything must be bounded.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use super::bindings::statehouse::policy::log::Level;
use super::digest::Digest;
use super::lines::Lines;
use super::locked;
use crate::limits;

/// The counters of a policy.
pub struct Counters {
    /// The policy's name, version and short digest, for log lines.
    pub policy: Arc<str>,
    digest: Digest,
    lines: Arc<Lines>,
    keeps_lines: AtomicBool,
    values: Mutex<Tally>,
    /// The errors that it answered with, by their texts.
    errors: Mutex<Tally>,
    /// The second of the last log line about this policy, and the number of lines in it.
    logged: Mutex<(u64, u32)>,
    /// The minute of the last warning.
    warned: Mutex<u64>,
}

/// Counts by name. Names beyond the limits are counted as `other`.
struct Tally {
    counts: BTreeMap<String, u64>,
    names_max: usize,
    name_bytes_max: usize,
}

/// The name of everything beyond the limits.
const OTHER: &str = "other";

impl Tally {
    fn new(names_max: usize, name_bytes_max: usize) -> Mutex<Self> {
        Mutex::new(Self {
            counts: BTreeMap::new(),
            names_max,
            name_bytes_max,
        })
    }

    fn add(&mut self, name: &str, by: u64) {
        let is_known = self.counts.contains_key(name);
        let fits = self.counts.len() < self.names_max && name.len() <= self.name_bytes_max;
        let name = if is_known || fits { name } else { OTHER };
        match self.counts.get_mut(name) {
            Some(count) => *count = count.saturating_add(by),
            None => _ = self.counts.insert(name.to_owned(), by),
        }
    }
}

impl Counters {
    pub(super) fn new(policy: String, digest: Digest, lines: Arc<Lines>) -> Self {
        Self {
            policy: policy.into(),
            digest,
            lines,
            keeps_lines: AtomicBool::new(true),
            values: Tally::new(limits::GUEST_COUNTERS_MAX, limits::POLICY_NAME_BYTES_MAX),
            errors: Tally::new(limits::GUEST_ERRORS_MAX, limits::GUEST_ERROR_BYTES_MAX),
            logged: Mutex::default(),
            warned: Mutex::default(),
        }
    }

    /// The recent lines of all policies of the engine.
    pub fn lines(&self) -> &Arc<Lines> {
        &self.lines
    }

    /// Keeps a line of this policy for readers, except during a trial.
    pub(super) fn keep(&self, level: Level, text: &str) {
        if self.keeps_lines.load(Ordering::Relaxed) {
            self.lines.push(self.digest, &self.policy, level, text);
        }
    }

    /// Keeps no lines for readers from now on. For a trial, which handles no client's request.
    pub(crate) fn begin_trial(&self) {
        self.keeps_lines.store(false, Ordering::Relaxed);
    }

    /// Adds to a counter.
    pub fn add(&self, name: &str, by: u64) {
        locked(&self.values).add(name, by);
    }

    /// Counts an error that the policy answered with.
    pub fn add_error(&self, text: &[u8]) {
        locked(&self.errors).add(str::from_utf8(text).unwrap_or(OTHER), 1);
    }

    /// Whether another line by or about this policy may be logged. The policy and its clients cause
    /// these lines, so they are limited, even across instances. Time zero means unknown and counts
    /// for the last second.
    pub fn may_log(&self, now_ms: u64) -> bool {
        let mut logged = locked(&self.logged);
        let second = now_ms / 1000;
        if second > logged.0 {
            *logged = (second, 0);
        }
        logged.1 = logged.1.saturating_add(1);
        let allowed = logged.1 <= limits::GUEST_LOG_LINES_PER_SECOND_MAX;
        drop(logged);
        if !allowed {
            self.add("log_lines_dropped", 1);
        }
        allowed
    }

    /// Whether a recurring warning about this policy may be logged: once a minute.
    pub fn may_warn(&self, now_ms: u64) -> bool {
        let mut warned = locked(&self.warned);
        let minute = now_ms / 60_000;
        let may = minute > *warned;
        *warned = minute.max(*warned);
        may
    }

    /// Resets the counters after a trial, and keeps lines again.
    pub(crate) fn end_trial(&self) {
        locked(&self.values).counts.clear();
        locked(&self.errors).counts.clear();
        self.keeps_lines.store(true, Ordering::Relaxed);
    }

    /// All counters.
    pub fn all(&self) -> BTreeMap<String, u64> {
        locked(&self.values).counts.clone()
    }

    /// The errors that it answered with, by their texts.
    pub fn errors(&self) -> BTreeMap<String, u64> {
        locked(&self.errors).counts.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counters() -> Counters {
        Counters::new("test".into(), Digest::of(b"test"), Arc::default())
    }

    /// Regression: calls outside of a request had no time, and each of them started a new second.
    #[test]
    fn log_rate_limit_applies_without_a_time() {
        let counters = counters();
        for _ in 0..limits::GUEST_LOG_LINES_PER_SECOND_MAX / 2 {
            assert!(counters.may_log(5_000) && counters.may_log(0));
        }
        for now_ms in [5_999, 0, 4_000, 5_000] {
            assert!(!counters.may_log(now_ms), "{now_ms}");
        }
        assert_eq!(counters.all()["log_lines_dropped"], 4);
        assert!(counters.may_log(6_000));
    }

    #[test]
    fn names_beyond_the_limit_are_counted_as_other() {
        let counters = counters();
        for name in 0..limits::GUEST_COUNTERS_MAX + 3 {
            counters.add(&name.to_string(), 2);
        }
        counters.add("0", 1);
        counters.add(&"x".repeat(limits::POLICY_NAME_BYTES_MAX + 1), 5);
        let all = counters.all();
        assert_eq!(all.len(), limits::GUEST_COUNTERS_MAX + 1);
        assert_eq!((all["0"], all["other"]), (3, 11));
        for text in [&b"a"[..], b"a", b"\xff"] {
            counters.add_error(text);
        }
        let errors = [("a".to_owned(), 2), ("other".to_owned(), 1)];
        assert_eq!(counters.errors(), errors.into());
        counters.end_trial();
        assert!(counters.all().is_empty() && counters.errors().is_empty());
    }

    #[test]
    fn trial_keeps_no_lines() {
        let counters = counters();
        let keep = |text: &str| counters.keep(Level::Info, text);
        counters.begin_trial();
        keep("of the trial");
        counters.end_trial();
        keep("of a request");
        let kept = counters.lines().since(0).lines;
        let texts: Vec<&str> = kept.iter().map(|it| &*it.text).collect();
        assert_eq!(texts, ["of a request"]);
    }

    #[test]
    fn one_warning_per_minute_is_allowed() {
        let counters = counters();
        let said = [120_000, 179_999, 60_000, 180_000].map(|now_ms| counters.may_warn(now_ms));
        assert_eq!(said, [true, false, false, true]);
    }
}
