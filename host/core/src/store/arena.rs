//! Stores the entries of a table in slots.
//!
//! A key keeps its slot number until it is removed. So a write to an existing key changes one slot,
//! and neither the index nor the order.

use rayon::prelude::*;

use super::entry::Entry;
use super::index::Keyed;
use super::owners::Owner;

/// The slot number of a key. There are at most `limits::KEYS_MAX_MAX`.
pub(super) type Slot = u32;

/// Entries by slot, with their owners.
#[derive(Clone, Default)]
pub(super) struct Arena {
    entries: Vec<Option<Entry>>,
    /// Stored next to the entries, not in them: an owner costs four bytes for each key, and code
    /// that shares entries does not depend on owners.
    owners: Vec<Owner>,
    free: Vec<Slot>,
}

impl Arena {
    /// Stores `entries` in slots from 0 on.
    pub(super) fn of(entries: Vec<(Entry, Owner)>) -> Self {
        let (entries, owners) = (entries.into_iter())
            .map(|(entry, owner)| (Some(entry), owner))
            .unzip();
        Self {
            entries,
            owners,
            free: Vec::new(),
        }
    }

    /// The number of used slots.
    pub(super) fn len(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    pub(super) fn get(&self, slot: Slot) -> &Entry {
        self.entries[slot as usize]
            .as_ref()
            .expect("a key's slot is removed with the key")
    }

    /// The entry in a slot, if the slot is used.
    pub(super) fn find(&self, slot: Slot) -> Option<&Entry> {
        self.entries.get(slot as usize)?.as_ref()
    }

    pub(super) fn owner(&self, slot: Slot) -> Owner {
        self.owners[slot as usize]
    }

    /// Keys and bytes of each owner below `owners`, as partial sums.
    ///
    /// Every CPU core computes one, because a start waits for it. If there are about as many owners
    /// as keys, there are fewer partial sums: they would take more memory than the entries.
    pub(super) fn loads(&self, owners: usize) -> Vec<Vec<(u64, u64)>> {
        let parts = rayon::current_num_threads().min(self.entries.len() / owners.max(1));
        let part = self.entries.len().div_ceil(parts.max(1)).max(1);
        let parts = self.entries.par_chunks(part);
        let parts = parts.zip(self.owners.par_chunks(part));
        let load = |(entries, part): (&[Option<Entry>], &[Owner])| {
            let mut loads = vec![(0, 0); owners];
            for (entry, owner) in entries.iter().zip(part) {
                if let (Some(entry), Some(load)) = (entry, loads.get_mut(*owner as usize)) {
                    load.0 += 1;
                    load.1 += entry.weight();
                }
            }
            loads
        };
        parts.map(load).collect()
    }

    /// Stores the entry of a new key in a free slot.
    pub(super) fn add(&mut self, entry: Entry, owner: Owner) -> Slot {
        if let Some(slot) = self.free.pop() {
            self.entries[slot as usize] = Some(entry);
            self.owners[slot as usize] = owner;
            return slot;
        }
        let slot = Slot::try_from(self.entries.len())
            .expect("the quota allows at most as many keys as slots");
        self.entries.push(Some(entry));
        self.owners.push(owner);
        slot
    }

    /// Replaces the entry in a slot with another one of the same key. Returns the old one.
    pub(super) fn replace(
        &mut self,
        slot: Slot,
        entry: Entry,
        owner: Owner,
    ) -> Option<(Entry, Owner)> {
        let old = self.entries[slot as usize].replace(entry)?;
        Some((
            old,
            std::mem::replace(&mut self.owners[slot as usize], owner),
        ))
    }

    /// Removes an entry and frees its slot.
    pub(super) fn take(&mut self, slot: Slot) -> Option<(Entry, Owner)> {
        let entry = self.entries[slot as usize].take()?;
        self.free.push(slot);
        Some((entry, self.owner(slot)))
    }
}

impl Keyed for Arena {
    fn key(&self, slot: Slot) -> &[u8] {
        self.get(slot).key()
    }
}
