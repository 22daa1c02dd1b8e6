//! The policies of all runs. They are compiled once.

use std::path::Path;
use std::sync::{Arc, OnceLock};

use statehouse::STANDARD_POLICY;
use statehouse_core::log::record::PolicyRecord;
use statehouse_core::policy::{Assignment, Digest, Engine, Instance, Policy, Registry};
use statehouse_core::store::Transaction;

/// The standard policy.
pub(crate) const STANDARD: usize = 0;
/// A policy with the behaviour of the standard policy and another digest.
pub(crate) const TWIN: usize = 1;
/// A policy that fails on request and uses hidden keys.
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
        [load(STANDARD_POLICY), load(&twin), load(&faulty())]
    })
}

#[path = "../../../tests/policies/building.rs"]
mod building;

/// The module of tests/policies/faulty.
fn faulty() -> Vec<u8> {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join("policies");
    std::fs::read(building::build("faulty", &target, |_| {})).expect("the build wrote the module")
}

pub(crate) fn policy(which: usize) -> Arc<Policy<Transaction>> {
    all()[which].clone()
}

pub(crate) fn digest(which: usize) -> Digest {
    policy(which).digest.into()
}

/// All three policies are loaded. The standard policy is active.
pub(crate) fn assignment() -> Assignment {
    let assignment = Assignment::of(digest(STANDARD));
    let assignment = assignment.load(digest(TWIN)).expect("there is room");
    assignment.load(digest(FAULTY)).expect("there is room")
}

/// A registry as a start builds it. Policies that the assignment does not name remain available for
/// duplicates, except `missing`.
pub(crate) fn registry(assignment: &Assignment, missing: Option<usize>) -> Registry<Transaction> {
    let mut registry = Registry::new(policy(STANDARD), None);
    let named = assignment.all();
    let (ready, others): (Vec<usize>, Vec<usize>) = [TWIN, FAULTY]
        .into_iter()
        .partition(|which| named.contains(&digest(*which)));
    for other in others {
        if Some(other) != missing {
            registry.retire(policy(other));
        }
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
