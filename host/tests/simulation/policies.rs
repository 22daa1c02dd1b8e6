//! The policies of all runs, which of them answers a request, and their changes by the operator and
//! the guard.

use std::sync::{Arc, OnceLock};

use statehouse::STANDARD_POLICY;
use statehouse_core::log::record::PolicyRecord;
use statehouse_core::policy::{
    Assignment, Canary, CanaryRule, Digest, Engine, Instance, Policy, Registry,
};
use statehouse_core::store::Transaction;
use statehouse_tests::policies::example;

use crate::oracle::Change;
use crate::world::World;

/// The standard policy.
pub(crate) const STANDARD: usize = 0;
/// A policy with the behaviour of the standard policy and another digest.
pub(crate) const TWIN: usize = 1;
/// A policy that fails at most requests and uses hidden keys: tests/policies/faulty.
pub(crate) const FAULTY: usize = 2;

type Policies = [Arc<Policy<Transaction>>; 3];

fn all() -> &'static Policies {
    static ALL: OnceLock<Policies> = OnceLock::new();
    ALL.get_or_init(|| {
        // A watchdog would make the result of a seed depend on the speed of the machine.
        let engine = Engine::without_watchdog().expect("an engine");
        let load = |file: &[u8]| Arc::new(engine.load(file).expect("a policy"));
        // The engine ignores a custom section: id 0, its length, its name with a length.
        let twin = [STANDARD_POLICY, b"\0\x05\x04twin"].concat();
        let faulty = std::fs::read(example("faulty")).expect("the build wrote the module");
        [load(STANDARD_POLICY), load(&twin), load(&faulty)]
    })
}

pub(crate) fn policy(which: usize) -> Arc<Policy<Transaction>> {
    all()[which].clone()
}

pub(crate) fn digest(which: usize) -> Digest {
    all()[which].digest.into()
}

/// All three policies are loaded, and one is active.
pub(crate) fn assignment(active: usize) -> Assignment {
    let assignment = Assignment::of(digest(STANDARD));
    let assignment = assignment.load(digest(TWIN)).expect("there is room");
    let assignment = assignment.load(digest(FAULTY)).expect("there is room");
    match active {
        STANDARD => assignment,
        _ => assignment.promote(digest(active)).expect("it is loaded"),
    }
}

/// A registry as a start builds it. Policies that the assignment does not name remain available for
/// redeliveries, except `missing`.
pub(crate) fn registry(assignment: &Assignment, missing: Option<usize>) -> Registry<Transaction> {
    let mut registry = Registry::new(policy(STANDARD), None);
    let named = assignment.all();
    let (ready, others): (Vec<usize>, Vec<usize>) = [TWIN, FAULTY]
        .into_iter()
        .partition(|which| named.contains(&digest(*which)));
    for other in others.into_iter().filter(|it| Some(*it) != missing) {
        registry.retire(policy(other));
    }
    let ready = ready.into_iter().map(|which| Instance::new(policy(which)));
    let assigned = registry.assign(assignment.clone(), ready.collect());
    assert!(assigned.is_ok(), "every named policy is ready");
    registry
}

/// The policy records that a start writes.
pub(crate) fn records() -> Vec<PolicyRecord> {
    let all = all().iter().enumerate();
    all.map(|(which, policy)| PolicyRecord::of(policy, which == STANDARD))
        .collect()
}

/// The policy that must answer a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Chosen {
    pub(crate) policy: usize,
    pub(crate) canary: bool,
    /// It owns the key by a route, so no guard watches it.
    pub(crate) routed: bool,
}

impl World {
    pub(crate) fn assignment(&self) -> &Assignment {
        let assignment = self.oracle.assignment.as_ref();
        assignment.expect("every start records one")
    }

    /// The policy that must answer a request for a key by the assignment.
    pub(crate) fn chosen(&self, client: &str, key: &str) -> Chosen {
        let assignment = self.assignment();
        let routes = assignment.routes.iter();
        let routes = routes.filter(|it| key.as_bytes().starts_with(&it.prefix.0));
        let routed = routes.max_by_key(|it| it.prefix.0.len());
        let canary = assignment.canary.as_ref().filter(|it| match &it.rule {
            CanaryRule::Percent(percent) => *percent == 100,
            CanaryRule::Clients(name) => name == client,
            CanaryRule::Keys(name) => name == key,
        });
        let of_canary = canary.map_or(assignment.active, |it| it.policy);
        let found = routed.map_or(of_canary, |it| it.policy);
        let which = (0..all().len()).find(|which| digest(*which) == found);
        Chosen {
            policy: which.expect("one of the three"),
            canary: routed.is_none() && canary.is_some(),
            routed: routed.is_some(),
        }
    }

    /// The operator assigns a policy: as the active one, as a canary or to a route.
    pub(crate) fn change_assignment(&mut self) {
        let which = match self.plan.faulty && self.dice.once_in(2) {
            true => FAULTY,
            false => self.dice.below(2) as usize,
        };
        let policy = digest(which);
        let seen = self.assignment().clone();
        let now = seen.load(policy).expect("there is room");
        let key = ["k", "k0", "e0", "f"][self.dice.below(4) as usize];
        let (event, next) = match self.dice.below(8) {
            0..=2 => ("policy swaps", now.promote(policy)),
            3 => ("policy rollbacks", now.rollback()),
            4 => {
                let rule = match self.dice.below(3) {
                    0 => CanaryRule::Percent(100),
                    1 => CanaryRule::Clients(format!("c{}", self.dice.below(4))),
                    _ => CanaryRule::Keys(key.to_owned()),
                };
                ("canaries begun", now.canary(Some(Canary { policy, rule })))
            }
            // One of these is a prefix of another.
            5 => ("routes set", now.route(key.as_bytes(), Some(policy))),
            6 => ("canaries ended", now.canary(None)),
            _ => match now.routes.first().map(|route| route.prefix.0.clone()) {
                Some(prefix) => ("routes removed", now.route(&prefix, None)),
                None => return,
            },
        };
        // The assignment refuses changes that are not possible now.
        let Ok(next) = next else { return };
        self.tally.count(event);
        self.trace.add(|| format!("{event}: {next:?}"));
        let ready = vec![Instance::new(self::policy(which))];
        let assigned = self.node.server.assign(&seen, next.clone(), ready);
        assert!(assigned.is_ok(), "every named policy is ready");
        self.assigned(next);
    }

    /// The last record assigns policies.
    pub(crate) fn assigned(&mut self, next: Assignment) {
        self.ledger.counted.clear();
        let last = self.node.appended();
        let change = Change::Assigned(Box::new(next));
        self.oracle.note((last, last), change);
    }

    /// The guard may have rolled a policy back, because it failed too often.
    pub(crate) fn check_guard(&mut self) {
        let (found, _) = self.node.server.policies();
        let before = self.assignment();
        let max = self.plan.guard_failures;
        if found == *before {
            for canary in [false, true] {
                let of_part = self.ledger.counted.iter().filter(|(it, _)| it.0 == canary);
                // One client counts for at most half of the limit.
                let failures: u32 = of_part.map(|(_, it)| (*it).min(max.div_ceil(2))).sum();
                let possible = canary || before.rollback().is_ok();
                assert!(
                    failures < max || !possible,
                    "obligation 9: no rollback after {failures} failures of {max}"
                );
            }
            return;
        }
        let guard = found.guard.clone();
        let guard =
            guard.expect("obligation 9: only the guard changes policies without the operator");
        assert_eq!(
            guard.policy,
            digest(FAULTY),
            "obligation 9: a rollback of a policy that did not fail"
        );
        let of_canary = before.canary.as_ref().map(|it| it.policy) == Some(guard.policy);
        let expected = match of_canary && found.canary.is_none() {
            true => before.end_canary_for(guard.why, guard.now_ms),
            false => before.roll_back_for(guard.why, guard.now_ms),
        };
        assert_eq!(expected.as_ref(), Ok(&found), "obligation 9: the rollback");
        let failures = std::mem::take(&mut self.ledger.failures);
        assert!(
            failures >= u64::from(max),
            "obligation 9: a rollback after {failures} failures of {max}"
        );
        self.tally.count("policies rolled back by the guard");
        self.trace.add(|| format!("the guard assigns {found:?}"));
        self.assigned(found);
    }
}
