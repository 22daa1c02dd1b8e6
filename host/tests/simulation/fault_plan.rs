//! Which faults a run has, and how its clients differ.

use std::time::Duration;

use statehouse_core::store::{Mode, Quota, Retention};
use statehouse_mqtt::Limits;
use statehouse_wal::simulation::Dice;
use statehouse_wal::{Durability, Options};

use crate::client::Client;
use crate::followers::Follower;
use crate::node::RECEIVE_MAX;

/// What may happen in a run. Each run leaves some of it out, so that the rest happens more often.
#[derive(Clone, Debug)]
pub(crate) struct FaultPlan {
    /// The store is behind a foreign broker.
    pub(crate) foreign: bool,
    pub(crate) steps: u64,
    pub(crate) crash_once_in: u64,
    pub(crate) cut_once_in: u64,
    pub(crate) commit_once_in: u64,
    /// Values of keys may expire, and sessions; then the wall clock is not stepped.
    pub(crate) expiry: bool,
    pub(crate) clock_steps: bool,
    pub(crate) full: bool,
    pub(crate) disk_errors: bool,
    pub(crate) takeovers: bool,
    /// Crashes once, when this position is durable.
    pub(crate) crash_at: Option<u64>,
    pub(crate) segment_bytes: u64,
    /// Records are released before they are durable, except urgent ones.
    pub(crate) interval: bool,
    pub(crate) history: (u64, u64),
    /// The operator changes the assignment of policies.
    pub(crate) policies: bool,
    /// One of the policies fails at most requests.
    pub(crate) faulty: bool,
    pub(crate) guard_failures: u32,
    /// A start may lack the module of a policy.
    pub(crate) missing_policy: bool,
    /// Values are so large that snapshots have several blocks, and reads are not captured.
    pub(crate) large: bool,
    pub(crate) client_keys_max: Option<u64>,
    /// The time in milliseconds, the number and the bytes of remembered requests.
    pub(crate) window: (u64, u64, u64),
}

impl FaultPlan {
    pub(crate) fn of(dice: &mut Dice) -> Self {
        let foreign = dice.once_in(4);
        let clock_steps = dice.once_in(3);
        let large = dice.once_in(12);
        // A foreign broker's watchers understand the standard notifications only.
        let faulty = !foreign && !clock_steps && dice.once_in(4);
        Self {
            foreign,
            steps: 120 + dice.below(120),
            crash_once_in: [25, 60, 1_000][dice.below(3) as usize],
            cut_once_in: [12, 40, 400][dice.below(3) as usize],
            commit_once_in: [2, 5, 12][dice.below(3) as usize],
            expiry: !clock_steps,
            clock_steps,
            full: dice.once_in(4),
            disk_errors: dice.once_in(3),
            takeovers: dice.once_in(2),
            crash_at: None,
            segment_bytes: [4096, 64 << 10][dice.below(2) as usize],
            interval: dice.once_in(8),
            history: (
                [0, 50_000, 256 << 20][dice.below(3) as usize],
                [1_000, u64::MAX][dice.below(2) as usize],
            ),
            policies: faulty || dice.once_in(3),
            faulty,
            guard_failures: [1, 2, 3][dice.below(3) as usize],
            missing_policy: dice.once_in(5),
            large,
            client_keys_max: (!faulty && dice.once_in(4)).then_some(2),
            window: match foreign {
                // Only this window retains requests there.
                true => (600_000, 10_000, 64 << 20),
                false => (
                    [1, 5_000, 600_000][dice.below(3) as usize],
                    [1, 10, 1_000][dice.below(3) as usize],
                    // The last requests of all sessions always fit.
                    if large { 4 << 20 } else { 64 << 10 },
                ),
            },
        }
    }

    /// A run whose only fault is one crash.
    pub(crate) fn one_crash(position: u64) -> Self {
        Self {
            foreign: false,
            steps: 150,
            crash_once_in: u64::MAX,
            cut_once_in: 60,
            commit_once_in: 1,
            expiry: true,
            clock_steps: false,
            full: false,
            disk_errors: false,
            takeovers: true,
            crash_at: Some(position),
            segment_bytes: 4096,
            interval: false,
            history: (256 << 20, u64::MAX),
            policies: true,
            faulty: false,
            guard_failures: 10,
            missing_policy: false,
            large: false,
            client_keys_max: None,
            window: (600_000, 1_000, 4 << 20),
        }
    }

    pub(crate) fn mode(&self) -> Mode {
        match self.foreign {
            true => Mode::Foreign,
            false => Mode::Embedded,
        }
    }

    pub(crate) fn options(&self) -> Options {
        Options {
            durability: match self.interval {
                true => Durability::Interval(Duration::from_secs(1)),
                false => Durability::Always,
            },
            segment_bytes: self.segment_bytes,
            history_bytes: self.history.0,
            history_ms: self.history.1,
            ..Options::default()
        }
    }

    pub(crate) fn retention(&self) -> Retention {
        let (window_ms, count_max, bytes_max) = self.window;
        Retention {
            window_ms,
            count_max,
            bytes_max,
            per_session: if self.foreign { 0 } else { RECEIVE_MAX.into() },
        }
    }

    pub(crate) fn quota(&self) -> Quota {
        let quota = Quota::default();
        quota.with_client(self.client_keys_max, None)
    }

    /// The clients of the run. The first one observes messages and wills in a session that lasts.
    pub(crate) fn clients(&self, dice: &mut Dice) -> Vec<Client> {
        if self.foreign {
            return Vec::new();
        }
        let mut clients: Vec<Client> = (0..2 + dice.below(3) as usize).map(Client::new).collect();
        for client in &mut clients {
            if client.index == 0 {
                client.filters.push(("t/#".into(), 2));
                client.filters.push(("will/#".into(), 2));
                continue;
            }
            client.expiry_s = match dice.below(6) {
                0 => 0,
                1 if self.expiry => 5,
                _ => 3600,
            };
            client.sets_dup = !dice.once_in(3);
            if dice.once_in(3) {
                client.receive_max = 1 + dice.below(3) as u16;
                client.watches = false;
            }
            // The faulty policy does not know prefixes.
            if !self.faulty && dice.once_in(2) {
                client.watches = false;
                client.follower = Some(Follower::default());
            }
            client.messenger = dice.once_in(4);
            if client.messenger {
                client.watches = false;
                client.follower = None;
                // With MQTT 3.1.1 the broker decides both.
                let limits = Limits::default();
                client.expiry_s = limits.session_expiry_max_s;
                client.receive_max = limits.in_flight_max;
            }
            if client.messenger || dice.once_in(2) {
                client.filters.push(("t/#".into(), dice.below(3) as u8));
            }
            if dice.once_in(2) {
                let delays: &[u32] = if client.messenger { &[0] } else { &[0, 3] };
                client.will_delay_s = Some(delays[dice.below(delays.len() as u64) as usize]);
            }
        }
        clients
    }
}
