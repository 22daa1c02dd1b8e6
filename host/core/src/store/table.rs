//! The key table: entries by key, in order, with their expiry times and the sums a quota needs.
//!
//! What enters: committed writes. What leaves: entries. It never asks whether an entry has expired:
//! that is the transaction's business, since it depends on the request's time.

use std::collections::BTreeSet;
use std::ops::Bound;

use rayon::prelude::*;

use super::entry::Entry;
use super::index::Index;
use super::order::Order;
use super::owners::{NOBODY, Owner};
use super::slots::{Slot, Slots};
use crate::limits::INDEX_PARTS;

/// All keys.
#[derive(Clone, Default)]
pub struct Table {
    // A snapshot or a duplicate's read-set shares entries instead of copying them.
    slots: Slots,
    index: Index<INDEX_PARTS>,
    order: Order,
    /// Those that expire, in the order of that.
    expiries: BTreeSet<(u64, Slot)>,
    bytes: u64,
}

impl Table {
    /// A table of these entries, each with its owner; of two with the same key the later counts. Quickest where they are
    /// sorted.
    pub(crate) fn of(mut entries: Vec<(Entry, Owner)>) -> Self {
        let rising = |pair: &[(Entry, Owner)]| pair[0].0.key() < pair[1].0.key();
        if !entries.par_windows(2).all(rising) {
            entries.sort_by(|(one, _), (other, _)| one.key().cmp(other.key()));
            entries.dedup_by(|later, kept| {
                let same = later.0.key() == kept.0.key();
                if same {
                    std::mem::swap(later, kept);
                }
                same
            });
        }
        let bytes = entries.par_iter().map(|(entry, _)| entry.weight()).sum();
        let expires = |(slot, (it, _)): (Slot, &(Entry, Owner))| Some((it.expires_ms()?, slot));
        let expiries = (0..).zip(&entries).filter_map(expires).collect();
        let slots = Slots::of(entries);
        Self {
            index: Index::of(&slots),
            order: Order::of_sorted(&slots),
            slots,
            expiries,
            bytes,
        }
    }

    /// The entry of `key`, expired or not.
    pub fn get(&self, key: &[u8]) -> Option<&Entry> {
        Some(self.slots.get(self.index.get(key, &self.slots)?))
    }

    /// The same, and its owner.
    pub(super) fn owned(&self, key: &[u8]) -> Option<(&Entry, Owner)> {
        let slot = self.index.get(key, &self.slots)?;
        Some((self.slots.get(slot), self.slots.owner(slot)))
    }

    /// Puts an entry that nobody owns, where nobody counts owners, and returns the one it replaces.
    pub fn insert(&mut self, entry: Entry) -> Option<Entry> {
        Some(self.put(entry, NOBODY)?.0)
    }

    /// Puts an entry of this owner and returns the one it replaces, with its own.
    pub(super) fn put(&mut self, entry: Entry, owner: Owner) -> Option<(Entry, Owner)> {
        self.bytes += entry.weight();
        let expires_ms = entry.expires_ms();
        let (slot, old) = match self.index.get(entry.key(), &self.slots) {
            Some(slot) => (slot, self.slots.replace(slot, entry, owner)),
            None => {
                let slot = self.slots.add(entry, owner);
                self.index.insert(slot, &self.slots);
                self.order.insert(slot, &self.slots);
                (slot, None)
            }
        };
        if let Some((old, _)) = &old {
            self.forget(slot, old);
        }
        if let Some(expires_ms) = expires_ms {
            self.expiries.insert((expires_ms, slot));
        }
        old
    }

    /// Takes an entry out, and says whose it was.
    pub(super) fn remove(&mut self, key: &[u8]) -> Option<(Entry, Owner)> {
        let slot = self.index.remove(key, &self.slots)?;
        self.order.remove(key, &self.slots);
        let (old, owner) = self.slots.take(slot)?;
        self.forget(slot, &old);
        Some((old, owner))
    }

    fn forget(&mut self, slot: Slot, old: &Entry) {
        self.bytes -= old.weight();
        if let Some(expires_ms) = old.expires_ms() {
            self.expiries.remove(&(expires_ms, slot));
        }
    }

    /// Keys and bytes of each owner below `owners`, in parts that are to be added up.
    pub(super) fn loads(&self, owners: usize) -> Vec<Vec<(u64, u64)>> {
        self.slots.loads(owners)
    }

    /// Entries in order of their keys that start with `prefix` and lie above `after`.
    pub fn range<'a>(
        &'a self,
        prefix: &'a [u8],
        after: Option<&'a [u8]>,
    ) -> impl Iterator<Item = &'a Entry> {
        self.range_owned(prefix, after).map(|(entry, _)| entry)
    }

    /// The same, each with its owner.
    pub(super) fn range_owned<'a>(
        &'a self,
        prefix: &'a [u8],
        after: Option<&'a [u8]>,
    ) -> impl Iterator<Item = (&'a Entry, Owner)> {
        let start = match after {
            Some(after) if after >= prefix => Bound::Excluded(after),
            _ => Bound::Included(prefix),
        };
        self.order
            .from(start, &self.slots)
            .map(|slot| (self.slots.get(slot), self.slots.owner(slot)))
            .take_while(move |(entry, _)| entry.key().starts_with(prefix))
    }

    /// When the next key expires.
    pub fn next_expiry_ms(&self) -> Option<u64> {
        self.expiries.first().map(|(expires_ms, _)| *expires_ms)
    }

    /// What has expired at `now_ms`, the oldest first.
    pub fn expired(&self, now_ms: u64) -> impl Iterator<Item = &Entry> {
        self.expiries
            .iter()
            .take_while(move |(ms, _)| *ms <= now_ms)
            .map(|(_, slot)| self.slots.get(*slot))
    }

    /// How many keys there are, expired ones that no sweep has removed yet included.
    pub fn keys(&self) -> u64 {
        self.slots.len() as u64
    }

    /// What they weigh together.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Stamp;

    fn entry(key: &str, value: &str, expires_ms: Option<u64>) -> Entry {
        let version = Stamp::default();
        Entry::new(key.as_bytes(), value.as_bytes(), version, None, expires_ms)
    }

    fn recount(table: &Table) -> (u64, u64, usize) {
        let all = || table.range(b"", None);
        (
            all().count() as u64,
            all().map(Entry::weight).sum(),
            all().filter(|it| it.expires_ms().is_some()).count(),
        )
    }

    #[test]
    fn sums_and_expiries_follow_every_write() {
        let mut table = Table::default();
        for (value, expires_ms) in [
            ("a", None),
            ("bb", Some(5)),
            ("ccc", Some(5)),
            ("d", Some(9)),
            ("", None),
        ] {
            table.insert(entry("k", value, expires_ms));
            table.insert(entry("other", "x", Some(7)));
            assert_eq!(
                (table.keys(), table.bytes(), table.expiries.len()),
                recount(&table)
            );
        }
        assert_eq!(table.next_expiry_ms(), Some(7));
        assert_eq!(table.expired(6).count(), 0);
        let expired: Vec<&[u8]> = table.expired(7).map(Entry::key).collect();
        assert_eq!(expired, [b"other"]);
        assert!(table.remove(b"absent").is_none());
        assert!(table.remove(b"other").is_some() && table.remove(b"k").is_some());
        assert_eq!(
            (table.keys(), table.bytes(), table.expiries.len()),
            (0, 0, 0)
        );
    }

    /// What is found by its key is not what was there before.
    #[test]
    fn the_last_write_of_a_key_is_what_it_holds() {
        let mut table = Table::default();
        assert_eq!(table.insert(entry("k", "old", Some(5))), None);
        let old = table.insert(entry("k", "new", Some(5)));
        assert_eq!(old, Some(entry("k", "old", Some(5))));
        assert_eq!(table.get(b"k"), Some(&entry("k", "new", Some(5))));
        assert_eq!(table.range(b"k", None).next(), table.get(b"k"));
        assert_eq!(table.expired(5).next(), table.get(b"k"));
        table.remove(b"k");
        assert_eq!(table.get(b"k"), None);
    }

    #[test]
    fn a_table_of_many_entries_is_the_same_as_one_by_one() {
        let all = [("b", Some(5)), ("a", None), ("c", Some(3)), ("a", Some(9))]
            .map(|(key, expires_ms)| entry(key, key, expires_ms));
        let mut one_by_one = Table::default();
        for entry in all.clone() {
            one_by_one.insert(entry);
        }
        let table = Table::of(all.map(|entry| (entry, NOBODY)).to_vec());
        let list = |table: &Table| -> Vec<Entry> { table.range(b"", None).cloned().collect() };
        let expiring = |table: &Table| -> Vec<Entry> { table.expired(u64::MAX).cloned().collect() };
        assert_eq!(list(&table), list(&one_by_one));
        assert_eq!(table.get(b"a"), one_by_one.get(b"a"));
        assert_eq!(expiring(&table), expiring(&one_by_one));
        assert_eq!(table.bytes(), one_by_one.bytes());
    }

    /// More keys than parts of the index, so that these grow, and a copy that goes its own way.
    #[test]
    fn every_key_is_found_while_others_come_and_go() {
        let key = |number: u32| format!("key/{number}");
        let mut table = Table::default();
        for number in 0..5_000 {
            table.insert(entry(&key(number), &key(number), None));
        }
        let kept = table.clone();
        for number in (0..5_000).step_by(2) {
            assert!(table.remove(key(number).as_bytes()).is_some());
        }
        for number in 0..5_000 {
            let wanted = entry(&key(number), &key(number), None);
            assert_eq!(kept.get(key(number).as_bytes()), Some(&wanted));
            let left = (number % 2 == 1).then_some(&wanted);
            assert_eq!(table.get(key(number).as_bytes()), left);
        }
    }

    #[test]
    fn a_range_is_ordered_within_its_prefix() {
        let mut table = Table::default();
        for key in ["b", "a/2", "a/1", "a", "a0"] {
            table.insert(entry(key, "", None));
        }
        let list = |prefix: &'static str, after: Option<&'static str>| -> Vec<String> {
            table
                .range(prefix.as_bytes(), after.map(str::as_bytes))
                .map(|entry| String::from_utf8(entry.key().to_vec()).unwrap())
                .collect()
        };
        assert_eq!(list("", None), ["a", "a/1", "a/2", "a0", "b"]);
        assert_eq!(list("a/", None), ["a/1", "a/2"]);
        assert_eq!(list("a/", Some("a/1")), ["a/2"]);
        assert_eq!(list("a/", Some("a")), ["a/1", "a/2"]);
        assert!(list("a/", Some("b")).is_empty());
    }
}
