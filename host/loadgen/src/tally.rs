//! The results of a load: counts, latencies, and errors by kind.

use std::collections::BTreeMap;
use std::time::Duration;

use hdrhistogram::Histogram;

use super::work::Verb;
use crate::limits;

/// Latencies in nanoseconds, with a precision of a thousandth of the value or a tenth of a
/// microsecond.
#[derive(Clone, Debug)]
pub struct Latencies(Histogram<u64>);

impl Default for Latencies {
    fn default() -> Self {
        let (low, high) = (limits::LOAD_LATENCY_NS_MIN, limits::LOAD_LATENCY_NS_MAX);
        // This fails for a low of 0, a high below twice the low, or more than 5 digits. None of
        // these constants is.
        Self(Histogram::new_with_bounds(low, high, 3).expect("bounds that fit each other"))
    }
}

impl Latencies {
    pub(super) fn note(&mut self, latency: Duration) {
        let ns = u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX);
        self.0.saturating_record(ns);
    }

    /// Adds all latencies of another.
    pub fn add(&mut self, other: &Self) {
        // This fails if the bounds of the other are wider, and all have the same bounds.
        let _ = self.0.add(&other.0);
    }

    /// The number of latencies.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.0.len()
    }

    /// The quantile in microseconds: 0.99 is p99. It is 0 without latencies.
    #[must_use]
    pub fn quantile_us(&self, quantile: f64) -> f64 {
        match self.0.is_empty() {
            true => 0.0,
            false => self.0.value_at_quantile(quantile) as f64 / 1000.0,
        }
    }

    /// The longest latency, in microseconds. It is 0 without latencies.
    #[must_use]
    pub fn max_us(&self) -> f64 {
        self.0.max() as f64 / 1000.0
    }
}

/// Errors by kind.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Errors(BTreeMap<String, u64>);

impl Errors {
    /// The kind for all further kinds when there are too many.
    const OTHERS: &str = "others";

    pub(super) fn note(&mut self, kind: &str, count: u64) {
        if count == 0 {
            return;
        }
        let known = self.0.contains_key(kind);
        let kind = match known || self.0.len() < limits::LOAD_ERROR_KINDS_MAX {
            true => kind,
            false => Self::OTHERS,
        };
        *self.0.entry(kind.to_owned()).or_default() += count;
    }

    /// Adds all errors of another.
    pub fn add(&mut self, other: &Self) {
        for (kind, count) in &other.0 {
            self.note(kind, *count);
        }
    }

    /// All kinds with their counts.
    pub fn kinds(&self) -> impl Iterator<Item = (&str, u64)> {
        self.0.iter().map(|(kind, count)| (kind.as_str(), *count))
    }

    /// The count of all kinds together.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.0.values().sum()
    }
}

/// The counts of one run. A request is of the window if it began in the window, or was due in it in
/// an open loop.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    /// Latencies of the GETs of the window with a correct answer.
    pub reads: Latencies,
    /// Latencies of all other requests of the window with a correct answer.
    pub writes: Latencies,
    /// How much later than due the requests of the window were sent. Only in an open loop.
    pub late: Latencies,
    /// Requests of the window.
    pub requests: u64,
    /// Requests of the window with a correct answer.
    pub answered: u64,
    /// GETs of the window whose key does not exist.
    pub misses: u64,
    /// Requests of the window without a correct answer.
    pub failed: u64,
    /// Correct answers that arrived in the window, including those to earlier requests.
    pub arrived: u64,
    /// Those of them that answer GETs.
    pub arrived_reads: u64,
    /// Errors of the whole run, also before and after the window, and missing or wrong
    /// notifications.
    pub errors: Errors,
    /// Requests that were sent in the whole run, including those of watchers.
    pub sent: u64,
    /// Requests that were answered in the whole run, correctly or not.
    pub replied: u64,
    /// Notifications in the whole run.
    pub notifications: u64,
}

impl Tally {
    /// Adds all counts of another.
    pub fn add(&mut self, other: &Self) {
        self.reads.add(&other.reads);
        self.writes.add(&other.writes);
        self.late.add(&other.late);
        self.errors.add(&other.errors);
        for (sum, more) in [
            (&mut self.requests, other.requests),
            (&mut self.answered, other.answered),
            (&mut self.misses, other.misses),
            (&mut self.failed, other.failed),
            (&mut self.arrived, other.arrived),
            (&mut self.arrived_reads, other.arrived_reads),
            (&mut self.sent, other.sent),
            (&mut self.replied, other.replied),
            (&mut self.notifications, other.notifications),
        ] {
            *sum += more;
        }
    }

    /// Latencies of all requests of the window.
    #[must_use]
    pub fn latencies(&self) -> Latencies {
        let mut all = self.reads.clone();
        all.add(&self.writes);
        all
    }

    pub(super) fn of(&mut self, verb: Verb) -> &mut Latencies {
        match verb {
            Verb::Get => &mut self.reads,
            Verb::Set | Verb::Del | Verb::Watch => &mut self.writes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_precise_to_a_thousandth() {
        let mut it = Latencies::default();
        assert_eq!((it.quantile_us(0.5), it.max_us()), (0.0, 0.0));
        for us in 1..=10_000 {
            it.note(Duration::from_micros(us));
        }
        for (quantile, us) in [(0.5, 5_000.0), (0.99, 9_900.0), (0.999, 9_990.0)] {
            let found = it.quantile_us(quantile);
            assert!((found / us - 1.0_f64).abs() < 0.002, "{found} for {us}");
        }
        let mut twice = it.clone();
        twice.add(&it);
        assert_eq!((it.count(), twice.count()), (10_000, 20_000));
    }

    #[test]
    fn latency_above_the_maximum_counts_as_the_maximum() {
        let mut it = Latencies::default();
        it.note(Duration::MAX);
        it.note(Duration::ZERO);
        assert_eq!(it.count(), 2);
        assert!(it.max_us() * 1000.0 >= limits::LOAD_LATENCY_NS_MAX as f64);
    }

    #[test]
    fn error_kinds_are_limited_and_no_error_is_lost() {
        let mut it = Errors::default();
        for n in 0..1000 {
            it.note(&format!("refused: {n}"), 1);
        }
        it.note("refused: 0", 1);
        it.note("never", 0);
        assert_eq!(it.count(), 1001);
        assert_eq!(it.kinds().count(), limits::LOAD_ERROR_KINDS_MAX + 1);
        assert!(it.kinds().any(|kind| kind == ("refused: 0", 2)));
    }
}
