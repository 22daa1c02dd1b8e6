//! How much of the table is used, in total and by client.
//!
//! There may be as many owners as keys, so the lock is released between pages, and the sums belong
//! to slightly different times.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

use super::Server;
use statehouse_config::limits;
use statehouse_core::store::Peer;

/// How much of the table is used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Keys, as `max_keys` counts them, including the policies' own.
    pub keys: u64,
    /// The bytes of keys and owners, as `max_bytes` counts them.
    pub bytes: u64,
    /// The number of clients that own keys.
    pub owners: u64,
    /// The clients that own the most bytes, in descending order.
    pub heaviest: Vec<Owned>,
}

/// A client and its share. Ordered by bytes.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Owned {
    /// Bytes, as `max_client_bytes` counts them.
    pub bytes: u64,
    /// Keys that this client wrote last.
    pub keys: u64,
    /// The client id; a long one is cut and ends with `…`.
    pub client: Box<str>,
}

impl Server {
    /// How many keys each of these clients watches.
    pub fn watch_counts(&self, peers: &[Peer]) -> Vec<usize> {
        let mut counts = Vec::with_capacity(peers.len());
        for peers in peers.chunks(limits::OWNERS_PER_TURN) {
            let locked = self.lock();
            let watches = &locked.core.store().state().watches;
            counts.extend(peers.iter().map(|peer| watches.count_by(peer)));
        }
        counts
    }

    /// How many locks each of these clients holds: keys that expire, and whose value is the id of
    /// the client that wrote them. Examines only the keys that expire first.
    pub fn lock_counts<'a>(&self, clients: impl Iterator<Item = &'a str>) -> HashMap<&'a str, u64> {
        let mut counts: HashMap<&str, u64> = clients.map(|client| (client, 0)).collect();
        let (mut after, mut left) = (None, limits::ADMIN_LOCKS_EXAMINED_MAX);
        while left > 0 {
            let turn = limits::EXPIRING_KEYS_PER_TURN.min(left);
            let before = left;
            let locked = self.lock();
            let expiring = locked.core.store().state().expiring(after);
            for (entry, owner, place) in expiring.take(turn) {
                (after, left) = (Some(place), left - 1);
                let holder = owner.filter(|it| it.as_bytes() == entry.value());
                if let Some(count) = holder.and_then(|it| counts.get_mut(it)) {
                    *count += 1;
                }
            }
            if before - left < turn {
                break;
            }
        }
        counts
    }

    /// How much is used, with the `count` largest owners.
    pub fn usage(&self, count: usize) -> Usage {
        let (keys, bytes) = self.lock().core.store().state().load();
        let mut heaviest = BinaryHeap::new();
        let (mut owners, mut from) = (0, Some(0));
        while let Some(at) = from {
            let locked = self.lock();
            let page;
            (from, page) = (locked.core.store().state().owners).page(at, limits::OWNERS_PER_TURN);
            for (client, keys, bytes) in page {
                owners += 1;
                let least = heaviest.peek().map(|Reverse(Owned { bytes, .. })| *bytes);
                if heaviest.len() < count || least.is_some_and(|least| bytes > least) {
                    let client = start_of(client);
                    heaviest.push(Reverse(Owned {
                        bytes,
                        keys,
                        client,
                    }));
                    if heaviest.len() > count {
                        heaviest.pop();
                    }
                }
            }
        }
        let heaviest = heaviest.into_sorted_vec().into_iter();
        Usage {
            keys,
            bytes,
            owners,
            heaviest: heaviest.map(|Reverse(it)| it).collect(),
        }
    }
}

/// Client ids of a foreign broker may have any length.
pub(super) fn start_of(client: &str) -> Box<str> {
    match client.floor_char_boundary(limits::ADMIN_CLIENT_ID_BYTES_MAX) {
        end if end < client.len() => format!("{}…", &client[..end]).into(),
        _ => client.into(),
    }
}
