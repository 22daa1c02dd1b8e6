//! What kind of run a seed is.

use std::time::Duration;

use statehouse_core::store::{Mode, Retention};
use statehouse_wal::simulation::Dice;
use statehouse_wal::{Durability, Options};

use crate::client::Taste;

/// Clients of a run.
pub(crate) const CLIENTS_MAX: u64 = 4;

/// What remembering a request costs where values are short, rounded up.
const REMEMBERED_BYTES_MAX: u64 = 1_600;

/// What may happen in a run. Each run leaves some of it out, so that the rest happens more often.
#[derive(Debug)]
pub(crate) struct Habits {
    pub(crate) faults: bool,
    pub(crate) full: bool,
    pub(crate) swaps: bool,
    pub(crate) ends: bool,
    pub(crate) jumps: bool,
    pub(crate) waits: bool,
    pub(crate) missing: bool,
    pub(crate) crash_once_in: u64,
    pub(crate) commit_once_in: u64,
}

/// Everything that is chosen at the beginning of a run.
pub(crate) struct Kind {
    pub(crate) mode: Mode,
    /// Requests that a client may have on their way.
    pub(crate) in_flight_max: u64,
    pub(crate) habits: Habits,
    pub(crate) taste: Taste,
    pub(crate) options: Options,
    pub(crate) retention: Retention,
}

impl Kind {
    pub(crate) fn of(dice: &mut Dice) -> Self {
        let mut often = |n: u64| dice.below(n) != 0;
        let habits = Habits {
            faults: often(2),
            full: !often(4),
            swaps: often(2),
            ends: !often(3),
            jumps: often(2),
            waits: often(2),
            missing: !often(6),
            crash_once_in: if often(3) { 30 } else { 90 },
            commit_once_in: if often(3) { 5 } else { 15 },
        };
        let fat = dice.once_in(3);
        let taste = Taste {
            keys: if fat {
                20
            } else {
                [2, 6, 20][dice.below(3) as usize]
            },
            fat,
            tokens: [3, 50][dice.below(2) as usize],
            reuse: dice.once_in(3),
            faulty: dice.once_in(4),
            watchful: false,
        };
        let durability = if dice.once_in(6) {
            Durability::Interval(Duration::from_secs(1))
        } else {
            Durability::Always
        };
        let options = Options {
            durability,
            segment_bytes: [4096, 16 << 10][dice.below(2) as usize],
            history_bytes: [0, 50_000, u64::MAX][dice.below(3) as usize],
            history_ms: [1_000, u64::MAX][dice.below(2) as usize],
            ..Options::default()
        };
        let in_flight_max = 1 + dice.below(6);
        // The last ones of all sessions that live always fit, those of the dead besides do not.
        let tight = CLIENTS_MAX * in_flight_max * REMEMBERED_BYTES_MAX;
        let retention = Retention {
            window_ms: [1, 5_000, 600_000][dice.below(3) as usize],
            count_max: [1, 10, 1_000][dice.below(3) as usize],
            bytes_max: if !fat && dice.once_in(2) {
                tight
            } else {
                4 << 20
            },
            per_session: in_flight_max,
        };
        if dice.once_in(3) {
            let taste = Taste {
                // The very same request is the same one.
                reuse: false,
                watchful: dice.once_in(2),
                ..taste
            };
            return Self::foreign(habits, taste, options, in_flight_max);
        }
        Self {
            mode: Mode::Embedded,
            in_flight_max,
            habits,
            taste,
            options,
            retention,
        }
    }

    /// Behind a foreign broker. What is bounded there is time: the rest fits.
    fn foreign(habits: Habits, taste: Taste, options: Options, in_flight_max: u64) -> Self {
        Self {
            mode: Mode::Foreign,
            in_flight_max,
            habits,
            taste,
            options,
            retention: Retention {
                window_ms: 600_000,
                count_max: 10_000,
                bytes_max: 64 << 20,
                per_session: 0,
            },
        }
    }
}
