//! A broker whose time is an argument.
//!
//! Without a call of [`Broker::advance`] a broker uses the system's time.

use std::{sync::Arc, time::Instant};

use crate::{Broker, Options, Recovery, Service, clock::Clock};

impl Broker {
    /// Like [`Broker::restore`], at this time of both clocks.
    #[must_use]
    pub fn restore_simulated(
        options: Options,
        service: Arc<dyn Service>,
        recovery: Recovery,
        now: Instant,
        wall_ms: u64,
    ) -> Self {
        let broker = Self::restore_at(options, service, recovery, Clock::at(now, wall_ms));
        broker.set_simulated(now);
        broker
    }

    /// Sets the time of both clocks, and handles everything that is due. Everything that follows
    /// happens at this time.
    ///
    /// Returns when something is due next.
    pub fn advance(&self, now: Instant, wall_ms: u64) -> Option<Instant> {
        self.set_simulated(now);
        loop {
            let next = {
                let mut core = self.lock();
                core.set_clock(Clock::at(now, wall_ms));
                core.run_deadlines(now)
            };
            if next.is_none_or(|at| at > now) {
                return next;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{NoService, simulation::Wire, testing::Hello};

    #[test]
    fn session_expires_in_simulated_time() {
        let begin = Instant::now();
        let broker = Broker::restore_simulated(
            Options::default(),
            Arc::new(NoService),
            Recovery::default(),
            begin,
            1,
        );
        let hello = Hello::new("c");
        let wire = Wire::connect(&broker, &hello.bytes()).ok().unwrap();
        assert_eq!(broker.advance(begin, 1), None);
        drop(wire);
        let end = begin + Duration::from_secs(1000);
        assert_eq!(broker.advance(begin, 1), Some(end));
        assert_eq!(broker.stats().sessions, 1);
        assert_eq!(broker.advance(end, 1_000_001), None);
        assert_eq!(broker.stats().sessions, 0);
    }
}
