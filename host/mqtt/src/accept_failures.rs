//! Log lines about connections that a listener cannot accept. Without file descriptors every
//! attempt fails, many times a second, so one line a minute counts the failures.

use std::{io, time::Instant};

use crate::limits::ACCEPT_LOG_PAUSE;

/// The failures of one listener. The first one is logged at once.
#[derive(Debug, Default)]
pub struct AcceptFailures {
    logged: Option<Instant>,
    /// The error of that line, as the number of the system.
    code: Option<i32>,
    /// Failures since then.
    failures: u64,
}

impl AcceptFailures {
    /// Logs `what`, with the error and the number of failures since the last line, or only counts
    /// the failure if the last line has the same error and is less than a minute old.
    pub fn log(&mut self, error: &io::Error, what: &'static str) {
        if let Some(failures) = self.count(error.raw_os_error(), Instant::now()) {
            tracing::warn!(%error, failures, "{what}");
        }
    }

    fn count(&mut self, code: Option<i32>, now: Instant) -> Option<u64> {
        self.failures += 1;
        let is_recent = |logged| now.saturating_duration_since(logged) < ACCEPT_LOG_PAUSE;
        if self.code == code && self.logged.is_some_and(is_recent) {
            return None;
        }
        (self.logged, self.code) = (Some(now), code);
        Some(std::mem::take(&mut self.failures))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_are_logged_at_once_and_then_once_a_minute() {
        let mut failures = AcceptFailures::default();
        let start = Instant::now();
        let end = start + ACCEPT_LOG_PAUSE;
        let [one, other] = [Some(24), Some(103)]
            .map(|code| move |failures: &mut AcceptFailures, at| failures.count(code, at));
        assert_eq!(one(&mut failures, start), Some(1));
        assert_eq!(one(&mut failures, start), None);
        assert_eq!(one(&mut failures, start), None);
        assert_eq!(one(&mut failures, end), Some(3));
        assert_eq!(one(&mut failures, end), None);
        assert_eq!(other(&mut failures, end), Some(2), "it is news");
    }
}
