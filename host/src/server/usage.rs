//! How much of the table is used, in total and by client.
//!
//! There may be as many owners as keys, so the lock is released between pages, and the sums belong
//! to slightly different times.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::Server;
use crate::limits;
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
fn start_of(client: &str) -> Box<str> {
    match client.floor_char_boundary(limits::ADMIN_CLIENT_ID_BYTES_MAX) {
        end if end < client.len() => format!("{}…", &client[..end]).into(),
        _ => client.into(),
    }
}
