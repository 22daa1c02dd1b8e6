//! The clock of a host, as a trait so that tests can give each host a rate of its own.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

/// A monotonic clock. Safety depends on its rate only: the clocks of two hosts must not differ by
/// more than 5 % over the length of a lease.
pub trait Clock: Send + Sync + fmt::Debug {
    /// The time since a fixed moment. It must count the time that the machine was suspended, or
    /// else a resumed leader would trust a lease that is over.
    fn now(&self) -> Duration;
    /// Returns after `duration` of this clock.
    fn sleep(&self, duration: Duration) -> Pin<Box<dyn Future<Output = ()> + Send>>;
}

/// The clock of this machine, which counts suspended time on Linux.
#[derive(Clone, Copy, Debug, Default)]
pub struct MachineClock;

impl Clock for MachineClock {
    fn now(&self) -> Duration {
        #[cfg(target_os = "linux")]
        let id = rustix::time::ClockId::Boottime;
        #[cfg(not(target_os = "linux"))]
        let id = rustix::time::ClockId::Monotonic;
        let time = rustix::time::clock_gettime(id);
        // Both are positive: the clock starts at the boot.
        Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
    }

    fn sleep(&self, duration: Duration) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        Box::pin(tokio::time::sleep(duration))
    }
}
