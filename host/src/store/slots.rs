//! Where entries lie.
//!
//! What enters: entries. What leaves: a number for each key, which stays the same whatever the key holds, until it is
//! removed. So a write to a key that is there changes one place, and what finds keys by hash or in order stays as it is.

use super::entry::Entry;

/// The place of a key: there are never more than `limits::KEYS_MAX_MAX`.
pub(super) type Slot = u32;

/// Entries by their slot.
#[derive(Clone, Default)]
pub(super) struct Slots {
    entries: Vec<Option<Entry>>,
    free: Vec<Slot>,
}

impl Slots {
    /// Entries in slots from 0 on.
    pub(super) fn of(entries: Vec<Entry>) -> Self {
        Self {
            entries: entries.into_iter().map(Some).collect(),
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

    pub(super) fn key(&self, slot: Slot) -> &[u8] {
        self.get(slot).key()
    }

    /// Puts the entry of a new key somewhere.
    pub(super) fn add(&mut self, entry: Entry) -> Slot {
        if let Some(slot) = self.free.pop() {
            self.entries[slot as usize] = Some(entry);
            return slot;
        }
        let slot = Slot::try_from(self.entries.len())
            .expect("the quota takes no more keys than there are slots");
        self.entries.push(Some(entry));
        slot
    }

    /// Puts another entry of the same key in its slot, and returns the old one.
    pub(super) fn replace(&mut self, slot: Slot, entry: Entry) -> Option<Entry> {
        self.entries[slot as usize].replace(entry)
    }

    /// Takes an entry out; the slot is free.
    pub(super) fn take(&mut self, slot: Slot) -> Option<Entry> {
        let entry = self.entries[slot as usize].take()?;
        self.free.push(slot);
        Some(entry)
    }
}
