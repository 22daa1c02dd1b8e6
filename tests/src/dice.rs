//! Random numbers for tests, from a printed seed, so that a failure can be reproduced.

use std::{
    hash::{BuildHasher, RandomState},
    time::Duration,
};

/// A generator (SplitMix64).
#[derive(Clone, Debug)]
pub struct Dice(u64);

impl Dice {
    /// Uses `TEST_SEED`, or a random seed. Prints the seed, which the test runner shows if the test
    /// fails.
    pub fn thrown() -> Dice {
        let seed = match std::env::var("TEST_SEED") {
            Ok(seed) => seed.parse().expect("TEST_SEED is a number"),
            Err(_) => RandomState::new().hash_one(0),
        };
        eprintln!("TEST_SEED={seed}");
        Dice(seed)
    }

    pub fn of(seed: u64) -> Dice {
        Dice(seed)
    }

    /// Creates another generator, so that each thread has its own sequence.
    pub fn split(&mut self) -> Dice {
        Dice(self.next())
    }

    #[allow(clippy::should_implement_trait, reason = "the sequence has no end")]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number from 0 up to but not including `end`.
    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    pub fn of_these<'a, T>(&mut self, all: &'a [T]) -> &'a T {
        let at = self.below(all.len() as u64);
        &all[usize::try_from(at).unwrap()]
    }

    /// A duration below `end_ms` milliseconds, with microsecond resolution.
    pub fn below_ms(&mut self, end_ms: u64) -> Duration {
        Duration::from_micros(self.below(end_ms * 1000))
    }
}
