//! How much somebody may do in a second.
//!
//! In comes each attempt and its time; out goes whether it is within the bound: so many at once, and as many in each second
//! after that.

use std::{
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::{Duration, Instant},
};

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

/// The same for all clients together. It takes no lock, and where there is no bound nobody writes to it.
#[derive(Debug)]
pub(crate) struct SharedAllowance {
    began: Instant,
    /// Between two; zero where any number is allowed.
    interval_ns: AtomicU64,
    /// Until when all is used up, since the beginning.
    used_until_ns: AtomicU64,
}

impl SharedAllowance {
    /// Zero: any number.
    pub(crate) fn per_second(count: u32) -> Self {
        let allowance = Self {
            began: Instant::now(),
            interval_ns: AtomicU64::new(0),
            used_until_ns: AtomicU64::new(0),
        };
        allowance.set_per_second(count);
        allowance
    }

    /// The bound from now on; zero for none. What was used under another one counts.
    pub(crate) fn set_per_second(&self, count: u32) {
        let interval_ns = SECOND_NS.checked_div(count.into()).unwrap_or(0);
        self.interval_ns.store(interval_ns, Relaxed);
    }

    /// Whether one more is allowed. One that is not uses up nothing.
    pub(crate) fn takes(&self, now: Instant) -> bool {
        let interval_ns = self.interval_ns.load(Relaxed);
        if interval_ns == 0 {
            return true;
        }
        // Five centuries fit.
        let now_ns = now.saturating_duration_since(self.began).as_nanos() as u64;
        let used = self.used_until_ns.fetch_update(Relaxed, Relaxed, |until| {
            let next = until.max(now_ns) + interval_ns;
            (next - now_ns <= SECOND_NS).then_some(next)
        });
        used.is_ok()
    }
}

/// A second in nanoseconds.
const SECOND_NS: u64 = 1_000_000_000;

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

    #[test]
    fn all_together_have_so_many_from_however_many_threads() {
        let allowance = SharedAllowance::per_second(100);
        let now = Instant::now();
        let taken = |after_ms: u64| {
            let now = now + Duration::from_millis(after_ms);
            let take = || (0..1000).filter(|_| allowance.takes(now)).count();
            std::thread::scope(|scope| {
                let threads = [(); 4].map(|()| scope.spawn(take));
                threads.map(|it| it.join().unwrap()).iter().sum::<usize>()
            })
        };
        assert_eq!(taken(0), 100);
        assert_eq!(taken(50), 5);
        assert_eq!(taken(60_000), 100, "nothing is saved up");
        allowance.set_per_second(0);
        assert_eq!(taken(60_000), 4000);
        allowance.set_per_second(10);
        assert_eq!(taken(60_000), 0);
        assert_eq!(taken(61_000), 10);
    }
}
