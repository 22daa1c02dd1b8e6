//! The key table: entries by key, in order, with their expiry times and the sums a quota needs.
//!
//! What enters: committed writes. What leaves: entries. It never asks whether an entry has expired:
//! that is the transaction's business, since it depends on the request's time.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::sync::Arc;

use bytes::Bytes;

use crate::clock::{Fence, Stamp};
use crate::limits::ENTRY_OVERHEAD_BYTES;

/// A key: any bytes, at least one.
pub type Key = Bytes;

/// What a key holds.
#[derive(Debug, PartialEq, Eq)]
pub struct Entry {
    /// The value, copied out of the packet it came in.
    pub value: Bytes,
    /// The version that its SET was given.
    pub version: Stamp,
    /// The highest fencing token that protects it.
    pub fence: Option<Fence>,
    /// When it is gone, in the store's milliseconds.
    pub expires_ms: Option<u64>,
}

impl Entry {
    /// Whether the entry is gone at `now_ms`.
    pub fn expired(&self, now_ms: u64) -> bool {
        self.expires_ms
            .is_some_and(|expires_ms| expires_ms <= now_ms)
    }
}

/// What an entry counts against `max_bytes`: whatever of it a client chose the length of, and the rest.
pub(super) fn weight(key: &[u8], entry: &Entry) -> u64 {
    let fence_bytes = entry.fence.as_ref().map_or(0, |fence| fence.node.len());
    (key.len() + entry.value.len() + fence_bytes) as u64 + ENTRY_OVERHEAD_BYTES
}

/// All keys.
#[derive(Clone, Default)]
pub struct Table {
    // A snapshot or a duplicate's read-set shares entries instead of copying them.
    entries: BTreeMap<Key, Arc<Entry>>,
    expiries: BTreeSet<(u64, Key)>,
    bytes: u64,
}

impl Table {
    /// A table of these entries; of two with the same key the later counts. Quickest where they are sorted.
    pub fn of(entries: Vec<(Key, Arc<Entry>)>) -> Self {
        let entries: BTreeMap<Key, Arc<Entry>> = entries.into_iter().collect();
        let expires = |(key, entry): (&Key, &Arc<Entry>)| Some((entry.expires_ms?, key.clone()));
        Self {
            bytes: entries.iter().map(|(key, entry)| weight(key, entry)).sum(),
            expiries: entries.iter().filter_map(expires).collect(),
            entries,
        }
    }

    /// The entry of `key`, expired or not.
    pub fn get(&self, key: &[u8]) -> Option<&Arc<Entry>> {
        self.entries.get(key)
    }

    /// Puts an entry and returns the one it replaces.
    pub fn insert(&mut self, key: Key, entry: Arc<Entry>) -> Option<Arc<Entry>> {
        self.bytes += weight(&key, &entry);
        if let Some(expires_ms) = entry.expires_ms {
            self.expiries.insert((expires_ms, key.clone()));
        }
        let new_expiry = entry.expires_ms;
        let old = self.entries.insert(key.clone(), entry);
        if let Some(old) = &old {
            self.bytes -= weight(&key, old);
            if let Some(expires_ms) = old.expires_ms
                && new_expiry != Some(expires_ms)
            {
                self.expiries.remove(&(expires_ms, key));
            }
        }
        old
    }

    /// Takes an entry out.
    pub fn remove(&mut self, key: &[u8]) -> Option<Arc<Entry>> {
        let (key, old) = self.entries.remove_entry(key)?;
        self.bytes -= weight(&key, &old);
        if let Some(expires_ms) = old.expires_ms {
            self.expiries.remove(&(expires_ms, key));
        }
        Some(old)
    }

    /// Entries in order of their keys that start with `prefix` and lie above `after`.
    pub fn range<'a>(
        &'a self,
        prefix: &'a [u8],
        after: Option<&'a [u8]>,
    ) -> impl Iterator<Item = (&'a Key, &'a Arc<Entry>)> {
        let start = match after {
            Some(after) if after >= prefix => Bound::Excluded(after),
            _ => Bound::Included(prefix),
        };
        self.entries
            .range::<[u8], _>((start, Bound::Unbounded))
            .take_while(move |(key, _)| key.starts_with(prefix))
    }

    /// When the next key expires.
    pub fn next_expiry_ms(&self) -> Option<u64> {
        self.expiries.first().map(|(expires_ms, _)| *expires_ms)
    }

    /// Keys that have expired at `now_ms`, the oldest first.
    pub fn expired(&self, now_ms: u64) -> impl Iterator<Item = &Key> {
        self.expiries
            .iter()
            .take_while(move |(ms, _)| *ms <= now_ms)
            .map(|(_, key)| key)
    }

    /// How many keys there are, expired ones that no sweep has removed yet included.
    pub fn keys(&self) -> u64 {
        self.entries.len() as u64
    }

    /// What they weigh together.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(value: &'static str, expires_ms: Option<u64>) -> Arc<Entry> {
        let version = Stamp::default();
        let value = Bytes::from_static(value.as_bytes());
        Arc::new(Entry {
            value,
            version,
            fence: None,
            expires_ms,
        })
    }

    fn recount(table: &Table) -> (u64, u64, usize) {
        let bytes = table
            .entries
            .iter()
            .map(|(key, entry)| weight(key, entry))
            .sum();
        let expiring = table
            .entries
            .values()
            .filter(|entry| entry.expires_ms.is_some())
            .count();
        (table.entries.len() as u64, bytes, expiring)
    }

    #[test]
    fn sums_and_expiries_follow_every_write() {
        let mut table = Table::default();
        let key = Bytes::from_static(b"k");
        for (value, expires_ms) in [
            ("a", None),
            ("bb", Some(5)),
            ("ccc", Some(5)),
            ("d", Some(9)),
            ("", None),
        ] {
            table.insert(key.clone(), entry(value, expires_ms));
            table.insert(Bytes::from_static(b"other"), entry("x", Some(7)));
            assert_eq!(
                (table.keys(), table.bytes(), table.expiries.len()),
                recount(&table)
            );
        }
        assert_eq!(table.next_expiry_ms(), Some(7));
        assert_eq!(table.expired(6).count(), 0);
        assert_eq!(table.expired(7).collect::<Vec<_>>(), [&b"other"[..]]);
        assert!(table.remove(b"absent").is_none());
        assert!(table.remove(b"other").is_some() && table.remove(b"k").is_some());
        assert_eq!(
            (table.keys(), table.bytes(), table.expiries.len()),
            (0, 0, 0)
        );
    }

    #[test]
    fn a_table_of_many_entries_is_the_same_as_one_by_one() {
        let all = [("b", Some(5)), ("a", None), ("c", Some(3)), ("a", Some(9))];
        let pair = |(key, expires_ms): (&'static str, _)| {
            (Bytes::from_static(key.as_bytes()), entry(key, expires_ms))
        };
        let mut one_by_one = Table::default();
        for (key, entry) in all.map(pair) {
            one_by_one.insert(key, entry);
        }
        let table = Table::of(all.map(pair).to_vec());
        assert_eq!(table.entries, one_by_one.entries);
        assert_eq!(table.expiries, one_by_one.expiries);
        assert_eq!(table.bytes(), one_by_one.bytes());
    }

    #[test]
    fn whatever_a_client_chooses_the_length_of_counts() {
        let version = Stamp::default();
        let node = "n".repeat(60_000).into();
        let fence = Some(Fence {
            wall: 1,
            counter: 1,
            node,
        });
        let value = Bytes::from_static(b"v");
        let fenced = Entry {
            value,
            version,
            fence,
            expires_ms: None,
        };
        assert_eq!(
            weight(b"key", &fenced),
            3 + 1 + 60_000 + ENTRY_OVERHEAD_BYTES
        );
    }

    #[test]
    fn a_range_is_ordered_within_its_prefix() {
        let mut table = Table::default();
        for key in ["b", "a/2", "a/1", "a", "a0"] {
            table.insert(Bytes::from_static(key.as_bytes()), entry("", None));
        }
        let list = |prefix: &'static str, after: Option<&'static str>| -> Vec<String> {
            table
                .range(prefix.as_bytes(), after.map(str::as_bytes))
                .map(|(key, _)| String::from_utf8(key.to_vec()).unwrap())
                .collect()
        };
        assert_eq!(list("", None), ["a", "a/1", "a/2", "a0", "b"]);
        assert_eq!(list("a/", None), ["a/1", "a/2"]);
        assert_eq!(list("a/", Some("a/1")), ["a/2"]);
        assert_eq!(list("a/", Some("a")), ["a/1", "a/2"]);
        assert!(list("a/", Some("b")).is_empty());
    }
}
