//! Where users have logged in: pairs of a user name and an address, in a table of a fixed size.
//!
//! A pair enters after a right password only, so a guesser can neither add nor replace one. A new pair replaces the one that has
//! its slot.

use std::hash::{BuildHasher, Hash, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::limits;

/// The table.
pub(super) struct Places {
    hasher: RandomState,
    slots: Box<[AtomicU64]>,
}

impl Places {
    pub(super) fn new() -> Self {
        let slots = (0..limits::LOGIN_PLACES).map(|_| AtomicU64::new(0));
        Self {
            hasher: RandomState::new(),
            slots: slots.collect(),
        }
    }

    /// Remembers a place.
    pub(super) fn insert(&self, place: impl Hash) {
        let (slot, hash) = self.slot(place);
        slot.store(hash, Ordering::Relaxed);
    }

    /// Whether the place is remembered.
    pub(super) fn contains(&self, place: impl Hash) -> bool {
        let (slot, hash) = self.slot(place);
        slot.load(Ordering::Relaxed) == hash
    }

    fn slot(&self, place: impl Hash) -> (&AtomicU64, u64) {
        // An empty slot holds 0.
        let hash = self.hasher.hash_one(place).max(1);
        (&self.slots[hash as usize % self.slots.len()], hash)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_remembered_until_another_has_its_slot() {
        let places = Places::new();
        assert!(!places.contains(("anna", 1)));
        places.insert(("anna", 1));
        assert!(places.contains(("anna", 1)));
        assert!(!places.contains(("anna", 2)) && !places.contains(("bert", 1)));
        for other in 0..100 * limits::LOGIN_PLACES {
            places.insert(("bert", other));
        }
        assert!(!places.contains(("anna", 1)));
    }
}
