//! Log lines that clients can bring about at will: one now and then, with the number of those that were left out.

use std::time::Instant;

use crate::limits;

/// When something was said last.
#[derive(Debug, Default)]
pub(super) struct Quiet {
    last: Option<Instant>,
    left_out: u64,
}

impl Quiet {
    /// Whether it may be said again, and how often it was not since the last time.
    pub(super) fn may_say(&mut self, now: Instant) -> Option<u64> {
        let recently = |last| now.saturating_duration_since(last) < limits::BROKER_LOG_PAUSE;
        if self.last.is_some_and(recently) {
            self.left_out += 1;
            return None;
        }
        self.last = Some(now);
        Some(std::mem::take(&mut self.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_out_is_counted() {
        let mut quiet = Quiet::default();
        let start = Instant::now();
        assert_eq!(quiet.may_say(start), Some(0));
        assert_eq!(quiet.may_say(start), None);
        assert_eq!(quiet.may_say(start), None);
        let later = start + limits::BROKER_LOG_PAUSE;
        assert_eq!(quiet.may_say(later), Some(2));
    }
}
