//! The random parameters of a run: its fault plan, workload, options and retention.

use std::time::Duration;

use statehouse_core::store::{Mode, Retention};
use statehouse_wal::simulation::Dice;
use statehouse_wal::{Durability, Options};

use crate::workload::Workload;

/// The maximum number of clients in a run.
pub(crate) const CLIENTS_MAX: u64 = 4;

/// The dedup table's bytes for a request with short values, rounded up.
const REMEMBERED_BYTES_MAX: u64 = 1_600;

/// The kinds of faults and events that may occur in a run. Each run leaves some out, so that the
/// remaining ones occur more often.
#[derive(Debug)]
pub(crate) struct FaultPlan {
    pub(crate) disk_faults: bool,
    pub(crate) full_disk: bool,
    pub(crate) policy_swaps: bool,
    pub(crate) session_ends: bool,
    pub(crate) clock_jumps: bool,
    pub(crate) long_waits: bool,
    pub(crate) missing_policy: bool,
    pub(crate) crash_once_in: u64,
    pub(crate) commit_once_in: u64,
}

/// The parameters that are chosen at the beginning of a run.
pub(crate) struct RunPlan {
    pub(crate) mode: Mode,
    /// The maximum number of requests that a client has in flight.
    pub(crate) in_flight_max: u64,
    pub(crate) fault_plan: FaultPlan,
    pub(crate) workload: Workload,
    pub(crate) options: Options,
    pub(crate) retention: Retention,
}

impl RunPlan {
    pub(crate) fn random(dice: &mut Dice) -> Self {
        let mut often = |n: u64| dice.below(n) != 0;
        let fault_plan = FaultPlan {
            disk_faults: often(2),
            full_disk: !often(4),
            policy_swaps: often(2),
            session_ends: !often(3),
            clock_jumps: often(2),
            long_waits: often(2),
            missing_policy: !often(6),
            crash_once_in: if often(3) { 30 } else { 90 },
            commit_once_in: if often(3) { 5 } else { 15 },
        };
        let large_values = dice.once_in(3);
        let workload = Workload {
            keys: if large_values {
                20
            } else {
                [2, 6, 20][dice.below(3) as usize]
            },
            large_values,
            fencing_once_in: [3, 50][dice.below(2) as usize],
            identical_requests: dice.once_in(3),
            faulty_policy: dice.once_in(4),
            many_watches: false,
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
        // The last requests of all live sessions always fit. They do not fit together with the
        // requests of ended sessions.
        let tight_bytes = CLIENTS_MAX * in_flight_max * REMEMBERED_BYTES_MAX;
        let retention = Retention {
            window_ms: [1, 5_000, 600_000][dice.below(3) as usize],
            count_max: [1, 10, 1_000][dice.below(3) as usize],
            bytes_max: if !large_values && dice.once_in(2) {
                tight_bytes
            } else {
                4 << 20
            },
            per_session: in_flight_max,
        };
        if dice.once_in(3) {
            let workload = Workload {
                // A foreign broker's redelivery is recognized by its identity alone, so an
                // identical request is always a duplicate.
                identical_requests: false,
                many_watches: dice.once_in(2),
                ..workload
            };
            return Self::foreign(fault_plan, workload, options, in_flight_max);
        }
        Self {
            mode: Mode::Embedded,
            in_flight_max,
            fault_plan,
            workload,
            options,
            retention,
        }
    }

    /// A run behind a foreign broker. The dedup table there is limited by time. Its other limits
    /// are so high that the requests of a run always fit.
    fn foreign(
        fault_plan: FaultPlan,
        workload: Workload,
        options: Options,
        in_flight_max: u64,
    ) -> Self {
        Self {
            mode: Mode::Foreign,
            in_flight_max,
            fault_plan,
            workload,
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
