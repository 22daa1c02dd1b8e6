//! Helpers for tests of policies on a store: a client, and the policies of the tests.

use std::path::Path;
use std::sync::OnceLock;

use bytes::Bytes;
use statehouse_core::request::{Delivery, Dialect, Request};
use statehouse_core::store::{Effects, Event, Peer, Store};
use statehouse_mqtt::Properties;
use statehouse_protocol::{ConnectionId, SessionId};

pub(crate) const NOW_MS: u64 = 1_700_000_000_000;

#[path = "../../../tests/policies/building.rs"]
mod building;

/// Builds a module of tests/policies.
pub(crate) fn module(package: &str) -> Vec<u8> {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join("policies");
    std::fs::read(building::build(package, &target, |_| {})).expect("cargo built it")
}

/// The module of tests/policies/faulty, built once.
pub(crate) fn faulty() -> &'static [u8] {
    static MODULE: OnceLock<Vec<u8>> = OnceLock::new();
    MODULE.get_or_init(|| module("faulty"))
}

/// Sends a request. Returns its effects and its answer.
pub(crate) fn ask(
    store: &mut Store,
    client: &str,
    arguments: &[&str],
    now_ms: u64,
) -> (Effects, Bytes) {
    ask_by(store, client, arguments, Delivery::default(), now_ms)
}

/// Like [`ask`], with this delivery.
pub(crate) fn ask_by(
    store: &mut Store,
    client: &str,
    arguments: &[&str],
    delivery: Delivery,
    now_ms: u64,
) -> (Effects, Bytes) {
    let arguments: Vec<&[u8]> = arguments.iter().map(|text| text.as_bytes()).collect();
    let payload = Bytes::from(statehouse_policy::resp::request(&arguments));
    let peer = Peer {
        client: client.into(),
        connection: ConnectionId(1),
        session: SessionId(1),
    };
    let properties = Properties::default();
    let request = Request {
        dialect: Dialect::Sdk,
        payload: &payload,
        timestamp: Some("1700000000000:0:client"),
        fencing_token: None,
        peer: &peer,
        properties: &properties,
        delivery,
        grants: None,
    };
    let mut effects = store.step(Event::Request(&request), now_ms);
    let answer = effects.answer.take().expect("every request has an answer");
    (effects, answer.payload)
}
