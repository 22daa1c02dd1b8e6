//! The times at which requests are due.
//!
//! In a closed loop, each answer triggers the next request, so a slow server receives fewer
//! requests. This measures throughput. In an open loop, requests are due at fixed times that do not
//! depend on the server, and latency counts from the due time. This measures how long users of a
//! busy server wait, without "coordinated omission".

use std::time::{Duration, Instant};

/// When requests are due.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Pace {
    /// A connection sends the next request as soon as it has a free slot.
    Closed,
    /// Requests are sent at a fixed rate over all connections, which take turns.
    Open {
        /// The rate, above 0.
        per_second: f64,
    },
}

/// The times of one run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Schedule {
    /// The time of the first request.
    pub(super) begin: Instant,
    /// The begin of the measured window.
    pub(super) from: Instant,
    /// The end of the window. No request is due later.
    pub(super) until: Instant,
}

impl Schedule {
    /// Whether a time is in the measured window.
    pub(super) fn has(&self, time: Instant) -> bool {
        self.from <= time && time < self.until
    }
}

/// The requests of one connection in an open loop.
#[derive(Clone, Copy, Debug)]
pub(super) struct Turns {
    period_ns: f64,
    number: usize,
    of: usize,
}

impl Turns {
    /// The turns of connection `number` of `of`.
    pub(super) fn new(per_second: f64, number: usize, of: usize) -> Self {
        Self {
            period_ns: 1e9 / per_second,
            number,
            of,
        }
    }

    /// When request `turn` of the connection is due, as the time since the begin.
    pub(super) fn due(&self, turn: u64) -> Duration {
        let overall = turn as f64 * self.of as f64 + self.number as f64;
        Duration::from_nanos((overall * self.period_ns) as u64)
    }

    /// How many requests of the connection are due before `end`.
    pub(super) fn before(&self, end: Duration) -> u64 {
        let overall =
            (end.as_nanos() as f64 / self.period_ns - self.number as f64) / self.of as f64;
        let mut count = overall.ceil().max(0.0) as u64;
        // Rounding may be off by one in either direction.
        while count > 0 && self.due(count - 1) >= end {
            count -= 1;
        }
        while self.due(count) < end {
            count += 1;
        }
        count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_take_turns_at_even_intervals() {
        let mut due: Vec<Duration> = (0..4)
            .flat_map(|number| (0..25).map(move |turn| Turns::new(1000.0, number, 4).due(turn)))
            .collect();
        due.sort_unstable();
        let even: Vec<Duration> = (0..100).map(Duration::from_millis).collect();
        assert_eq!(due, even);
    }

    #[test]
    fn before_counts_all_turns_until_the_end() {
        for (per_second, of) in [(1000.0, 3), (7.0, 50), (123_456.0, 1), (0.5, 2)] {
            for ms in [0, 1, 10, 999, 1000, 12_345] {
                let end = Duration::from_millis(ms);
                let all: u64 = (0..of)
                    .map(|number| Turns::new(per_second, number, of).before(end))
                    .sum();
                let expected = (ms as f64 / 1000.0 * per_second).ceil() as u64;
                assert!(
                    all.abs_diff(expected) <= 1,
                    "{all} for {expected} at {per_second}/s"
                );
            }
        }
    }
}
