//! Converts instants to wall time and back, for times that outlive the process.
//!
//! The broker uses instants, which clock steps do not change. A pair of readings of both clocks
//! converts them for records. The pair is taken at the start and then periodically. So times
//! recorded after a clock step, or after the machine slept, are right by the wall clock that the
//! next start reads.

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

    /// The instant of a wall time; `None` if it is too far in the future for an instant. A time too
    /// early for an instant becomes the time of this pair, which is past as well.
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
    fn wall_time_round_trips() {
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
