//! Random numbers of a test, from a seed that it prints, so that a failure can be thrown again.

use std::{
    hash::{BuildHasher, RandomState},
    time::Duration,
};

/// A generator (SplitMix64).
#[derive(Clone, Debug)]
pub struct Dice(u64);

impl Dice {
    /// From `TEST_SEED`, or from a seed of the system; says which, which the test runner shows where the test fails.
    pub fn thrown() -> Dice {
        let seed = match std::env::var("TEST_SEED") {
            Ok(seed) => seed.parse().expect("TEST_SEED is a number"),
            Err(_) => RandomState::new().hash_one(0),
        };
        eprintln!("TEST_SEED={seed}");
        Dice(seed)
    }

    /// From this seed.
    pub fn of(seed: u64) -> Dice {
        Dice(seed)
    }

    /// Another generator, so that threads do not depend on each other's order.
    pub fn split(&mut self) -> Dice {
        Dice(self.next())
    }

    /// Any number.
    #[allow(clippy::should_implement_trait, reason = "there is no end of them")]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// From 0 up to but not this.
    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    /// Any of them.
    pub fn of_these<'a, T>(&mut self, all: &'a [T]) -> &'a T {
        let at = self.below(all.len() as u64);
        &all[usize::try_from(at).unwrap()]
    }

    /// A time shorter than this many milliseconds, to the microsecond.
    pub fn below_ms(&mut self, end_ms: u64) -> Duration {
        Duration::from_micros(self.below(end_ms * 1000))
    }
}
