//! How often somebody may be wrong: a bound on guesses, by address and by user.
//!
//! In comes each guess before it is checked, and again where it was right; out goes whether it may be checked at all. Takes
//! the same memory however many addresses and names there are.

use std::hash::{BuildHasher, Hash, RandomState};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Places for guessers. Those who share one by chance share its bound; which ones do, nobody outside can tell.
const SLOTS: usize = 4096;

/// A bound of so many guesses at once, and one more after each interval.
pub(super) struct Throttle {
    burst: u32,
    interval: Duration,
    hasher: RandomState,
    /// Until when each has used up what it may do, if one guess uses up one interval.
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

    /// A guess. Where it is allowed it counts as wrong from now on, so that nobody saves one by leaving early.
    pub(super) fn allows(&self, who: impl Hash, now: Instant) -> bool {
        self.change(who, |used_until| {
            let from = used_until.map_or(now, |until| until.max(now));
            let used = from.duration_since(now) + self.interval;
            let is_allowed = used <= self.interval * self.burst;
            if is_allowed {
                *used_until = from.checked_add(self.interval);
            }
            is_allowed
        })
    }

    /// A guess was right, or was not checked: it does not count.
    pub(super) fn forgives(&self, who: impl Hash) {
        self.change(who, |used_until| {
            *used_until = used_until.and_then(|until| until.checked_sub(self.interval));
        });
    }

    fn change<R>(&self, who: impl Hash, f: impl FnOnce(&mut Option<Instant>) -> R) -> R {
        let index = self.hasher.hash_one(who) as usize % SLOTS;
        // Nothing panics while it is held.
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
    fn guesses_are_bounded_at_once_and_over_time() {
        let throttle = Throttle::new(3, SECOND);
        let now = Instant::now();
        let allowed = |now| (0..10).filter(|_| throttle.allows("a", now)).count();
        assert_eq!(allowed(now), 3);
        assert_eq!(allowed(now), 0);
        assert_eq!(allowed(now + SECOND), 1);
        assert_eq!(allowed(now + 3 * SECOND), 2);
        // Patience is not saved up beyond the bound.
        assert_eq!(allowed(now + 1000 * SECOND), 3);
    }

    #[test]
    fn who_is_right_may_come_again_and_others_are_not_held_up() {
        let throttle = Throttle::new(3, SECOND);
        let now = Instant::now();
        for _ in 0..100 {
            assert!(throttle.allows("right", now));
            throttle.forgives("right");
        }
        while throttle.allows("wrong", now) {}
        // Some share a place with the guesser, or with several others, by chance: one in several runs.
        let others = SLOTS / 8;
        let held_up = (0..others)
            .filter(|other| !throttle.allows(other, now))
            .count();
        assert!(held_up < 10, "{held_up} of {others}");
    }
}
