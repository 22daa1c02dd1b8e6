//! Entries by key alone, which is what most requests look for.
//!
//! What enters: entries. What leaves: the one of a key, after one look at a table of hashes and one at the entry itself,
//! where a search in order compares some thirty keys among a million. It knows no order and no time.

use std::hash::{BuildHasher, RandomState};

use hashbrown::HashTable;
use hashbrown::hash_table::Entry as Place;
use rayon::prelude::*;

use super::entry::Entry;
use crate::limits::INDEX_PARTS;

/// Entries by the hash of their key, which is seeded anew in each process: clients choose the keys.
#[derive(Clone)]
pub(super) struct Index {
    hasher: RandomState,
    /// Many small tables: one that grows moves all of its entries at once, while every request waits.
    parts: Vec<HashTable<Entry>>,
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
    /// An index of entries with different keys, made by all cores: a start waits for it.
    pub(super) fn of<'a>(entries: impl Iterator<Item = &'a Entry>) -> Self {
        let mut index = Self::default();
        let hasher = &index.hasher;
        let entries: Vec<&Entry> = entries.collect();
        let hashed: Vec<(u64, Entry)> = entries
            .into_par_iter()
            .map(|entry| (hasher.hash_one(entry.key()), entry.clone()))
            .collect();
        let mut grouped = vec![Vec::new(); INDEX_PARTS];
        for (hash, entry) in hashed {
            grouped[part(hash)].push((hash, entry));
        }
        let parts = index.parts.par_iter_mut().zip(grouped);
        parts.for_each(|(part, group)| {
            part.reserve(group.len(), |it| hasher.hash_one(it.key()));
            for (hash, entry) in group {
                part.insert_unique(hash, entry, |it| hasher.hash_one(it.key()));
            }
        });
        index
    }

    pub(super) fn get(&self, key: &[u8]) -> Option<&Entry> {
        let hash = self.hasher.hash_one(key);
        self.parts[part(hash)].find(hash, |it| it.key() == key)
    }

    /// Puts an entry in the place of the one that has its key.
    pub(super) fn insert(&mut self, entry: Entry) {
        let hasher = &self.hasher;
        let hash = hasher.hash_one(entry.key());
        let place = self.parts[part(hash)].entry(
            hash,
            |it| it.key() == entry.key(),
            |it| hasher.hash_one(it.key()),
        );
        match place {
            Place::Occupied(mut place) => *place.get_mut() = entry,
            Place::Vacant(place) => drop(place.insert(entry)),
        }
    }

    pub(super) fn remove(&mut self, key: &[u8]) {
        let hash = self.hasher.hash_one(key);
        if let Ok(place) = self.parts[part(hash)].find_entry(hash, |it| it.key() == key) {
            place.remove();
        }
    }
}

/// Which table. Each of these chooses by the lowest bits of the hash, and tells entries apart by its highest.
fn part(hash: u64) -> usize {
    (hash >> 40) as usize % INDEX_PARTS
}
