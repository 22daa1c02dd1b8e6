//! The end of a lease, on a clock that counts the time that the machine was suspended.
//!
//! Invariant: no lease is measured with tokio's clock, which stands still during a suspension on
//! Linux. The clock of the store does not, so a resumed client would trust a lease that is over.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use crate::limits;

/// A moment, as the time since a fixed one before it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Moment(Duration);

impl Moment {
    pub(crate) fn now() -> Self {
        let now = clock::now();
        #[cfg(test)]
        let now = now + tests::SUSPENDED.get();
        Self(now)
    }

    pub(crate) fn elapsed(self) -> Duration {
        Self::now().0.saturating_sub(self.0)
    }

    /// This moment plus `duration`, limited so that the sum cannot overflow.
    pub(crate) fn later(self, duration: Duration) -> Self {
        Self(self.0 + duration.min(limits::DURATION_MAX))
    }

    /// The time until this moment; zero after it.
    pub(crate) fn left(self) -> Duration {
        self.0.saturating_sub(Self::now().0)
    }

    pub(crate) fn is_over(self) -> bool {
        self.left().is_zero()
    }

    /// This moment on tokio's clock if the machine is not suspended before, and now if it is over.
    pub(crate) fn instant(self) -> Instant {
        // In this order: if the thread is interrupted between the two, the result is too early.
        let now = Instant::now();
        now + self.left()
    }

    /// Returns when this moment has passed. After a suspension this takes a step at most.
    pub(crate) async fn passed(self) {
        loop {
            let left = self.left();
            if left.is_zero() {
                return;
            }
            sleep(left.min(limits::LEASE_CHECK_PAUSE)).await;
        }
    }
}

#[cfg(unix)]
mod clock {
    use std::time::Duration;

    use rustix::time::{ClockId, clock_gettime};

    pub(super) fn now() -> Duration {
        #[cfg(any(target_os = "linux", target_os = "android"))]
        let id = ClockId::Boottime;
        // On macOS it counts suspensions.
        #[cfg(not(any(target_os = "linux", target_os = "android")))]
        let id = ClockId::Monotonic;
        let time = clock_gettime(id);
        // Both are positive: the clock starts at the boot.
        Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
    }
}

#[cfg(not(unix))]
mod clock {
    use std::sync::LazyLock;
    use std::time::{Duration, Instant};

    static START: LazyLock<Instant> = LazyLock::new(Instant::now);

    /// The clock of the standard library counts suspensions on Windows.
    pub(super) fn now() -> Duration {
        START.elapsed()
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    thread_local! {
        /// How long the machine seems to have been suspended.
        pub(super) static SUSPENDED: Cell<Duration> = const { Cell::new(Duration::ZERO) };
    }

    const HOUR: Duration = Duration::from_secs(3600);

    fn suspend(duration: Duration) {
        SUSPENDED.set(SUSPENDED.get() + duration);
    }

    #[tokio::test]
    async fn lease_ends_while_the_machine_is_suspended() {
        let asked_at = Moment::now();
        let end = asked_at.later(HOUR);
        assert!(!end.is_over() && end.instant() > Instant::now());
        suspend(2 * HOUR);
        assert!(asked_at.elapsed() >= 2 * HOUR);
        assert!(end.is_over() && end.instant() <= Instant::now());
    }

    #[tokio::test]
    async fn wait_for_the_end_notices_a_suspension() {
        let end = Moment::now().later(HOUR);
        let suspended = async {
            sleep(Duration::from_millis(10)).await;
            suspend(HOUR);
        };
        let passed = tokio::time::timeout(3 * limits::LEASE_CHECK_PAUSE, end.passed());
        let (passed, ()) = tokio::join!(passed, suspended);
        assert_eq!(passed, Ok(()));
    }

    #[test]
    fn longest_lease_does_not_overflow() {
        let end = Moment::now().later(Duration::MAX);
        assert!(end.left() > limits::DURATION_MAX - HOUR);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn clock_is_not_behind_the_one_that_stands_still() {
        let id = rustix::time::ClockId::Monotonic;
        let still = rustix::time::clock_gettime(id);
        assert!(clock::now() >= Duration::new(still.tv_sec as u64, still.tv_nsec as u32));
    }
}
