//! Rate limits. A limit of N per second allows a burst of N, and then one more every 1/N seconds.

use std::{
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::{Duration, Instant},
};

/// A rate limit for one thread.
#[derive(Debug, Clone, Default)]
pub(crate) struct RateLimit {
    per_second: u32,
    /// The time between two events; none without a limit.
    interval: Option<Duration>,
    /// The time up to which the limit is used: each event adds one interval.
    used_until: Option<Instant>,
}

impl RateLimit {
    /// Changes the limit; zero for none. Events under the previous limit still count.
    pub(crate) fn set_per_second(&mut self, count: u32) {
        if self.per_second != count {
            self.per_second = count;
            self.interval = Duration::from_secs(1).checked_div(count);
        }
    }

    /// Whether one more event is allowed now. A refused event does not count.
    pub(crate) fn allows(&mut self, now: Instant) -> bool {
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

/// A rate limit for all clients together. It takes no lock, and is never written to if there is no
/// limit.
#[derive(Debug)]
pub(crate) struct SharedRateLimit {
    began: Instant,
    /// The time between two events; zero without a limit.
    interval_ns: AtomicU64,
    /// The time since `began` up to which the limit is used.
    used_until_ns: AtomicU64,
}

impl SharedRateLimit {
    /// A new limit; zero for none.
    pub(crate) fn per_second(count: u32) -> Self {
        let rate_limit = Self {
            began: Instant::now(),
            interval_ns: AtomicU64::new(0),
            used_until_ns: AtomicU64::new(0),
        };
        rate_limit.set_per_second(count);
        rate_limit
    }

    /// Changes the limit; zero for none. Events under the previous limit still count.
    pub(crate) fn set_per_second(&self, count: u32) {
        let interval_ns = SECOND_NS.checked_div(count.into()).unwrap_or(0);
        self.interval_ns.store(interval_ns, Relaxed);
    }

    /// Whether one more event is allowed now. A refused event does not count.
    pub(crate) fn allows(&self, now: Instant) -> bool {
        let interval_ns = self.interval_ns.load(Relaxed);
        if interval_ns == 0 {
            return true;
        }
        // A u64 holds five centuries of nanoseconds.
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

    fn per_second(count: u32) -> RateLimit {
        let mut rate_limit = RateLimit::default();
        rate_limit.set_per_second(count);
        rate_limit
    }

    #[test]
    fn limit_allows_a_burst_and_then_its_rate() {
        let mut rate_limit = per_second(10);
        let now = Instant::now();
        let mut taken = |after_ms: u64| {
            let now = now + Duration::from_millis(after_ms);
            (0..1000).filter(|_| rate_limit.allows(now)).count()
        };
        assert_eq!(taken(0), 10);
        assert_eq!(taken(0), 0);
        assert_eq!(taken(99), 0);
        assert_eq!(taken(100), 1);
        assert_eq!(taken(500), 4);
        assert_eq!(taken(60_000), 10, "unused events do not accumulate");
    }

    #[test]
    fn zero_means_no_limit() {
        let mut rate_limit = RateLimit::default();
        let now = Instant::now();
        assert!((0..100_000).all(|_| rate_limit.allows(now)));
    }

    #[test]
    fn changed_limit_applies_at_once_and_keeps_past_events() {
        let mut rate_limit = per_second(10);
        let now = Instant::now();
        let mut taken = |per_second| {
            rate_limit.set_per_second(per_second);
            (0..1000).filter(|_| rate_limit.allows(now)).count()
        };
        assert_eq!(taken(10), 10);
        assert_eq!(taken(10), 0);
        assert_eq!(taken(5), 0, "this second is used up");
        assert_eq!(taken(0), 1000);
        assert_eq!(taken(100), 0);
    }

    #[test]
    fn shared_limit_holds_over_several_threads() {
        let rate_limit = SharedRateLimit::per_second(100);
        let now = Instant::now();
        let taken = |after_ms: u64| {
            let now = now + Duration::from_millis(after_ms);
            let take = || (0..1000).filter(|_| rate_limit.allows(now)).count();
            std::thread::scope(|scope| {
                let threads = [(); 4].map(|()| scope.spawn(take));
                threads.map(|it| it.join().unwrap()).iter().sum::<usize>()
            })
        };
        assert_eq!(taken(0), 100);
        assert_eq!(taken(50), 5);
        assert_eq!(taken(60_000), 100, "unused events do not accumulate");
        rate_limit.set_per_second(0);
        assert_eq!(taken(60_000), 4000);
        rate_limit.set_per_second(10);
        assert_eq!(taken(60_000), 0);
        assert_eq!(taken(61_000), 10);
    }
}
