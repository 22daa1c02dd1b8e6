//! Several policies in one store: the selection of a policy for each request, its rights, and
//! rollbacks by the guard.
#![allow(clippy::unwrap_used, reason = "tests fail by panicking")]

mod answering;
#[path = "../common/mod.rs"]
mod common;
mod watching;

use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use common::{NOW_MS, at, faulty};
use statehouse::STANDARD_POLICY;
use statehouse_config::limits;
use statehouse_core::policy::{Assignment, Digest, Engine, Instance, Policy, Registry};
use statehouse_core::request::{Delivery, Dialect};
use statehouse_core::store::{Effects, Peer, Quota, Store, Transaction};
use statehouse_core::{Core, Input};
use statehouse_mqtt::Properties;
use statehouse_tests::assert_contains;

struct Policies {
    engine: Arc<Engine<Transaction>>,
    /// The built-in policy.
    standard: Arc<Policy<Transaction>>,
    /// The same policy with another digest.
    twin: Arc<Policy<Transaction>>,
    /// The policy of tests/policies/faulty.
    faulty: Arc<Policy<Transaction>>,
}

fn policies() -> &'static Policies {
    static ALL: OnceLock<Policies> = OnceLock::new();
    ALL.get_or_init(|| {
        let engine = Arc::new(Engine::new().expect("an engine"));
        let load = |file: &[u8]| Arc::new(engine.load(file).expect("a policy"));
        Policies {
            standard: load(STANDARD_POLICY),
            twin: load(&twin()),
            faulty: load(faulty()),
            engine: engine.clone(),
        }
    })
}

/// The standard policy with a custom section, which the engine ignores: id 0, its length, its name
/// with a length.
fn twin() -> Vec<u8> {
    [STANDARD_POLICY, b"\0\x05\x04twin"].concat()
}

fn digest(policy: &Policy<Transaction>) -> Digest {
    policy.digest.into()
}

/// An assignment with all three policies loaded. The standard policy is active.
fn loaded() -> Assignment {
    let all = policies();
    let assignment = Assignment::of(digest(&all.standard));
    let assignment = assignment.load(digest(&all.twin)).unwrap();
    assignment.load(digest(&all.faulty)).unwrap()
}

/// A store whose active policy is the faulty one.
fn faulty_core() -> Core {
    core(loaded().promote(digest(&policies().faulty)).unwrap())
}

/// A store whose active policy is this one.
fn core_under(policy: &Arc<Policy<Transaction>>) -> Core {
    let it = digest(policy);
    let assignment = loaded().load(it).unwrap().promote(it).unwrap();
    core_with(assignment, vec![policy.clone()])
}

/// The faulty policy with another digest, so that its counters belong to one test alone.
fn faulty_alone() -> Arc<Policy<Transaction>> {
    faulty_number(0)
}

/// The faulty policy with a digest for each number.
fn faulty_number(number: u8) -> Arc<Policy<Transaction>> {
    let file = [faulty(), &[0, 7, 6], b"alone", &[number]].concat();
    Arc::new(policies().engine.load(&file).expect("a policy"))
}

/// A store with an assignment of the three policies.
fn core(assignment: Assignment) -> Core {
    core_with(assignment, Vec::new())
}

/// A store with an assignment of the three policies and of `more`.
fn core_with(assignment: Assignment, more: Vec<Arc<Policy<Transaction>>>) -> Core {
    let all = policies();
    let mut registry = Registry::new(all.standard.clone(), None);
    let given = [all.twin.clone(), all.faulty.clone()].into_iter();
    let ready = given.chain(more).map(Instance::new).collect();
    assert!(registry.assign(assignment, ready).is_ok());
    common::core(Store::new(registry, Quota::default()))
}

fn ask(core: &mut Core, client: &str, arguments: &[&str]) -> (Effects, Bytes) {
    common::ask(core, client, arguments, NOW_MS)
}

/// Lets a client watch these keys.
fn watch(core: &mut Core, keys: &[impl AsRef<str>]) {
    for key in keys {
        ask(core, "watcher", &["KEYNOTIFY", key.as_ref()]);
    }
}

fn by(effects: &Effects) -> Digest {
    digest(effects.by.as_ref().expect("every policy is loaded"))
}
