//! The hash index of a table: slots by key.
//!
//! A lookup costs one look at a hash table and one at the entry; an ordered search would compare
//! some twenty keys among a million.

use std::hash::{BuildHasher, RandomState};

use rayon::prelude::*;

use super::arena::{Arena, Slot};
use super::compact_table::CompactTable;

/// The keys of slots, which an index compares with.
pub(super) trait Keyed {
    /// The key in a used slot.
    fn key(&self, slot: Slot) -> &[u8];
}

/// Slots by the hash of their key. The hash is seeded in each process, because clients choose the
/// keys.
#[derive(Clone)]
pub(super) struct Index<const PARTS: usize, S = RandomState> {
    hasher: S,
    /// Many small hash tables: a growing table moves all of its entries at once, while every
    /// request waits.
    parts: Vec<CompactTable<Slot>>,
}

impl<const PARTS: usize, S: Default> Default for Index<PARTS, S> {
    fn default() -> Self {
        Self {
            hasher: S::default(),
            parts: vec![CompactTable::default(); PARTS],
        }
    }
}

impl<const PARTS: usize, S: BuildHasher + Default + Sync> Index<PARTS, S> {
    /// Builds the index of entries in slots from 0 on, on all CPU cores, because a start waits for
    /// it.
    pub(super) fn of(arena: &Arena) -> Self {
        let mut index = Self::default();
        let all = 0..arena.len() as Slot;
        let hash = |slot| index.hash(arena.key(slot));
        let hashes: Vec<(usize, u32)> = all.clone().into_par_iter().map(hash).collect();
        let mut grouped = vec![Vec::new(); PARTS];
        for (slot, (part, short)) in all.zip(hashes) {
            grouped[part].push((short, slot));
        }
        let parts = index.parts.par_iter_mut().zip(grouped);
        parts.for_each(|(part, group)| {
            part.reserve(group.len());
            for (short, slot) in group {
                part.insert(short, slot);
            }
        });
        index
    }

    pub(super) fn get(&self, key: &[u8], arena: &impl Keyed) -> Option<Slot> {
        let (part, short) = self.hash(key);
        self.parts[part].find(short, |slot| arena.key(slot) == key)
    }

    /// Adds a slot whose key is new.
    pub(super) fn insert(&mut self, slot: Slot, arena: &impl Keyed) {
        let (part, short) = self.hash(arena.key(slot));
        self.parts[part].insert(short, slot);
    }

    /// Removes the slot of `key` and returns it. The slot must still hold the entry.
    pub(super) fn remove(&mut self, key: &[u8], arena: &impl Keyed) -> Option<Slot> {
        let (part, short) = self.hash(key);
        self.parts[part].remove(short, |slot| arena.key(slot) == key)
    }

    /// Whether the bucket is used that a search for this hash reads first.
    pub(super) fn is_bucket_used(&self, part: usize, short: u32) -> bool {
        self.parts[part].is_home_used(short)
    }

    /// A slot with this hash. Its key may be another one.
    pub(super) fn likely_slot(&self, part: usize, short: u32) -> Option<Slot> {
        self.parts[part].find(short, |_| true)
    }

    /// The number of the hash table, and the hash within it.
    pub(super) fn hash(&self, key: &[u8]) -> (usize, u32) {
        let hash = self.hasher.hash_one(key);
        ((hash >> u32::BITS) as usize % PARTS, hash as u32)
    }
}

#[cfg(test)]
mod tests {
    use std::hash::{BuildHasherDefault, Hasher};

    use super::*;

    /// Gives every key the same hash.
    #[derive(Default)]
    struct ConstantHasher;

    impl Hasher for ConstantHasher {
        fn finish(&self) -> u64 {
            7
        }
        fn write(&mut self, _: &[u8]) {}
    }

    impl Keyed for Vec<String> {
        fn key(&self, slot: Slot) -> &[u8] {
            self[slot as usize].as_bytes()
        }
    }

    #[test]
    fn keys_with_equal_hashes_are_distinguished() {
        let keys: Vec<String> = (0..100).map(|number| format!("key {number}")).collect();
        let mut index = Index::<4, BuildHasherDefault<ConstantHasher>>::default();
        for slot in 0..keys.len() as Slot {
            assert_eq!(index.get(keys.key(slot), &keys), None);
            index.insert(slot, &keys);
        }
        for slot in 0..keys.len() as Slot {
            assert_eq!(index.get(keys.key(slot), &keys), Some(slot));
        }
        for slot in (0..keys.len() as Slot).rev() {
            assert_eq!(index.remove(keys.key(slot), &keys), Some(slot));
            assert_eq!(index.remove(keys.key(slot), &keys), None);
            let left = keys
                .iter()
                .filter(|key| index.get(key.as_bytes(), &keys).is_some());
            assert_eq!(left.count(), slot as usize);
        }
    }
}
