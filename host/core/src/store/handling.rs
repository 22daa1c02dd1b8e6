//! Handles a request: chooses its policy, runs it, and commits and remembers the result.

use bytes::Bytes;
use statehouse_mqtt::Properties;
use statehouse_protocol::Peer;
use xxhash_rust::xxh3::{xxh3_64, xxh3_128};

use super::Store;
use super::effects::{Answer, Effects, Handled, RestsOn, Trip, internal_error};
use super::notification::{Notification, Recipients, notify, splice};
use super::notifier::{Attributed, Notifier};
use super::read_set::CapturedReads;
use super::reexecution::SampledRequest;
use super::remembered::{Context, Identity, Outcome, Remembered, StoredPayload};
use super::state::State;
use super::transaction::Transaction;
use super::watch::WatchChange;
use super::write::{Change, Write};
use crate::clock::Stamp;
use crate::limits;
use crate::log::JournalRoom;
use crate::policy::{
    self, Call, CallOutcome, Choice, EndedCall, Failure, Part, Policy, Repeat, Share,
};
use crate::request::{self, Dialect, Request};

/// What a policy decided about a request, with the notifications of its changes.
struct Decision {
    part: Part,
    answer: Answer,
    captured: Option<CapturedReads>,
    notifications: Vec<Notification>,
    /// Of changes that the client missed.
    missed: Vec<Notification>,
}

impl Store {
    pub(super) fn handle(
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
        let (mut transaction, decided) =
            self.run_policy(choice, transaction, request, now_ms, effects);
        let by = self.registry.slot(choice.slot).policy().clone();
        effects.by = Some(by.clone());
        let context = Context {
            now_ms,
            clock,
            dialect: request.dialect,
            policy: by.digest,
        };
        let decision = match decided {
            Ok(decision) => decision,
            Err((failure, is_own)) => {
                by.work.request(effects.fuel, None);
                // A failure of another policy during notification does not count against this one.
                if is_own {
                    let what = "a policy failed; the request changed nothing";
                    let fuel = effects.fuel;
                    self.count_failure(choice, request, now_ms, (fuel, &failure, what), effects);
                }
                effects.failed = Some(failure);
                let answer = internal_error();
                if is_own && choice.part == Part::Active && !self.is_full() {
                    let captured = transaction.take_captured();
                    self.sample(request, &context, &answer, &[], &captured, effects);
                }
                self.remember_failure(request, identified, context, answer, effects);
                return transaction.roll_back();
            }
        };
        by.work.request(effects.fuel, decision.answer.command);
        let answered = (effects.fuel, CallOutcome::Answered);
        self.guard(choice, &by, request.peer, answered, effects);
        self.commit(transaction, decision, request, identified, context, effects)
    }

    /// Answers a request whose policy failed. A redelivery gets the same answer: the next policy
    /// might execute it, after younger requests.
    fn remember_failure(
        &mut self,
        request: &Request<'_>,
        identified: Option<Identity>,
        context: Context,
        answer: Answer,
        effects: &mut Effects,
    ) {
        let identity = identified.unwrap_or_else(|| identity(request));
        let clock = context.clock;
        let remembered = self.remembered(request, identity, context, &answer, None, effects.fuel);
        let recorded = self.may_record_unchanged();
        self.insert(request, &remembered, recorded);
        if recorded {
            effects.handled = Some(Box::new(Handled {
                remembered,
                repeatable: true,
                clock,
                writes: Vec::new(),
            }));
        }
        effects.answer = Some(answer);
    }

    /// Whether the disk has room for nothing.
    fn is_full(&self) -> bool {
        self.quota.journal == JournalRoom::Nothing
    }

    /// Whether a request that changes nothing may be recorded. On a full disk it must not use the
    /// room that removals need, and is remembered in memory only.
    fn may_record_unchanged(&self) -> bool {
        self.quota.journal == JournalRoom::Growth
    }

    fn insert(&mut self, request: &Request<'_>, remembered: &Remembered, recorded: bool) {
        self.duplicates.insert(remembered, recorded);
        self.duplicates
            .evict(request.delivery.session, remembered.context.now_ms);
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
        let digest = chosen.digest();
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
        let share = || Share::of(self.quota.fuel_max, request.payload.len());
        if foreign {
            let changes = Recipients::of_all(&transaction.state().watches, transaction.changes());
            let notifier = Notifier::new(&mut self.registry, now_ms, share());
            let notified;
            (transaction, notified) =
                notifier.notify_for(choice.slot, false, transaction, changes, effects);
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
                notifier.notify_for(choice.slot, true, transaction, missed, effects);
            match notified {
                Ok(notifications) => decision.missed = notifications,
                Err(failure) => return (transaction, Err(failure)),
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
            part,
            mut answer,
            captured: mut reads,
            notifications,
            missed,
        } = decision;
        let begins_watch = transaction.begins_watch();
        let (state, writes, watches) = transaction.commit();
        let watches_durable = state.watches.are_durable();
        if watches_durable && !watches.is_empty() {
            let changes = watches.into_iter().map(|(scope, key, began)| match began {
                true => WatchChange::Began(scope, key, request.dialect),
                false => WatchChange::Ended(scope, key),
            });
            effects.note_watches(request.peer, changes.collect());
        }
        answer.put = writes.iter().any(Write::is_visible_put);
        // A removal that was refused for want of room is not in the captured reads, so a request
        // with a refusal must not be re-executed on them.
        let is_full = self.is_full();
        if part == Part::Active && !is_full {
            self.sample(request, &context, &answer, &writes, &reads, effects);
        }
        let is_shadowed = self.registry.shadow().is_some();
        self.removals.note(&writes, is_shadowed);
        // A rule may write before the standard policy executes a read. A watch must begin again.
        if !writes.is_empty() && !begins_watch {
            answer.repeat = Repeat::Same;
        }
        let repeatable = answer.repeat == Repeat::Same;
        let recorded = !writes.is_empty() || repeatable && self.may_record_unchanged();
        if repeatable || recorded {
            let identity = identified.unwrap_or_else(|| identity(request));
            let is_refused = is_full && effects.exceeded.is_some();
            let kept = reads.take_if(|it| !is_refused && !it.is_large());
            let remembered =
                self.remembered(request, identity, context, &answer, kept, effects.fuel);
            if repeatable {
                self.insert(request, &remembered, recorded);
            }
            if recorded {
                effects.handled = Some(Box::new(Handled {
                    remembered,
                    repeatable,
                    clock: state.hlc.last(),
                    writes,
                }));
            } else {
                reads = remembered.captured.or(reads);
            }
        }
        // A recorded answer waits for its record, which is behind everything that it rests on.
        effects.rests_on = RestsOn::of(reads, watches_durable);
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
            let client = request.peer.shown();
            tracing::error!(%policy, digest = %policy.digest, client, %failure, "{what}");
        }
        let outcome = CallOutcome::failed(failure, policy.start_fuel, self.quota.fuel_max);
        if let Some(outcome) = outcome {
            let ended = (fuel, outcome);
            self.guard(choice, &policy, request.peer, ended, effects);
        }
    }

    /// Counts a call in the guard of the policy, and records a trip in `effects`. A request has at
    /// most one trip, so later calls are not counted: a guard that trips counts from zero, and its
    /// trip must not be lost. Another policy that fails too often trips at its next failure.
    fn guard(
        &mut self,
        choice: Choice,
        by: &Policy<Transaction>,
        peer: &Peer,
        (fuel, outcome): (u64, CallOutcome),
        effects: &mut Effects,
    ) {
        let part = choice.part;
        if effects.tripped.is_some() || choice.by_route {
            return;
        }
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

    /// Copies a request and what the active policy made of it for re-execution, if the request was
    /// sampled. If the policy failed, only a candidate re-executes it, and `captured` are the reads
    /// before the failure.
    fn sample(
        &mut self,
        request: &Request<'_>,
        context: &Context,
        answer: &Answer,
        writes: &[Write],
        captured: &Option<CapturedReads>,
        effects: &mut Effects,
    ) {
        let every = self.supervision.purity_every;
        let for_purity = effects.failed.is_none() && self.turns.purity(every, context.now_ms);
        let shadow = self.registry.shadow();
        let candidate = shadow.filter(|(_, per_mille)| self.turns.shadow(*per_mille));
        if !for_purity && candidate.is_none() {
            return;
        }
        let Some(by) = effects.by.clone() else { return };
        // Copied, so that a queued sample does not retain the buffers of its connection.
        let properties = Bytes::copy_from_slice(request.properties.raw());
        effects.sampled = Some(Box::new(SampledRequest {
            candidate: candidate.map(|(policy, _)| policy.clone()),
            for_purity,
            by,
            failure: effects.failed.clone(),
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
            captured: captured.as_ref().filter(|it| !it.is_large()).cloned(),
            fuel_max: self.quota.fuel_max,
            removals: self.removals.count(),
        }));
    }

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

pub(super) fn identity(request: &Request<'_>) -> Identity {
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
    match peer.known() {
        Some(client) => xxh3_64(client.as_bytes()),
        None => xxh3_64(&peer.session.0.to_le_bytes()),
    }
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
            "a result that rests on other calls of imports than in the first execution".into(),
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

/// Renders the notifications with the remaining fuel of the request. Their recipients are the
/// watchers before the request: a watch begins and ends with the commit.
fn render_notifications(call: &mut Call<'_, Transaction>) -> Result<Vec<Notification>, Failure> {
    let transaction = call.host();
    let changes = Recipients::of_all(&transaction.state().watches, transaction.changes());
    let mut notifications = Vec::new();
    for (change, to) in changes {
        notify(call, &change, to, &mut notifications)?;
    }
    Ok(notifications)
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
