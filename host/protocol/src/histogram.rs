//! Times, counted in buckets with fixed bounds. Only operators read them.

use alloc::vec;
use alloc::vec::Vec;
use core::time::Duration;

/// A histogram of times. To record a time costs a search among some bounds, and no allocation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Histogram {
    bounds: &'static [Duration],
    /// The bounds in nanoseconds: whole numbers are compared faster.
    bounds_ns: Vec<u64>,
    /// How many times are in each bucket: those up to its bound and above the bound before. The
    /// last bucket has no bound.
    buckets: Vec<u64>,
    sum_ns: u64,
}

impl Histogram {
    /// An empty histogram. The bounds must ascend.
    #[must_use]
    pub fn new(bounds: &'static [Duration]) -> Self {
        Self {
            bounds,
            bounds_ns: bounds.iter().map(|it| nanos(*it)).collect(),
            buckets: vec![0; bounds.len() + 1],
            sum_ns: 0,
        }
    }

    /// Counts a time.
    pub fn record(&mut self, time: Duration) {
        self.record_many(time, 1);
    }

    /// Counts several times with this mean.
    pub fn record_many(&mut self, mean: Duration, times: u32) {
        let ns = nanos(mean);
        let bucket = self.bounds_ns.partition_point(|bound| *bound < ns);
        self.buckets[bucket] += u64::from(times);
        self.sum_ns = self.sum_ns.saturating_add(ns.saturating_mul(times.into()));
    }

    /// The buckets: the bound of each, none for the last one, and how many times it counts.
    pub fn buckets(&self) -> impl Iterator<Item = (Option<Duration>, u64)> {
        let bounds = self.bounds.iter().copied().map(Some);
        bounds.chain([None]).zip(self.buckets.iter().copied())
    }

    /// How many times were counted.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }

    /// The sum of all times.
    #[must_use]
    pub fn sum(&self) -> Duration {
        Duration::from_nanos(self.sum_ns)
    }
}

/// Five hundred years fit.
fn nanos(time: Duration) -> u64 {
    let whole = time.as_secs().saturating_mul(1_000_000_000);
    whole.saturating_add(time.subsec_nanos().into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_counts_up_to_the_bound_that_it_reaches() {
        const MS: Duration = Duration::from_millis(1);
        static BOUNDS: [Duration; 2] = [MS, Duration::from_millis(10)];
        let mut times = Histogram::new(&BOUNDS);
        for time in [Duration::ZERO, MS, MS + Duration::from_nanos(1), 11 * MS] {
            times.record(time);
        }
        times.record_many(2 * MS, 3);
        let counts: Vec<u64> = times.buckets().map(|(_, count)| count).collect();
        assert_eq!(counts, [2, 4, 1]);
        assert_eq!(times.buckets().last(), Some((None, 1)));
        assert_eq!(times.count(), 7);
        assert_eq!(times.sum(), 19 * MS + Duration::from_nanos(1));
    }
}
