//! The figures of a store at one moment, and what two of them say about the time between.

use std::time::{Duration, Instant};

use statehouse_protocol::Histogram;

use super::document::{Latency, Rates};
use crate::policies::manager::Listing;
use statehouse_core::policy::Digest;
use statehouse_server::{Longest, Observed, Server, Stats};

/// The figures of a store at one moment.
pub(super) struct Sample {
    pub(super) at: Instant,
    pub(super) counts: Counts,
    pub(super) times: Times,
    /// The longest times since the sample before.
    pub(super) longest: Longest,
    /// Requests and digests of policies.
    pub(super) policies: Vec<(Digest, u64)>,
}

/// Events since the start.
#[derive(Clone, Copy, Default)]
pub(super) struct Counts {
    pub(super) requests: u64,
    pub(super) get: u64,
    pub(super) set: u64,
    pub(super) del: u64,
    pub(super) other: u64,
    pub(super) refused: u64,
    pub(super) failed: u64,
    pub(super) notifications: u64,
    pub(super) publishes: Option<(u64, u64)>,
}

/// Times since the start, or since an operator watches.
pub(super) struct Times {
    /// None before the first request.
    pub(super) request: Option<Histogram>,
    pub(super) notification: Histogram,
    pub(super) policy: Histogram,
    pub(super) queue: Histogram,
    pub(super) flush: Histogram,
    pub(super) send: Histogram,
    /// Flushes to the disk.
    pub(super) disk: Option<Histogram>,
}

impl Sample {
    pub(super) fn of(
        server: &Server,
        stats: &Stats,
        broker: Option<&statehouse_mqtt::Stats>,
        listing: &Listing,
        observed: Observed,
        disk: Option<Histogram>,
    ) -> Self {
        let times = server.times();
        let mut counts = Counts {
            requests: stats.requests,
            refused: stats.refused.all(),
            notifications: stats.notifications,
            publishes: broker.map(|it| (it.messages_in, it.messages_out)),
            ..Counts::default()
        };
        let mut request: Option<Histogram> = None;
        for it in &times.requests {
            counts.add(&it.command, it.outcome, it.times.count());
            match &mut request {
                Some(sum) => sum.merge(&it.times),
                None => request = Some(it.times.clone()),
            }
        }
        let policies = listing.policies.iter();
        Self {
            at: Instant::now(),
            counts,
            times: Times {
                request,
                notification: times.notifications,
                policy: times.calls,
                queue: observed.stages.queue,
                flush: observed.stages.flush,
                send: observed.stages.send,
                disk,
            },
            longest: observed.longest,
            policies: policies.map(|it| (it.digest, it.done.requests)).collect(),
        }
    }
}

impl Counts {
    /// Adds requests with one command and outcome.
    fn add(&mut self, command: &str, outcome: &str, requests: u64) {
        let of_command = match command {
            "GET" => &mut self.get,
            "SET" => &mut self.set,
            "DEL" | "VDEL" => &mut self.del,
            _ => &mut self.other,
        };
        *of_command += requests;
        match outcome {
            "refused" => self.refused += requests,
            "failed" => self.failed += requests,
            _ => {}
        }
    }

    pub(super) fn rates(&self, before: &Self, seconds: f64) -> Rates {
        let rate = |of: fn(&Self) -> u64| tenths(per_second(of(self), of(before), seconds));
        let publishes = self.publishes.zip(before.publishes);
        let publishes = publishes.map(|(now, then)| {
            let rate = |now, then| tenths(per_second(now, then, seconds));
            (rate(now.0, then.0), rate(now.1, then.1))
        });
        Rates {
            requests: rate(|it| it.requests),
            get: rate(|it| it.get),
            set: rate(|it| it.set),
            del: rate(|it| it.del),
            other: rate(|it| it.other),
            refused: rate(|it| it.refused),
            failed: rate(|it| it.failed),
            notifications: rate(|it| it.notifications),
            publishes_in: publishes.map(|it| it.0),
            publishes_out: publishes.map(|it| it.1),
        }
    }
}

/// The times that were counted between two samples. `max` is the longest one, if it is known.
pub(super) fn latency(
    now: Option<&Histogram>,
    then: Option<&Histogram>,
    max: Option<Duration>,
) -> Latency {
    let Some(now) = now else {
        return Latency::default();
    };
    let window = then.map_or_else(|| now.clone(), |then| now.since(then));
    let count = window.count();
    // An estimate may lie behind the longest time of its bucket.
    let us = |time: Duration| micros(max.map_or(time, |max| time.min(max)));
    Latency {
        count,
        p50: window.quantile(500).map(us),
        p99: window.quantile(990).map(us),
        max: max.filter(|_| count > 0).map(micros),
    }
}

pub(super) fn per_second(now: u64, then: u64, seconds: f64) -> f64 {
    now.saturating_sub(then) as f64 / seconds
}

/// Rounded to one digit, since more would be noise.
pub(super) fn tenths(value: f64) -> f64 {
    (value * 10.0).round() / 10.0
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    static BOUNDS: [Duration; 2] = [Duration::from_millis(1), Duration::from_millis(10)];

    #[test]
    fn rates_are_differences_per_second() {
        let mut before = Counts::default();
        before.add("GET", "ok", 100);
        let mut now = before;
        now.requests = 30;
        now.add("GET", "ok", 10);
        now.add("VDEL", "refused", 4);
        now.add("DEL", "failed", 2);
        now.add("KEYNOTIFY", "ok", 1);
        let rates = now.rates(&before, 2.0);
        assert_eq!((rates.get, rates.del, rates.other), (5.0, 3.0, 0.5));
        assert_eq!((rates.refused, rates.failed), (2.0, 1.0));
        assert_eq!((rates.requests, rates.set), (15.0, 0.0));
        assert_eq!(rates.publishes_in, None);
        // A store that was replaced counts from zero.
        assert_eq!(before.rates(&now, 1.0).requests, 0.0);
    }

    #[test]
    fn latency_is_that_of_the_window_and_never_beyond_its_maximum() {
        let mut then = Histogram::new(&BOUNDS);
        then.record_many(Duration::from_micros(500), 1_000);
        let mut now = then.clone();
        now.record_many(Duration::from_millis(2), 10);
        let max = Some(Duration::from_millis(3));
        let it = latency(Some(&now), Some(&then), max);
        assert_eq!((it.count, it.max), (10, Some(3_000)));
        assert_eq!((it.p50, it.p99), (Some(3_000), Some(3_000)));
        let none = latency(Some(&now), Some(&now), max);
        assert_eq!((none.count, none.p50, none.max), (0, None, None));
        assert_eq!(latency(None, None, None).count, 0);
        // The first request of a store began its histogram.
        assert_eq!(latency(Some(&now), None, None).count, 1_010);
    }
}
