//! Answers a redelivered request with the bytes of the first answer.
//!
//! The request is re-executed on its captured reads, and nothing is stored again. The watches that
//! it ended end again. If an earlier run may not have sent the notifications, they are sent again.

use super::effects::{Answer, Effects, INTERNAL_ERROR, RestsOn, internal_error};
use super::notifier::renotify;
use super::remembered::{Outcome, Remembered, StoredPayload};
use super::replay;
use super::state::State;
use super::step::{Store, end_watches};
use super::transaction::Transaction;
use crate::policy::{Failure, Policy, Repeat};
use crate::request::Request;

/// How the answer to a redelivery was obtained.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rerun {
    /// Re-execution gave the same answer.
    Same,
    /// The stored answer was used: the reads were not captured, or re-execution took too long.
    Stored,
    /// Re-execution gave another answer. The stored one was used.
    Different,
}

/// What became of the notifications of a request that an earlier run handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Renotified {
    /// They are sent to the current watchers.
    Sent,
    /// Not all of them could be rendered: the policy or the captured reads are missing, or a policy
    /// failed.
    Incomplete,
}

impl Store {
    /// Answers a redelivery. The same policy on the same reads gives the same bytes. Notifications
    /// are sent again only if an earlier run may not have sent them.
    pub(super) fn answer_redelivery(
        &mut self,
        mut state: Box<State>,
        original: &Remembered,
        request: &Request<'_>,
        now_ms: u64,
        effects: &mut Effects,
    ) -> Box<State> {
        effects.by = self.registry.by_digest(&original.context.policy);
        let reexecuted = effects.by.as_ref().and_then(|policy| {
            let captured = original.captured.as_ref()?;
            Some(replay::reexecute(policy, original, captured, request))
        });
        let (reexecuted, transaction) = reexecuted.unzip();
        let outcome = &original.outcome;
        let rerun = match &reexecuted {
            None => Rerun::Stored,
            Some(Err(failure)) if failure.is_of_machine() => Rerun::Stored,
            Some(Ok(answer)) if outcome.is(answer) => Rerun::Same,
            Some(_) => Rerun::Different,
        };
        if rerun == Rerun::Different
            && let Some(policy) = &effects.by
            && let Some(reexecuted) = &reexecuted
        {
            report_difference(policy, outcome, reexecuted, request, now_ms);
        }
        effects.repeated = Some(rerun);
        // The record of the original may not be durable yet.
        effects.rests_on = RestsOn::Everything;
        effects.answer = Some(match (reexecuted, &outcome.payload) {
            (Some(Ok(answer)), _) if rerun == Rerun::Same => answer,
            (_, StoredPayload::Whole(payload)) => Answer {
                payload: payload.clone(),
                version: outcome.version,
                repeat: Repeat::Same,
                command: outcome.command,
                put: outcome.put,
            },
            (_, StoredPayload::Digest(_)) => internal_error(),
        });
        let transaction = transaction.filter(|_| rerun == Rerun::Same);
        if let Some(transaction) = &transaction {
            // A KEYNOTIFY that was redelivered before this request has begun the watch again.
            let ended = transaction.ended_watches().collect();
            end_watches(&mut state.watches, request.peer, ended, effects);
        }
        // Clients of a foreign broker stay connected across a restart, and which notifications the
        // earlier run has sent is unknown.
        let failed = outcome.payload.is(INTERNAL_ERROR);
        let may_be_unnotified = !failed
            && state.watches.are_durable()
            && !state.watches.is_empty()
            && original.number < self.earlier_below;
        if !may_be_unnotified || !self.renotified.insert(original.number) {
            return state;
        }
        let Some(transaction) = transaction else {
            effects.renotified = Some(Renotified::Incomplete);
            return state;
        };
        let (state, notifications, failed) = renotify(
            &mut self.registry,
            now_ms,
            state,
            self.quota,
            request.payload.len(),
            transaction.changes(),
            effects,
        );
        effects.renotified = match failed {
            true => Some(Renotified::Incomplete),
            false => (!notifications.is_empty()).then_some(Renotified::Sent),
        };
        effects.notifications = notifications;
        state
    }
}

/// Counts and logs that a policy gave a redelivered request another answer than the first time.
fn report_difference(
    policy: &Policy<Transaction>,
    outcome: &Outcome,
    reexecuted: &Result<Answer, Failure>,
    request: &Request<'_>,
    now_ms: u64,
) {
    policy.work.different();
    if !policy.counters.may_log(now_ms) {
        return;
    }
    let client = request.peer.shown();
    let first = outcome.payload.digest();
    let now = match reexecuted {
        Ok(answer) => blake3::hash(&answer.payload).to_string(),
        Err(failure) => failure.to_string(),
    };
    tracing::error!(%policy, digest = %policy.digest, client, %first, %now, "a redelivered request was answered otherwise by the same policy on the same reads; the first answer is sent");
}

impl Outcome {
    /// Whether the answer is the recorded one.
    fn is(&self, answer: &Answer) -> bool {
        self.payload.is(&answer.payload) && self.version == answer.version
    }
}
