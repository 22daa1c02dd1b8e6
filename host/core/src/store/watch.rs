//! Watches: which client is notified of which keys, in which dialect.
//!
//! A watch belongs to a client id and a key, or to a client id and a prefix of keys. With the
//! embedded broker it ends with the connection that made it. Clients of a foreign broker stay
//! connected while this process is down, so their watches are durable: they are recorded, and
//! recovered after a restart. These events end them:
//!
//! * the client's `KEYNOTIFY key STOP` ends one watch;
//! * [`Input::Undeliverable`](crate::Input::Undeliverable) ends the client's watches of a key and
//!   of its prefixes, because a notification of that key could not be delivered (PUBACK 0x10);
//! * [`Input::Disconnected`](crate::Input::Disconnected) ends all watches of the client: it
//!   disconnected, or did not renew its watches in time.
//!
//! Rules that forbid a client to read a key do not end its watch: it reports nothing meanwhile.
//!
//! A disconnection is not always seen: there may be no presence source, or this process was down.
//! Then the client's watches remain until one of their keys changes. [`Watches::peers`] lists all
//! clients with watches, so that a start can give each of them a deadline.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::iter;
use std::ops::Bound;
use std::sync::Arc;

use super::entry::Key;
use super::quota::{Exceeded, Quota};
use crate::limits::{WATCH_OVERHEAD_BYTES, WATCH_PREFIX_BYTES_MAX};
use crate::log::JournalRoom;
use crate::request::Dialect;
use statehouse_protocol::Peer;
use statehouse_protocol::rights::{ClientRights, Right, SharedAnswers};

/// What a watch covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Scope {
    /// One key.
    Key,
    /// All keys that start with these bytes.
    Prefix,
}

impl Scope {
    /// Whether a watch of `watched` covers a key.
    pub(super) fn covers(self, watched: &[u8], key: &[u8]) -> bool {
        match self {
            Self::Key => watched == key,
            Self::Prefix => key.starts_with(watched),
        }
    }
}

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
    /// The client watches this key or prefix in this dialect.
    Began(Scope, Key, Dialect),
    /// The client does not watch this key or prefix any more.
    Ended(Scope, Key),
    /// The client has no watches any more.
    AllEnded,
}

/// All watches.
#[derive(Clone, Default)]
pub struct Watches {
    by_key: HashMap<Key, Watchers>,
    by_prefix: BTreeMap<Key, Watchers>,
    /// Ordered, so that a snapshot can continue after its last piece.
    by_peer: BTreeMap<Peer, Held>,
    count: usize,
    bytes: usize,
    durable: bool,
    /// Whether any client got rights. Without rules no watcher is looked up for its rights.
    ruled: bool,
}

/// Notifications use the dialect of the request that registered the watch.
type Watchers = BTreeMap<Peer, Dialect>;

/// The watches of one connection.
#[derive(Clone, Default)]
struct Held {
    keys: BTreeSet<Key>,
    prefixes: BTreeSet<Key>,
    bytes: usize,
    /// `None` if there are no rules.
    rights: Option<Arc<dyn ClientRights>>,
}

impl Held {
    fn of(&self, scope: Scope) -> &BTreeSet<Key> {
        match scope {
            Scope::Key => &self.keys,
            Scope::Prefix => &self.prefixes,
        }
    }

    fn of_mut(&mut self, scope: Scope) -> &mut BTreeSet<Key> {
        match scope {
            Scope::Key => &mut self.keys,
            Scope::Prefix => &mut self.prefixes,
        }
    }

    fn len(&self) -> usize {
        self.keys.len() + self.prefixes.len()
    }

    /// The watches after `after`, or all.
    fn range<'a>(
        &'a self,
        after: Option<(Scope, &'a Key)>,
    ) -> impl Iterator<Item = (Scope, &'a Key)> {
        let scopes = [Scope::Key, Scope::Prefix].into_iter();
        let scopes = scopes.filter(move |it| after.is_none_or(|(scope, _)| *it >= scope));
        scopes.flat_map(move |it| {
            let last = after.filter(|(scope, _)| *scope == it);
            let from = last.map_or(Bound::Unbounded, |(_, key)| Bound::Excluded(key));
            let keys = self.of(it).range::<Key, _>((from, Bound::Unbounded));
            keys.map(move |key| (it, key))
        })
    }
}

/// The prefixes of a key in an ordered collection, the longest first. `greatest` finds the greatest
/// one that is not above its argument.
///
/// That one either is a prefix of the key, or shares with it all bytes that any prefix of the key
/// can have. So each step shortens the bound, and no step visits a prefix twice.
fn prefixes<'a, 'k, T>(
    key: &'k [u8],
    greatest: impl Fn(&[u8]) -> Option<(&'a Key, T)>,
) -> impl Iterator<Item = (&'a Key, T)> {
    let mut bound = Some(&key[..key.len().min(WATCH_PREFIX_BYTES_MAX)]);
    iter::from_fn(move || {
        while let Some(end) = bound {
            let (prefix, found) = greatest(end)?;
            let common = iter::zip(prefix, end).take_while(|(a, b)| a == b).count();
            if common == prefix.len() {
                bound = common.checked_sub(1).map(|len| &end[..len]);
                return Some((prefix, found));
            }
            bound = Some(&end[..common]);
        }
        None
    })
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
    pub fn check(
        &self,
        peer: &Peer,
        scope: Scope,
        key: &[u8],
        quota: &Quota,
    ) -> Result<(), Exceeded> {
        let none = Held::default();
        let held = self.by_peer.get(peer).unwrap_or(&none);
        let (all, own) = (quota.watches_max, quota.watches_per_connection_max);
        let own_bytes = quota.watch_bytes_per_connection_max();
        if held.of(scope).contains(key) {
            Ok(())
        } else if self.durable && quota.journal != JournalRoom::Growth {
            // Recorded watches must not use the room that removals need.
            Err(Exceeded::Disk)
        } else if held.len() as u64 >= own {
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
    pub fn add(&mut self, scope: Scope, key: Key, peer: &Peer, dialect: Dialect) -> bool {
        let watchers = match scope {
            Scope::Key => self.by_key.entry(key.clone()).or_default(),
            Scope::Prefix => self.by_prefix.entry(key.clone()).or_default(),
        };
        let before = watchers.insert(peer.clone(), dialect);
        if before.is_none() {
            let held = self.by_peer.entry(peer.clone()).or_default();
            held.bytes += weight(&key);
            self.bytes += weight(&key);
            self.count += 1;
            held.of_mut(scope).insert(key);
        }
        before != Some(dialect)
    }

    /// Sets the rights of a client with watches; `None` if there are no rules.
    pub fn set_rights(&mut self, peer: &Peer, rights: Option<Arc<dyn ClientRights>>) {
        if let Some(held) = self.by_peer.get_mut(peer) {
            self.ruled |= rights.is_some();
            held.rights = rights;
        }
    }

    /// The number of watches of `peer`.
    pub fn count_by(&self, peer: &Peer) -> usize {
        self.by_peer.get(peer).map_or(0, |held| held.len())
    }

    /// Whether `peer` has a watch of `key`.
    pub fn contains(&self, scope: Scope, key: &[u8], peer: &Peer) -> bool {
        self.by_peer
            .get(peer)
            .is_some_and(|held| held.of(scope).contains(key))
    }

    /// The watches of `peer`, in order.
    pub fn by(&self, peer: &Peer) -> impl Iterator<Item = (Scope, &Key)> {
        let held = self.by_peer.get(peer);
        held.into_iter().flat_map(|held| held.range(None))
    }

    /// The watches of `peer` that cover a key.
    pub fn covering<'a>(
        &'a self,
        key: &'a [u8],
        peer: &Peer,
    ) -> impl Iterator<Item = (Scope, &'a Key)> {
        let held = self.by_peer.get(peer);
        let exact = held.and_then(|held| held.keys.get(key));
        let prefixes = held.into_iter().flat_map(move |held| {
            prefixes(key, |end| {
                let below = (Bound::Unbounded, Bound::Included(end));
                let prefix = held.prefixes.range::<[u8], _>(below).next_back()?;
                Some((prefix, ()))
            })
        });
        let exact = exact.into_iter().map(|it| (Scope::Key, it));
        exact.chain(prefixes.map(|(it, ())| (Scope::Prefix, it)))
    }

    /// Removes one watch. Returns whether it existed.
    pub fn remove(&mut self, scope: Scope, key: &[u8], peer: &Peer) -> bool {
        let Some(held) = self.by_peer.get_mut(peer) else {
            return false;
        };
        let removed = held.of_mut(scope).remove(key);
        if removed {
            held.bytes -= weight(key);
            if held.len() == 0 {
                self.by_peer.remove(peer);
            }
            self.forget(scope, key, peer);
        }
        removed
    }

    /// Removes all watches of a connection. Returns whether there were any.
    pub fn remove_all(&mut self, peer: &Peer) -> bool {
        let held = self.by_peer.remove(peer);
        for (scope, key) in held.iter().flat_map(|held| held.range(None)) {
            self.forget(scope, key, peer);
        }
        held.is_some()
    }

    /// Applies recorded changes.
    pub(crate) fn apply(&mut self, recorded: WatchChanges) {
        let WatchChanges { peer, changes } = recorded;
        for change in changes {
            match change {
                WatchChange::Began(scope, key, dialect) => {
                    _ = self.add(scope, key, &peer, dialect);
                }
                WatchChange::Ended(scope, key) => _ = self.remove(scope, &key, &peer),
                WatchChange::AllEnded => _ = self.remove_all(&peer),
            }
        }
    }

    /// All connections with watches, in order.
    pub fn peers(&self) -> impl Iterator<Item = &Peer> {
        self.by_peer.keys()
    }

    /// All watches after `after`, ordered by connection, scope and key.
    pub fn range<'a>(
        &'a self,
        after: Option<&'a (Peer, Scope, Key)>,
    ) -> impl Iterator<Item = (&'a Peer, Scope, &'a Key, Dialect)> {
        let first = after.and_then(|(peer, scope, key)| {
            let (peer, held) = self.by_peer.get_key_value(peer)?;
            let rest = held.range(Some((*scope, key)));
            Some(rest.map(move |(scope, key)| (peer, scope, key)))
        });
        let from = after.map_or(Bound::Unbounded, |(peer, ..)| Bound::Excluded(peer));
        let others = self.by_peer.range::<Peer, _>((from, Bound::Unbounded));
        let others = others.flat_map(|(peer, held)| {
            (held.range(None)).map(move |(scope, key)| (peer, scope, key))
        });
        (first.into_iter().flatten().chain(others)).filter_map(|(peer, scope, key)| {
            let watchers = match scope {
                Scope::Key => self.by_key.get(key)?,
                Scope::Prefix => self.by_prefix.get(key)?,
            };
            Some((peer, scope, key, *watchers.get(peer)?))
        })
    }

    fn forget(&mut self, scope: Scope, key: &[u8], peer: &Peer) {
        let watchers = match scope {
            Scope::Key => self.by_key.get_mut(key),
            Scope::Prefix => self.by_prefix.get_mut(key),
        };
        if let Some(watchers) = watchers {
            watchers.remove(peer);
            if watchers.is_empty() {
                match scope {
                    Scope::Key => _ = self.by_key.remove(key),
                    Scope::Prefix => _ = self.by_prefix.remove(key),
                }
            }
            self.count -= 1;
            self.bytes -= weight(key);
        }
    }

    /// The watchers of a key and their dialects, each client once. A watch of the key decides the
    /// dialect, else that of its longest watched prefix. A client without the right to read the key
    /// is left out, and so not notified while the rules forbid it.
    pub fn of(&self, key: &[u8]) -> Vec<(&Peer, Dialect)> {
        let exact = self.by_key.get(key).into_iter().flatten();
        let exact = exact.map(|(peer, dialect)| (peer, *dialect));
        let mut prefixes = self.prefixes_of(key).peekable();
        let mut covering: Vec<_> = if prefixes.peek().is_none() {
            exact.collect()
        } else {
            let mut by_peer: BTreeMap<&Peer, Dialect> = exact.collect();
            for (peer, dialect) in prefixes.flatten() {
                by_peer.entry(peer).or_insert(*dialect);
            }
            by_peer.into_iter().collect()
        };
        if self.ruled {
            let mut answers = SharedAnswers::default();
            covering.retain(|(peer, _)| self.may_read(peer, key, &mut answers));
        }
        covering
    }

    fn may_read<'a>(&'a self, peer: &Peer, key: &[u8], answers: &mut SharedAnswers<'a>) -> bool {
        let rights = self.by_peer.get(peer).and_then(|held| held.rights.as_ref());
        rights.is_none_or(|rights| rights.allow_once(key, Right::Read, answers))
    }

    /// The watchers of each watched prefix of a key, the longest prefix first.
    fn prefixes_of<'a, 'k>(
        &'a self,
        key: &'k [u8],
    ) -> impl Iterator<Item = &'a Watchers> + use<'a, 'k> {
        let found = prefixes(key, |end| {
            let below = (Bound::Unbounded, Bound::Included(end));
            self.by_prefix.range::<[u8], _>(below).next_back()
        });
        found.map(|(_, watchers)| watchers)
    }

    /// The number of watches that cover a key, regardless of the rights of their clients.
    pub fn count_of(&self, key: &[u8]) -> usize {
        let exact = self.by_key.get(key).map_or(0, Watchers::len);
        exact + self.prefixes_of(key).map(Watchers::len).sum::<usize>()
    }

    /// The memory of all watches in bytes, as `max_watches` limits it.
    pub fn bytes(&self) -> usize {
        self.bytes
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
mod tests;
