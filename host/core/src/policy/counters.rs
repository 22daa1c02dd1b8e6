//! The counters and log lines of a policy, and the rate limit of log lines about it.
//!
//! Names and numbers come from the guest, so everything must be bounded.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use super::bindings::statehouse::policy::log::Level;
use super::digest::Digest;
use super::lines::Lines;
use crate::limits;

/// The counters of a policy.
pub struct Counters {
    /// The policy's name, version and short digest, for log lines.
    pub policy: Arc<str>,
    digest: Digest,
    lines: Arc<Lines>,
    values: Mutex<BTreeMap<String, u64>>,
    /// The second of the last log line about this policy, and the number of lines in it.
    logged: Mutex<(u64, u32)>,
    /// The minute of the last warning.
    warned: Mutex<u64>,
}

impl Counters {
    pub(super) fn new(policy: String, digest: Digest, lines: Arc<Lines>) -> Self {
        Self {
            policy: policy.into(),
            digest,
            lines,
            values: Mutex::default(),
            logged: Mutex::default(),
            warned: Mutex::default(),
        }
    }

    /// The recent lines of all policies of the engine.
    pub fn lines(&self) -> &Arc<Lines> {
        &self.lines
    }

    /// Keeps a line of this policy for readers.
    pub(super) fn keep(&self, level: Level, text: &str) {
        self.lines.push(self.digest, &self.policy, level, text);
    }

    /// Adds to a counter. New names beyond the limit are dropped.
    pub fn add(&self, name: &str, by: u64) {
        // A poisoned lock only means that a thread panicked between two complete updates.
        let mut values = self.values.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(value) = values.get_mut(name) {
            *value = value.saturating_add(by);
        } else if values.len() < limits::GUEST_COUNTERS_MAX
            && name.len() <= limits::POLICY_NAME_BYTES_MAX
        {
            values.insert(name.to_owned(), by);
        }
    }

    /// Whether another line by or about this policy may be logged. The policy and its clients cause
    /// these lines, so they are limited, even across instances. Time zero means unknown and counts
    /// for the last second.
    pub fn may_log(&self, now_ms: u64) -> bool {
        let mut logged = self.logged.lock().unwrap_or_else(PoisonError::into_inner);
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
        let mut warned = self.warned.lock().unwrap_or_else(PoisonError::into_inner);
        let minute = now_ms / 60_000;
        let may = minute > *warned;
        *warned = minute.max(*warned);
        may
    }

    /// Resets the counters after a trial, which handled no client's request.
    pub fn clear(&self) {
        self.values
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clear();
    }

    /// All counters.
    pub fn all(&self) -> BTreeMap<String, u64> {
        self.values
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
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
    fn one_warning_per_minute_is_allowed() {
        let counters = counters();
        let said = [120_000, 179_999, 60_000, 180_000].map(|now_ms| counters.may_warn(now_ms));
        assert_eq!(said, [true, false, false, true]);
    }
}
