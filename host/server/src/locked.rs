//! The state under the server's lock: the core, its clock, and figures about both.

use std::time::Instant;

use statehouse_config::limits;
use statehouse_core::clock::{Clock, Reading};
use statehouse_core::log::{Journal, JournalRoom, LogPosition};
use statehouse_core::policy::{Absent, Assignment, Instance, Swaps};
use statehouse_core::request::Early;
use statehouse_core::store::{Renotified, Rerun, Transaction};
use statehouse_core::{Core, Decision, Input, Now, Outcome, Swapped};

use super::Stats;
use super::timing::{CallTimes, error_of};

pub(super) struct Locked {
    pub(super) core: Core,
    clock: Clock,
    pub(super) swaps: Swaps,
    pub(super) stats: Stats,
    pub(super) calls: CallTimes,
    wall_behind: bool,
    pub(super) journal: JournalRoom,
}

impl Locked {
    pub(super) fn new(core: Core, clock: Clock) -> Self {
        Self {
            core,
            clock,
            swaps: Swaps::default(),
            stats: Stats::default(),
            calls: CallTimes::default(),
            wall_behind: false,
            journal: JournalRoom::Growth,
        }
    }

    /// Handles one input and counts it.
    pub(super) fn handle<'a>(&mut self, input: Input<'a>, now: Now) -> Decision<'a> {
        let decision = self.core.handle(input, now);
        let stats = &mut self.stats;
        match &decision.outcome {
            Outcome::Event => {}
            Outcome::Handled(..) => stats.requests += 1,
            Outcome::ForbiddenResponseTopic(_) => stats.refused.response_topic += 1,
            Outcome::Expired => stats.refused.expired += 1,
            Outcome::Answered(_, Early::UnsupportedVersion(_)) => {
                stats.refused.unsupported_version += 1;
            }
            Outcome::Answered(_, Early::QosZero) => stats.refused.qos_0 += 1,
            Outcome::Refused(..) => stats.refused.malformed += 1,
            Outcome::Disconnected(..) => stats.kicked += 1,
        }
        let effects = &decision.effects;
        stats.policy_failures += effects.failures;
        if let Some(rerun) = effects.repeated {
            stats.duplicates += 1;
            stats.duplicates_different += u64::from(rerun == Rerun::Different);
        } else if effects.failed.is_none()
            && let (Some(policy), Some(error)) = (&effects.by, error_of(effects))
        {
            policy.counters.add_error(error);
        }
        match effects.renotified {
            Some(Renotified::Sent) => stats.renotified += 1,
            Some(Renotified::Incomplete) => stats.not_renotified += 1,
            None => {}
        }
        for notification in effects.expired.iter().chain(&effects.notifications) {
            stats.notifications += notification.to.len() as u64;
        }
        if let Some(swapped) = decision.swapped {
            self.note_swap(swapped, now.ms);
        }
        decision
    }

    /// Applies an assignment before the next request. Returns the position of its record, and
    /// instances to drop outside the lock.
    pub(super) fn assign(
        &mut self,
        next: Assignment,
        ready: Vec<Instance<Transaction>>,
    ) -> Result<(LogPosition, Vec<Instance<Transaction>>), Absent> {
        let now_ms = self.now_ms();
        let assigned = self.core.assign(next, ready)?;
        if let Some(swapped) = assigned.swapped {
            self.note_swap(swapped, now_ms);
        }
        Ok((assigned.position, assigned.left))
    }

    fn note_swap(&mut self, swapped: Swapped, now_ms: u64) {
        self.stats.swaps += 1;
        self.swaps.swapped(now_ms, swapped.from, swapped.to);
    }

    /// Whether the log had room only for removals, or none.
    pub(super) fn is_short_of_room(&self) -> bool {
        self.journal != JournalRoom::Growth
    }

    /// Refuses writes that the log has no room for, so that no client waits for a full disk.
    pub(super) fn check_disk_space(&mut self, journal: &dyn Journal) {
        let room = journal.room();
        if room == self.journal {
            return;
        }
        self.journal = room;
        self.core.store_mut().quota().journal = room;
        match room {
            JournalRoom::Growth => tracing::info!("there is room again: writes are accepted"),
            JournalRoom::Removals | JournalRoom::Nothing => {
                tracing::error!("{}", journal.shortage());
            }
        }
    }

    /// Whether the system clock was stepped back so far that an operator should look.
    pub(super) fn is_clock_behind(&mut self) -> bool {
        self.now_ms();
        self.wall_behind
    }

    /// The present time of both clocks.
    pub(super) fn now(&mut self) -> Now {
        Now {
            ms: self.now_ms(),
            instant: Instant::now(),
        }
    }

    /// Reads the clock. If the system clock was stepped ahead, no time has passed, so every
    /// deadline is postponed by the step.
    pub(super) fn now_ms(&mut self) -> u64 {
        let Reading {
            now_ms,
            wall_behind_ms,
            stepped_ms,
        } = self.clock.read();
        if stepped_ms > 0 {
            if self.core.postpone(now_ms, stepped_ms) {
                tracing::warn!(
                    stepped_ms,
                    "the system clock was stepped ahead: the store's time follows, and the deadlines of keys move with it"
                );
            } else {
                tracing::error!(
                    stepped_ms,
                    "the system clock was stepped ahead, and the log has no room: the deadlines of keys do not move with the clock, and keys expire early by its step"
                );
            }
        }
        self.core.set_wall_behind(wall_behind_ms);
        self.stats.clock_behind_ms = wall_behind_ms;
        let behind = wall_behind_ms > limits::CLOCK_UNHEALTHY_MS_MIN;
        if behind != self.wall_behind {
            self.wall_behind = behind;
            if behind {
                tracing::warn!(
                    wall_behind_ms,
                    "the system clock was stepped back; the store's time goes on, slower by 1/16 until the system clock has caught up, and clients whose clocks follow the system's look late"
                );
            } else {
                tracing::info!("the system clock has caught up with the store's time");
            }
        }
        now_ms
    }
}
