//! A request that came again: it is answered as the first time.
//!
//! What enters: a request, what is remembered of its original, and the state. What leaves: the same answer. Nothing is
//! stored again. Where an earlier run may not have told the watchers, they are told again; nothing else is done twice.

use super::effects::{Answer, Effects, RestsOn, internal_error};
use super::remembered::{Kept, Outcome, Remembered};
use super::replay;
use super::state::State;
use super::step::Store;
use super::telling::Telling;
use crate::policy::{Failure, Repeat};
use crate::request::Request;

/// What became of a duplicate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rerun {
    /// It ran again and gave the same.
    Same,
    /// Only its answer was kept, or the machine was too slow to run it.
    Stored,
    /// It ran again and gave something else: the stored answer counts.
    Different,
}

/// What became of the notifications of a duplicate whose original an earlier run handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToldAgain {
    /// They are sent again, to whoever watches now.
    Told,
    /// Not all could be said again: the policy or what it saw is not there any more, or nobody could tell of a change.
    Impossible,
}

impl Store {
    /// Answers a duplicate: the same policy on the same state gives the same bytes. Nothing is stored
    /// again, and nobody is told again but where the run before may not have.
    pub(super) fn repeat(
        &mut self,
        state: Box<State>,
        original: &Remembered,
        request: &Request<'_>,
        now_ms: u64,
        effects: &mut Effects,
    ) -> Box<State> {
        effects.by = self.registry.by_digest(&original.context.policy);
        let again = effects.by.as_ref().and_then(|policy| {
            let evidence = original.evidence.as_ref()?;
            Some(replay::again(policy, original, evidence, request))
        });
        let (again, transaction) = again.unzip();
        let outcome = &original.outcome;
        let rerun = match &again {
            // A slow machine says nothing about the policy.
            None | Some(Err(Failure::Watchdog)) => Rerun::Stored,
            Some(Ok(answer)) if outcome.is(answer) => Rerun::Same,
            Some(_) => Rerun::Different,
        };
        if rerun == Rerun::Different
            && let Some(policy) = &effects.by
        {
            policy.work.different();
            if policy.counters.may_log(now_ms) {
                let client = request.peer.client.escape_debug();
                let first = outcome.payload.digest();
                let now = match &again {
                    Some(Ok(answer)) => blake3::hash(&answer.payload).to_string(),
                    Some(Err(failure)) => failure.to_string(),
                    None => String::new(),
                };
                tracing::error!(%policy, digest = %policy.digest, %client, %first, %now, "a duplicate was answered otherwise by the same policy on the same state; its first answer counts");
            }
        }
        effects.repeated = Some(rerun);
        // The original may still be on its way to the disk.
        effects.rests_on = RestsOn::Everything;
        effects.answer = Some(match (again, &outcome.payload) {
            (Some(Ok(answer)), _) if rerun == Rerun::Same => answer,
            (_, Kept::Whole(payload)) => Answer {
                payload: payload.clone(),
                version: outcome.version,
                repeat: Repeat::Same,
                command: outcome.command,
                put: outcome.put,
            },
            (_, Kept::Digest(_)) => internal_error(),
        });
        // Clients of a foreign broker were there all the time, and nobody knows what an earlier run has told them.
        let may_be_untold = state.watches.are_kept()
            && !state.watches.is_empty()
            && original.number < self.earlier_below;
        if !may_be_untold || !self.told_again.insert(original.number) {
            return state;
        }
        let Some(transaction) = transaction.filter(|_| rerun == Rerun::Same) else {
            effects.told_again = Some(ToldAgain::Impossible);
            return state;
        };
        let telling = Telling::new(&mut self.registry, now_ms, None);
        let (state, notices, failed) = telling.tell_again(
            state,
            self.quota,
            request.payload.len(),
            transaction.changes(),
            effects,
        );
        effects.told_again = match failed {
            true => Some(ToldAgain::Impossible),
            false => (!notices.is_empty()).then_some(ToldAgain::Told),
        };
        effects.notices = notices;
        state
    }
}

impl Outcome {
    /// Whether this is that answer.
    fn is(&self, answer: &Answer) -> bool {
        self.payload.is(&answer.payload) && self.version == answer.version
    }
}
