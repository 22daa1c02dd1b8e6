//! Slots by key alone, which is what most requests look for.
//!
//! What enters: slots. What leaves: the one of a key, after one look at a table of hashes and one at the entry itself,
//! where a search in order compares some twenty keys among a million. It knows no order and no time.

use std::hash::{BuildHasher, RandomState};

use hashbrown::HashTable;
use rayon::prelude::*;

use super::slots::{Slot, Slots};
use crate::limits::INDEX_PARTS;

/// Slots by the hash of their key, which is seeded anew in each process: clients choose the keys.
#[derive(Clone)]
pub(super) struct Index {
    hasher: RandomState,
    /// Many small tables: one that grows moves all of its slots at once, while every request waits.
    parts: Vec<HashTable<Slot>>,
}

impl Default for Index {
    fn default() -> Self {
        Self {
            hasher: RandomState::new(),
            parts: vec![HashTable::new(); INDEX_PARTS],
        }
    }
}

impl Index {
    /// An index of entries in slots from 0 on, made by all cores: a start waits for it.
    pub(super) fn of(slots: &Slots) -> Self {
        let mut index = Self::default();
        let hasher = &index.hasher;
        let all = 0..slots.len() as Slot;
        let hash = |slot: Slot| hasher.hash_one(slots.key(slot));
        let hashes: Vec<u64> = all.clone().into_par_iter().map(hash).collect();
        let mut grouped = vec![Vec::new(); INDEX_PARTS];
        for (slot, hash) in all.zip(hashes) {
            grouped[part(hash)].push((hash, slot));
        }
        let parts = index.parts.par_iter_mut().zip(grouped);
        parts.for_each(|(part, group)| {
            part.reserve(group.len(), |&it| hash(it));
            for (of, slot) in group {
                part.insert_unique(of, slot, |&it| hash(it));
            }
        });
        index
    }

    pub(super) fn get(&self, key: &[u8], slots: &Slots) -> Option<Slot> {
        let hash = self.hasher.hash_one(key);
        let found = self.parts[part(hash)].find(hash, |&it| slots.key(it) == key);
        found.copied()
    }

    /// Takes in a slot whose key is not there yet.
    pub(super) fn insert(&mut self, slot: Slot, slots: &Slots) {
        let hash = |&it: &Slot| self.hasher.hash_one(slots.key(it));
        let of = hash(&slot);
        self.parts[part(of)].insert_unique(of, slot, hash);
    }

    /// Forgets the slot of `key` and returns it, while the entry is still in it.
    pub(super) fn remove(&mut self, key: &[u8], slots: &Slots) -> Option<Slot> {
        let hash = self.hasher.hash_one(key);
        let found = self.parts[part(hash)].find_entry(hash, |&it| slots.key(it) == key);
        Some(found.ok()?.remove().0)
    }
}

/// Which table. Each of these chooses by the lowest bits of the hash, and tells entries apart by its highest.
fn part(hash: u64) -> usize {
    (hash >> 40) as usize % INDEX_PARTS
}
