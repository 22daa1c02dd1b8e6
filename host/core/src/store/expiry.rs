//! The end of keys: what has expired goes, and its watchers hear of it.
//!
//! What enters: the state and `now`. What leaves: the state without the expired keys, and notices. A
//! key goes even where no policy can say so.

use super::effects::{Effects, Swept};
use super::owners::NOBODY;
use super::state::State;
use super::telling::Telling;
use super::transaction::Transaction;
use super::write::{Change, Write};
use super::{Entry, Key, Quota, Table};
use crate::clock::Stamp;
use crate::limits;
use crate::policy::Registry;

/// Tells whoever watches now of keys that an earlier run removed, since their time was over.
pub(super) fn tell_again(
    state: Box<State>,
    registry: &mut Registry<Transaction>,
    quota: Quota,
    now_ms: u64,
    removed: &[(Key, Stamp)],
    effects: &mut Effects,
) -> Box<State> {
    let change = |(key, version): &(Key, Stamp)| Change::Expired(key.clone(), *version);
    let changes: Vec<Change> = removed.iter().map(change).collect();
    let telling = Telling::new(registry, now_ms, None);
    let (state, notices, _) = telling.tell_again(state, quota, 0, changes.iter(), effects);
    effects.expired.extend(notices);
    state
}

/// Moves the deadline of every key, since time went ahead by so much without passing. `each` gets the writes to record, in
/// parts that are small enough for a record.
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

/// Removes keys that have expired, at most one step's worth.
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
    // Nobody watches a policy's own bookkeeping, so there is nobody to tell.
    let forgotten = due(&state.hidden);
    let forgotten = forgotten.into_iter().map(|entry| {
        let key = Key::copy_from_slice(entry.key());
        Write {
            hidden: true,
            ..Write::of(Change::Expired(key, Stamp::default()))
        }
    });
    let forgotten: Vec<Write> = forgotten.collect();
    state.write_all(&forgotten, NOBODY);
    let mut transaction = Transaction::sweep(state, quota, now_ms);
    for entry in &expired {
        transaction.expire(entry.key());
    }
    let mut telling = Telling::new(registry, now_ms, None);
    let changes: Vec<Change> = transaction.changes().cloned().collect();
    for change in changes {
        if !transaction.state().watches.has(change.key()) {
            continue;
        }
        let owner = telling.registry.owner(change.key());
        let told;
        (transaction, told) = telling.tell(owner, transaction, &change, effects);
        // A key goes even where nobody can say so.
        effects.expired.extend(told.into_iter().flatten());
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
