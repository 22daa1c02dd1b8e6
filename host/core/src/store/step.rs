//! One step of the store: takes an event, returns effects.

use std::collections::HashSet;
use std::sync::Arc;

use statehouse_protocol::rights::ClientRights;
use statehouse_protocol::{Peer, SessionId};

use super::duplicates::Duplicates;
use super::effects::Effects;
use super::expiry::{self, NewDeadline};
use super::handling::identity;
use super::read_set::Read;
use super::reexecution::{self, Removals, SampledRequest, Sampler};
use super::state::State;
use super::supervision::Supervision;
use super::table::Table;
use super::transaction::Transaction;
use super::watch::{Scope, WatchChange, Watches};
use super::{Key, Quota, Retention};
use crate::clock::Stamp;
use crate::log::JournalRoom;
use crate::policy::{Absent, Assignment, Guard, Instance, Registry};
use crate::request::Request;

/// The input of a step.
#[derive(Clone, Copy)]
pub(crate) enum Event<'a> {
    /// A client's request.
    Request(&'a Request<'a>),
    /// A connection ended. Its watches end with it.
    Disconnected(&'a Peer),
    /// A notification for this key could not be delivered. The client's watches that cover the key
    /// end.
    Undeliverable(&'a Peer, &'a [u8]),
    /// A client has these rights now. Its watches cover only keys that it may read.
    Rights(&'a Peer, &'a Arc<dyn ClientRights>),
    /// An earlier run removed these expired keys and may not have notified their watchers.
    Expired(&'a [(Key, Stamp)]),
    /// Sessions ended. Their requests can never be redelivered.
    SessionsEnded(&'a [SessionId]),
    /// Only time has passed.
    Sweep,
}

/// The key table, the policies, and everything else that decides the result of a request.
pub struct Store {
    /// Always present between steps. A step moves it into its transaction.
    state: Option<Box<State>>,
    pub(super) registry: Registry<Transaction>,
    pub(super) quota: Quota,
    pub(super) duplicates: Duplicates,
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

    /// The entries of `keys` just before a sampled request, if they can still be determined.
    pub fn reads_before(
        &self,
        sampled: &SampledRequest,
        keys: &[(bool, Key)],
    ) -> Option<Vec<Read>> {
        reexecution::reads_before(self.state(), &self.removals, sampled, keys)
    }

    /// The requests that may be redelivered.
    pub fn duplicates(&self) -> &Duplicates {
        &self.duplicates
    }

    /// Sizes the dedup table for this Receive Maximum. Must be called before a client is sent that
    /// maximum, or a redelivery might not be recognized. Returns whether it is higher than before.
    pub fn raise_receive_max(&mut self, receive_max: u16) -> bool {
        self.duplicates.raise_per_session(receive_max)
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
        self.state
            .as_ref()
            .expect("every step puts the state back before it returns")
    }

    /// The state, to change it without a request: for tests and tools.
    pub fn state_mut(&mut self) -> &mut State {
        self.state
            .as_mut()
            .expect("every step puts the state back before it returns")
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
        next_expiry_ms(self.state())
    }

    /// Postpones the deadline of every remembered request, because the clock was stepped ahead.
    pub(crate) fn postpone_requests(&mut self, by_ms: u64) {
        self.duplicates.postpone(by_ms);
    }

    /// Postpones the deadline of every key, because the clock was stepped ahead. Calls `each` with
    /// new deadlines to record, and the state that has them.
    pub(crate) fn postpone_keys(
        &mut self,
        by_ms: u64,
        mut each: impl FnMut(&[NewDeadline], &State),
    ) {
        let mut state = self
            .state
            .take()
            .expect("every step puts the state back before it returns");
        expiry::postpone(&mut state, by_ms, &mut each);
        self.state = Some(state);
    }

    /// The bytes that records of [`Self::postpone_keys`] take, at most; of whole entries with
    /// `whole`.
    pub(crate) fn postponement_bytes(&self, whole: bool) -> u64 {
        expiry::postponement_bytes(self.state(), whole)
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

    /// Handles one event. Fills the effects, which must be empty. `now_ms` must not be lower than in
    /// an earlier step, or versions and expiry would run backwards.
    pub(crate) fn step(&mut self, event: Event<'_>, now_ms: u64, effects: &mut Effects) {
        let mut state = self
            .state
            .take()
            .expect("every step puts the state back before it returns");
        // Expired keys are removed first, up to the limits of one step, so that no quota counts them
        // and watchers are notified of the removal before any later change. Without room for the
        // record they stay, and no request sees them.
        let may_sweep = self.quota.journal != JournalRoom::Nothing;
        if may_sweep && next_expiry_ms(&state).is_some_and(|expires_ms| expires_ms <= now_ms) {
            state = expiry::sweep(state, &mut self.registry, self.quota, now_ms, effects);
            if let Some(swept) = &effects.swept {
                let is_shadowed = self.registry.shadow().is_some();
                self.removals.note(&swept.writes, is_shadowed);
            }
        }
        self.state = Some(match event {
            Event::Request(request) => {
                let suspect = self.duplicates.arrive(&request.delivery);
                let identity = suspect.then(|| identity(request));
                let original = identity.and_then(|it| self.duplicates.find(&request.delivery, &it));
                match original {
                    Some(original) => {
                        self.answer_redelivery(state, &original, request, now_ms, effects)
                    }
                    None => self.handle(state, request, identity, now_ms, effects),
                }
            }
            Event::Disconnected(peer) => {
                if state.watches.remove_all(peer) && state.watches.are_durable() {
                    effects.note_watches(peer, vec![WatchChange::AllEnded]);
                }
                state
            }
            Event::Undeliverable(peer, key) => {
                let watches = state.watches.covering(key, peer);
                let ended = watches.map(|(scope, key)| (scope, key.clone())).collect();
                end_watches(&mut state.watches, peer, ended, effects);
                state
            }
            Event::Rights(peer, rights) => {
                state.watches.set_rights(peer, Some(rights.clone()));
                state
            }
            Event::Expired(removed) => {
                let (registry, quota) = (&mut self.registry, self.quota);
                expiry::renotify(state, registry, quota, now_ms, removed, effects)
            }
            Event::SessionsEnded(sessions) => {
                self.duplicates.ended(sessions);
                state
            }
            Event::Sweep => state,
        });
    }
}

/// The time at which the next key expires, visible or hidden.
fn next_expiry_ms(state: &State) -> Option<u64> {
    let tables = [&state.table, &state.hidden];
    tables.into_iter().filter_map(Table::next_expiry_ms).min()
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
        let ended = ended
            .into_iter()
            .map(|(scope, key)| WatchChange::Ended(scope, key));
        effects.note_watches(peer, ended.collect());
    }
}
