//! Log lines about connections that a listener cannot accept. Without file descriptors every
//! attempt fails, many times a second, so there is one line a minute.

use std::{io, time::Instant};

use crate::{limits::ACCEPT_LOG_PAUSE, log_throttle::LogThrottle};

/// The failures of one listener.
#[derive(Debug, Default)]
pub struct AcceptFailures {
    /// The last error, as the number of the system.
    code: Option<i32>,
    /// The limit of its lines.
    throttle: LogThrottle,
}

impl AcceptFailures {
    /// Logs `what`, with the error and the number of lines about it that were left out, unless it
    /// is the error of the last line, less than a minute ago.
    pub fn log(&mut self, error: &io::Error, what: &'static str) {
        if let Some(suppressed) = self.allow(error.raw_os_error(), Instant::now()) {
            tracing::warn!(%error, suppressed, "{what}");
        }
    }

    fn allow(&mut self, code: Option<i32>, now: Instant) -> Option<u64> {
        if self.code != code {
            *self = Self {
                code,
                ..Self::default()
            };
        }
        self.throttle.allow(now, ACCEPT_LOG_PAUSE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_error_is_logged_at_once_and_then_once_a_minute() {
        let mut failures = AcceptFailures::default();
        let start = Instant::now();
        for (code, now, expected) in [
            (24, start, Some(0)),
            (24, start, None),
            (103, start, Some(0)),
            (103, start, None),
            (103, start, None),
            (103, start + ACCEPT_LOG_PAUSE, Some(2)),
        ] {
            assert_eq!(failures.allow(Some(code), now), expected, "{code}");
        }
    }
}
