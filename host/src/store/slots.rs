//! Where entries lie.
//!
//! What enters: entries. What leaves: a number for each key, which stays the same whatever the key holds, until it is
//! removed. So a write to a key that is there changes one place, and what finds keys by hash or in order stays as it is.

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

    /// All entries with their owners, in no order.
    pub(super) fn all(&self) -> impl Iterator<Item = (&Entry, Owner)> {
        let all = self.entries.iter().zip(&self.owners);
        all.filter_map(|(entry, owner)| Some((entry.as_ref()?, *owner)))
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
