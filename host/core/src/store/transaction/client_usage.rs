//! Checks what the client of a request owns against its quota.
//!
//! Far from the quota, a put costs one look at the client's sums. The previous owner of each key is
//! determined only if the result depends on it.

use super::super::owners::{NO_OWNER, Owner};
use super::super::quota::Exceeded;
use super::{Origin, Transaction, Write};

/// What the client of a request owns.
#[derive(Clone, Copy)]
pub(super) struct ClientUsage {
    /// Its owner number; `None` if it owned nothing before.
    owner: Option<Owner>,
    /// An upper bound of its keys and bytes, including everything staged.
    most: (u64, u64),
}

impl Transaction {
    /// Starts counting at the first put of the request.
    pub(super) fn count_client_usage(&mut self, key: &[u8], hidden: bool) {
        let Some(Origin { peer, .. }) = &self.origin else {
            return;
        };
        if self.client_usage.is_none() {
            let owner = self.state.owners.find(&peer.client);
            if owner.is_none() {
                self.load.1 += self.state.cost_of_entering(&peer.client, key, hidden);
            }
            let most = owner.map_or((0, 0), |it| self.state.owners.load(it));
            self.client_usage = Some(ClientUsage { owner, most });
        }
    }

    /// Checks the quota of the client after a put of `bytes` was staged.
    pub(super) fn check_client_usage(&mut self, bytes: u64) -> Result<(), Exceeded> {
        let Some(ClientUsage { owner, most }) = &mut self.client_usage else {
            return Ok(());
        };
        *most = (most.0 + 1, most.1 + bytes);
        // There is nearly always room even if every key is new to the client, so the previous owner
        // does not matter.
        if self.quota.check_client((0, 0), *most).is_ok() {
            return Ok(());
        }
        let owner = *owner;
        let before = self.owned(owner, self.staged.len() - 1);
        let after = self.owned(owner, self.staged.len());
        self.client_usage = Some(ClientUsage { owner, most: after });
        self.quota.check_client(before, after)
    }

    /// Keys and bytes that `owner` has after the first `staged` staged writes.
    fn owned(&self, owner: Option<Owner>, staged: usize) -> (u64, u64) {
        let (mut keys, mut bytes) = owner.map_or((0, 0), |it| self.state.owners.load(it));
        let staged = &self.staged[..staged];
        for (at, write) in staged.iter().enumerate() {
            let same = |it: &Write| it.hidden == write.hidden && it.key() == write.key();
            let held = || self.state.part(write.hidden).owned(write.key());
            if !staged[..at].iter().any(same)
                && let Some((entry, _)) = held().filter(|(_, before)| Some(*before) == owner)
            {
                (keys, bytes) = (keys - 1, bytes - entry.weight());
            }
            if !staged[at + 1..].iter().any(same)
                && let Some(entry) = write.entry()
            {
                (keys, bytes) = (keys + 1, bytes + entry.weight());
            }
        }
        (keys, bytes)
    }

    /// The owner of the keys that were put: the client, which gets an owner number if it has none.
    pub(super) fn owner(&mut self) -> Owner {
        match (&self.client_usage, &self.origin) {
            (Some(ClientUsage { owner, .. }), Some(Origin { peer, .. })) => {
                owner.unwrap_or_else(|| self.state.owners.enter(&peer.client))
            }
            _ => NO_OWNER,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use crate::limits::{ENTRY_OVERHEAD_BYTES, OWNER_OVERHEAD_BYTES};
    use crate::policy::{Access, Denial, Fault, Host};
    use crate::store::{Owners, Quota, State};

    const CLIENTS: [&str; 3] = ["", "a", "a client with a long name"];

    fn put(transaction: &mut Transaction, key: &str, bytes: usize) -> Result<(), Denial> {
        let put = transaction.put_plain(key.as_bytes(), &vec![0; bytes]);
        put.map(drop)
    }

    /// An operation of a policy on a visible or hidden key.
    #[derive(Clone, Debug)]
    enum Operation {
        Put(usize),
        Delete,
    }

    type Keys = BTreeMap<(bool, &'static str), (&'static str, u64)>;

    fn owned(keys: &Keys, client: &str) -> (u64, u64) {
        let own = keys.values().filter(|(owner, _)| *owner == client);
        own.fold((0, 0), |sum, (_, weight)| (sum.0 + 1, sum.1 + weight))
    }

    fn operations() -> impl Strategy<Value = Vec<(bool, &'static str, Operation)>> {
        let key = prop::sample::select(&["k1", "k2", "k3", "k4"][..]);
        let operation = prop_oneof![
            4 => (0usize..100).prop_map(Operation::Put),
            1 => Just(Operation::Delete),
        ];
        prop::collection::vec((prop::bool::weighted(0.2), key, operation), 1..8)
    }

    proptest! {
        /// Requests with several writes of visible and hidden keys. Some are refused, some are
        /// rolled back.
        #[test]
        fn client_sums_match_a_model(
            requests in prop::collection::vec((0..CLIENTS.len(), operations(), prop::bool::weighted(0.8)), 1..30),
        ) {
            let quota = Quota {
                client_keys_max: 3,
                client_bytes_max: 3 * ENTRY_OVERHEAD_BYTES + 150,
                keys_max: 7,
                ..Quota::default()
            };
            let (mut state, mut keys) = (Box::<State>::default(), Keys::new());
            for (client, operations, commits) in requests {
                let client = CLIENTS[client];
                let mut transaction = Transaction::of_client(state, quota, client);
                let mut staged = keys.clone();
                for (hidden, key, operation) in operations {
                    let access = if hidden { Access::Hidden } else { Access::Write };
                    transaction.head(key.as_bytes(), access).unwrap();
                    match operation {
                        Operation::Delete => {
                            let there = staged.remove(&(hidden, key)).is_some();
                            prop_assert_eq!(transaction.delete(key.as_bytes()).ok(), Some(there));
                        }
                        Operation::Put(bytes) => {
                            let mut after = staged.clone();
                            let weight = (key.len() + bytes) as u64 + ENTRY_OVERHEAD_BYTES;
                            after.insert((hidden, key), (client, weight));
                            let owns = quota.check_client(owned(&staged, client), owned(&after, client));
                            let fits = after.len() <= 7 && owns.is_ok();
                            match put(&mut transaction, key, bytes) {
                                Ok(()) => prop_assert!(fits, "{:?}", owns),
                                Err(Denial::Fault(Fault::Quota)) => prop_assert!(!fits),
                                Err(other) => prop_assert!(false, "{:?}", other),
                            }
                            if fits {
                                staged = after;
                            }
                        }
                    }
                }
                state = match commits {
                    true => {
                        keys = staged;
                        transaction.commit().0
                    }
                    false => transaction.roll_back(),
                };
                let mut cost = 0;
                for client in CLIENTS {
                    let number = state.owners.find(client);
                    let due = owned(&keys, client);
                    prop_assert_eq!(number.map_or((0, 0), |it| state.owners.load(it)), due);
                    prop_assert_eq!(number.is_some(), due.0 > 0, "{:?} has a row", client);
                    cost += number.map_or(0, |_| Owners::cost(client));
                }
                prop_assert_eq!(state.owners.bytes(), cost);
                for ((hidden, key), (owner, _)) in &keys {
                    prop_assert_eq!(state.owner(key.as_bytes(), *hidden), Some(*owner));
                }
            }
        }
    }

    /// Otherwise client ids could fill the store: one key, rewritten under many long ids.
    #[test]
    fn new_owner_is_charged_for_its_client_id() {
        let id = "x".repeat(1_000);
        let mut quota = Quota {
            bytes_max: 1_000,
            ..Quota::default()
        };
        let mut transaction = Transaction::of_client(Box::default(), quota, &id);
        for _ in 0..2 {
            assert!(put(&mut transaction, "k", 1).is_err());
        }
        quota.bytes_max = 1_000 + OWNER_OVERHEAD_BYTES + 2 + ENTRY_OVERHEAD_BYTES;
        let mut transaction = Transaction::of_client(transaction.roll_back(), quota, &id);
        assert!(put(&mut transaction, "k", 1).is_ok());
        // A client that takes over the only key of another one replaces it in the sums.
        let mut transaction =
            Transaction::of_client(transaction.commit().0, quota, &id.replace('x', "y"));
        assert!(put(&mut transaction, "k", 1).is_ok());
        let mut transaction = Transaction::of_client(transaction.commit().0, quota, "z");
        assert!(put(&mut transaction, "l", 1).is_err());
        assert!(transaction.delete(b"k").unwrap());
        let mut transaction = Transaction::of_client(transaction.commit().0, quota, "z");
        assert!(put(&mut transaction, "l", 1).is_ok());
    }
}
