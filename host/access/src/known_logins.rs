//! Remembers pairs of a user name and an address with a successful login, in a table of fixed size.
//!
//! A pair must be inserted only after a right password, so that a guesser can neither add nor
//! replace one. A new pair replaces the pair in its slot.

use std::hash::{BuildHasher, Hash, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::limits;

/// A table of hashes of pairs.
pub(super) struct KnownLogins {
    hasher: RandomState,
    slots: Box<[AtomicU64]>,
}

impl KnownLogins {
    pub(super) fn new() -> Self {
        let slots = (0..limits::KNOWN_LOGINS_MAX).map(|_| AtomicU64::new(0));
        Self {
            hasher: RandomState::new(),
            slots: slots.collect(),
        }
    }

    pub(super) fn insert(&self, login: impl Hash) {
        let (slot, hash) = self.slot(login);
        slot.store(hash, Ordering::Relaxed);
    }

    pub(super) fn contains(&self, login: impl Hash) -> bool {
        let (slot, hash) = self.slot(login);
        slot.load(Ordering::Relaxed) == hash
    }

    fn slot(&self, login: impl Hash) -> (&AtomicU64, u64) {
        // 0 is the value of an empty slot.
        let hash = self.hasher.hash_one(login).max(1);
        (&self.slots[hash as usize % self.slots.len()], hash)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn login_is_known_until_another_one_takes_its_slot() {
        let logins = KnownLogins::new();
        assert!(!logins.contains(("anna", 1)));
        logins.insert(("anna", 1));
        assert!(logins.contains(("anna", 1)));
        assert!(!logins.contains(("anna", 2)) && !logins.contains(("bert", 1)));
        for other in 0..100 * limits::KNOWN_LOGINS_MAX {
            logins.insert(("bert", other));
        }
        assert!(!logins.contains(("anna", 1)));
    }
}
