//! How much somebody may do in a second.
//!
//! In comes each attempt and its time; out goes whether it is within the bound: so many at once, and as many in each second
//! after that.

use std::time::{Duration, Instant};

/// A bound of so many a second.
#[derive(Debug, Clone, Default)]
pub(crate) struct Allowance {
    per_second: u32,
    /// Between two; none where any number is allowed.
    interval: Option<Duration>,
    /// Until when all is used up, if one uses up one interval.
    used_until: Option<Instant>,
}

impl Allowance {
    /// The bound from now on; zero for none. What was used under another one counts.
    pub(crate) fn set_per_second(&mut self, count: u32) {
        if self.per_second != count {
            self.per_second = count;
            self.interval = Duration::from_secs(1).checked_div(count);
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

    fn per_second(count: u32) -> Allowance {
        let mut allowance = Allowance::default();
        allowance.set_per_second(count);
        allowance
    }

    #[test]
    fn so_many_at_once_and_as_many_a_second_after_that() {
        let mut allowance = per_second(10);
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
        let mut allowance = Allowance::default();
        let now = Instant::now();
        assert!((0..100_000).all(|_| allowance.takes(now)));
    }

    #[test]
    fn another_bound_counts_at_once_and_the_same_one_gives_nothing_back() {
        let mut allowance = per_second(10);
        let now = Instant::now();
        let mut taken = |per_second| {
            allowance.set_per_second(per_second);
            (0..1000).filter(|_| allowance.takes(now)).count()
        };
        assert_eq!(taken(10), 10);
        assert_eq!(taken(10), 0);
        assert_eq!(taken(5), 0, "all of this second is used up");
        assert_eq!(taken(0), 1000);
        assert_eq!(taken(100), 0);
    }
}
