//! When requests are due.
//!
//! In a closed loop the answer to one request is the time for the next, so a slow server is asked less: that shows its
//! throughput. In an open loop requests are due at fixed times whatever the server does, and latency counts from there:
//! that shows what users of a busy server wait (no "coordinated omission").

use std::time::{Duration, Instant};

/// When requests are due.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Pace {
    /// The next one as soon as there is room.
    Closed,
    /// So many each second over all connections, which take turns.
    Open {
        /// Above 0.
        per_second: f64,
    },
}

/// The times of one run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Schedule {
    /// The first request.
    pub(super) begin: Instant,
    /// From here on it is measured.
    pub(super) from: Instant,
    /// No request begins later.
    pub(super) until: Instant,
}

impl Schedule {
    /// Whether this is in the measured window.
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
    /// Those of the connection `number` of `of`.
    pub(super) fn new(per_second: f64, number: usize, of: usize) -> Self {
        Self {
            period_ns: 1e9 / per_second,
            number,
            of,
        }
    }

    /// When its request `turn` is due, counted from the begin.
    pub(super) fn due(&self, turn: u64) -> Duration {
        let overall = turn as f64 * self.of as f64 + self.number as f64;
        Duration::from_nanos((overall * self.period_ns) as u64)
    }

    /// How many are due before this.
    pub(super) fn before(&self, end: Duration) -> u64 {
        let overall =
            (end.as_nanos() as f64 / self.period_ns - self.number as f64) / self.of as f64;
        let mut count = overall.ceil().max(0.0) as u64;
        // Rounding may be off by one either way.
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
    fn connections_take_turns_at_even_times() {
        let mut due: Vec<Duration> = (0..4)
            .flat_map(|number| (0..25).map(move |turn| Turns::new(1000.0, number, 4).due(turn)))
            .collect();
        due.sort_unstable();
        let even: Vec<Duration> = (0..100).map(Duration::from_millis).collect();
        assert_eq!(due, even);
    }

    #[test]
    fn all_turns_before_an_end_are_counted() {
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
