//! The self-test of a policy that is being loaded: a few requests over an empty store of its own.
//!
//! What enters: a policy that nobody has asked anything yet. What leaves: whether it can answer at all. What it
//! answers is its own business.

use std::sync::Arc;

use bytes::Bytes;

use statehouse_core::policy::{Failure, LoadError, Policy, Registry};
use statehouse_core::request::{Delivery, Dialect, Request};
use statehouse_core::store::{Event, Peer, Quota, Store, Transaction};

/// What is asked: what every client of a state store asks.
const REQUESTS: [(&str, &[u8]); 3] = [
    ("GET", b"*2\r\n$3\r\nGET\r\n$9\r\nself-test\r\n"),
    ("SET", b"*3\r\n$3\r\nSET\r\n$9\r\nself-test\r\n$1\r\n1\r\n"),
    ("DEL", b"*2\r\n$3\r\nDEL\r\n$9\r\nself-test\r\n"),
];

/// Any time will do; this one is no round number that a policy might treat as none.
const NOW_MS: u64 = 1_700_000_000_123;

/// Asks a policy. It may fail at what it does not know, and at nothing else: one that fails at everything is refused.
pub(crate) fn run(policy: &Arc<Policy<Transaction>>) -> Result<(), LoadError> {
    let registry = Registry::new(policy.clone(), None);
    let mut store = Store::new(registry, Quota::default());
    let peer = Peer {
        client: "self-test".into(),
        connection: 1,
        session: 1,
    };
    let properties = statehouse_mqtt::Properties::default();
    let mut failed: Option<(&'static str, Failure)> = None;
    let mut failures = 0;
    for (name, payload) in REQUESTS {
        let payload = Bytes::from_static(payload);
        let request = Request {
            dialect: Dialect::Sdk,
            payload: &payload,
            timestamp: None,
            fencing_token: None,
            peer: &peer,
            properties: &properties,
            delivery: Delivery::default(),
            grants: None,
        };
        let effects = store.step(Event::Request(&request), NOW_MS);
        if let Some(failure) = effects.failed {
            failures += 1;
            failed.get_or_insert((name, failure));
        }
    }
    drop(store);
    policy.work.clear();
    policy.counters.clear();
    match failed {
        Some((name, failure)) if failures == REQUESTS.len() => {
            Err(LoadError::SelfTest(name, failure))
        }
        _ => Ok(()),
    }
}
