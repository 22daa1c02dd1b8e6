//! Limits log lines that clients can cause at will: one line per pause, with the number of lines
//! suppressed since the last one.

use std::time::Instant;

use statehouse_config::limits;

/// The limit of one kind of line.
#[derive(Debug, Default)]
pub(super) struct LogThrottle {
    last: Option<Instant>,
    suppressed: u64,
}

impl LogThrottle {
    /// Returns the number of lines suppressed since the last one, or none if this line must be
    /// suppressed too.
    pub(super) fn allow(&mut self, now: Instant) -> Option<u64> {
        let recently = |last| now.saturating_duration_since(last) < limits::BROKER_LOG_PAUSE;
        if self.last.is_some_and(recently) {
            self.suppressed += 1;
            return None;
        }
        self.last = Some(now);
        Some(std::mem::take(&mut self.suppressed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suppressed_lines_are_counted() {
        let mut throttle = LogThrottle::default();
        let start = Instant::now();
        assert_eq!(throttle.allow(start), Some(0));
        assert_eq!(throttle.allow(start), None);
        assert_eq!(throttle.allow(start), None);
        let later = start + limits::BROKER_LOG_PAUSE;
        assert_eq!(throttle.allow(later), Some(2));
    }
}
