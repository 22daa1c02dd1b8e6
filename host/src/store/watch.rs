//! Watches: which connection wants to hear of which key, in which dialect.
//!
//! What enters: registrations, their ends, and ends of connections. What leaves: the watchers of a
//! key. A watch belongs to (client id, key) and lives as long as the connection that made it.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use super::table::Key;
use crate::limits::{WATCHES_MAX, WATCHES_PER_CONNECTION_MAX};
use crate::request::Dialect;

/// A connection: the client id and a number that no other connection of this process has.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Peer {
    /// The client id, as the transport knows it; empty where it does not.
    pub client: Arc<str>,
    /// The connection's number.
    pub connection: u64,
}

impl Peer {
    /// The client id, where the transport knows it.
    pub fn known(&self) -> Option<&str> {
        (!self.client.is_empty()).then_some(&*self.client)
    }
}

/// All watches.
#[derive(Default)]
pub struct Watches {
    // Notifications speak the dialect of the request that registered.
    by_key: HashMap<Key, BTreeMap<Peer, Dialect>>,
    by_peer: HashMap<Peer, BTreeSet<Key>>,
    count: usize,
}

impl Watches {
    /// Whether `peer` may add a watch of `key`.
    pub fn has_room(&self, peer: &Peer, key: &[u8]) -> bool {
        let held = self.by_peer.get(peer);
        held.is_some_and(|keys| keys.contains(key))
            || (self.count < WATCHES_MAX
                && held.map_or(0, BTreeSet::len) < WATCHES_PER_CONNECTION_MAX)
    }

    /// Registers. A second time changes nothing but the dialect.
    pub fn add(&mut self, key: Key, peer: &Peer, dialect: Dialect) {
        let watchers = self.by_key.entry(key.clone()).or_default();
        if watchers.insert(peer.clone(), dialect).is_none() {
            self.by_peer.entry(peer.clone()).or_default().insert(key);
            self.count += 1;
        }
    }

    /// Whether `peer` watches `key`.
    pub fn contains(&self, key: &[u8], peer: &Peer) -> bool {
        self.by_peer
            .get(peer)
            .is_some_and(|keys| keys.contains(key))
    }

    /// Ends one watch.
    pub fn remove(&mut self, key: &[u8], peer: &Peer) {
        if let Some(keys) = self.by_peer.get_mut(peer)
            && keys.remove(key)
        {
            if keys.is_empty() {
                self.by_peer.remove(peer);
            }
            self.forget(key, peer);
        }
    }

    /// Ends all watches of a connection.
    pub fn gone(&mut self, peer: &Peer) {
        for key in self.by_peer.remove(peer).unwrap_or_default() {
            self.forget(&key, peer);
        }
    }

    fn forget(&mut self, key: &[u8], peer: &Peer) {
        if let Some(watchers) = self.by_key.get_mut(key) {
            watchers.remove(peer);
            if watchers.is_empty() {
                self.by_key.remove(key);
            }
            self.count -= 1;
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

    /// How many watches there are.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(client: &str, connection: u64) -> Peer {
        Peer {
            client: client.into(),
            connection,
        }
    }

    #[test]
    fn a_watch_is_a_set_member_and_its_last_dialect_wins() {
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
    fn a_late_end_of_an_older_connection_takes_nothing_of_the_newer() {
        let mut watches = Watches::default();
        let key = Key::from_static(b"k");
        watches.add(key.clone(), &peer("a", 1), Dialect::Sdk);
        watches.add(key.clone(), &peer("a", 2), Dialect::Sdk);
        watches.add(Key::from_static(b"other"), &peer("a", 1), Dialect::Sdk);
        watches.gone(&peer("a", 1));
        assert_eq!(
            watches
                .of(b"k")
                .map(|(peer, _)| peer.connection)
                .collect::<Vec<_>>(),
            [2]
        );
        assert!(watches.of(b"other").next().is_none());
        assert_eq!(watches.len(), 1);
    }

    #[test]
    fn a_connection_holds_a_bounded_number() {
        let mut watches = Watches::default();
        let greedy = peer("a", 1);
        for i in 0..WATCHES_PER_CONNECTION_MAX {
            let key = Key::from(i.to_string());
            assert!(watches.has_room(&greedy, &key));
            watches.add(key, &greedy, Dialect::Sdk);
        }
        assert!(!watches.has_room(&greedy, b"one more"));
        assert!(
            watches.has_room(&greedy, b"0"),
            "registering again is always possible"
        );
        assert!(watches.has_room(&peer("b", 2), b"one more"));
    }
}
