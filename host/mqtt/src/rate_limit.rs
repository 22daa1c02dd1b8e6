//! Rate limits. A limit of N per second allows a burst of N, and then one more every 1/N seconds.
//!
//! A repeated message may have had its effect before, and a refusal would deny that. So a client
//! that sends its unacknowledged messages again may use its own limit ahead of time, for some
//! seconds.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Instant,
};

use crate::limits::{RATE_LIMITS_CLEARED_AT_MIN, REPETITIONS_AHEAD_MAX};

/// A rate limit for one client or for all clients together. It takes no lock, and is never written
/// to if there is no limit.
#[derive(Debug)]
pub(crate) struct RateLimit {
    began: Instant,
    /// The time between two events; zero without a limit.
    interval_ns: AtomicU64,
    /// The time since `began` up to which the limit is used.
    used_until_ns: AtomicU64,
}

impl RateLimit {
    /// A new limit; zero for none.
    pub(crate) fn per_second(count: u32, now: Instant) -> Self {
        let rate_limit = Self {
            began: now,
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
        self.allows_until(now, SECOND_NS)
    }

    /// Whether a repeated event is allowed now, ahead of time if need be.
    pub(crate) fn allows_repeated(&self, now: Instant) -> bool {
        let ahead_ns = REPETITIONS_AHEAD_MAX.as_nanos() as u64;
        self.allows_until(now, SECOND_NS + ahead_ns)
    }

    fn allows_until(&self, now: Instant, ahead_max_ns: u64) -> bool {
        let interval_ns = self.interval_ns.load(Relaxed);
        if interval_ns == 0 {
            return true;
        }
        let now_ns = self.time_ns(now);
        let used = self.used_until_ns.fetch_update(Relaxed, Relaxed, |until| {
            let next = until.max(now_ns) + interval_ns;
            (next - now_ns <= ahead_max_ns).then_some(next)
        });
        used.is_ok()
    }

    /// Whether earlier events still count.
    fn is_used(&self, now: Instant) -> bool {
        self.used_until_ns.load(Relaxed) > self.time_ns(now)
    }

    /// A u64 holds five centuries of nanoseconds.
    fn time_ns(&self, now: Instant) -> u64 {
        now.saturating_duration_since(self.began).as_nanos() as u64
    }
}

/// The rate limits of clients by client id. A client keeps its limit when it connects again, or a
/// reconnection would allow another burst.
#[derive(Debug, Default)]
pub(crate) struct ClientRateLimits(Mutex<ByClient>);

#[derive(Debug, Default)]
struct ByClient {
    limits: HashMap<Arc<str>, Arc<RateLimit>>,
    /// The number of entries at which those that are not needed any more are removed.
    cleared_at: usize,
}

impl ClientRateLimits {
    /// The limit of a client. Entries are kept while a connection holds them and while they count
    /// events, which is some seconds at most. So there are no more than connections and recent
    /// ones.
    pub(crate) fn of(&self, client: &Arc<str>, now: Instant) -> Arc<RateLimit> {
        // A panic under this lock leaves a valid map.
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if all.limits.len() >= all.cleared_at {
            all.limits
                .retain(|_, limit| Arc::strong_count(limit) > 1 || limit.is_used(now));
            all.cleared_at = (2 * all.limits.len()).max(RATE_LIMITS_CLEARED_AT_MIN);
        }
        let limit = all.limits.entry(client.clone());
        limit
            .or_insert_with(|| Arc::new(RateLimit::per_second(0, now)))
            .clone()
    }
}

const SECOND_NS: u64 = 1_000_000_000;

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn limit_allows_a_burst_and_then_its_rate() {
        let now = Instant::now();
        let rate_limit = RateLimit::per_second(10, now);
        let taken = |after_ms: u64| {
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

    /// The client pays for its repetitions later.
    #[test]
    fn repetitions_may_use_the_limit_ahead_of_time() {
        let now = Instant::now();
        let rate_limit = RateLimit::per_second(10, now);
        let after = |s: u64| now + Duration::from_secs(s);
        let first = |s| (0..1000).filter(|_| rate_limit.allows(after(s))).count();
        let repeated = |s| {
            (0..1000)
                .filter(|_| rate_limit.allows_repeated(after(s)))
                .count()
        };
        let ahead_s = REPETITIONS_AHEAD_MAX.as_secs();
        assert_eq!((first(0), repeated(0)), (10, 10 * ahead_s as usize));
        assert_eq!((repeated(1), first(1)), (10, 0));
        assert_eq!((first(1 + ahead_s), first(2 + ahead_s)), (0, 10));
    }

    #[test]
    fn changed_limit_applies_at_once_and_keeps_past_events() {
        let now = Instant::now();
        let rate_limit = RateLimit::per_second(0, now);
        let taken = |per_second| {
            rate_limit.set_per_second(per_second);
            (0..1000).filter(|_| rate_limit.allows(now)).count()
        };
        assert_eq!(taken(0), 1000);
        assert_eq!(taken(10), 10);
        assert_eq!(taken(10), 0);
        assert_eq!(taken(5), 0, "this second is used up");
        assert_eq!(taken(0), 1000);
        assert_eq!(taken(100), 0);
    }

    #[test]
    fn limits_of_clients_outlive_their_connections_for_a_second() {
        let (all, now) = (ClientRateLimits::default(), Instant::now());
        let taken = |client: &str, now| {
            let limit = all.of(&client.into(), now);
            limit.set_per_second(10);
            (0..100).filter(|_| limit.allows(now)).count()
        };
        assert_eq!(
            [taken("a", now), taken("b", now), taken("a", now)],
            [10, 10, 0]
        );
        for client in 0..10 * RATE_LIMITS_CLEARED_AT_MIN {
            let now = now + Duration::from_millis(2 * client as u64);
            assert_eq!(taken(&client.to_string(), now), 10);
        }
        let held = all.0.lock().unwrap().limits.len();
        assert!(held <= RATE_LIMITS_CLEARED_AT_MIN, "{held}");
    }

    #[test]
    fn shared_limit_holds_over_several_threads() {
        let now = Instant::now();
        let rate_limit = RateLimit::per_second(100, now);
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
