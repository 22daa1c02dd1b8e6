//! The end of keys: what has expired goes, and its watchers hear of it.
//!
//! What enters: the state and `now`. What leaves: the state without the expired keys, and notices. A
//! key goes even where no policy can say so.

use bytes::Bytes;

use super::step::{Effects, Swept};
use super::telling::Telling;
use super::transaction::{Change, State, Transaction, Write};
use super::{Key, Quota, Table};
use crate::clock::Stamp;
use crate::limits;
use crate::policy::{self, Registry};

/// Tells whoever watches now of keys that an earlier run removed, since their time was over.
pub(super) fn tell_again(
    state: Box<State>,
    registry: &mut Registry<Transaction>,
    quota: Quota,
    now_ms: u64,
    removed: &[(Key, Stamp)],
    effects: &mut Effects,
) -> Box<State> {
    let change = |(key, version): &(Key, Stamp)| Change {
        key: key.clone(),
        event: policy::Event::Expired,
        version: *version,
        value: Bytes::new(),
    };
    let changes: Vec<Change> = removed.iter().map(change).collect();
    let telling = Telling::new(registry, now_ms, None);
    let (state, notices, _) = telling.tell_again(state, quota, &changes, effects);
    effects.expired.extend(notices);
    state
}

/// Removes keys that have expired, at most one step's worth.
pub(super) fn sweep(
    mut state: Box<State>,
    registry: &mut Registry<Transaction>,
    quota: Quota,
    now_ms: u64,
    effects: &mut Effects,
) -> Box<State> {
    let due = |table: &Table| -> Vec<Key> {
        table
            .expired(now_ms)
            .take(limits::SWEEP_KEYS_PER_STEP_MAX)
            .cloned()
            .collect()
    };
    let expired = due(&state.table);
    // Nobody watches a policy's own bookkeeping, so there is nobody to tell.
    let forgotten = due(&state.hidden);
    for key in &forgotten {
        state.hidden.remove(key);
    }
    let forgotten = forgotten.into_iter().map(|key| Write {
        key,
        hidden: true,
        entry: None,
        expired: true,
        version: Stamp::default(),
        key_at: None,
        value_at: None,
    });
    let mut transaction = Transaction::sweep(state, quota, now_ms);
    for key in &expired {
        transaction.expire(key);
    }
    let mut telling = Telling::new(registry, now_ms, None);
    for change in transaction.changes().to_vec() {
        if transaction.state().watches.of(&change.key).next().is_none() {
            continue;
        }
        let owner = telling.registry.owner(&change.key);
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
