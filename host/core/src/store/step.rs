//! One step of the store: takes an input, returns effects.

use std::collections::HashSet;

use statehouse_protocol::{Peer, SessionId};

use super::duplicates::Duplicates;
use super::effects::Effects;
use super::expiry;
use super::handling::identity;
use super::notifier::renotify;
use super::reexecution::{Removals, Sampler};
use super::state::State;
use super::transaction::Transaction;
use super::watch::{Scope, WatchChange, Watches};
use super::write::Change;
use super::{Key, Quota, Retention};
use crate::clock::Stamp;
use crate::log::JournalRoom;
use crate::policy::{Absent, Assignment, Guard, GuardSettings, Instance, Registry};
use crate::request::Request;
use crate::{Input, limits};

/// How the active policy and a canary are supervised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Supervision {
    /// How many failures and how much fuel are tolerated.
    pub guard: GuardSettings,
    /// Re-executes one of this many requests of the active policy on a fresh instance to detect
    /// hidden state. Above [`limits::PURITY_REQUESTS_PER_SECOND_MAX`], the rate stays constant.
    /// Zero turns it off.
    pub purity_every: u32,
}

impl Default for Supervision {
    fn default() -> Self {
        Self {
            guard: GuardSettings::default(),
            purity_every: limits::PURITY_SAMPLE_DEFAULT,
        }
    }
}

/// The key table, the policies, and everything else that decides the result of a request.
pub struct Store {
    /// Always present between steps. A step moves it into its transaction.
    state: Option<Box<State>>,
    pub(super) registry: Registry<Transaction>,
    pub(super) quota: Quota,
    pub(crate) duplicates: Duplicates,
    pub(super) supervision: Supervision,
    /// Guards of the active policy and of a canary, in this order.
    pub(super) guards: [Guard; 2],
    pub(super) removals: Removals,
    /// Requests with a lower number were handled by an earlier run.
    pub(super) earlier_below: u64,
    /// Requests of an earlier run whose notifications were sent again. At most as many as were
    /// remembered at the start.
    pub(super) renotified: HashSet<u64>,
    /// Selects requests of the active policy for re-execution.
    pub(super) turns: Sampler,
}

const PRESENT: &str = "every step puts the state back before it returns";

impl Store {
    /// Creates an empty store with the policies of `registry`.
    pub fn new(registry: Registry<Transaction>, quota: Quota) -> Self {
        let duplicates = Duplicates::new(Retention::default());
        Self::restore(registry, quota, Box::default(), duplicates)
    }

    /// Creates a store from recovered state.
    pub fn restore(
        registry: Registry<Transaction>,
        quota: Quota,
        state: Box<State>,
        duplicates: Duplicates,
    ) -> Self {
        Self {
            state: Some(state),
            registry,
            quota,
            earlier_below: duplicates.next_number(),
            renotified: HashSet::new(),
            duplicates,
            supervision: Supervision::default(),
            guards: Default::default(),
            removals: Removals::default(),
            turns: Sampler::default(),
        }
    }

    /// The supervision settings. Changes apply from the next step on.
    pub fn supervision(&mut self) -> &mut Supervision {
        &mut self.supervision
    }

    /// The requests that may be redelivered.
    pub fn duplicates(&self) -> &Duplicates {
        &self.duplicates
    }

    /// Removes the requests of all other sessions.
    pub fn retain_sessions(&mut self, live: &[SessionId]) {
        let live: HashSet<SessionId> = live.iter().copied().collect();
        self.duplicates.retain(|session| live.contains(&session));
    }

    /// The bounds of the table. Changes apply from the next step on.
    pub fn quota(&mut self) -> &mut Quota {
        &mut self.quota
    }

    /// The state between steps.
    pub fn state(&self) -> &State {
        self.state.as_ref().expect(PRESENT)
    }

    /// The state, to change it without a request: for tests and tools.
    pub fn state_mut(&mut self) -> &mut State {
        self.state.as_mut().expect(PRESENT)
    }

    /// The policies.
    pub fn registry(&mut self) -> &mut Registry<Transaction> {
        &mut self.registry
    }

    /// Applies another assignment from the next request on, as [`Registry::assign`] does. A policy
    /// that it no longer names is retained while a request that it handled may be redelivered.
    /// Fails if the assignment names a policy that is not loaded.
    pub fn assign(
        &mut self,
        assignment: Assignment,
        ready: Vec<Instance<Transaction>>,
    ) -> Result<Vec<Instance<Transaction>>, Absent> {
        let left = self.registry.assign(assignment, ready)?;
        let remembered = self.duplicates.policies();
        self.registry
            .forget_retired(|digest| remembered.contains(digest));
        for policy in left.iter().map(Instance::policy) {
            if remembered.contains(&policy.digest) {
                self.registry.retire(policy.clone());
            }
        }
        Ok(left)
    }

    /// The time in milliseconds at which the next key expires.
    pub fn next_expiry_ms(&self) -> Option<u64> {
        self.state().next_expiry_ms()
    }

    /// Loads what requests of this session with these payloads will probably need from memory,
    /// because lookups one after the other take longer. Has no other effect.
    pub fn prefetch(&self, session: SessionId, payloads: &mut dyn Iterator<Item = &[u8]>) {
        let state = self.state();
        let writes = state.table.prefetch(payloads);
        self.duplicates.prefetch(session, writes);
        state.recent.prefetch(writes);
    }

    /// Whether an earlier run handled this request and may not have sent its notifications.
    pub fn may_be_unnotified(&self, request: &Request<'_>) -> bool {
        self.state().watches.are_durable()
            && (self.duplicates.find(&request.delivery, &identity(request)))
                .is_some_and(|original| original.number < self.earlier_below)
    }

    /// Handles a request. Fills the effects, which must be empty. `now_ms` must not be lower than
    /// in an earlier step, or versions and expiry would run backwards.
    pub(crate) fn answer(&mut self, request: &Request<'_>, now_ms: u64, effects: &mut Effects) {
        let state = self.take_swept(now_ms, effects);
        let suspect = self.duplicates.arrive(&request.delivery);
        let identity = suspect.then(|| identity(request));
        let original = identity.and_then(|it| self.duplicates.find(&request.delivery, &it));
        self.state = Some(match original {
            Some(original) => self.answer_redelivery(state, &original, request, now_ms, effects),
            None => self.handle(state, request, identity, now_ms, effects),
        });
    }

    /// Handles any other input, under the same conditions as [`Self::answer`].
    pub(crate) fn step(&mut self, input: Input<'_>, now_ms: u64, effects: &mut Effects) {
        let mut state = self.take_swept(now_ms, effects);
        match input {
            // The core parses a PUBLISH and calls `answer`.
            Input::Publish(_) | Input::Sweep => {}
            Input::Disconnected(peer) => {
                if state.watches.remove_all(peer) && state.watches.are_durable() {
                    effects.note_watches(peer, vec![WatchChange::AllEnded]);
                }
            }
            Input::Undeliverable(peer, key) => {
                let watches = state.watches.covering(key, peer);
                let ended = watches.map(|(scope, key)| (scope, key.clone())).collect();
                end_watches(&mut state.watches, peer, ended, effects);
            }
            Input::Rights(peer, rights) => state.watches.set_rights(peer, Some(rights.clone())),
            Input::Expired(removed) => {
                let change = |(key, version): &(Key, Stamp)| Change::Expired(key.clone(), *version);
                let changes: Vec<Change> = removed.iter().map(change).collect();
                let (registry, quota) = (&mut self.registry, self.quota);
                let notifications;
                (state, notifications, _) =
                    renotify(registry, now_ms, state, quota, 0, changes.iter(), effects);
                effects.expired.extend(notifications);
            }
            Input::SessionsEnded(sessions) => self.duplicates.ended(sessions),
        }
        self.state = Some(state);
    }

    /// Takes the state out for a step. Expired keys are removed first, up to the limits of one
    /// step, so that no quota counts them and watchers are notified of the removal before any later
    /// change. Without room for the record they stay, and no request sees them.
    fn take_swept(&mut self, now_ms: u64, effects: &mut Effects) -> Box<State> {
        let mut state = self.state.take().expect(PRESENT);
        let may_sweep = self.quota.journal != JournalRoom::Nothing;
        if may_sweep
            && state
                .next_expiry_ms()
                .is_some_and(|expires_ms| expires_ms <= now_ms)
        {
            state = expiry::sweep(state, &mut self.registry, self.quota, now_ms, effects);
            if let Some(swept) = &effects.swept {
                let is_shadowed = self.registry.shadow().is_some();
                self.removals.note(&swept.writes, is_shadowed);
            }
        }
        state
    }
}

/// Ends watches of a client, and records it if watches are durable.
pub(super) fn end_watches(
    watches: &mut Watches,
    peer: &Peer,
    mut ended: Vec<(Scope, Key)>,
    effects: &mut Effects,
) {
    ended.retain(|(scope, key)| watches.remove(*scope, key, peer));
    if watches.are_durable() && !ended.is_empty() {
        let ended = ended.into_iter();
        let ended = ended.map(|(scope, key)| WatchChange::Ended(scope, key));
        effects.note_watches(peer, ended.collect());
    }
}
