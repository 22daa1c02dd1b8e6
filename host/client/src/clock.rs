//! The client's hybrid logical clock (Kulkarni et al. 2014). Its readings must always rise.
//!
//! The clock follows the versions in responses, but never more than a minute ahead of the wall
//! clock. If the wall clock is set back further, readings start from it again, because the store
//! would refuse higher ones.

use crate::limits;
use crate::version::Version;

/// .NET clients cannot read this counter any more. From here on the wall part is incremented
/// instead.
const COUNTER_MAX: u32 = (1 << 31) - 2;

/// A clock with the name of its node.
#[derive(Debug)]
pub(crate) struct Clock {
    node: Box<str>,
    wall_ms: u64,
    counter: u32,
}

impl Clock {
    /// A clock for the node `name`. Characters that a node must not contain are replaced.
    pub(crate) fn new(name: &str) -> Self {
        let node: String = name
            .chars()
            .map(|c| if c == ':' { '_' } else { c })
            .collect();
        Self {
            node: node.into(),
            wall_ms: 0,
            counter: 0,
        }
    }

    /// The send event of the paper: returns a reading above all earlier ones, unless they are too
    /// far in the future.
    pub(crate) fn read(&mut self, now_ms: u64) -> String {
        let is_too_far = self.wall_ms > furthest_ms(now_ms);
        if now_ms > self.wall_ms || is_too_far {
            self.wall_ms = now_ms;
            self.counter = 0;
        } else {
            self.step();
        }
        format!("{:015}:{:05}:{}", self.wall_ms, self.counter, self.node)
    }

    /// The receive event: later readings are above `version`, unless it is too far in the future.
    pub(crate) fn observe(&mut self, version: &Version, now_ms: u64) {
        if version.wall_ms() > furthest_ms(now_ms) || version.counter() > COUNTER_MAX {
            return;
        }
        if (version.wall_ms(), version.counter()) > (self.wall_ms, self.counter) {
            self.wall_ms = version.wall_ms();
            self.counter = version.counter();
        }
    }

    fn step(&mut self) {
        if self.counter >= COUNTER_MAX {
            self.wall_ms += 1;
            self.counter = 0;
        } else {
            self.counter += 1;
        }
    }
}

/// The furthest time in the future that a reading may have.
fn furthest_ms(now_ms: u64) -> u64 {
    now_ms.saturating_add(limits::CLOCK_AHEAD_MS_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readings_rise_while_the_wall_clock_does_not() {
        let mut clock = Clock::new("me");
        assert_eq!(clock.read(5_000), "000000000005000:00000:me");
        assert_eq!(clock.read(5_000), "000000000005000:00001:me");
        assert_eq!(clock.read(4_000), "000000000005000:00002:me");
        assert_eq!(clock.read(5_001), "000000000005001:00000:me");
    }

    #[test]
    fn version_moves_the_clock() {
        let mut clock = Clock::new("me");
        clock.observe(&"9000:7:StateStore".parse().unwrap(), 5_000);
        assert_eq!(clock.read(5_000), "000000000009000:00008:me");
        clock.observe(&"8000:99:StateStore".parse().unwrap(), 5_000);
        assert_eq!(clock.read(5_000), "000000000009000:00009:me");
    }

    #[test]
    fn version_over_a_minute_ahead_is_ignored() {
        let mut clock = Clock::new("me");
        clock.observe(&"65001:0:StateStore".parse().unwrap(), 5_000);
        assert_eq!(clock.read(5_000), "000000000005000:00000:me");
        clock.observe(&"65000:0:StateStore".parse().unwrap(), 5_000);
        assert_eq!(clock.read(5_000), "000000000065000:00001:me");
    }

    /// Regression: the store refused each SET for as long as the wall clock had been ahead.
    #[test]
    fn clock_follows_a_wall_clock_that_is_set_back() {
        let mut clock = Clock::new("me");
        assert_eq!(clock.read(86_400_000), "000000086400000:00000:me");
        assert_eq!(clock.read(86_340_000), "000000086400000:00001:me");
        assert_eq!(clock.read(5_000), "000000000005000:00000:me");
        assert_eq!(clock.read(5_000), "000000000005000:00001:me");
    }

    #[test]
    fn counter_does_not_overflow() {
        let mut clock = Clock::new("me");
        let last = format!("9000:{COUNTER_MAX}:StateStore");
        clock.observe(&last.parse().unwrap(), 9_000);
        assert_eq!(clock.read(9_000), "000000000009001:00000:me");
    }

    #[test]
    fn node_contains_no_colon() {
        let reading = Clock::new("a:b").read(1);
        assert_eq!(reading.parse::<Version>().unwrap().node(), "a_b");
    }
}
