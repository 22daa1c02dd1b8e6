//! Helpers for tests of policies on a store: a client, and the policies of the tests.

use std::sync::OnceLock;
use std::time::Instant;

use bytes::Bytes;
use statehouse_core::request::{Delivery, Dialect, Incoming};
use statehouse_core::store::{Effects, Peer, Store};
use statehouse_core::{Core, Input, Now, Settings};
use statehouse_mqtt::{Properties, PropertiesBuilder};
use statehouse_tests::policies::example;

pub(crate) const NOW_MS: u64 = 1_700_000_000_000;

/// Builds a module of tests/policies.
pub(crate) fn module(package: &str) -> Vec<u8> {
    std::fs::read(example(package)).expect("cargo built it")
}

/// The module of tests/policies/faulty, built once.
pub(crate) fn faulty() -> &'static [u8] {
    static MODULE: OnceLock<Vec<u8>> = OnceLock::new();
    MODULE.get_or_init(|| module("faulty"))
}

/// A core with this store. Its clients use the dialect of the official libraries.
pub(crate) fn core(store: Store) -> Core {
    let settings = Settings {
        dialect: Some(Dialect::Sdk),
        ..Settings::default()
    };
    Core::in_memory(store, settings)
}

/// No request of these tests expires, so the instant does not matter.
pub(crate) fn at(ms: u64) -> Now {
    Now {
        ms,
        instant: Instant::now(),
    }
}

/// The properties of a request.
pub(crate) fn request_properties() -> Properties {
    PropertiesBuilder::new()
        .response_topic("answers")
        .correlation_data(b"1")
        .user("__ts", "1700000000000:0:client")
        .finish()
        .and_then(Properties::parse)
        .expect("short properties")
}

/// Sends a request. Returns its effects and its answer.
pub(crate) fn ask(
    core: &mut Core,
    client: &str,
    arguments: &[&str],
    now_ms: u64,
) -> (Effects, Bytes) {
    ask_by(core, client, arguments, Delivery::default(), now_ms)
}

/// Like [`ask`], with this delivery.
pub(crate) fn ask_by(
    core: &mut Core,
    client: &str,
    arguments: &[&str],
    delivery: Delivery,
    now_ms: u64,
) -> (Effects, Bytes) {
    let arguments: Vec<&[u8]> = arguments.iter().map(|text| text.as_bytes()).collect();
    let payload = Bytes::from(statehouse_policy::resp::request(&arguments));
    let peer = Peer::numbered(client, 1);
    let properties = request_properties();
    let incoming = Incoming {
        delivery,
        ..Incoming::new(&peer, &payload, &properties)
    };
    let mut effects = core.handle(Input::Publish(&incoming), at(now_ms)).effects;
    let answer = effects.answer.take().expect("every request has an answer");
    (effects, answer.payload)
}
