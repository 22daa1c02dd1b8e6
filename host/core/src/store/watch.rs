//! Watches: which client is notified of which key, in which dialect.
//!
//! A watch belongs to a client id and a key. With the embedded broker it ends with the connection
//! that made it. Clients of a foreign broker stay connected while this process is down, so their
//! watches are durable: they are recorded, and recovered after a restart. These events end them:
//!
//! * the client's `KEYNOTIFY key STOP` ends one watch;
//! * [`Event::Undeliverable`](super::Event::Undeliverable) ends one watch, because its notification
//!   could not be delivered (PUBACK 0x10);
//! * [`Event::Disconnected`](super::Event::Disconnected) ends all watches of the client: it disconnected, or did
//!   not renew its watches in time.
//!
//! A disconnection is not always seen: there may be no presence source, or this process was down.
//! Then the client's watches remain until one of their keys changes. [`Watches::peers`] lists all
//! clients with watches, so that a start can give each of them a deadline.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Bound;

use super::entry::Key;
use super::quota::{Exceeded, Quota};
use crate::limits::WATCH_OVERHEAD_BYTES;
use crate::request::Dialect;
use statehouse_protocol::Peer;

/// Changes of one client's watches: a record, or a part of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WatchChanges {
    /// The client.
    pub peer: Peer,
    /// The changes, in order.
    pub changes: Vec<WatchChange>,
}

/// A change of watches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WatchChange {
    /// The client watches this key in this dialect.
    Began(Key, Dialect),
    /// The client does not watch this key any more.
    Ended(Key),
    /// The client has no watches any more.
    AllEnded,
}

/// All watches.
#[derive(Clone, Default)]
pub struct Watches {
    // Notifications use the dialect of the request that registered the watch.
    by_key: HashMap<Key, BTreeMap<Peer, Dialect>>,
    /// Ordered, so that a snapshot can continue after its last piece.
    by_peer: BTreeMap<Peer, Held>,
    count: usize,
    bytes: usize,
    durable: bool,
}

/// The watches of one connection.
#[derive(Clone, Default)]
struct Held {
    keys: BTreeSet<Key>,
    bytes: usize,
}

fn weight(key: &[u8]) -> usize {
    key.len() + WATCH_OVERHEAD_BYTES
}

impl Watches {
    /// Whether watches are durable. If so, every change must be recorded.
    pub fn are_durable(&self) -> bool {
        self.durable
    }

    /// Sets whether watches are durable. If not, removes all watches, because their connections
    /// belonged to an earlier process.
    pub fn set_durable(&mut self, durable: bool) {
        if !durable {
            *self = Self::default();
        }
        self.durable = durable;
    }

    /// Whether `peer` may add a watch of `key`.
    pub fn check(&self, peer: &Peer, key: &[u8], quota: &Quota) -> Result<(), Exceeded> {
        let none = Held::default();
        let held = self.by_peer.get(peer).unwrap_or(&none);
        let (all, own) = (quota.watches_max, quota.watches_per_connection_max);
        let own_bytes = quota.watch_bytes_per_connection_max();
        if held.keys.contains(key) {
            Ok(())
        } else if held.keys.len() as u64 >= own {
            Err(Exceeded::ClientWatches(own))
        } else if (held.bytes + weight(key)) as u64 > own_bytes {
            Err(Exceeded::WatchBytes(own_bytes))
        } else if self.count as u64 >= all {
            Err(Exceeded::Watches(all))
        } else if (self.bytes + weight(key)) as u64 > quota.watch_bytes_max {
            Err(Exceeded::WatchBytes(quota.watch_bytes_max))
        } else {
            Ok(())
        }
    }

    /// Adds a watch, or changes its dialect. Returns whether anything changed.
    pub fn add(&mut self, key: Key, peer: &Peer, dialect: Dialect) -> bool {
        let watchers = self.by_key.entry(key.clone()).or_default();
        let before = watchers.insert(peer.clone(), dialect);
        if before.is_none() {
            let held = self.by_peer.entry(peer.clone()).or_default();
            held.bytes += weight(&key);
            self.bytes += weight(&key);
            self.count += 1;
            held.keys.insert(key);
        }
        before != Some(dialect)
    }

    /// Whether `peer` watches `key`.
    pub fn contains(&self, key: &[u8], peer: &Peer) -> bool {
        self.by_peer
            .get(peer)
            .is_some_and(|held| held.keys.contains(key))
    }

    /// How many keys `peer` watches.
    pub fn count_by(&self, peer: &Peer) -> usize {
        self.by_peer.get(peer).map_or(0, |held| held.keys.len())
    }

    /// The keys that `peer` watches, in order.
    pub fn by(&self, peer: &Peer) -> impl Iterator<Item = &Key> {
        let held = self.by_peer.get(peer);
        held.into_iter().flat_map(|held| &held.keys)
    }

    /// Removes one watch. Returns whether it existed.
    pub fn remove(&mut self, key: &[u8], peer: &Peer) -> bool {
        let Some(held) = self.by_peer.get_mut(peer) else {
            return false;
        };
        let removed = held.keys.remove(key);
        if removed {
            held.bytes -= weight(key);
            if held.keys.is_empty() {
                self.by_peer.remove(peer);
            }
            self.forget(key, peer);
        }
        removed
    }

    /// Removes all watches of a connection. Returns whether there were any.
    pub fn remove_all(&mut self, peer: &Peer) -> bool {
        let held = self.by_peer.remove(peer);
        for key in held.iter().flat_map(|held| &held.keys) {
            self.forget(key, peer);
        }
        held.is_some()
    }

    /// Applies recorded changes.
    pub(crate) fn apply(&mut self, recorded: WatchChanges) {
        let WatchChanges { peer, changes } = recorded;
        for change in changes {
            match change {
                WatchChange::Began(key, dialect) => _ = self.add(key, &peer, dialect),
                WatchChange::Ended(key) => _ = self.remove(&key, &peer),
                WatchChange::AllEnded => _ = self.remove_all(&peer),
            }
        }
    }

    /// All connections with watches, in order.
    pub fn peers(&self) -> impl Iterator<Item = &Peer> {
        self.by_peer.keys()
    }

    /// All watches after `after`, ordered by connection and key.
    pub(crate) fn range(
        &self,
        after: Option<&(Peer, Key)>,
    ) -> impl Iterator<Item = (&Peer, &Key, Dialect)> {
        let first = after.and_then(|(peer, key)| {
            let (peer, held) = self.by_peer.get_key_value(peer)?;
            let behind = (Bound::Excluded(key), Bound::Unbounded);
            Some(
                held.keys
                    .range::<Key, _>(behind)
                    .map(move |key| (peer, key)),
            )
        });
        let from = after.map_or(Bound::Unbounded, |(peer, _)| Bound::Excluded(peer));
        let others = self.by_peer.range::<Peer, _>((from, Bound::Unbounded));
        let others = others.flat_map(|(peer, held)| held.keys.iter().map(move |key| (peer, key)));
        first
            .into_iter()
            .flatten()
            .chain(others)
            .filter_map(|(peer, key)| Some((peer, key, *self.by_key.get(key)?.get(peer)?)))
    }

    fn forget(&mut self, key: &[u8], peer: &Peer) {
        if let Some(watchers) = self.by_key.get_mut(key) {
            watchers.remove(peer);
            if watchers.is_empty() {
                self.by_key.remove(key);
            }
            self.count -= 1;
            self.bytes -= weight(key);
        }
    }

    /// The watchers of a key and their dialects.
    pub fn of(&self, key: &[u8]) -> impl Iterator<Item = (&Peer, Dialect)> {
        self.by_key
            .get(key)
            .into_iter()
            .flatten()
            .map(|(peer, dialect)| (peer, *dialect))
    }

    /// Whether a key has watchers.
    pub fn has(&self, key: &[u8]) -> bool {
        self.of(key).next().is_some()
    }

    /// The number of watches.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether there are no watches.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use statehouse_protocol::SessionId;

    fn peer(client: &str, connection: u64) -> Peer {
        Peer {
            client: client.into(),
            connection: statehouse_protocol::ConnectionId(connection),
            session: SessionId(1),
        }
    }

    #[test]
    fn last_dialect_of_a_watch_wins() {
        let mut watches = Watches::default();
        let key = Key::from_static(b"k");
        watches.add(key.clone(), &peer("a", 1), Dialect::Sdk);
        watches.add(key.clone(), &peer("a", 1), Dialect::Documents);
        let of: Vec<_> = watches.of(b"k").collect();
        assert_eq!(of, [(&peer("a", 1), Dialect::Documents)]);
        assert!(watches.contains(b"k", &peer("a", 1)) && !watches.contains(b"k", &peer("a", 2)));
        watches.remove(b"k", &peer("a", 1));
        watches.remove(b"k", &peer("a", 1));
        assert!(watches.is_empty() && watches.of(b"k").next().is_none());
    }

    #[test]
    fn end_of_an_old_connection_keeps_newer_watches() {
        let mut watches = Watches::default();
        let key = Key::from_static(b"k");
        watches.add(key.clone(), &peer("a", 1), Dialect::Sdk);
        watches.add(key.clone(), &peer("a", 2), Dialect::Sdk);
        watches.add(Key::from_static(b"other"), &peer("a", 1), Dialect::Sdk);
        watches.remove_all(&peer("a", 1));
        assert_eq!(
            watches
                .of(b"k")
                .map(|(peer, _)| peer.connection.0)
                .collect::<Vec<_>>(),
            [2]
        );
        assert!(watches.of(b"other").next().is_none());
        assert_eq!(watches.len(), 1);
    }

    #[test]
    fn watches_of_a_connection_are_limited() {
        let mut watches = Watches::default();
        let (greedy, other) = (peer("a", 1), peer("b", 2));
        let mut quota = Quota {
            watches_max: 5,
            watches_per_connection_max: 3,
            ..Quota::default()
        };
        let mut add = |peer: &Peer, key: &'static str, quota: &Quota| {
            watches.check(peer, key.as_bytes(), quota)?;
            watches.add(Key::from(key), peer, Dialect::Sdk);
            Ok(())
        };
        for key in ["0", "1", "2"] {
            assert_eq!(add(&greedy, key, &quota), Ok(()));
        }
        let own = Err(Exceeded::ClientWatches(3));
        assert_eq!(add(&greedy, "one more", &quota), own);
        assert_eq!(add(&greedy, "0", &quota), Ok(()), "it exists already");
        assert_eq!(add(&other, "0", &quota), Ok(()));
        assert_eq!(add(&other, "1", &quota), Ok(()));
        let all = Err(Exceeded::Watches(5));
        assert_eq!(add(&other, "2", &quota), all);
        quota.watches_max = 2;
        assert_eq!(add(&other, "1", &quota), Ok(()), "existing watches stay");
    }

    #[test]
    fn watched_keys_are_limited_in_bytes() {
        let mut watches = Watches::default();
        let greedy = peer("a", 1);
        let long = |n: usize| Key::from(format!("{n:032000}"));
        let mut held = 0;
        let quota = Quota {
            watch_bytes_max: 8 << 20,
            ..Quota::default()
        };
        while watches.check(&greedy, &long(held), &quota).is_ok() {
            watches.add(long(held), &greedy, Dialect::Sdk);
            held += 1;
        }
        assert_eq!(held, (1 << 20) / weight(&long(0)), "an eighth of all");
        let other = watches.check(&peer("b", 2), &long(held), &quota);
        assert_eq!(other, Ok(()), "the limit of another client is separate");
        watches.remove(&long(0), &greedy);
        assert_eq!(watches.check(&greedy, &long(held), &quota), Ok(()));
        watches.remove_all(&greedy);
        assert_eq!((watches.bytes, watches.len()), (0, 0));
    }
}
