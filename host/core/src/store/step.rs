//! One step of the store: an event in, effects out.

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use bytes::Bytes;
use statehouse_mqtt::Properties;
use xxhash_rust::xxh3::xxh3_128;

use super::capture::{Evidence, Read};
use super::duplicates::Duplicates;
use super::effects::{Answer, Effects, Handled, RestsOn, Trip, internal_error};
use super::expiry;
use super::notice::{Notice, notices_of, splice, told_by};
use super::observed::{self, Observed, Removals, Turns};
use super::remembered::{Context, Identity, Kept, Outcome, Remembered};
use super::state::State;
use super::table::Table;
use super::telling::Telling;
use super::transaction::Transaction;
use super::watch::WatchChange;
use super::write::{Change, Write};
use super::{Key, Quota, Retention};
use crate::clock::Stamp;
use crate::limits;
use crate::policy::{
    self, Absent, Assignment, Call, Choice, Ended, Failure, Guard, GuardSettings, How, Instance,
    Part, Policy, Registry, Repeat, Share,
};
use crate::request::{self, Dialect, Request};
use statehouse_protocol::Peer;

/// What a step is about.
#[derive(Clone, Copy)]
pub enum Event<'a> {
    /// A client asks.
    Request(&'a Request<'a>),
    /// A connection ended: its watches end too.
    Gone(&'a Peer),
    /// Nobody took a notification for this key, or the client may not read it any more: that watch ends.
    Unheard(&'a Peer, &'a [u8]),
    /// An earlier run removed these keys, since their time was over, and may not have told anybody.
    Expired(&'a [(Key, Stamp)]),
    /// Sessions ended: none of their requests can come again.
    Ended(&'a [u64]),
    /// Nothing but time has passed.
    Sweep,
}

/// The key table with everything that decides about it.
pub struct Store {
    /// Always there between steps; a step lends it to its transaction.
    state: Option<Box<State>>,
    pub(super) registry: Registry<Transaction>,
    pub(super) quota: Quota,
    duplicates: Duplicates,
    supervision: Supervision,
    /// Over the active policy, and over a canary.
    guards: [Guard; 2],
    removals: Removals,
    /// Requests below this number were handled by an earlier run.
    pub(super) earlier_below: u64,
    /// Those of them whose notifications were sent again: not more than were remembered at the start.
    pub(super) told_again: HashSet<u64>,
    /// Over requests of the active policy.
    turns: Turns,
}

/// How policies that answer are supervised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Supervision {
    /// What is tolerated of one.
    pub guard: GuardSettings,
    /// Of so many requests of the active one, one runs again on a fresh instance, but no more than if there were
    /// [`limits::PURITY_REQUESTS_PER_SECOND_MAX`]; zero means none.
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

impl Store {
    /// An empty store under the policies of `registry`.
    pub fn new(registry: Registry<Transaction>, quota: Quota) -> Self {
        let duplicates = Duplicates::new(Retention::default());
        Self::restore(registry, quota, Box::default(), duplicates)
    }

    /// A store that goes on from recorded state.
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
            told_again: HashSet::new(),
            duplicates,
            supervision: Supervision::default(),
            guards: Default::default(),
            removals: Removals::default(),
            turns: Turns::default(),
        }
    }

    /// How policies that answer are supervised; a changed one counts from the next step on.
    pub fn supervision(&mut self) -> &mut Supervision {
        &mut self.supervision
    }

    /// What keys held when an observed request began, if that can still be told.
    pub fn recall(&self, observed: &Observed, keys: &[(bool, Key)]) -> Option<Vec<Read>> {
        observed::recall(self.state(), &self.removals, observed, keys)
    }

    /// Requests that may come again.
    pub fn duplicates(&self) -> &Duplicates {
        &self.duplicates
    }

    /// Remembers what clients may send again that are told this Receive Maximum. Called before the first of them is.
    /// True where that is more than before.
    pub fn raise_receive_max(&mut self, receive_max: u16) -> bool {
        self.duplicates.raise_per_session(receive_max)
    }

    /// Forgets the requests of sessions that are no more.
    pub fn retain_sessions(&mut self, live: &[u64]) {
        let live: HashSet<u64> = live.iter().copied().collect();
        self.duplicates.retain(|session| live.contains(&session));
    }

    /// Bounds of the table; a changed one counts from the next step on.
    pub fn quota(&mut self) -> &mut Quota {
        &mut self.quota
    }

    /// The state between steps.
    pub fn state(&self) -> &State {
        self.state
            .as_ref()
            .expect("every step puts the state back before it returns")
    }

    /// The state, to put something there that no request did: for tests and tools.
    pub fn state_mut(&mut self) -> &mut State {
        self.state
            .as_mut()
            .expect("every step puts the state back before it returns")
    }

    /// The policies.
    pub fn registry(&mut self) -> &mut Registry<Transaction> {
        &mut self.registry
    }

    /// Takes another assignment into force from the next request on, as [`Registry::assign`] does. A policy that it names
    /// no more stays at hand where a request that it handled may come again.
    ///
    /// # Errors
    /// [`Absent`].
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

    /// When the next key expires, in the store's milliseconds.
    pub fn next_expiry_ms(&self) -> Option<u64> {
        next_expiry_ms(self.state())
    }

    /// Moves every deadline to as much later as time went ahead without passing. `each` gets effects to record.
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

    /// Whether this is a request that an earlier run handled, whose notifications may not have left.
    pub fn may_be_untold(&self, request: &Request<'_>) -> bool {
        self.state().watches.are_kept()
            && (self.duplicates.find(&request.delivery, &identity(request)))
                .is_some_and(|original| original.number < self.earlier_below)
    }

    /// Handles one event at `now_ms`, which must not lie below that of an earlier step.
    pub fn step(&mut self, event: Event<'_>, now_ms: u64) -> Effects {
        let mut effects = Effects::default();
        let mut state = self
            .state
            .take()
            .expect("every step puts the state back before it returns");
        // What has expired goes first, so that no quota counts it and its watchers hear of its end
        // before they hear of what comes after.
        if next_expiry_ms(&state).is_some_and(|expires_ms| expires_ms <= now_ms) {
            state = expiry::sweep(state, &mut self.registry, self.quota, now_ms, &mut effects);
            if let Some(swept) = &effects.swept {
                let recalled = self.registry.shadow().is_some();
                self.removals.note(&swept.writes, recalled);
            }
        }
        self.state = Some(match event {
            Event::Request(request) => {
                let suspect = self.duplicates.arrive(&request.delivery);
                let identity = suspect.then(|| identity(request));
                let original = identity.and_then(|it| self.duplicates.find(&request.delivery, &it));
                match original {
                    Some(original) => self.repeat(state, &original, request, now_ms, &mut effects),
                    None => self.handle(state, request, identity, now_ms, &mut effects),
                }
            }
            Event::Gone(peer) => {
                if state.watches.gone(peer) && state.watches.are_kept() {
                    effects.note_watches(peer, vec![WatchChange::AllEnded]);
                }
                state
            }
            Event::Unheard(peer, key) => {
                if state.watches.remove(key, peer) && state.watches.are_kept() {
                    let key = Key::copy_from_slice(key);
                    effects.note_watches(peer, vec![WatchChange::Ended(key)]);
                }
                state
            }
            Event::Expired(removed) => {
                let (registry, quota) = (&mut self.registry, self.quota);
                expiry::tell_again(state, registry, quota, now_ms, removed, &mut effects)
            }
            Event::Ended(sessions) => {
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
        let routes = self.registry.routes().clone();
        let chosen = self.registry.slot(choice.slot);
        let by = chosen.policy().clone();
        let policy = by.digest;
        let mut call = chosen.begin(transaction, request.payload.clone());
        let mut foreign = false;
        let decided = decide(&mut call, request, now_ms).and_then(|(answer, evidence)| {
            let others = |it: &Change| routes.is_others(&policy.into(), it.key());
            foreign = call.host().changes().any(others);
            let notices = match foreign {
                true => Vec::new(),
                false => tell(&mut call)?,
            };
            Ok((answer, evidence, notices))
        });
        if let Err(failure) = &decided {
            call.discard(failure);
        }
        effects.fuel = call.burnt();
        let mut transaction = call.end();
        effects.denied = transaction.take_denied();
        effects.exceeded = transaction.exceeded();
        // What others fail at, while they tell of it, is not this policy's fault.
        let mut blameless = false;
        let decided = match decided {
            Ok((answer, evidence, _)) if foreign => {
                let share = Share::of(self.quota.fuel_max, request.payload.len());
                let told;
                (transaction, told) =
                    self.tell_by_owners(choice.slot, transaction, now_ms, share, effects);
                told.map(|notices| (answer, evidence, notices))
                    .map_err(|(failure, its_own)| {
                        blameless = !its_own;
                        failure
                    })
            }
            decided => decided,
        };
        effects.by = Some(by.clone());
        let (mut answer, evidence, notices) = match decided {
            Ok(decided) => decided,
            Err(failure) => {
                by.work.request(effects.fuel, None);
                if !blameless {
                    let what = "a policy failed; the request changed nothing";
                    let fuel = effects.fuel;
                    self.blame(choice, request, now_ms, (fuel, &failure, what), effects);
                }
                effects.failed = Some(failure);
                effects.answer = Some(internal_error());
                return transaction.roll_back();
            }
        };
        by.work.request(effects.fuel, answer.command);
        let well = (effects.fuel, How::Well);
        self.guard(choice.part, &by, request.peer, well, effects);
        let (state, writes, watches) = transaction.commit();
        let watches_kept = state.watches.are_kept();
        if watches_kept && !watches.is_empty() {
            let changes = watches.into_iter().map(|(key, began)| match began {
                true => WatchChange::Began(key, request.dialect),
                false => WatchChange::Ended(key),
            });
            effects.note_watches(request.peer, changes.collect());
        }
        answer.put = writes.iter().any(|write| write.entry().is_some());
        let context = Context {
            now_ms,
            clock,
            dialect: request.dialect,
            policy,
        };
        if choice.part == Part::Active {
            effects.observed = self.observe(&by, request, &context, &answer, &writes, &evidence);
        }
        let recalled = self.registry.shadow().is_some();
        self.removals.note(&writes, recalled);
        // On a full disk what changes nothing may not use up the room that removals need: it runs anew instead.
        let kept = !writes.is_empty() || !self.quota.journal_full;
        let owed = answer.repeat == Repeat::Same && kept;
        if owed || !writes.is_empty() {
            // What takes long to run again may take too long on a busy machine.
            let costly = effects.fuel > limits::FUEL_PER_CALL_DEFAULT;
            let whole = evidence.is_none() || costly;
            let remembered = Remembered {
                number: self.duplicates.next_number(),
                delivery: request.delivery,
                turn: self.duplicates.next_turn(request.delivery.session),
                identity: identified.unwrap_or_else(|| identity(request)),
                until_ms: self.duplicates.until_ms(request.properties, now_ms),
                context,
                evidence,
                outcome: Outcome {
                    payload: Kept::new(&answer.payload, whole),
                    version: answer.version,
                    command: answer.command,
                    put: answer.put,
                },
            };
            if owed {
                self.duplicates.insert(&remembered);
                self.duplicates.evict(request.delivery.session, now_ms);
            }
            effects.handled = Some(Handled {
                remembered,
                owed,
                clock: state.hlc.last(),
                writes,
            });
        } else {
            effects.rests_on = RestsOn::of(evidence, watches_kept);
        }
        effects.answer = Some(answer);
        effects.notices.extend(notices);
        state
    }

    /// Lets each change be told by who owns its key: this request changed keys of others. Where it cannot be told of at
    /// all, why, and whether that is the policy `by` itself.
    fn tell_by_owners(
        &mut self,
        by: usize,
        mut transaction: Transaction,
        now_ms: u64,
        share: Share,
        effects: &mut Effects,
    ) -> (Transaction, Result<Vec<Notice>, (Failure, bool)>) {
        let mut telling = Telling::new(&mut self.registry, now_ms, Some(share));
        let mut notices = Vec::new();
        let changes: Vec<Change> = transaction.changes().cloned().collect();
        for change in changes {
            if !transaction.state().watches.has(change.key()) {
                continue;
            }
            let owner = telling.registry.route_owner(change.key());
            let told;
            match owner.filter(|owner| *owner != by) {
                Some(owner) => {
                    (transaction, told) = telling.tell(owner, transaction, &change, effects);
                }
                None => {
                    let speaker = telling.registry.slot(by);
                    (transaction, told, _) = told_by(speaker, transaction, &change);
                }
            }
            match told {
                Ok(told) => notices.extend(told),
                Err(failure) => {
                    return (transaction, Err((failure, owner.is_none_or(|it| it == by))));
                }
            }
        }
        (transaction, Ok(notices))
    }

    /// Counts a call that failed, and says so.
    fn blame(
        &mut self,
        who: Choice,
        request: &Request<'_>,
        now_ms: u64,
        (fuel, failure, what): (u64, &Failure, &'static str),
        effects: &mut Effects,
    ) {
        let policy = self.registry.slot(who.slot).policy().clone();
        policy.work.failure(failure);
        effects.failures += 1;
        if policy.counters.may_log(now_ms) {
            let client = request.peer.client.escape_debug();
            tracing::error!(%policy, digest = %policy.digest, %client, %failure, "{what}");
        }
        let how = How::failed(failure, policy.start_fuel, self.quota.fuel_max);
        let ended = (fuel, how);
        self.guard(who.part, &policy, request.peer, ended, effects);
    }

    /// Counts a call of a policy that is watched over.
    fn guard(
        &mut self,
        part: Part,
        by: &Policy<Transaction>,
        peer: &Peer,
        (fuel, how): (u64, How),
        effects: &mut Effects,
    ) {
        let guard = match part {
            Part::Active => &mut self.guards[0],
            Part::Canary => &mut self.guards[1],
            // There is nothing that its keys could go back to.
            Part::Routed => return,
        };
        let client = number_of(peer);
        let ended = Ended { client, fuel, how };
        if let Some(why) = guard.note(self.supervision.guard, by.digest.into(), ended) {
            effects.tripped = Some(Trip { part, why });
        }
    }

    /// Copies a request for who runs it again, where it is its turn.
    fn observe(
        &mut self,
        by: &Arc<Policy<Transaction>>,
        request: &Request<'_>,
        context: &Context,
        answer: &Answer,
        writes: &[Write],
        evidence: &Option<Evidence>,
    ) -> Option<Box<Observed>> {
        let every = self.supervision.purity_every;
        let for_purity = self.turns.purity(every, context.now_ms);
        let shadow = self.registry.shadow();
        let candidate = shadow.filter(|(_, per_mille)| self.turns.shadow(*per_mille));
        let candidate = candidate.map(|(policy, _)| policy.clone());
        if !for_purity && candidate.is_none() {
            return None;
        }
        // Copied, so that what waits does not hold the buffers of its connection.
        let properties = Bytes::copy_from_slice(request.properties.raw());
        Some(Box::new(Observed {
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
            // They were read once, so they can be read again.
            properties: Properties::parse(properties).unwrap_or_default(),
            delivery: request.delivery,
            grants: request.grants.cloned(),
            evidence: evidence.clone(),
            fuel_max: self.quota.fuel_max,
            removals: self.removals.count(),
        }))
    }

    /// Who answers a request.
    fn choose(&mut self, request: &Request<'_>, now_ms: u64, effects: &mut Effects) -> Choice {
        let mut key = None;
        if self.registry.wants_key() {
            let fuel_max = self.quota.fuel_max;
            let keyed = (self.registry).key_of(request.payload, now_ms, fuel_max);
            for (who, fuel, failure) in keyed.failures {
                let what = "a policy failed to tell the key of a request";
                self.blame(who, request, now_ms, (fuel, &failure, what), effects);
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
    // Who looks for two requests with one identity can only meet himself, so this need not be hard.
    xxh3_128(&parts).to_le_bytes()
}

/// A number for a client, also over its sessions; where nobody knows the client, its session's.
fn number_of(peer: &Peer) -> u64 {
    let mut hasher = DefaultHasher::new();
    match peer.known() {
        Some(client) => client.hash(&mut hasher),
        None => peer.session.hash(&mut hasher),
    }
    hasher.finish()
}

/// When the next key expires, visible or hidden.
fn next_expiry_ms(state: &State) -> Option<u64> {
    let tables = [&state.table, &state.hidden];
    tables.into_iter().filter_map(Table::next_expiry_ms).min()
}

/// Lets the policy decide. What it read by then is what the decision rests on.
pub(super) fn decide(
    call: &mut Call<'_, Transaction>,
    request: &Request<'_>,
    now_ms: u64,
) -> Result<(Answer, Option<Evidence>), Failure> {
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
    if transaction.strayed() {
        return Err(Failure::Malformed(
            "another answer than the first time, for it asked for more".into(),
        ));
    }
    let answer = Answer {
        payload,
        version: outcome.version.map(Stamp::from),
        repeat: outcome.repeat,
        command: outcome.command,
        put: false,
    };
    Ok((answer, transaction.take_evidence()))
}

/// Lets the policy tell the watchers, in what is left of the budget.
fn tell(call: &mut Call<'_, Transaction>) -> Result<Vec<Notice>, Failure> {
    let transaction = call.host();
    if transaction.state().watches.is_empty() {
        return Ok(Vec::new());
    }
    let watches = &transaction.state().watches;
    let watched = |it: &&Change| watches.of(it.key()).next().is_some();
    let changes: Vec<Change> = transaction.changes().filter(watched).cloned().collect();
    notices_of(call, &changes)
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
