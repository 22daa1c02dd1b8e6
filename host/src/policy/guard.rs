//! Watches over a policy that answers: fails it too often, or burns it too much, then the host goes back.
//!
//! What enters: the end of each request of one policy. What leaves: once, why it may not go on.

use super::digest::Digest;
use crate::limits;

/// What an operator tolerates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GuardSettings {
    /// Failed requests among the last thousand; zero tolerates all.
    pub failures_max: u32,
    /// Fuel of a request, on average over the last thousand; zero tolerates all.
    pub fuel_mean_max: u64,
}

impl Default for GuardSettings {
    fn default() -> Self {
        Self {
            failures_max: limits::GUARD_FAILURES_DEFAULT,
            fuel_mean_max: 0,
        }
    }
}

/// The last requests of one policy.
#[derive(Debug, Default)]
pub struct Guard {
    policy: Option<Digest>,
    /// What each burnt, and whether it failed; the oldest is written over.
    window: Vec<(u64, bool)>,
    next: usize,
    failures: u32,
    fuel: u64,
}

impl Guard {
    /// A request of `policy` ended. Where it is one too many, the words for that; then counting begins anew.
    pub fn note(
        &mut self,
        settings: GuardSettings,
        policy: Digest,
        fuel: u64,
        failed: bool,
    ) -> Option<String> {
        if self.policy != Some(policy) {
            *self = Self {
                policy: Some(policy),
                window: std::mem::take(&mut self.window),
                ..Self::default()
            };
            self.window.clear();
        }
        if self.window.len() < limits::GUARD_WINDOW_REQUESTS {
            self.window.push((fuel, failed));
        } else {
            let (old_fuel, old_failed) =
                std::mem::replace(&mut self.window[self.next], (fuel, failed));
            self.next = (self.next + 1) % limits::GUARD_WINDOW_REQUESTS;
            self.fuel -= old_fuel;
            self.failures -= u32::from(old_failed);
        }
        // A call burns far less than a thousandth of what a u64 holds.
        self.fuel += fuel;
        self.failures += u32::from(failed);
        let requests = self.window.len();
        let why = if settings.failures_max > 0 && self.failures >= settings.failures_max {
            format!(
                "it failed at {} of its last {requests} requests",
                self.failures
            )
        } else {
            let mean = self.fuel / requests as u64;
            let tried = requests >= limits::GUARD_FUEL_REQUESTS_MIN;
            if settings.fuel_mean_max == 0 || !tried || mean <= settings.fuel_mean_max {
                return None;
            }
            format!("it burnt {mean} fuel for a request, over its last {requests}")
        };
        self.policy = None;
        Some(why)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_count_among_the_last_thousand() {
        let settings = GuardSettings {
            failures_max: 3,
            fuel_mean_max: 0,
        };
        let (mut guard, policy) = (Guard::default(), Digest::of(b"a"));
        let mut note = |policy, failed| guard.note(settings, policy, 1, failed);
        for _ in 0..2 {
            assert_eq!(note(policy, true), None);
        }
        // They leave the window one by one.
        for _ in 0..limits::GUARD_WINDOW_REQUESTS - 2 {
            assert_eq!(note(policy, false), None);
        }
        assert_eq!(note(policy, true), None);
        assert_eq!(note(policy, true), None);
        let why = note(policy, true).unwrap();
        assert_eq!(why, "it failed at 3 of its last 1000 requests");
        // Counting begins anew, as it does with another policy.
        assert_eq!(note(policy, true), None);
        assert_eq!(note(policy, true), None);
        assert_eq!(note(Digest::of(b"b"), true), None);
        assert_eq!(note(policy, true), None);
    }

    #[test]
    fn fuel_counts_on_average() {
        let settings = GuardSettings {
            failures_max: 0,
            fuel_mean_max: 1000,
        };
        let (mut guard, policy) = (Guard::default(), Digest::of(b"a"));
        let mut note = |fuel| guard.note(settings, policy, fuel, true);
        // One costly request at the beginning proves nothing.
        assert_eq!(note(1_001), None);
        for _ in 0..2 * limits::GUARD_WINDOW_REQUESTS {
            assert_eq!(note(1_000), None);
        }
        assert_eq!(note(1_999), None, "the first one has left the window");
        assert!(note(1_002).is_some_and(|why| why.contains("1001 fuel")));
    }
}
