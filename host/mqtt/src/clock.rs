//! Instants to wall time and back, for what has to outlive the process.
//!
//! Inside the broker times are instants, which no step of the wall clock moves. A pair of readings carries them into
//! records and out of them. It is taken at the start and again and again, so that what is recorded after a step of the
//! wall clock, or after a sleep of the machine, is right by the clock that the next start reads.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// One moment on both clocks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Clock {
    at: Instant,
    wall_ms: u64,
}

impl Clock {
    /// The pair as of now.
    pub(crate) fn now() -> Self {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH);
        Self::at(Instant::now(), millis(wall.unwrap_or_default()))
    }

    /// A pair of readings.
    pub(crate) fn at(at: Instant, wall_ms: u64) -> Self {
        Self { at, wall_ms }
    }

    /// When the pair was taken.
    pub(crate) fn taken(&self) -> Instant {
        self.at
    }

    /// Milliseconds since 1970.
    pub(crate) fn wall_ms(&self, at: Instant) -> u64 {
        match at.checked_duration_since(self.at) {
            Some(later) => self.wall_ms.saturating_add(millis(later)),
            None => self
                .wall_ms
                .saturating_sub(millis(self.at.duration_since(at))),
        }
    }

    /// The instant of a wall time; `None` where it is too far ahead to ever come. An instant cannot be arbitrarily
    /// early: what is before the first one there is becomes the start, which is past as well.
    pub(crate) fn instant(&self, wall_ms: u64) -> Option<Instant> {
        match wall_ms.checked_sub(self.wall_ms) {
            Some(ahead_ms) => self.at.checked_add(Duration::from_millis(ahead_ms)),
            None => Some(
                self.at
                    .checked_sub(Duration::from_millis(self.wall_ms - wall_ms))
                    .unwrap_or(self.at),
            ),
        }
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_and_back() {
        let at = Instant::now() + Duration::from_secs(100);
        let clock = Clock::at(at, 1_000_000);
        for ms in [1_000_000, 1_000_001, 999_999, 2_000_000, 950_000] {
            assert_eq!(clock.instant(ms).map(|at| clock.wall_ms(at)), Some(ms));
        }
        assert_eq!(clock.wall_ms(at + Duration::from_secs(1)), 1_001_000);
        assert_eq!(clock.wall_ms(at - Duration::from_secs(1)), 999_000);
        assert!(clock.instant(u64::MAX).is_none_or(|late| late > at));
        let early = Clock::at(at, u64::MAX).instant(0);
        assert!(early.is_some_and(|early| early <= at));
    }
}
