//! Random numbers that differ between processes, for names, correlation data and pauses. They must
//! not be used as secrets.

use std::hash::{BuildHasher, Hasher, RandomState};

/// A random number that the operating system seeds through the keys of the standard hasher.
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
