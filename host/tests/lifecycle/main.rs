//! Several policies in one running store: who answers what, what each may do, and how the host goes back.
#![allow(clippy::unwrap_used, reason = "tests fail by panicking")]

mod answering;
#[path = "../common/mod.rs"]
mod common;
mod watching;

use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use common::{NOW_MS, faulty};
use statehouse::{STANDARD_POLICY, limits};
use statehouse_core::policy::{Assignment, Digest, Engine, Instance, Policy, Registry};
use statehouse_core::request::{Delivery, Dialect};
use statehouse_core::store::{Effects, Event, Peer, Quota, Store, Transaction};
use statehouse_mqtt::Properties;

struct Policies {
    engine: Arc<Engine<Transaction>>,
    /// The built-in one.
    standard: Arc<Policy<Transaction>>,
    /// Another build of it: the same behaviour under another digest.
    twin: Arc<Policy<Transaction>>,
    /// The one of tests/policies/faulty.
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

/// A custom section is nothing to the engine: id 0, its length, its name with a length.
fn twin() -> Vec<u8> {
    [STANDARD_POLICY, b"\0\x05\x04twin"].concat()
}

fn digest(policy: &Policy<Transaction>) -> Digest {
    policy.digest.into()
}

/// All three loaded, the standard one active.
fn loaded() -> Assignment {
    let all = policies();
    let assignment = Assignment::of(digest(&all.standard));
    let assignment = assignment.load(digest(&all.twin)).unwrap();
    assignment.load(digest(&all.faulty)).unwrap()
}

/// Another build of the faulty one, which no other test has to do with: what it counts is this test's.
fn faulty_alone() -> Arc<Policy<Transaction>> {
    faulty_number(0)
}

/// One more.
fn faulty_number(number: u8) -> Arc<Policy<Transaction>> {
    let file = [faulty(), &[0, 7, 6], b"alone", &[number]].concat();
    Arc::new(policies().engine.load(&file).expect("a policy"))
}

/// A store under an assignment of the three.
fn store(assignment: Assignment) -> Store {
    store_with(assignment, Vec::new())
}

/// A store under an assignment of the three and of more.
fn store_with(assignment: Assignment, more: Vec<Arc<Policy<Transaction>>>) -> Store {
    let all = policies();
    let mut registry = Registry::new(all.standard.clone(), None);
    let given = [all.twin.clone(), all.faulty.clone()].into_iter();
    let ready = given.chain(more).map(Instance::new).collect();
    assert!(registry.assign(assignment, ready).is_ok());
    Store::new(registry, Quota::default())
}

fn ask(store: &mut Store, client: &str, arguments: &[&str]) -> (Effects, Bytes) {
    common::ask(store, client, arguments, NOW_MS)
}

fn by(effects: &Effects) -> Digest {
    digest(effects.by.as_ref().expect("every policy is here"))
}
