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

/// A time, and its bucket in all histograms with the same bounds.
#[derive(Clone, Copy, Debug)]
pub struct TimeBucket {
    bucket: usize,
    ns: u64,
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
        let TimeBucket { bucket, ns } = self.bucket_of(mean);
        self.buckets[bucket] += u64::from(times);
        self.sum_ns = self.sum_ns.saturating_add(ns.saturating_mul(times.into()));
    }

    /// The bucket of a time. One search is enough for all histograms with the same bounds.
    #[must_use]
    pub fn bucket_of(&self, time: Duration) -> TimeBucket {
        let ns = nanos(time);
        let bucket = self.bounds_ns.partition_point(|bound| *bound < ns);
        TimeBucket { bucket, ns }
    }

    /// Counts a time whose bucket was found in a histogram with the same bounds.
    pub fn record_at(&mut self, counted: TimeBucket) {
        self.buckets[counted.bucket] += 1;
        self.sum_ns = self.sum_ns.saturating_add(counted.ns);
    }

    /// The buckets: the bound of each, none for the last one, and how many times it counts.
    pub fn buckets(&self) -> impl Iterator<Item = (Option<Duration>, u64)> {
        let bounds = self.bounds.iter().copied().map(Some);
        bounds.chain([None]).zip(self.buckets.iter().copied())
    }

    /// The times that were counted since `before`, an earlier state of this histogram.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        let earlier = before.buckets.iter().copied().chain(core::iter::repeat(0));
        let counts = self.buckets.iter().zip(earlier);
        Self {
            buckets: counts.map(|(now, then)| now.saturating_sub(then)).collect(),
            sum_ns: self.sum_ns.saturating_sub(before.sum_ns),
            ..self.clone()
        }
    }

    /// Adds the times of another histogram, which must have the same bounds.
    pub fn merge(&mut self, other: &Self) {
        debug_assert_eq!(self.bounds, other.bounds);
        for (sum, count) in self.buckets.iter_mut().zip(&other.buckets) {
            *sum += count;
        }
        self.sum_ns = self.sum_ns.saturating_add(other.sum_ns);
    }

    /// The time that this many of a thousand times do not exceed, estimated within its bucket. The
    /// last bucket counts as its lower bound. None if nothing was counted.
    #[must_use]
    pub fn quantile(&self, per_mille: u64) -> Option<Duration> {
        let count = self.count();
        // Beyond 2^54 times the estimate would be wrong, and no histogram counts as many.
        let rank = count.saturating_mul(per_mille).div_ceil(1000).max(1);
        let mut below = 0;
        let mut lower = 0;
        for (bucket, counted) in self.buckets.iter().enumerate() {
            let upper = self.bounds_ns.get(bucket).copied().unwrap_or(lower);
            if *counted > 0 && below + counted >= rank {
                let share = (rank - below) as f64 / *counted as f64;
                let within = ((upper - lower) as f64 * share) as u64;
                return Some(Duration::from_nanos(lower + within));
            }
            below += counted;
            lower = upper;
        }
        None
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
        let mut other = Histogram::new(&BOUNDS);
        other.record_at(times.bucket_of(11 * MS));
        assert_eq!(other.buckets().last(), Some((None, 1)));
        assert_eq!(other.sum(), 11 * MS);
    }

    #[test]
    fn quantiles_of_a_window_are_estimated_within_their_bucket() {
        static BOUNDS: [Duration; 2] = [Duration::from_millis(10), Duration::from_millis(20)];
        let ms = Duration::from_millis;
        let mut times = Histogram::new(&BOUNDS);
        assert_eq!(times.quantile(500), None);
        times.record_many(ms(19), 1000);
        let before = times.clone();
        times.record_many(ms(5), 90);
        times.record_many(ms(15), 10);
        let window = times.since(&before);
        assert_eq!((window.count(), window.sum()), (100, ms(600)));
        assert_eq!(window.quantile(450), Some(ms(5)));
        assert_eq!(window.quantile(900), Some(ms(10)));
        assert_eq!(window.quantile(950), Some(ms(15)));
        assert_eq!(window.quantile(1000), Some(ms(20)));
        times.record(ms(900));
        assert_eq!(times.quantile(1000), Some(ms(20)), "the last bound");
        let mut sum = window.clone();
        sum.merge(&window);
        assert_eq!((sum.count(), sum.sum()), (200, ms(1200)));
        // An earlier state that counts more is that of another store.
        assert_eq!(before.since(&times).count(), 0);
    }
}
