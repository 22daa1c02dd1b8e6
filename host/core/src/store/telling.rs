//! Who tells of a change: the policy that owns its key, in its own words; the built-in one where that cannot.
//!
//! What enters: changes, one after the other, and who owns each key. What leaves: notices. A policy that failed once
//! says no more in the same step, since it would most likely fail again while everybody waits.

use super::Quota;
use super::effects::Effects;
use super::notice::{Notice, told_by};
use super::state::State;
use super::transaction::Transaction;
use super::write::Change;
use crate::limits;
use crate::policy::{Failure, Registry, Share, fuel};

/// Tells of the changes of one step.
pub(super) struct Telling<'a> {
    pub(super) registry: &'a mut Registry<Transaction>,
    pub(super) now_ms: u64,
    /// What all owners may take together; beyond it the built-in policy speaks for them.
    pub(super) share: Option<Share>,
    /// Those that failed.
    silent: Vec<usize>,
}

impl<'a> Telling<'a> {
    /// Nobody has failed yet.
    pub(super) fn new(
        registry: &'a mut Registry<Transaction>,
        now_ms: u64,
        share: Option<Share>,
    ) -> Self {
        Self {
            registry,
            now_ms,
            share,
            silent: Vec::new(),
        }
    }

    /// Tells all who watch a key of its change. What an owner fails at counts against that owner.
    ///
    /// # Errors
    /// The failure of the built-in policy, where not even that could tell.
    pub(super) fn tell(
        &mut self,
        owner: usize,
        mut transaction: Transaction,
        change: &Change,
        effects: &mut Effects,
    ) -> (Transaction, Result<Vec<Notice>, Failure>) {
        let built_in = self.registry.built_in();
        let heard = owner != built_in
            && !self.silent.contains(&owner)
            && self.share.as_ref().is_none_or(Share::is_left);
        if heard {
            let (told, burnt);
            (transaction, told, burnt) = told_by(self.registry.slot(owner), transaction, change);
            if let Some(share) = &mut self.share {
                share.burn(burnt);
            }
            match told {
                Ok(notices) => return (transaction, Ok(notices)),
                Err(failure) => {
                    self.silent.push(owner);
                    self.failed(owner, &failure, effects);
                }
            }
        }
        let (transaction, told, _) = told_by(self.registry.slot(built_in), transaction, change);
        if let Err(failure) = &told {
            self.failed(built_in, failure, effects);
        }
        (transaction, told)
    }

    /// Tells of changes that an earlier run made and may not have told of, to whoever watches these keys now. What could be
    /// told under any bound of fuel still can, for a request with so many bytes if one made them; but all together take no more
    /// than one request may. With the notices, whether anything could not be told.
    pub(super) fn tell_again<'c>(
        mut self,
        state: Box<State>,
        quota: Quota,
        payload_bytes: usize,
        changes: impl Iterator<Item = &'c Change>,
        effects: &mut Effects,
    ) -> (Box<State>, Vec<Notice>, bool) {
        let quota = Quota {
            fuel_max: fuel(limits::FUEL_PER_CALL_MAX, payload_bytes),
            ..quota
        };
        self.share = Some(Share::of(limits::FUEL_PER_CALL_MAX, payload_bytes));
        let mut transaction = Transaction::sweep(state, quota, self.now_ms);
        let (mut notices, mut failed) = (Vec::new(), false);
        for change in changes {
            if !transaction.state().watches.has(change.key()) {
                continue;
            }
            let owner = self.registry.owner(change.key());
            let told;
            (transaction, told) = self.tell(owner, transaction, change, effects);
            failed |= told.is_err();
            notices.extend(told.into_iter().flatten());
        }
        (transaction.roll_back(), notices, failed)
    }

    fn failed(&mut self, speaker: usize, failure: &Failure, effects: &mut Effects) {
        let policy = self.registry.slot(speaker).policy().clone();
        effects.failures += 1;
        policy.work.failure(failure);
        if policy.counters.may_log(self.now_ms) {
            tracing::error!(%policy, digest = %policy.digest, %failure, "a policy failed to tell of a change");
        }
    }
}
