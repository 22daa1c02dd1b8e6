//! The guard: rolls a policy back if it fails too often or uses too much fuel.
//!
//! A failure that delayed every client counts in full. Of cheap failures, one client contributes at
//! most half of the limit, so that it cannot disable a policy that serves other clients well.

use std::collections::{HashMap, VecDeque};

use super::budget::Failure;
use super::digest::Digest;
use crate::limits;

/// Limits, from the configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GuardSettings {
    /// Failed requests among the last thousand; zero turns this off. Once the policy has answered
    /// another client well, cheap failures of one client count for at most half of the limit.
    /// Otherwise a client that finds a payload at which the policy fails could disable it for all
    /// others.
    pub failures_max: u32,
    /// Mean fuel of a request over the last thousand; zero turns this off.
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

/// The end of one request of a policy.
#[derive(Clone, Copy, Debug)]
pub struct EndedCall {
    /// A hash of the client id.
    pub client: u64,
    /// The fuel used.
    pub fuel: u64,
    /// The outcome.
    pub outcome: CallOutcome,
}

/// The outcome of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallOutcome {
    /// It was answered.
    Answered,
    /// The policy failed deterministically, at little cost.
    Failed,
    /// The policy failed after it used the fuel of a whole call, or its restart will use that much.
    Exhausted,
    /// The watchdog stopped the call. Once may be a slow machine; repeatedly it is the policy.
    Stopped,
}

impl CallOutcome {
    /// Classifies a failed call. The failure requires a new instance, which takes `start_fuel`. A
    /// call may use `fuel_max`. `None` if the machine lacks a resource, such as memory: that says
    /// nothing about the policy.
    pub fn failed(failure: &Failure, start_fuel: u64, fuel_max: u64) -> Option<Self> {
        Some(match failure {
            Failure::Machine(_) => return None,
            Failure::Watchdog => Self::Stopped,
            Failure::Fuel => Self::Exhausted,
            _ if start_fuel > fuel_max => Self::Exhausted,
            Failure::Trap(_) | Failure::Malformed(_) => Self::Failed,
        })
    }
}

/// The last requests of one policy.
#[derive(Debug, Default)]
pub struct Guard {
    policy: Option<Digest>,
    window: VecDeque<EndedCall>,
    fuel: u64,
    failed: Tally,
    exhausted: u32,
    stopped: u32,
    /// Two clients that this policy has answered well: enough to decide for any client whether
    /// there is another one.
    satisfied: [Option<u64>; 2],
}

/// Cheap failures in the window, counted by client.
#[derive(Debug, Default)]
struct Tally(HashMap<u64, u32>);

impl Tally {
    fn add(&mut self, client: u64) {
        *self.0.entry(client).or_default() += 1;
    }

    fn remove(&mut self, client: u64) {
        if let Some(count) = self.0.get_mut(&client) {
            *count -= 1;
            if *count == 0 {
                self.0.remove(&client);
            }
        }
    }

    fn all(&self) -> u32 {
        self.0.values().sum()
    }

    /// How many of these count towards `max`. Once the policy has answered another client well, one
    /// client contributes at most half.
    fn counted(&self, max: u32, satisfied: &[Option<u64>; 2]) -> u32 {
        let counted = self.0.iter().map(|(client, count)| {
            let has_other = satisfied.iter().flatten().any(|it| it != client);
            match has_other {
                true => (*count).min(max.div_ceil(2)),
                false => *count,
            }
        });
        counted.sum()
    }
}

impl Guard {
    /// Notes the end of a request of `policy`. Returns the reason if a limit is exceeded; then
    /// counting starts from zero.
    pub fn note(
        &mut self,
        settings: GuardSettings,
        policy: Digest,
        ended: EndedCall,
    ) -> Option<String> {
        if self.policy != Some(policy) {
            let mut window = std::mem::take(&mut self.window);
            window.clear();
            *self = Self {
                policy: Some(policy),
                window,
                ..Self::default()
            };
        }
        if self.window.len() == limits::GUARD_WINDOW_REQUESTS
            && let Some(old) = self.window.pop_front()
        {
            self.fuel -= old.fuel;
            match old.outcome {
                CallOutcome::Answered => {}
                CallOutcome::Failed => self.failed.remove(old.client),
                CallOutcome::Exhausted => self.exhausted -= 1,
                CallOutcome::Stopped => self.stopped -= 1,
            }
        }
        self.window.push_back(ended);
        // A call uses far less than a thousandth of the range of a u64.
        self.fuel += ended.fuel;
        match ended.outcome {
            CallOutcome::Answered => self.note_satisfied(ended.client),
            CallOutcome::Failed => self.failed.add(ended.client),
            CallOutcome::Exhausted => self.exhausted += 1,
            CallOutcome::Stopped => self.stopped += 1,
        }
        let why = self.verdict(settings, ended.outcome)?;
        self.policy = None;
        Some(why)
    }

    fn note_satisfied(&mut self, client: u64) {
        match self.satisfied {
            [None, _] => self.satisfied[0] = Some(client),
            [Some(first), None] if first != client => self.satisfied[1] = Some(client),
            _ => {}
        }
    }

    /// The reason why the policy must be rolled back, if the last request exceeded a limit.
    fn verdict(&self, settings: GuardSettings, last: CallOutcome) -> Option<String> {
        let requests = self.window.len();
        let max = settings.failures_max;
        if max > 0 && matches!(last, CallOutcome::Failed | CallOutcome::Exhausted) {
            let counted = self.failed.counted(max, &self.satisfied) + self.exhausted;
            let failed = self.failed.all() + self.exhausted;
            if counted >= max {
                return Some(format!(
                    "it failed at {failed} of its last {requests} requests"
                ));
            }
        }
        let stopped = self.stopped;
        if max > 0 && last == CallOutcome::Stopped && stopped >= limits::GUARD_WATCHDOG_MAX {
            return Some(format!(
                "the watchdog stopped it at {stopped} of its last {requests} requests"
            ));
        }
        let mean = self.fuel / requests as u64;
        let tried = requests >= limits::GUARD_FUEL_REQUESTS_MIN;
        let costly = settings.fuel_mean_max > 0 && tried && mean > settings.fuel_mean_max;
        costly.then(|| format!("it used {mean} fuel per request over its last {requests} requests"))
    }
}

#[cfg(test)]
mod tests {
    use super::CallOutcome::{Answered, Exhausted, Failed, Stopped};
    use super::*;

    const THREE: GuardSettings = limited_to(3);

    const fn limited_to(failures_max: u32) -> GuardSettings {
        GuardSettings {
            failures_max,
            fuel_mean_max: 0,
        }
    }

    /// Notes calls of one policy.
    fn noted_with(settings: GuardSettings) -> impl FnMut(u64, CallOutcome) -> Option<String> {
        let (mut guard, policy) = (Guard::default(), Digest::of(b"a"));
        move |client, outcome| guard.note(settings, policy, of(client, outcome))
    }

    fn of(client: u64, outcome: CallOutcome) -> EndedCall {
        EndedCall {
            client,
            fuel: 1,
            outcome,
        }
    }

    #[test]
    fn failures_count_within_the_window() {
        let (mut guard, policy) = (Guard::default(), Digest::of(b"a"));
        let mut note = |policy, outcome| guard.note(THREE, policy, of(1, outcome));
        for _ in 0..2 {
            assert_eq!(note(policy, Failed), None);
        }
        // They leave the window one by one.
        for _ in 0..limits::GUARD_WINDOW_REQUESTS - 2 {
            assert_eq!(note(policy, Answered), None);
        }
        assert_eq!(note(policy, Failed), None);
        assert_eq!(note(policy, Failed), None);
        let why = note(policy, Failed).unwrap();
        assert_eq!(why, "it failed at 3 of its last 1000 requests");
        // Counting starts from zero, as it does with another policy.
        assert_eq!(note(policy, Failed), None);
        assert_eq!(note(policy, Failed), None);
        assert_eq!(note(Digest::of(b"b"), Failed), None);
        assert_eq!(note(policy, Failed), None);
    }

    /// Regression: ten failing payloads of one client disabled the policy for all clients.
    #[test]
    fn failing_client_alone_cannot_disable_a_policy() {
        let mut note = noted_with(limited_to(10));
        assert_eq!(note(1, Answered), None);
        assert_eq!(note(2, Answered), None);
        for _ in 0..2 * limits::GUARD_WINDOW_REQUESTS {
            assert_eq!(note(1, Failed), None);
        }
        // The other half must come from another client.
        for _ in 0..4 {
            assert_eq!(note(3, Failed), None);
        }
        let why = note(3, Failed).unwrap();
        assert_eq!(why, "it failed at 1000 of its last 1000 requests");
    }

    #[test]
    fn costly_failures_count_in_full() {
        for outcome in [Exhausted, Stopped] {
            let mut note = noted_with(limited_to(10));
            for client in [1, 2] {
                assert_eq!(note(client, Answered), None);
            }
            for _ in 1..10 {
                assert_eq!(note(1, outcome), None);
            }
            // Cheap failures of one client would count for at most half of the limit.
            assert!(note(1, outcome).is_some(), "{outcome:?}");
        }
    }

    #[test]
    fn cheap_and_costly_failures_are_added() {
        let mut note = noted_with(THREE);
        for client in [1, 2] {
            assert_eq!(note(client, Answered), None);
        }
        for outcome in [Exhausted, Exhausted] {
            assert_eq!(note(1, outcome), None);
        }
        for _ in 0..limits::GUARD_WINDOW_REQUESTS {
            assert_eq!(note(2, Answered), None);
        }
        // Two of three failures count.
        for outcome in [Failed, Failed, Failed, Exhausted] {
            assert_eq!(note(1, outcome).is_some(), outcome == Exhausted);
        }
    }

    #[test]
    fn failure_with_costly_restart_is_exhausted() {
        let trap = || Failure::Trap("unreachable".into());
        // Regression: a machine without memory caused the rollback of a policy without a fault.
        let lack = || Failure::Machine("no memory".into());
        for (failure, start_fuel, outcome) in [
            (trap(), 1_000, Some(Failed)),
            (trap(), 1_001, Some(Exhausted)),
            (Failure::Fuel, 0, Some(Exhausted)),
            (Failure::Watchdog, 1_001, Some(Stopped)),
            (lack(), 0, None),
            (lack(), 1_001, None),
        ] {
            let found = CallOutcome::failed(&failure, start_fuel, 1_000);
            assert_eq!(found, outcome, "{failure} {start_fuel}");
        }
    }

    #[test]
    fn single_client_reaches_the_failure_limit_alone() {
        let mut note = noted_with(THREE);
        assert_eq!(note(1, Answered), None);
        assert_eq!(note(1, Failed), None);
        assert_eq!(note(1, Failed), None);
        assert!(note(1, Failed).is_some());
        // If no client was answered well, one client can reach the limit alone.
        for client in [1, 2] {
            assert_eq!(note(client, Failed), None);
        }
        assert!(note(1, Failed).is_some());
    }

    /// A single pause of the machine proves nothing, but repeated timeouts do.
    #[test]
    fn watchdog_stops_have_their_own_limit() {
        let (mut guard, policy) = (Guard::default(), Digest::of(b"a"));
        let max = limits::GUARD_WATCHDOG_MAX;
        let mut note = |settings, outcome| guard.note(settings, policy, of(1, outcome));
        for _ in 0..2 {
            assert_eq!(note(THREE, Failed), None);
        }
        for _ in 1..max {
            assert_eq!(note(THREE, Stopped), None);
        }
        let why = note(THREE, Stopped).unwrap();
        assert_eq!(why, "the watchdog stopped it at 10 of its last 12 requests");
        for _ in 0..limits::GUARD_WINDOW_REQUESTS {
            assert_eq!(note(limited_to(0), Stopped), None);
        }
    }

    #[test]
    fn mean_fuel_is_limited() {
        let settings = GuardSettings {
            failures_max: 0,
            fuel_mean_max: 1000,
        };
        let (mut guard, policy) = (Guard::default(), Digest::of(b"a"));
        let mut note = |fuel| {
            let ended = EndedCall {
                fuel,
                ..of(1, Failed)
            };
            guard.note(settings, policy, ended)
        };
        // One costly request at the beginning proves nothing.
        assert_eq!(note(1_001), None);
        for _ in 0..2 * limits::GUARD_WINDOW_REQUESTS {
            assert_eq!(note(1_000), None);
        }
        assert_eq!(note(1_999), None, "the first one has left the window");
        assert!(note(1_002).is_some_and(|why| why.contains("1001 fuel")));
    }
}
