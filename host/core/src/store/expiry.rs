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
use super::{Entry, Key, Quota, Table};
use crate::clock::Stamp;
use crate::limits;
use crate::policy::Registry;

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

/// Postpones the deadline of every key by `by_ms`, because the clock was stepped ahead. Calls
/// `each` with writes to record, in parts that fit into a record.
pub(super) fn postpone(state: &mut State, now_ms: u64, by_ms: u64, each: &mut dyn FnMut(Swept)) {
    for hidden in [false, true] {
        let expiring: Vec<Entry> = state.part(hidden).expired(u64::MAX).cloned().collect();
        let mut entries = expiring.iter().peekable();
        while entries.peek().is_some() {
            let (mut writes, mut bytes) = (Vec::new(), 0);
            while let Some(entry) = entries.next_if(|_| {
                writes.len() < limits::POSTPONED_KEYS_PER_RECORD_MAX
                    && bytes < limits::POSTPONED_BYTES_PER_RECORD_MAX
            }) {
                bytes += entry.weight();
                writes.push(Write {
                    hidden,
                    ..Write::of(Change::Set(entry.postponed(by_ms)))
                });
            }
            state.write_by(&writes, None);
            each(Swept {
                now_ms,
                clock: state.hlc.last(),
                writes,
            });
        }
    }
}

/// Removes expired keys, up to the limit of one step.
pub(super) fn sweep(
    mut state: Box<State>,
    registry: &mut Registry<Transaction>,
    quota: Quota,
    now_ms: u64,
    effects: &mut Effects,
) -> Box<State> {
    let due = |table: &Table| -> Vec<Entry> {
        table
            .expired(now_ms)
            .take(limits::SWEEP_KEYS_PER_STEP_MAX)
            .cloned()
            .collect()
    };
    let expired = due(&state.table);
    // Hidden keys have no watchers.
    let forgotten = due(&state.hidden);
    let forgotten = forgotten.into_iter().map(|entry| {
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
    let mut notifier = Notifier::new(registry, now_ms, None);
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
