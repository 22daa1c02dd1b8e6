//! The store's hybrid logical clock as a pure function.

use crate::Stamp;
use crate::limits::COUNTER_END;

pub(super) const ZERO: Stamp = Stamp {
    wall: 0,
    counter: 0,
};

/// The receive update of a hybrid logical clock (Kulkarni et al. 2014, figure 5): a version greater
/// than `clock` and `observed`, at `now` or later. Without `observed` it is the update for a local
/// event.
#[must_use]
pub fn receive(clock: Stamp, observed: Option<Stamp>, now_ms: u64) -> Stamp {
    let observed = observed.unwrap_or(ZERO);
    let wall = clock.wall.max(observed.wall).max(now_ms);
    let counter = [clock, observed]
        .into_iter()
        .filter(|stamp| stamp.wall == wall)
        .map(|stamp| u64::from(stamp.counter) + 1)
        .max()
        .unwrap_or(0);
    match u32::try_from(counter) {
        Ok(counter) if counter < COUNTER_END => Stamp { wall, counter },
        _ => Stamp {
            wall: wall + 1,
            counter: 0,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stamp(wall: u64, counter: u32) -> Stamp {
        Stamp { wall, counter }
    }

    #[test]
    fn a_version_is_greater_than_clock_and_observed() {
        // The store's time is ahead of both.
        assert_eq!(receive(stamp(5, 7), Some(stamp(6, 9)), 10), stamp(10, 0));
        // The store's clock is ahead.
        assert_eq!(receive(stamp(20, 7), Some(stamp(6, 9)), 10), stamp(20, 8));
        // The request is ahead.
        assert_eq!(receive(stamp(5, 7), Some(stamp(20, 9)), 10), stamp(20, 10));
        // Equal walls: the higher counter decides.
        assert_eq!(receive(stamp(20, 7), Some(stamp(20, 9)), 10), stamp(20, 10));
        assert_eq!(receive(stamp(20, 9), Some(stamp(20, 7)), 20), stamp(20, 10));
        assert_eq!(receive(stamp(20, 9), None, 10), stamp(20, 10));
        assert_eq!(receive(stamp(20, 9), None, 21), stamp(21, 0));
    }

    #[test]
    fn a_counter_fits_into_a_signed_word() {
        let last = COUNTER_END - 1;
        assert_eq!(receive(stamp(20, last - 1), None, 0), stamp(20, last));
        assert_eq!(receive(stamp(20, last), None, 0), stamp(21, 0));
        let observed = Some(stamp(20, u32::MAX));
        assert_eq!(receive(stamp(0, 0), observed, 0), stamp(21, 0));
    }
}
