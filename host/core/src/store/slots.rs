//! Where entries lie.
//!
//! What enters: entries. What leaves: a number for each key, which stays the same whatever the key holds, until it is
//! removed. So a write to a key that is there changes one place, and what finds keys by hash or in order stays as it is.

use rayon::prelude::*;

use super::entry::Entry;
use super::index::Keyed;
use super::owners::Owner;

/// The place of a key: there are never more than `limits::KEYS_MAX_MAX`.
pub(super) type Slot = u32;

/// Entries by their slot, and whose they are.
#[derive(Clone, Default)]
pub(super) struct Slots {
    entries: Vec<Option<Entry>>,
    /// Beside them and not in them: so an owner costs each key four bytes, and nothing that shares an entry knows of it.
    owners: Vec<Owner>,
    free: Vec<Slot>,
}

impl Slots {
    /// Entries in slots from 0 on.
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

    /// How many are taken.
    pub(super) fn len(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    pub(super) fn get(&self, slot: Slot) -> &Entry {
        self.entries[slot as usize]
            .as_ref()
            .expect("a slot is forgotten with its key")
    }

    pub(super) fn owner(&self, slot: Slot) -> Owner {
        self.owners[slot as usize]
    }

    /// Keys and bytes of each owner below `owners`, in a part for each core, since a start waits for it; but where there are
    /// about as many owners as keys in fewer, or the sums would take more than what they are of.
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

    /// Puts the entry of a new key somewhere.
    pub(super) fn add(&mut self, entry: Entry, owner: Owner) -> Slot {
        if let Some(slot) = self.free.pop() {
            self.entries[slot as usize] = Some(entry);
            self.owners[slot as usize] = owner;
            return slot;
        }
        let slot = Slot::try_from(self.entries.len())
            .expect("the quota takes no more keys than there are slots");
        self.entries.push(Some(entry));
        self.owners.push(owner);
        slot
    }

    /// Puts another entry of the same key in its slot, and returns the old one.
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

    /// Takes an entry out; the slot is free.
    pub(super) fn take(&mut self, slot: Slot) -> Option<(Entry, Owner)> {
        let entry = self.entries[slot as usize].take()?;
        self.free.push(slot);
        Some((entry, self.owner(slot)))
    }
}

impl Keyed for Slots {
    fn key(&self, slot: Slot) -> &[u8] {
        self.get(slot).key()
    }
}
