//! Numbers that two processes do not share. Not for secrets: names, correlation data and pauses need only be different.

use std::hash::{BuildHasher, Hasher, RandomState};

/// A number from the operating system's randomness, through the keys of the standard hasher.
#[must_use]
pub fn random() -> u64 {
    let mut hasher = RandomState::new().build_hasher();
    hasher.write_u32(std::process::id());
    hasher.finish()
}

#[cfg(test)]
mod tests {
    #[test]
    fn numbers_differ() {
        assert_ne!(super::random(), super::random());
    }
}
