//! Renders notifications with the policy that owns each key, and falls back to the built-in policy.
//!
//! A policy that fails is not called again in the same step: it would most likely fail again, and
//! each failure delays all requests.

use super::Quota;
use super::effects::Effects;
use super::notification::{Notification, Recipients, notify_as};
use super::state::State;
use super::transaction::Transaction;
use super::write::Change;
use crate::limits;
use crate::policy::{Failure, Registry, Share, fuel};

/// The result of a chosen policy and of those that notify for it. The error says whether the chosen
/// policy itself failed.
pub(super) type Attributed<T> = Result<T, (Failure, bool)>;

/// Renders the notifications of the changes of one step.
pub(super) struct Notifier<'a> {
    registry: &'a mut Registry<Transaction>,
    now_ms: u64,
    /// The fuel that all owning policies may use together. When it is used up, the built-in policy
    /// renders the rest.
    share: Share,
    /// Policies that failed in this step, by slot.
    failing: Vec<usize>,
}

impl<'a> Notifier<'a> {
    pub(super) fn new(registry: &'a mut Registry<Transaction>, now_ms: u64, share: Share) -> Self {
        Self {
            registry,
            now_ms,
            share,
            failing: Vec::new(),
        }
    }

    /// Renders the notifications of one change. A failure counts against the policy that failed.
    /// Fails if the built-in policy fails, too.
    fn notify(
        &mut self,
        owner: usize,
        mut transaction: Box<Transaction>,
        change: &Change,
        to: Recipients,
        effects: &mut Effects,
    ) -> (Box<Transaction>, Result<Vec<Notification>, Failure>) {
        let built_in = self.registry.built_in();
        let may_call = owner != built_in && !self.failing.contains(&owner) && self.share.is_left();
        if may_call {
            let (result, fuel_used);
            (transaction, result, fuel_used) =
                notify_as(self.registry.slot(owner), transaction, change, to.clone());
            self.share.spend(fuel_used);
            match result {
                Ok(notifications) => return (transaction, Ok(notifications)),
                Err(failure) => {
                    self.failing.push(owner);
                    self.count_failure(owner, &failure, effects);
                }
            }
        }
        let slot = self.registry.slot(built_in);
        let (transaction, result, _) = notify_as(slot, transaction, change, to);
        if let Err(failure) = &result {
            self.count_failure(built_in, failure, effects);
        }
        (transaction, result)
    }

    /// Renders the notifications of a request that policy `by` handled: of its own changes, or of
    /// those that its client `missed`. Each change is rendered by the policy that owns its key, or
    /// else by policy `by`. At the request's own changes, a failure of policy `by` fails the
    /// request, and the fuel of policy `by` counts as that of the request.
    pub(super) fn notify_for(
        mut self,
        by: usize,
        missed: bool,
        mut transaction: Box<Transaction>,
        changes: Vec<(Change, Recipients)>,
        effects: &mut Effects,
    ) -> (Box<Transaction>, Attributed<Vec<Notification>>) {
        let mut notifications = Vec::new();
        for (change, to) in changes {
            let owner = self.registry.route_owner(change.key()).unwrap_or(by);
            let may_call = by == self.registry.built_in() || self.share.is_left();
            let is_own = !missed && owner == by && may_call;
            let result;
            if is_own {
                let fuel_used;
                (transaction, result, fuel_used) =
                    notify_as(self.registry.slot(by), transaction, &change, to);
                self.share.spend(fuel_used);
                effects.fuel += fuel_used;
            } else {
                (transaction, result) = self.notify(owner, transaction, &change, to, effects);
            }
            match result {
                Ok(result) => notifications.extend(result),
                Err(failure) => return (transaction, Err((failure, is_own))),
            }
        }
        (transaction, Ok(notifications))
    }

    /// Renders the notifications of a sweep, or of changes that an earlier run made. The returned
    /// flag says whether any change could not be rendered.
    pub(super) fn notify_all(
        mut self,
        mut transaction: Box<Transaction>,
        changes: Vec<(Change, Recipients)>,
        effects: &mut Effects,
    ) -> (Box<Transaction>, Vec<Notification>, bool) {
        let (mut notifications, mut failed) = (Vec::new(), false);
        for (change, to) in changes {
            let owner = self.registry.owner(change.key());
            let result;
            (transaction, result) = self.notify(owner, transaction, &change, to, effects);
            failed |= result.is_err();
            notifications.extend(result.into_iter().flatten());
        }
        (transaction, notifications, failed)
    }

    fn count_failure(&mut self, slot: usize, failure: &Failure, effects: &mut Effects) {
        let policy = self.registry.slot(slot).policy().clone();
        effects.failures += 1;
        policy.work.failure(failure, self.now_ms);
        if policy.counters.may_log(self.now_ms) {
            tracing::error!(%policy, digest = %policy.digest, %failure, "a policy failed to render a notification");
        }
    }
}

/// Notifies current watchers of changes that an earlier run made and may not have sent.
///
/// The fuel limit is the maximum that any configuration allows for one request of `payload_bytes`,
/// shared by all changes. So every change that could be rendered under any configuration still can.
/// The returned flag says whether any change could not be rendered.
pub(super) fn renotify<'a>(
    registry: &mut Registry<Transaction>,
    now_ms: u64,
    state: Box<State>,
    quota: Quota,
    payload_bytes: usize,
    changes: impl Iterator<Item = &'a Change>,
    effects: &mut Effects,
) -> (Box<State>, Vec<Notification>, bool) {
    let quota = Quota {
        fuel_max: fuel(limits::FUEL_PER_CALL_MAX, payload_bytes),
        ..quota
    };
    let share = Share::of(limits::FUEL_PER_CALL_MAX, payload_bytes);
    let notifier = Notifier::new(registry, now_ms, share);
    let changes = Recipients::of_all(&state.watches, changes);
    let transaction = Transaction::sweep(state, quota, now_ms);
    let (transaction, notifications, failed) = notifier.notify_all(transaction, changes, effects);
    (transaction.roll_back(), notifications, failed)
}
