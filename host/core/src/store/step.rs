//! One step of the store: takes an event, returns effects.

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use bytes::Bytes;
use statehouse_mqtt::Properties;
use xxhash_rust::xxh3::xxh3_128;

use super::duplicates::Duplicates;
use super::effects::{Answer, Effects, Handled, RestsOn, Trip, internal_error};
use super::expiry;
use super::notification::{Notification, Recipients, notify, splice};
use super::notifier::{Attributed, Notifier};
use super::read_set::{CapturedReads, Read};
use super::reexecution::{self, Removals, SampledRequest, Sampler};
use super::remembered::{Context, Identity, Outcome, Remembered, StoredPayload};
use super::state::State;
use super::supervision::Supervision;
use super::table::Table;
use super::transaction::Transaction;
use super::watch::{Scope, WatchChange, Watches};
use super::write::{Change, Write};
use super::{Key, Quota, Retention};
use crate::clock::Stamp;
use crate::limits;
use crate::policy::{
    self, Absent, Assignment, Call, CallOutcome, Choice, EndedCall, Failure, Guard, Instance, Part,
    Policy, Registry, Repeat, Share,
};
use crate::request::{self, Dialect, Request};
use statehouse_protocol::rights::{ClientRights, Right};
use statehouse_protocol::{Peer, SessionId};

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
    /// A client has these rights now. Its watches of keys that it may not read any more end.
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
    duplicates: Duplicates,
    supervision: Supervision,
    /// Guards of the active policy and of a canary, in this order.
    guards: [Guard; 2],
    removals: Removals,
    /// Requests with a lower number were handled by an earlier run.
    pub(super) earlier_below: u64,
    /// Requests of an earlier run whose notifications were sent again. At most as many as were
    /// remembered at the start.
    pub(super) renotified: HashSet<u64>,
    /// Selects requests of the active policy for re-execution.
    turns: Sampler,
}

/// What a policy decided about a request, with the notifications of its changes.
struct Decision {
    by: Arc<Policy<Transaction>>,
    part: Part,
    answer: Answer,
    captured: Option<CapturedReads>,
    notifications: Vec<Notification>,
    /// Of changes that the client missed.
    missed: Vec<Notification>,
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
    ///
    /// # Errors
    /// Returns [`Absent`] if the assignment names a policy that is not loaded.
    pub fn assign(
        &mut self,
        assignment: Assignment,
        ready: Vec<Instance<Transaction>>,
    ) -> Result<Vec<Instance<Transaction>>, Absent> {
        let left = self.registry.assign(assignment, ready)?;
        let remembered = self.duplicates.policies();
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

    /// Postpones every deadline by `by_ms`, because the clock was stepped ahead. Calls `each` with
    /// effects to record.
    pub fn postpone(&mut self, now_ms: u64, by_ms: u64, mut each: impl FnMut(Effects)) {
        self.duplicates.postpone(by_ms);
        let mut state = self
            .state
            .take()
            .expect("every step puts the state back before it returns");
        expiry::postpone(&mut state, now_ms, by_ms, &mut |swept| {
            each(Effects {
                swept: Some(swept),
                ..Effects::default()
            });
        });
        self.state = Some(state);
    }

    /// Loads what requests with these payloads will probably need from memory, because lookups one
    /// after the other take longer. Has no other effect.
    pub fn prefetch(&self, payloads: &mut dyn Iterator<Item = &[u8]>) {
        let state = self.state();
        let count = state.table.prefetch(payloads);
        self.duplicates.prefetch(count);
        state.recent.prefetch(count);
    }

    /// Whether an earlier run handled this request and may not have sent its notifications.
    pub fn may_be_unnotified(&self, request: &Request<'_>) -> bool {
        self.state().watches.are_durable()
            && (self.duplicates.find(&request.delivery, &identity(request)))
                .is_some_and(|original| original.number < self.earlier_below)
    }

    /// Handles one event. `now_ms` must not be lower than in an earlier step, or versions and
    /// expiry would run backwards.
    pub(crate) fn step(&mut self, event: Event<'_>, now_ms: u64) -> Effects {
        let mut effects = Effects::default();
        let mut state = self
            .state
            .take()
            .expect("every step puts the state back before it returns");
        // Expired keys are removed first, so that no quota counts them and watchers are notified of
        // the removal before any later change.
        if next_expiry_ms(&state).is_some_and(|expires_ms| expires_ms <= now_ms) {
            state = expiry::sweep(state, &mut self.registry, self.quota, now_ms, &mut effects);
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
                        self.answer_redelivery(state, &original, request, now_ms, &mut effects)
                    }
                    None => self.handle(state, request, identity, now_ms, &mut effects),
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
                end_watches(&mut state.watches, peer, ended, &mut effects);
                state
            }
            Event::Rights(peer, rights) => {
                let watches = state.watches.by(peer);
                let forbidden = |(scope, key): &(Scope, &Key)| {
                    *scope == Scope::Key && !rights.allow(key, Right::Read)
                };
                let ended = watches.filter(forbidden);
                let ended = ended.map(|(scope, key)| (scope, key.clone())).collect();
                end_watches(&mut state.watches, peer, ended, &mut effects);
                state.watches.set_rights(peer, Some(rights.clone()));
                state
            }
            Event::Expired(removed) => {
                let (registry, quota) = (&mut self.registry, self.quota);
                expiry::renotify(state, registry, quota, now_ms, removed, &mut effects)
            }
            Event::SessionsEnded(sessions) => {
                self.duplicates.ended(sessions);
                state
            }
            Event::Sweep => state,
        });
        effects
    }

    fn handle(
        &mut self,
        state: Box<State>,
        request: &Request<'_>,
        identified: Option<Identity>,
        now_ms: u64,
        effects: &mut Effects,
    ) -> Box<State> {
        let clock = state.hlc.last();
        let mut transaction = Transaction::begin(state, self.quota, now_ms, request);
        let choice = self.choose(request, now_ms, effects);
        if choice.part == Part::Routed {
            transaction.confine(
                self.registry.slot(choice.slot).digest(),
                self.registry.routes(),
            );
        }
        let (transaction, decided) = self.run_policy(choice, transaction, request, now_ms, effects);
        let decision = match decided {
            Ok(decision) => decision,
            Err((failure, is_own)) => {
                let by = self.registry.slot(choice.slot).policy().clone();
                by.work.request(effects.fuel, None);
                effects.by = Some(by);
                // A failure of another policy during notification does not count against this one.
                if is_own {
                    let what = "a policy failed; the request changed nothing";
                    let fuel = effects.fuel;
                    self.count_failure(choice, request, now_ms, (fuel, &failure, what), effects);
                }
                effects.failed = Some(failure);
                effects.answer = Some(internal_error());
                return transaction.roll_back();
            }
        };
        let by = &decision.by;
        effects.by = Some(by.clone());
        by.work.request(effects.fuel, decision.answer.command);
        let answered = (effects.fuel, CallOutcome::Answered);
        self.guard(choice.part, by, request.peer, answered, effects);
        let context = Context {
            now_ms,
            clock,
            dialect: request.dialect,
            policy: by.digest,
        };
        self.commit(transaction, decision, request, identified, context, effects)
    }

    /// Runs the chosen policy and renders the notifications.
    fn run_policy(
        &mut self,
        choice: Choice,
        transaction: Box<Transaction>,
        request: &Request<'_>,
        now_ms: u64,
        effects: &mut Effects,
    ) -> (Box<Transaction>, Attributed<Decision>) {
        let routes = self.registry.routes().clone();
        let chosen = self.registry.slot(choice.slot);
        let by = chosen.policy().clone();
        let digest = by.digest.into();
        let mut call = chosen.begin(transaction, request.payload.clone());
        let mut foreign = false;
        let decided = decide(&mut call, request, now_ms).and_then(|(answer, captured)| {
            let others = |it: &Change| routes.is_owned_by_other(&digest, it.key());
            foreign = call.host().changes().any(others);
            let notifications = match foreign {
                true => Vec::new(),
                false => render_notifications(&mut call)?,
            };
            Ok(Decision {
                by,
                part: choice.part,
                answer,
                captured,
                notifications,
                missed: Vec::new(),
            })
        });
        if let Err(failure) = &decided {
            call.discard(failure);
        }
        effects.fuel = call.fuel_used();
        let mut transaction = call.end();
        effects.denied = transaction.take_denied();
        effects.exceeded = transaction.exceeded();
        let mut decision = match decided {
            Ok(decision) => decision,
            Err(failure) => return (transaction, Err((failure, true))),
        };
        let share = || Some(Share::of(self.quota.fuel_max, request.payload.len()));
        if foreign {
            let notifier = Notifier::new(&mut self.registry, now_ms, share());
            let notified;
            (transaction, notified) = notifier.notify_for(choice.slot, transaction, effects);
            match notified {
                Ok(notifications) => decision.notifications = notifications,
                Err(failure) => return (transaction, Err(failure)),
            }
        }
        let missed = transaction.take_missed();
        if !missed.is_empty() {
            let notifier = Notifier::new(&mut self.registry, now_ms, share());
            let notified;
            (transaction, notified) =
                notifier.notify_missed(choice.slot, transaction, missed, effects);
            match notified {
                Ok(notifications) => decision.missed = notifications,
                Err(failure) => return (transaction, Err((failure, false))),
            }
        }
        (transaction, Ok(decision))
    }

    /// Commits a request, and remembers it if a redelivery must get the same answer.
    fn commit(
        &mut self,
        transaction: Box<Transaction>,
        decision: Decision,
        request: &Request<'_>,
        identified: Option<Identity>,
        context: Context,
        effects: &mut Effects,
    ) -> Box<State> {
        let Decision {
            by,
            part,
            mut answer,
            captured,
            notifications,
            missed,
        } = decision;
        let (state, writes, watches) = transaction.commit();
        let watches_durable = state.watches.are_durable();
        if watches_durable && !watches.is_empty() {
            let changes = watches.into_iter().map(|(scope, key, began)| match began {
                true => WatchChange::Began(scope, key, request.dialect),
                false => WatchChange::Ended(scope, key),
            });
            effects.note_watches(request.peer, changes.collect());
        }
        answer.put = writes.iter().any(|write| write.entry().is_some());
        if part == Part::Active {
            effects.sampled = self.sample(&by, request, &context, &answer, &writes, &captured);
        }
        let is_shadowed = self.registry.shadow().is_some();
        self.removals.note(&writes, is_shadowed);
        // On a full disk, requests that change nothing must not use the room that removals need.
        // They run again on redelivery.
        let may_remember = !writes.is_empty() || !self.quota.journal_full;
        let repeatable = answer.repeat == Repeat::Same && may_remember;
        if repeatable || !writes.is_empty() {
            let identity = identified.unwrap_or_else(|| identity(request));
            let remembered =
                self.remembered(request, identity, context, &answer, captured, effects.fuel);
            if repeatable {
                self.duplicates.insert(&remembered);
                self.duplicates
                    .evict(request.delivery.session, remembered.context.now_ms);
            }
            effects.handled = Some(Box::new(Handled {
                remembered,
                repeatable,
                clock: state.hlc.last(),
                writes,
            }));
        } else {
            effects.rests_on = RestsOn::of(captured, watches_durable);
        }
        effects.answer = Some(answer);
        effects.expired.extend(missed);
        effects.notifications.extend(notifications);
        state
    }

    /// Describes a request for the dedup table.
    fn remembered(
        &self,
        request: &Request<'_>,
        identity: Identity,
        context: Context,
        answer: &Answer,
        captured: Option<CapturedReads>,
        fuel: u64,
    ) -> Remembered {
        // A request that used much fuel may exceed the watchdog on re-execution on a busy machine.
        let costly = fuel > limits::FUEL_PER_CALL_DEFAULT;
        let whole = captured.is_none() || costly;
        Remembered {
            number: self.duplicates.next_number(),
            delivery: request.delivery,
            turn: self.duplicates.next_turn(request.delivery.session),
            identity,
            until_ms: (self.duplicates).until_ms(request.properties, context.now_ms),
            context,
            captured,
            outcome: Outcome {
                payload: StoredPayload::new(&answer.payload, whole),
                version: answer.version,
                command: answer.command,
                put: answer.put,
            },
        }
    }

    /// Counts and logs a failed call of a policy.
    fn count_failure(
        &mut self,
        choice: Choice,
        request: &Request<'_>,
        now_ms: u64,
        (fuel, failure, what): (u64, &Failure, &'static str),
        effects: &mut Effects,
    ) {
        let policy = self.registry.slot(choice.slot).policy().clone();
        policy.work.failure(failure, now_ms);
        effects.failures += 1;
        if policy.counters.may_log(now_ms) {
            let client = request.peer.client.escape_debug();
            tracing::error!(%policy, digest = %policy.digest, %client, %failure, "{what}");
        }
        let outcome = CallOutcome::failed(failure, policy.start_fuel, self.quota.fuel_max);
        let ended = (fuel, outcome);
        self.guard(choice.part, &policy, request.peer, ended, effects);
    }

    /// Counts a call in the guard of the policy, and records a trip in `effects`.
    fn guard(
        &mut self,
        part: Part,
        by: &Policy<Transaction>,
        peer: &Peer,
        (fuel, outcome): (u64, CallOutcome),
        effects: &mut Effects,
    ) {
        let guard = match part {
            Part::Active => &mut self.guards[0],
            Part::Canary => &mut self.guards[1],
            // A routed policy has no predecessor to roll back to.
            Part::Routed => return,
        };
        let client = number_of(peer);
        let ended = EndedCall {
            client,
            fuel,
            outcome,
        };
        if let Some(why) = guard.note(self.supervision.guard, by.digest.into(), ended) {
            effects.tripped = Some(Trip { part, why });
        }
    }

    /// Copies a request for re-execution if it was sampled.
    fn sample(
        &mut self,
        by: &Arc<Policy<Transaction>>,
        request: &Request<'_>,
        context: &Context,
        answer: &Answer,
        writes: &[Write],
        captured: &Option<CapturedReads>,
    ) -> Option<Box<SampledRequest>> {
        let every = self.supervision.purity_every;
        let for_purity = self.turns.purity(every, context.now_ms);
        let shadow = self.registry.shadow();
        let candidate = shadow.filter(|(_, per_mille)| self.turns.shadow(*per_mille));
        let candidate = candidate.map(|(policy, _)| policy.clone());
        if !for_purity && candidate.is_none() {
            return None;
        }
        // Copied, so that a queued sample does not retain the buffers of its connection.
        let properties = Bytes::copy_from_slice(request.properties.raw());
        Some(Box::new(SampledRequest {
            candidate,
            for_purity,
            by: by.clone(),
            payload: Bytes::copy_from_slice(request.payload),
            context: context.clone(),
            answer: answer.payload.clone(),
            version: answer.version,
            writes: writes.to_vec(),
            peer: request.peer.clone(),
            timestamp: request.timestamp.map(Into::into),
            fencing_token: request.fencing_token.map(Into::into),
            // These bytes were parsed successfully before.
            properties: Properties::parse(properties).unwrap_or_default(),
            delivery: request.delivery,
            grants: request.grants.cloned(),
            captured: captured.clone(),
            fuel_max: self.quota.fuel_max,
            removals: self.removals.count(),
        }))
    }

    /// Chooses the policy that handles a request.
    fn choose(&mut self, request: &Request<'_>, now_ms: u64, effects: &mut Effects) -> Choice {
        let mut key = None;
        if self.registry.wants_key() {
            let fuel_max = self.quota.fuel_max;
            let keyed = (self.registry).key_of(request.payload, now_ms, fuel_max);
            for (choice, fuel, failure) in keyed.failures {
                let what = "a policy failed to determine the key of a request";
                self.count_failure(choice, request, now_ms, (fuel, &failure, what), effects);
            }
            key = keyed.key;
        }
        self.registry.choose(&request.peer.client, key.as_deref())
    }
}

fn identity(request: &Request<'_>) -> Identity {
    let parts = request::identity(
        &request.peer.client,
        request.payload,
        request.properties,
        request.timestamp,
        request.fencing_token,
    );
    // A collision affects only the attacker's own session, so a non-cryptographic hash is enough.
    xxh3_128(&parts).to_le_bytes()
}

/// A hash of the client id, which is stable across sessions; of the session number if the client is
/// unknown.
fn number_of(peer: &Peer) -> u64 {
    let mut hasher = DefaultHasher::new();
    match peer.known() {
        Some(client) => client.hash(&mut hasher),
        None => peer.session.hash(&mut hasher),
    }
    hasher.finish()
}

/// The time at which the next key expires, visible or hidden.
fn next_expiry_ms(state: &State) -> Option<u64> {
    let tables = [&state.table, &state.hidden];
    tables.into_iter().filter_map(Table::next_expiry_ms).min()
}

/// Runs the policy and builds the answer. The captured reads end here: the notifications do not
/// belong to the decision.
pub(super) fn decide(
    call: &mut Call<'_, Transaction>,
    request: &Request<'_>,
    now_ms: u64,
) -> Result<(Answer, Option<CapturedReads>), Failure> {
    let outcome = call.handle(policy::Request {
        payload: request.payload,
        dialect: request.dialect.into(),
        timestamp: request.timestamp,
        fencing_token: request.fencing_token,
        client: request.peer.known(),
        now: now_ms,
    })?;
    let transaction = call.host();
    let payload = splice(outcome.reply, request.payload, transaction)?;
    if transaction.diverged() {
        return Err(Failure::Malformed(
            "the re-execution asked for something that the first run did not ask".into(),
        ));
    }
    let answer = Answer {
        payload,
        version: outcome.version.map(Stamp::from),
        repeat: outcome.repeat,
        command: outcome.command,
        put: false,
    };
    Ok((answer, transaction.take_captured()))
}

/// Renders the notifications with the remaining fuel of the request.
fn render_notifications(call: &mut Call<'_, Transaction>) -> Result<Vec<Notification>, Failure> {
    let transaction = call.host();
    if transaction.state().watches.is_empty() {
        return Ok(Vec::new());
    }
    let watches = &transaction.state().watches;
    let watched = |it: &Change| Some((it.clone(), Recipients::of(watches, it.key())?));
    let changes: Vec<_> = transaction.changes().filter_map(watched).collect();
    let mut notifications = Vec::new();
    for (change, to) in changes {
        notify(call, &change, to, &mut notifications)?;
    }
    Ok(notifications)
}

/// Ends watches of a client, and records it if watches are durable.
fn end_watches(
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

impl From<Dialect> for policy::Dialect {
    fn from(dialect: Dialect) -> Self {
        match dialect {
            Dialect::Sdk => Self::Sdk,
            Dialect::Documents => Self::Documents,
            Dialect::Preview => Self::Preview,
        }
    }
}
