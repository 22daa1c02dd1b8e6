//! How much of the table is taken, and who owns how much of it.
//!
//! What enters: how many owners are wanted. What leaves: sums, and those who own the most. There may be as many owners as keys,
//! so that the lock is given back again and again, and the sums are of about the same time.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::Server;
use crate::limits;

/// How much of the table is taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Keys, as `max_keys` counts them: a policy's own are among them.
    pub keys: u64,
    /// What they and their owners weigh, in bytes, as `max_bytes` counts them.
    pub bytes: u64,
    /// Clients that own anything.
    pub owners: u64,
    /// Those of them that own the most bytes, the heaviest first.
    pub heaviest: Vec<Owned>,
}

/// A client, and what it owns. The heaviest is the greatest.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Owned {
    /// As `max_client_bytes` counts them.
    pub bytes: u64,
    /// Keys that it wrote last.
    pub keys: u64,
    /// Its client id, or the beginning of a long one and `…`.
    pub client: Box<str>,
}

impl Server {
    /// How much is taken, with at most `count` of the owners.
    pub fn usage(&self, count: usize) -> Usage {
        let (keys, bytes) = self.lock().store.state().load();
        let mut heaviest = BinaryHeap::new();
        let (mut owners, mut from) = (0, Some(0));
        while let Some(at) = from {
            let core = self.lock();
            let page;
            (from, page) = (core.store.state().owners).page(at, limits::OWNERS_PER_TURN);
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

/// A client of a foreign broker names itself at any length.
fn start_of(client: &str) -> Box<str> {
    match client.floor_char_boundary(limits::ADMIN_CLIENT_ID_BYTES_MAX) {
        end if end < client.len() => format!("{}…", &client[..end]).into(),
        _ => client.into(),
    }
}
