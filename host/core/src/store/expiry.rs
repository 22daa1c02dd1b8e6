//! Removes expired keys and notifies their watchers.
//!
//! A key must be removed even if no policy can render the notification; otherwise a failing policy
//! could make keys immortal.

use super::effects::{Effects, Swept};
use super::notification::Recipients;
use super::notifier::Notifier;
use super::owners::NO_OWNER;
use super::state::State;
use super::table::Table;
use super::transaction::Transaction;
use super::write::{Change, Write};
use super::{Entry, Key, Quota};
use crate::clock::Stamp;
use crate::limits;
use crate::policy::{Registry, Share};

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

impl State {
    /// The time at which the next key expires, visible or hidden.
    pub(super) fn next_expiry_ms(&self) -> Option<u64> {
        let tables = [&self.table, &self.hidden];
        tables.into_iter().filter_map(Table::next_expiry_ms).min()
    }

    /// The bytes that records of new deadlines take, at most; of whole entries with `whole`.
    pub(crate) fn postponement_bytes(&self, whole: bool) -> u64 {
        let parts = [&self.table, &self.hidden];
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
    pub(crate) fn postpone_keys(
        &mut self,
        by_ms: u64,
        mut each: impl FnMut(&[NewDeadline], &Self),
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
            let expiring = self.part(hidden).expired(u64::MAX);
            let all: Vec<NewDeadline> = expiring.map(postponed).collect();
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
                    self.set_deadline(deadline);
                }
                each(part, self);
                rest = others;
            }
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
    let share = Share::of(quota.fuel_max, 0);
    let notifier = Notifier::new(registry, now_ms, share);
    let changes = Recipients::of_all(&transaction.state().watches, transaction.changes());
    // The keys are removed even if no notification could be rendered.
    let (transaction, notifications, _) = notifier.notify_all(transaction, changes, effects);
    effects.expired.extend(notifications);
    let (state, mut writes, _) = transaction.commit();
    writes.extend(forgotten);
    effects.swept = Some(Swept {
        now_ms,
        clock: state.hlc.last(),
        writes,
    });
    state
}
