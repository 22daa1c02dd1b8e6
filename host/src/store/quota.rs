//! How much the table may hold.
//!
//! What enters: what is there and what a write would add. What leaves: yes or no. Removing and
//! shrinking are always allowed, so that a full store can be emptied.

use crate::limits;

/// Bounds of the table, from the configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quota {
    /// Keys.
    pub keys_max: u64,
    /// Keys, values and what an entry costs besides, in bytes.
    pub bytes_max: u64,
    /// One key, in bytes.
    pub key_bytes_max: u64,
    /// One value, in bytes.
    pub value_bytes_max: u64,
    /// The disk under the journal is full: nothing may be put, only removed.
    pub journal_full: bool,
}

impl Default for Quota {
    /// The bounds of `serve` where nobody sets others.
    fn default() -> Self {
        Self {
            keys_max: limits::KEYS_MAX_DEFAULT,
            bytes_max: limits::BYTES_MAX_DEFAULT,
            key_bytes_max: limits::KEY_BYTES_MAX_DEFAULT,
            value_bytes_max: limits::VALUE_BYTES_MAX_DEFAULT,
            journal_full: false,
        }
    }
}

impl Quota {
    /// Whether the table may grow from `before` to `after`, each given as keys and bytes.
    pub fn allows(&self, before: (u64, u64), after: (u64, u64)) -> bool {
        let keys_max = self.keys_max.min(limits::KEYS_MAX_MAX);
        (after.0 <= keys_max || after.0 <= before.0)
            && (after.1 <= self.bytes_max || after.1 <= before.1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn growing_stops_at_the_bound_and_shrinking_never() {
        let quota = Quota {
            keys_max: 2,
            bytes_max: 100,
            key_bytes_max: 10,
            value_bytes_max: 10,
            journal_full: false,
        };
        assert!(quota.allows((1, 50), (2, 100)));
        assert!(!quota.allows((2, 50), (3, 60)));
        assert!(!quota.allows((1, 50), (1, 101)));
        // A lowered bound must not lock what is already above it.
        assert!(quota.allows((5, 300), (5, 300)) && quota.allows((5, 300), (4, 200)));
        assert!(!quota.allows((5, 300), (5, 301)));
    }
}
