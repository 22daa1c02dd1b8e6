//! What decides, under the server's lock: store, clock and recorder, and the changes of policies and time between two
//! requests.

use std::sync::Arc;

use super::{AssignError, Stats};
use crate::limits;
use statehouse_core::clock::{Clock, Reading};
use statehouse_core::log::record::PolicyRecord;
use statehouse_core::log::{Journal, LogPosition, Recorder};
use statehouse_core::policy::{Assignment, Instance, Part, Policy, Swaps};
use statehouse_core::store::{Store, Transaction, Trip};

/// What decides, under one lock.
pub(super) struct Core {
    pub(super) store: Store,
    pub(super) clock: Clock,
    pub(super) recorder: Recorder,
    pub(super) run: u32,
    pub(super) swaps: Swaps,
    pub(super) stats: Stats,
    pub(super) wall_behind: bool,
    pub(super) journal_full: bool,
}

impl Core {
    /// Changes who answers what, and says so in the journal, before the next request.
    pub(super) fn assign(
        &mut self,
        next: Assignment,
        ready: Vec<Instance<Transaction>>,
    ) -> Result<(LogPosition, Vec<Instance<Transaction>>), AssignError> {
        let now_ms = self.now();
        let before = self.store.registry().assignment().active;
        let left = self.store.assign(next, ready);
        let left = left.map_err(AssignError::Absent)?;
        let registry = self.store.registry();
        let assignment = registry.assignment();
        if assignment.active != before {
            self.stats.swaps += 1;
            self.swaps.swapped(now_ms, before, assignment.active);
        }
        let record = |it: &Arc<Policy<Transaction>>| {
            PolicyRecord::of(it, it.digest == assignment.built_in.0)
        };
        let named = registry.policies().map(record).collect();
        Ok((self.recorder.assign(named, assignment), left))
    }

    /// Goes back to the policy before, or ends a canary, before the next request.
    pub(super) fn trip(&mut self, trip: &Trip) {
        let now_ms = self.now();
        let registry = self.store.registry();
        let assignment = registry.assignment();
        let why = trip.why.clone();
        let (next, bad) = match (trip.part, &assignment.canary) {
            (Part::Active, _) => (assignment.roll_back_for(why, now_ms), assignment.active),
            (Part::Canary, Some(canary)) => (assignment.end_canary_for(why, now_ms), canary.policy),
            (Part::Canary | Part::Routed, _) => return,
        };
        let Some(policy) = registry.by_digest(&bad.0) else {
            return;
        };
        let why = &trip.why;
        let done = next.map_err(|error| error.to_string()).and_then(|next| {
            // The policy before the active one is kept warm. The failing instance is given back at once: a pause
            // of some ten microseconds, once.
            self.assign(next, Vec::new())
                .map_err(|error| error.to_string())
        });
        match (done, trip.part) {
            (Ok(_), Part::Canary) => {
                tracing::error!(%policy, digest = %policy.digest, why, "a canary is ended: the active policy answers its requests");
            }
            (Ok(_), _) => {
                tracing::error!(%policy, digest = %policy.digest, why, "a policy is rolled back: the one before it answers");
            }
            (Err(error), _) if policy.counters.may_warn(now_ms) => {
                tracing::error!(%policy, digest = %policy.digest, why, error, "a policy cannot be rolled back");
            }
            (Err(_), _) => {}
        }
    }

    /// Writes that grow the table are refused before the journal is hurt.
    pub(super) fn look_for_room(&mut self, journal: &dyn Journal) {
        let full = !journal.has_room();
        if full != self.journal_full {
            self.journal_full = full;
            self.store.quota().journal_full = full;
            if full {
                tracing::error!(
                    "the disk is full: writes are refused until there is room, removals are not"
                );
            } else {
                tracing::info!("there is room on the disk again");
            }
        }
    }

    /// The system clock was stepped ahead, and no time has passed: every deadline keeps the time
    /// that is left.
    fn postpone(&mut self, now_ms: u64, stepped_ms: u64) {
        tracing::warn!(
            stepped_ms,
            "the system clock was stepped ahead: the store's time follows, and the deadlines of keys move with it"
        );
        let Self {
            store, recorder, ..
        } = self;
        store.postpone(now_ms, stepped_ms, |effects| {
            recorder.step(None, &effects, false);
        });
    }

    pub(super) fn now(&mut self) -> u64 {
        let Reading {
            now_ms,
            wall_behind_ms,
            stepped_ms,
        } = self.clock.read();
        if stepped_ms > 0 {
            self.postpone(now_ms, stepped_ms);
        }
        self.stats.clock_behind_ms = wall_behind_ms;
        let behind = wall_behind_ms > limits::CLOCK_UNHEALTHY_MS_MIN;
        if behind != self.wall_behind {
            self.wall_behind = behind;
            if behind {
                tracing::warn!(
                    wall_behind_ms,
                    "the system clock was stepped back; the store's time goes on, and clients whose clocks follow the system's look late"
                );
            } else {
                tracing::info!("the system clock has caught up with the store's time");
            }
        }
        now_ms
    }
}
