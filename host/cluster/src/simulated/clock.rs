//! The clock of a simulated host: tokio's clock at another rate and with another zero.

use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use tokio::time::Instant;

use crate::clock::Clock;

const MILLION: u128 = 1_000_000;

/// A clock with a rate.
#[derive(Clone, Debug)]
pub struct SimulatedClock {
    began: Instant,
    offset: Duration,
    /// Time of this clock per million units of real time.
    parts_per_million: u32,
}

impl SimulatedClock {
    /// A clock that shows `offset` now and runs at a rate, which must not be 0.
    #[must_use]
    pub fn new(offset: Duration, parts_per_million: u32) -> Self {
        Self {
            began: Instant::now(),
            offset,
            parts_per_million,
        }
    }
}

impl Clock for SimulatedClock {
    fn now(&self) -> Duration {
        let nanos = self.began.elapsed().as_nanos() * u128::from(self.parts_per_million) / MILLION;
        self.offset + Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }

    fn sleep(&self, duration: Duration) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        let nanos = (duration.as_nanos() * MILLION).div_ceil(self.parts_per_million.into());
        let real = Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
        Box::pin(tokio::time::sleep(real))
    }
}
