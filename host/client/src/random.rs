//! Numbers that two clients do not share. Not for secrets: names and correlation data need only be
//! different.

use std::hash::{BuildHasher, Hasher, RandomState};

/// A number from the operating system's randomness, through the keys of the standard hasher.
pub(crate) fn number() -> u64 {
    let mut hasher = RandomState::new().build_hasher();
    hasher.write_u32(std::process::id());
    hasher.finish()
}

#[cfg(test)]
mod tests {
    #[test]
    fn numbers_differ() {
        assert_ne!(super::number(), super::number());
    }
}
