//! Limits the rate of wrong passwords, by address or by user.
//!
//! [`Throttle::allows`] is called before a password is checked and counts it as wrong;
//! [`Throttle::refund`] is called if it was right. The memory must not depend on the number of
//! addresses and names, because clients choose them.

use std::hash::{BuildHasher, Hash, RandomState};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Slots for sources of guesses. Sources that share a slot by chance share its limit. The hash is
/// random, so a client cannot choose a source that shares a slot with another one.
const SLOTS: usize = 4096;

/// A limit of `burst` guesses at once, and one more after each interval.
pub(super) struct Throttle {
    burst: u32,
    interval: Duration,
    hasher: RandomState,
    /// For each slot the end of the time that its guesses have used. A guess uses one interval.
    used_until: Mutex<Box<[Option<Instant>]>>,
}

impl Throttle {
    pub(super) fn new(burst: u32, interval: Duration) -> Self {
        Self {
            burst,
            interval,
            hasher: RandomState::new(),
            used_until: Mutex::new(vec![None; SLOTS].into_boxed_slice()),
        }
    }

    /// Whether a guess may be checked. An allowed guess counts as wrong at once, so that a client
    /// cannot save guesses by disconnecting early.
    pub(super) fn allows(&self, source: impl Hash, now: Instant) -> bool {
        self.change(source, |used_until| {
            let from = used_until.map_or(now, |until| until.max(now));
            let used = from.duration_since(now) + self.interval;
            let is_allowed = used <= self.interval * self.burst;
            if is_allowed {
                *used_until = from.checked_add(self.interval);
            }
            is_allowed
        })
    }

    /// Uncounts an allowed guess that was right or was not checked.
    pub(super) fn refund(&self, source: impl Hash) {
        self.change(source, |used_until| {
            *used_until = used_until.and_then(|until| until.checked_sub(self.interval));
        });
    }

    fn change<R>(&self, source: impl Hash, f: impl FnOnce(&mut Option<Instant>) -> R) -> R {
        let index = self.hasher.hash_one(source) as usize % SLOTS;
        // Code under this lock does not panic.
        let mut slots = self
            .used_until
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        f(&mut slots[index])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn guesses_are_limited_at_once_and_over_time() {
        let throttle = Throttle::new(3, SECOND);
        let now = Instant::now();
        let allowed = |now| (0..10).filter(|_| throttle.allows("a", now)).count();
        assert_eq!(allowed(now), 3);
        assert_eq!(allowed(now), 0);
        assert_eq!(allowed(now + SECOND), 1);
        assert_eq!(allowed(now + 3 * SECOND), 2);
        // A long pause allows no more than one burst.
        assert_eq!(allowed(now + 1000 * SECOND), 3);
    }

    #[test]
    fn right_passwords_and_other_sources_are_not_limited() {
        let throttle = Throttle::new(3, SECOND);
        let now = Instant::now();
        for _ in 0..100 {
            assert!(throttle.allows("right", now));
            throttle.refund("right");
        }
        while throttle.allows("wrong", now) {}
        // Some sources share a slot with the guesser, or with several others, by chance: about one
        // in several runs.
        let others = SLOTS / 8;
        let refused = (0..others)
            .filter(|other| !throttle.allows(other, now))
            .count();
        assert!(refused < 10, "{refused} of {others}");
    }
}
