//! Removes expired keys and notifies their watchers.
//!
//! A key must be removed even if no policy can render the notification; otherwise a failing policy
//! could make keys immortal.

use super::effects::{Effects, Swept};
use super::notification::Recipients;
use super::notifier::Notifier;
use super::owners::NO_OWNER;
use super::state::State;
use super::transaction::Transaction;
use super::write::{Change, Write};
use super::{Entry, Key, Quota};
use crate::clock::Stamp;
use crate::limits;
use crate::policy::{Registry, Share};

/// Notifies current watchers of expired keys that an earlier run removed.
pub(super) fn renotify(
    state: Box<State>,
    registry: &mut Registry<Transaction>,
    quota: Quota,
    now_ms: u64,
    removed: &[(Key, Stamp)],
    effects: &mut Effects,
) -> Box<State> {
    let change = |(key, version): &(Key, Stamp)| Change::Expired(key.clone(), *version);
    let changes: Vec<Change> = removed.iter().map(change).collect();
    let notifier = Notifier::new(registry, now_ms, None);
    let (state, notifications, _) = notifier.renotify(state, quota, 0, changes.iter(), effects);
    effects.expired.extend(notifications);
    state
}

/// The latest deadline, in milliseconds since 1970: the standard policy gives no later one, because
/// many clients read integers of 64 bits with a sign.
const EXPIRES_MS_MAX: u64 = i64::MAX.unsigned_abs();

/// A key with a new deadline, because the clock was stepped ahead.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewDeadline {
    /// Whether the key is hidden.
    pub hidden: bool,
    /// The key.
    pub key: Key,
    /// The new deadline, in milliseconds since 1970.
    pub expires_ms: u64,
}

/// The bytes that records of new deadlines take, at most; of whole entries with `whole`.
pub(super) fn postponement_bytes(state: &State, whole: bool) -> u64 {
    let parts = [false, true].map(|hidden| state.part(hidden));
    let keys = parts.into_iter().flat_map(|it| it.expired(u64::MAX));
    let bytes = |entry: &Entry| match whole {
        true => entry.weight(),
        false => entry.key().len() as u64,
    };
    keys.map(|entry| bytes(entry) + limits::NEW_DEADLINE_BYTES_MAX)
        .sum()
}

/// Postpones the deadline of every key by `by_ms`, because the clock was stepped ahead. Calls
/// `each` with new deadlines to record, in parts that fit into a record, and the state that has
/// them.
pub(super) fn postpone(
    state: &mut State,
    by_ms: u64,
    each: &mut dyn FnMut(&[NewDeadline], &State),
) {
    for hidden in [false, true] {
        let postponed = |entry: &Entry| {
            let expires_ms = entry.expires_ms().unwrap_or(0).saturating_add(by_ms);
            NewDeadline {
                hidden,
                key: Key::copy_from_slice(entry.key()),
                expires_ms: expires_ms.min(EXPIRES_MS_MAX),
            }
        };
        let all: Vec<NewDeadline> = (state.part(hidden).expired(u64::MAX))
            .map(postponed)
            .collect();
        let mut rest = &all[..];
        while !rest.is_empty() {
            let mut bytes = 0;
            let part = rest.iter().take(limits::POSTPONED_KEYS_PER_RECORD_MAX);
            let fits = part.take_while(|it| {
                bytes += it.key.len();
                bytes <= limits::POSTPONED_BYTES_PER_RECORD_MAX
            });
            // The first one always fits: a key is shorter than a record.
            let (part, others) = rest.split_at(fits.count().max(1));
            for deadline in part {
                state.set_deadline(deadline);
            }
            each(part, state);
            rest = others;
        }
    }
}

/// The expired visible keys that one step removes, the oldest first. The first one is always among
/// them, so each step makes progress.
fn due(state: &State, now_ms: u64) -> Vec<Entry> {
    let mut watched = 0;
    let expired = state.table.expired(now_ms);
    let expired = expired.take(limits::SWEEP_KEYS_PER_STEP_MAX);
    let due = expired.take_while(|entry| {
        let fits = watched < limits::SWEEP_WATCHES_PER_STEP_MAX;
        watched += state.watches.count_of(entry.key());
        fits
    });
    due.cloned().collect()
}

/// Removes expired keys, up to the limits of one step. The others stay, and no request sees them.
pub(super) fn sweep(
    mut state: Box<State>,
    registry: &mut Registry<Transaction>,
    quota: Quota,
    now_ms: u64,
    effects: &mut Effects,
) -> Box<State> {
    let expired = due(&state, now_ms);
    // Hidden keys have no watchers.
    let forgotten = state.hidden.expired(now_ms);
    let forgotten = forgotten.take(limits::SWEEP_KEYS_PER_STEP_MAX);
    let forgotten = forgotten.map(|entry| {
        let key = Key::copy_from_slice(entry.key());
        Write {
            hidden: true,
            ..Write::of(Change::Expired(key, Stamp::default()))
        }
    });
    let forgotten: Vec<Write> = forgotten.collect();
    state.write_all(&forgotten, NO_OWNER);
    let mut transaction = Transaction::sweep(state, quota, now_ms);
    for entry in &expired {
        transaction.expire(entry.key());
    }
    // Together as much as one request, because all other requests wait.
    let share = Some(Share::of(quota.fuel_max, 0));
    let mut notifier = Notifier::new(registry, now_ms, share);
    let changes: Vec<Change> = transaction.changes().cloned().collect();
    for change in changes {
        let to = Recipients::of(&transaction.state().watches, change.key());
        let Some(to) = to else { continue };
        let owner = notifier.registry.owner(change.key());
        let result;
        (transaction, result) = notifier.notify(owner, transaction, &change, to, effects);
        // The key is removed even if no notification could be rendered.
        effects.expired.extend(result.into_iter().flatten());
    }
    let (state, mut writes, _) = transaction.commit();
    writes.extend(forgotten);
    effects.swept = Some(Swept {
        now_ms,
        clock: state.hlc.last(),
        writes,
    });
    state
}
