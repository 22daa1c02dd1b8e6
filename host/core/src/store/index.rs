//! Slots by key alone, which is what most requests look for.
//!
//! What enters: slots. What leaves: the one of a key, after one look at a table of hashes and one at the entry itself,
//! where a search in order compares some twenty keys among a million. It knows no order and no time.

use std::hash::{BuildHasher, RandomState};

use hashbrown::HashTable;
use rayon::prelude::*;

use super::slots::{Slot, Slots};

/// What an index finds: keys by their slots.
pub(super) trait Keyed {
    /// The key in a slot that is taken.
    fn key(&self, slot: Slot) -> &[u8];
}

/// Slots by the hash of their key, which is seeded anew in each process: clients choose the keys.
#[derive(Clone)]
pub(super) struct Index<const PARTS: usize, S = RandomState> {
    hasher: S,
    /// Many small tables: one that grows moves all of its places at once, while every request waits.
    parts: Vec<HashTable<Place>>,
}

/// A slot, and the part of its key's hash that its table goes by: a table that grows need not look at the keys again.
#[derive(Clone, Copy)]
struct Place {
    short: u32,
    slot: Slot,
}

impl<const PARTS: usize, S: Default> Default for Index<PARTS, S> {
    fn default() -> Self {
        Self {
            hasher: S::default(),
            parts: vec![HashTable::new(); PARTS],
        }
    }
}

impl<const PARTS: usize, S: BuildHasher + Default + Sync> Index<PARTS, S> {
    /// An index of entries in slots from 0 on, made by all cores: a start waits for it.
    pub(super) fn of(slots: &Slots) -> Self {
        let mut index = Self::default();
        let all = 0..slots.len() as Slot;
        let hash = |slot| index.hash(slots.key(slot));
        let hashes: Vec<(usize, u32)> = all.clone().into_par_iter().map(hash).collect();
        let mut grouped = vec![Vec::new(); PARTS];
        for (slot, (part, short)) in all.zip(hashes) {
            grouped[part].push(Place { short, slot });
        }
        let parts = index.parts.par_iter_mut().zip(grouped);
        parts.for_each(|(part, group)| {
            part.reserve(group.len(), Place::hash);
            for place in group {
                part.insert_unique(place.hash(), place, Place::hash);
            }
        });
        index
    }

    pub(super) fn get(&self, key: &[u8], slots: &impl Keyed) -> Option<Slot> {
        let (part, short) = self.hash(key);
        let is_it = |it: &Place| it.short == short && slots.key(it.slot) == key;
        self.parts[part].find(long(short), is_it).map(|it| it.slot)
    }

    /// Takes in a slot whose key is not there yet.
    pub(super) fn insert(&mut self, slot: Slot, slots: &impl Keyed) {
        let (part, short) = self.hash(slots.key(slot));
        let place = Place { short, slot };
        self.parts[part].insert_unique(place.hash(), place, Place::hash);
    }

    /// Forgets the slot of `key` and returns it, while the entry is still in it.
    pub(super) fn remove(&mut self, key: &[u8], slots: &impl Keyed) -> Option<Slot> {
        let (part, short) = self.hash(key);
        let is_it = |it: &Place| it.short == short && slots.key(it.slot) == key;
        let found = self.parts[part].find_entry(long(short), is_it);
        Some(found.ok()?.remove().0.slot)
    }

    /// Which table, and the hash there.
    fn hash(&self, key: &[u8]) -> (usize, u32) {
        let hash = self.hasher.hash_one(key);
        ((hash >> u32::BITS) as usize % PARTS, hash as u32)
    }
}

impl Place {
    fn hash(&self) -> u64 {
        long(self.short)
    }
}

/// A table chooses by the lowest bits, and tells its places apart by the highest.
fn long(short: u32) -> u64 {
    u64::from(short) << u32::BITS | u64::from(short)
}

#[cfg(test)]
mod tests {
    use std::hash::{BuildHasherDefault, Hasher};

    use super::*;

    /// All keys have the same hash.
    #[derive(Default)]
    struct Same;

    impl Hasher for Same {
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
    fn keys_with_one_hash_are_told_apart() {
        let keys: Vec<String> = (0..100).map(|number| format!("key {number}")).collect();
        let mut index = Index::<4, BuildHasherDefault<Same>>::default();
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
