//! How far the clock of a follower is ahead of its leader's.
//!
//! A record and a beat of the link hold the leader's time. They arrive later, so the clock of the
//! follower seems to be ahead by the delay too. The smallest difference is the best estimate. If
//! the clock of the follower is set, the estimate moves with it: without a leader nothing would
//! correct it.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use statehouse_cluster::{Clock as _, MachineClock};
use statehouse_core::clock::wall_ms;

use statehouse_listener::front::Times;

/// Records that an estimate needs. One record may be late because this process was paused. A beat
/// suffices, since the next one follows soon.
const SAMPLES_MIN: u32 = 3;

/// How long the smallest difference counts: clocks drift, and are set.
const WINDOW: Duration = Duration::from_secs(60);

/// The clock of the leader, as the links and the log show it.
#[derive(Debug, Default)]
pub struct LeaderClock(Mutex<ClockOffset>);

impl LeaderClock {
    /// The leader sent its clocks.
    pub fn compare(&self, times: Times) {
        self.locked().compared(times, wall_ms(), MachineClock.now());
    }

    pub(super) fn locked(&self) -> MutexGuard<'_, ClockOffset> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug, Default)]
pub(super) struct ClockOffset {
    /// Whether records are received as they are written. Before, they are of the past.
    is_live: bool,
    samples: u32,
    least: Option<Sample>,
    /// The last difference from the wall clock of the leader.
    from_leader: Option<Sample>,
}

#[derive(Clone, Copy, Debug)]
struct Sample {
    ahead_ms: i64,
    wall_ms: u64,
    /// On a clock that is never set.
    at: Duration,
}

impl Sample {
    fn new(leader_ms: u64, wall_ms: u64, at: Duration) -> Self {
        Self {
            ahead_ms: difference(wall_ms, leader_ms),
            wall_ms,
            at,
        }
    }

    /// The difference if the record arrived now.
    fn moved(&self, wall_ms: u64, now: Duration) -> i64 {
        let passed_ms = now.saturating_sub(self.at).as_millis();
        let passed_ms = i64::try_from(passed_ms).unwrap_or(i64::MAX);
        let since_ms = difference(wall_ms, self.wall_ms);
        self.ahead_ms
            .saturating_add(since_ms.saturating_sub(passed_ms))
    }
}

fn difference(a_ms: u64, b_ms: u64) -> i64 {
    a_ms.cast_signed().saturating_sub(b_ms.cast_signed())
}

impl ClockOffset {
    /// From now on records are received as they are written.
    pub(super) fn follows(&mut self) {
        self.is_live = true;
    }

    /// The log is read again, so its records are of the past. The clock of the leader is still what
    /// it was.
    pub(super) fn forget(&mut self) {
        self.is_live = false;
    }

    /// The leader has just sent these times.
    pub(super) fn compared(&mut self, times: Times, wall_ms: u64, now: Duration) {
        self.samples = self.samples.max(SAMPLES_MIN);
        self.add(times.store_ms, wall_ms, now);
        self.from_leader = Some(Sample::new(times.wall_ms, wall_ms, now));
    }

    /// By how many milliseconds the clock differs from the wall clock of the leader.
    pub(super) fn off_leader_ms(&self, wall_ms: u64, now: Duration) -> Option<u64> {
        let from_leader = self.from_leader.as_ref()?;
        Some(from_leader.moved(wall_ms, now).unsigned_abs())
    }

    /// A record of this time was received. `now` is a clock that is never set.
    pub(super) fn received(&mut self, record_ms: u64, wall_ms: u64, now: Duration) {
        if !self.is_live {
            return;
        }
        self.samples = self.samples.saturating_add(1);
        self.add(record_ms, wall_ms, now);
    }

    fn add(&mut self, leader_ms: u64, wall_ms: u64, now: Duration) {
        let sample = Sample::new(leader_ms, wall_ms, now);
        let is_replaced = |least: Sample| {
            sample.ahead_ms < least.moved(wall_ms, now) || now.saturating_sub(least.at) >= WINDOW
        };
        if self.least.is_none_or(is_replaced) {
            self.least = Some(sample);
        }
    }

    /// By how many milliseconds the clock is ahead, if that is known.
    pub(super) fn ahead_ms(&self, wall_ms: u64, now: Duration) -> Option<u64> {
        let least = self.least.filter(|_| self.samples >= SAMPLES_MIN)?;
        u64::try_from(least.moved(wall_ms, now)).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Duration = Duration::from_secs(7);

    fn after(ms: u64) -> Duration {
        NOW + Duration::from_millis(ms)
    }

    #[test]
    fn only_live_records_count_and_the_fastest_decides() {
        let mut offset = ClockOffset::default();
        for _ in 0..10 {
            offset.received(1_000, 900_000, NOW);
        }
        assert_eq!(offset.ahead_ms(900_000, NOW), None, "records of the past");
        offset.follows();
        // They arrive after 900, 10 and 800 ms.
        offset.received(1_000_000, 1_005_900, after(900));
        offset.received(1_001_000, 1_006_010, after(1_010));
        assert_eq!(offset.ahead_ms(1_006_010, after(1_010)), None, "too few");
        offset.received(1_001_200, 1_007_000, after(2_000));
        assert_eq!(offset.ahead_ms(1_007_000, after(2_000)), Some(5_010));
        // A clock that is behind is not ahead.
        offset.received(1_001_300, 999_000, after(2_100));
        assert_eq!(offset.ahead_ms(999_000, after(2_100)), None);
    }

    #[test]
    fn one_beat_of_the_link_suffices() {
        let mut offset = ClockOffset::default();
        let times = Times {
            store_ms: 4_600_000,
            wall_ms: 1_000_000,
        };
        offset.compared(times, 1_000_300, NOW);
        assert_eq!(offset.ahead_ms(1_000_300, NOW), None);
        assert_eq!(offset.off_leader_ms(1_000_300, NOW), Some(300));
        assert_eq!(offset.off_leader_ms(1_001_300, after(1_000)), Some(300));
        assert_eq!(offset.off_leader_ms(999_000, NOW), Some(1_000));
        offset.compared(times, 4_600_000 + 5_000, NOW);
        assert_eq!(offset.ahead_ms(4_605_000, NOW), Some(5_000));
        offset.forget();
        assert_eq!(offset.ahead_ms(4_605_000, NOW), Some(5_000));
    }

    /// The leader has died, so no record arrives any more.
    #[test]
    fn estimate_moves_with_a_clock_that_is_set_later() {
        let mut offset = ClockOffset::default();
        offset.follows();
        for _ in 0..SAMPLES_MIN {
            offset.received(1_000_000, 1_005_000, NOW);
        }
        let later = after(2_000);
        assert_eq!(offset.ahead_ms(1_007_000, later), Some(5_000));
        assert_eq!(offset.ahead_ms(1_002_000, later), Some(0));
        assert_eq!(offset.ahead_ms(1_012_000, later), Some(10_000));
    }
}
