//! The key table: entries by key, in order, with their expiry times and the sums that quotas need.
//!
//! It returns expired entries as well: whether an entry has expired depends on the request's time,
//! so the transaction decides.

use std::collections::BTreeSet;
use std::ops::Bound;

use rayon::prelude::*;

use super::arena::{Arena, Slot};
use super::entry::Entry;
use super::index::Index;
use super::order::Order;
use super::owners::{NO_OWNER, Owner};
use crate::limits::INDEX_PARTS;

mod prefetch;

/// All keys.
#[derive(Clone, Default)]
pub struct Table {
    // Snapshots and captured reads share entries with the table.
    arena: Arena,
    index: Index<INDEX_PARTS>,
    order: Order,
    /// Expiring entries, ordered by time.
    expiries: BTreeSet<(u64, Slot)>,
    bytes: u64,
}

impl Table {
    /// Creates a table of entries with owners. If a key occurs twice, the later entry counts.
    /// Fastest if `entries` is sorted.
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
        let arena = Arena::of(entries);
        Self {
            index: Index::of(&arena),
            order: Order::of_sorted(&arena),
            arena,
            expiries,
            bytes,
        }
    }

    /// The entry of `key`, expired or not.
    pub fn get(&self, key: &[u8]) -> Option<&Entry> {
        Some(self.arena.get(self.index.get(key, &self.arena)?))
    }

    /// The entry of `key` and its owner.
    pub(super) fn owned(&self, key: &[u8]) -> Option<(&Entry, Owner)> {
        let slot = self.index.get(key, &self.arena)?;
        Some((self.arena.get(slot), self.arena.owner(slot)))
    }

    /// Inserts an entry without an owner and returns the one that it replaces. Does not update the
    /// sums of owners.
    pub fn insert(&mut self, entry: Entry) -> Option<Entry> {
        Some(self.put(entry, NO_OWNER)?.0)
    }

    /// Inserts an entry and returns the one that it replaces, with its owner.
    pub(super) fn put(&mut self, entry: Entry, owner: Owner) -> Option<(Entry, Owner)> {
        self.bytes += entry.weight();
        let expires_ms = entry.expires_ms();
        let (slot, old) = match self.index.get(entry.key(), &self.arena) {
            Some(slot) => (slot, self.arena.replace(slot, entry, owner)),
            None => {
                let slot = self.arena.add(entry, owner);
                self.index.insert(slot, &self.arena);
                self.order.insert(slot, &self.arena);
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

    /// Removes an entry and returns it with its owner.
    pub(super) fn remove(&mut self, key: &[u8]) -> Option<(Entry, Owner)> {
        let slot = self.index.remove(key, &self.arena)?;
        self.order.remove(key, &self.arena);
        let (old, owner) = self.arena.take(slot)?;
        self.forget(slot, &old);
        Some((old, owner))
    }

    fn forget(&mut self, slot: Slot, old: &Entry) {
        self.bytes -= old.weight();
        if let Some(expires_ms) = old.expires_ms() {
            self.expiries.remove(&(expires_ms, slot));
        }
    }

    /// Keys and bytes of each owner below `owners`, as partial sums.
    pub(super) fn loads(&self, owners: usize) -> Vec<Vec<(u64, u64)>> {
        self.arena.loads(owners)
    }

    /// Entries whose keys start with `prefix` and are greater than `after`, in order.
    pub fn range<'a>(
        &'a self,
        prefix: &'a [u8],
        after: Option<&'a [u8]>,
    ) -> impl Iterator<Item = &'a Entry> {
        self.range_owned(prefix, after).map(|(entry, _)| entry)
    }

    /// The same entries, each with its owner.
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
            .from(start, &self.arena)
            .map(|slot| (self.arena.get(slot), self.arena.owner(slot)))
            .take_while(move |(entry, _)| entry.key().starts_with(prefix))
    }

    /// Entries from a key on, in order.
    pub(super) fn from<'a>(
        &'a self,
        start: Bound<&[u8]>,
    ) -> impl Iterator<Item = &'a Entry> + use<'a> {
        self.order
            .from(start, &self.arena)
            .map(|slot| self.arena.get(slot))
    }

    /// The number of keys from `start` on and before `end`.
    pub(super) fn count(&self, start: Bound<&[u8]>, end: Bound<&[u8]>) -> u64 {
        self.order.count(start, end, &self.arena)
    }

    /// The time at which the next key expires.
    pub fn next_expiry_ms(&self) -> Option<u64> {
        self.expiries.first().map(|(expires_ms, _)| *expires_ms)
    }

    /// Entries that have expired at `now_ms`, the oldest first.
    pub fn expired(&self, now_ms: u64) -> impl Iterator<Item = &Entry> {
        self.expiries
            .iter()
            .take_while(move |(ms, _)| *ms <= now_ms)
            .map(|(_, slot)| self.arena.get(*slot))
    }

    /// The entries behind a place in the order of expiry, each with its owner and place.
    pub(super) fn expiring(
        &self,
        after: Option<(u64, Slot)>,
    ) -> impl Iterator<Item = (&Entry, Owner, (u64, Slot))> {
        let start = after.map_or(Bound::Unbounded, Bound::Excluded);
        self.expiries
            .range((start, Bound::Unbounded))
            .map(|place| (self.arena.get(place.1), self.arena.owner(place.1), *place))
    }

    /// The number of keys, including expired ones that no sweep has removed yet.
    pub fn keys(&self) -> u64 {
        self.arena.len() as u64
    }

    /// The weight of all entries.
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

    /// Keys, bytes and expiring keys, as the table counts them.
    fn sums(table: &Table) -> (u64, u64, usize) {
        let all = || table.range(b"", None);
        let sums = (table.keys(), table.bytes(), table.expiries.len());
        assert_eq!(sums.0, all().count() as u64);
        assert_eq!(sums.1, all().map(Entry::weight).sum::<u64>());
        assert_eq!(sums.2, all().filter_map(Entry::expires_ms).count());
        sums
    }

    #[test]
    fn sums_and_expiries_match_after_every_write() {
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
            sums(&table);
        }
        assert_eq!(table.next_expiry_ms(), Some(7));
        assert_eq!(table.expired(6).count(), 0);
        let expired: Vec<&[u8]> = table.expired(7).map(Entry::key).collect();
        assert_eq!(expired, [b"other"]);
        assert!(table.remove(b"absent").is_none());
        assert!(table.remove(b"other").is_some() && table.remove(b"k").is_some());
        assert_eq!(sums(&table), (0, 0, 0));
    }

    /// A lookup by key must return the last write.
    #[test]
    fn lookups_return_the_last_write() {
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
    fn bulk_and_single_insertion_give_equal_tables() {
        let all = [("b", Some(5)), ("a", None), ("c", Some(3)), ("a", Some(9))]
            .map(|(key, expires_ms)| entry(key, key, expires_ms));
        let mut one_by_one = Table::default();
        for entry in all.clone() {
            one_by_one.insert(entry);
        }
        let table = Table::of(all.map(|entry| (entry, NO_OWNER)).to_vec());
        let list = |table: &Table| -> Vec<Entry> { table.range(b"", None).cloned().collect() };
        let expiring = |table: &Table| -> Vec<Entry> { table.expired(u64::MAX).cloned().collect() };
        assert_eq!(list(&table), list(&one_by_one));
        assert_eq!(table.get(b"a"), one_by_one.get(b"a"));
        assert_eq!(expiring(&table), expiring(&one_by_one));
        assert_eq!(table.bytes(), one_by_one.bytes());
    }

    /// More keys than index parts, so that these grow, and a clone that is modified independently.
    #[test]
    fn keys_are_found_after_removals_and_in_clones() {
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
            let expected = entry(&key(number), &key(number), None);
            assert_eq!(kept.get(key(number).as_bytes()), Some(&expected));
            let left = (number % 2 == 1).then_some(&expected);
            assert_eq!(table.get(key(number).as_bytes()), left);
        }
    }

    #[test]
    fn range_is_ordered_and_limited_to_its_prefix() {
        let mut table = Table::default();
        for key in ["b", "a/2", "a/1", "a", "a0"] {
            table.insert(entry(key, "", None));
        }
        let list = |prefix: &'static str, after: Option<&'static str>| -> Vec<String> {
            let range = table.range(prefix.as_bytes(), after.map(str::as_bytes));
            let key = |entry: &Entry| String::from_utf8(entry.key().to_vec()).unwrap();
            range.map(key).collect()
        };
        assert_eq!(list("", None), ["a", "a/1", "a/2", "a0", "b"]);
        assert_eq!(list("a/", None), ["a/1", "a/2"]);
        assert_eq!(list("a/", Some("a/1")), ["a/2"]);
        assert_eq!(list("a/", Some("a")), ["a/1", "a/2"]);
        assert!(list("a/", Some("b")).is_empty());
    }
}
