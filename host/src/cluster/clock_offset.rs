//! How far the clock of a follower is ahead of its leader's.
//!
//! A record holds the leader's time. It arrives later, so the clock of the follower seems to be
//! ahead by the delay too. The smallest difference of several records is the best estimate.

use std::time::{Duration, Instant};

/// Records that an estimate needs. One record may be late because this process was paused.
const SAMPLES_MIN: u32 = 3;

/// How long the smallest difference counts: clocks drift, and are set.
const WINDOW: Duration = Duration::from_secs(60);

/// The estimate.
#[derive(Debug, Default)]
pub(super) struct ClockOffset {
    /// Whether records are received as they are written. Before, they are of the past.
    is_live: bool,
    samples: u32,
    least: Option<(i64, Instant)>,
}

impl ClockOffset {
    /// From now on records are received as they are written.
    pub(super) fn follows(&mut self) {
        self.is_live = true;
    }

    /// A record of this time was received.
    pub(super) fn received(&mut self, record_ms: u64, wall_ms: u64) {
        if !self.is_live {
            return;
        }
        let ahead_ms = wall_ms
            .cast_signed()
            .saturating_sub(record_ms.cast_signed());
        self.samples = self.samples.saturating_add(1);
        match self.least {
            Some((least, at)) if least <= ahead_ms && at.elapsed() < WINDOW => {}
            _ => self.least = Some((ahead_ms, Instant::now())),
        }
    }

    /// By how many milliseconds the clock is ahead, if that is known.
    pub(super) fn ahead_ms(&self) -> Option<u64> {
        let (least, _) = self.least.filter(|_| self.samples >= SAMPLES_MIN)?;
        u64::try_from(least).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_live_records_count_and_the_fastest_decides() {
        let mut offset = ClockOffset::default();
        for _ in 0..10 {
            offset.received(1_000, 900_000);
        }
        assert_eq!(offset.ahead_ms(), None, "records of the past");
        offset.follows();
        offset.received(1_000_000, 1_005_900);
        offset.received(1_000_100, 1_005_110);
        assert_eq!(offset.ahead_ms(), None, "too few");
        offset.received(1_000_200, 1_005_800);
        assert_eq!(offset.ahead_ms(), Some(5_010));
        // A clock that is behind is not ahead.
        offset.received(1_000_300, 999_000);
        assert_eq!(offset.ahead_ms(), None);
    }
}
