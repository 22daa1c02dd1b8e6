//! How much somebody may do in a second.
//!
//! In comes each attempt and its time; out goes whether it is within the bound: so many at once, and as many in each second
//! after that.

use std::time::{Duration, Instant};

/// A bound of so many a second.
#[derive(Debug, Clone)]
pub(crate) struct Allowance {
    /// Between two; none where any number is allowed.
    interval: Option<Duration>,
    /// Until when all is used up, if one uses up one interval.
    used_until: Option<Instant>,
}

impl Allowance {
    /// Zero: any number.
    pub(crate) fn per_second(count: u32) -> Self {
        Self {
            interval: Duration::from_secs(1).checked_div(count),
            used_until: None,
        }
    }

    /// Whether one more is allowed. One that is not uses up nothing.
    pub(crate) fn takes(&mut self, now: Instant) -> bool {
        let Some(interval) = self.interval else {
            return true;
        };
        let next = self.used_until.map_or(now, |until| until.max(now)) + interval;
        let is_allowed = next.duration_since(now) <= Duration::from_secs(1);
        if is_allowed {
            self.used_until = Some(next);
        }
        is_allowed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn so_many_at_once_and_as_many_a_second_after_that() {
        let mut allowance = Allowance::per_second(10);
        let now = Instant::now();
        let mut taken = |after_ms: u64| {
            let now = now + Duration::from_millis(after_ms);
            (0..1000).filter(|_| allowance.takes(now)).count()
        };
        assert_eq!(taken(0), 10);
        assert_eq!(taken(0), 0);
        assert_eq!(taken(99), 0);
        assert_eq!(taken(100), 1);
        assert_eq!(taken(500), 4);
        assert_eq!(taken(60_000), 10, "nothing is saved up");
    }

    #[test]
    fn zero_is_any_number() {
        let mut allowance = Allowance::per_second(0);
        let now = Instant::now();
        assert!((0..100_000).all(|_| allowance.takes(now)));
    }
}
