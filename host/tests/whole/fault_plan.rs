//! Which faults a run has, and how its clients differ.

use statehouse_wal::Options;
use statehouse_wal::simulation::Dice;

use crate::client::Client;

/// What may happen in a run. Each run leaves some of it out, so that the rest happens more often.
#[derive(Clone, Debug)]
pub(crate) struct FaultPlan {
    pub(crate) steps: u64,
    pub(crate) crash_once_in: u64,
    pub(crate) cut_once_in: u64,
    pub(crate) commit_once_in: u64,
    /// Values of keys may expire, and sessions; then the wall clock is not stepped.
    pub(crate) expiry: bool,
    pub(crate) clock_steps: bool,
    pub(crate) full: bool,
    pub(crate) sync_errors: bool,
    pub(crate) takeovers: bool,
    /// Crashes once, when this position is durable.
    pub(crate) crash_at: Option<u64>,
    pub(crate) segment_bytes: u64,
}

impl FaultPlan {
    pub(crate) fn of(dice: &mut Dice) -> Self {
        let clock_steps = dice.once_in(3);
        Self {
            steps: 120 + dice.below(120),
            crash_once_in: [25, 60, 1_000][dice.below(3) as usize],
            cut_once_in: [12, 40, 400][dice.below(3) as usize],
            commit_once_in: [2, 5, 12][dice.below(3) as usize],
            expiry: !clock_steps,
            clock_steps,
            full: dice.once_in(4),
            sync_errors: dice.once_in(3),
            takeovers: dice.once_in(2),
            crash_at: None,
            segment_bytes: [4096, 64 << 10][dice.below(2) as usize],
        }
    }

    /// A run whose only fault is one crash.
    pub(crate) fn one_crash(position: u64) -> Self {
        Self {
            steps: 150,
            crash_once_in: u64::MAX,
            cut_once_in: 60,
            commit_once_in: 1,
            expiry: true,
            clock_steps: false,
            full: false,
            sync_errors: false,
            takeovers: true,
            crash_at: Some(position),
            segment_bytes: 4096,
        }
    }

    pub(crate) fn options(&self) -> Options {
        Options {
            segment_bytes: self.segment_bytes,
            ..Options::default()
        }
    }

    /// The clients of the run. The first one observes messages and wills in a session that lasts.
    pub(crate) fn clients(&self, dice: &mut Dice) -> Vec<Client> {
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
            if dice.once_in(3) {
                client.receive_max = 1 + dice.below(3) as u16;
                client.watches = false;
            }
            if dice.once_in(2) {
                client.filters.push(("t/#".into(), dice.below(3) as u8));
            }
            if dice.once_in(2) {
                client.will_delay_s = Some([0, 3][dice.below(2) as usize]);
            }
        }
        clients
    }
}
