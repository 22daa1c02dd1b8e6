//! Limits log lines that clients can cause at will: one line per pause, with the number of lines
//! suppressed since the last one.

use std::time::{Duration, Instant};

/// The limit of one kind of line.
#[derive(Debug, Default)]
pub struct LogThrottle {
    last: Option<Instant>,
    suppressed: u64,
}

impl LogThrottle {
    /// Returns the number of lines suppressed since the last one. If that was less than `pause` ago,
    /// returns none: this line must be suppressed too.
    pub fn allow(&mut self, now: Instant, pause: Duration) -> Option<u64> {
        let recently = |last| now.saturating_duration_since(last) < pause;
        if self.last.is_some_and(recently) {
            self.suppressed += 1;
            return None;
        }
        self.last = Some(now);
        Some(std::mem::take(&mut self.suppressed))
    }
}
