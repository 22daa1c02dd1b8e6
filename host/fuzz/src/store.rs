//! Targets for the store: requests to the standard policy, and clock readings.

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use statehouse::STANDARD_POLICY;
use statehouse_core::policy::{Engine, Policy, Registry};
use statehouse_core::request::{Delivery, Dialect, Incoming};
use statehouse_core::store::{Effects, Peer, Quota, Store, Transaction};
use statehouse_core::{Core, Input, Now, Settings};
use statehouse_mqtt::{Properties, PropertiesBuilder};
use statehouse_policy::{hlc, resp};

const NOW_MS: u64 = 1_700_000_000_000;
const TIMESTAMP: &str = "001700000000000:00000:fuzz";

/// The standard policy. Each thread compiles it once.
pub(crate) fn policy() -> Arc<Policy<Transaction>> {
    thread_local! {
        static POLICY: Arc<Policy<Transaction>> = {
            let engine = Engine::new().expect("the machine has an engine");
            Arc::new(engine.load(STANDARD_POLICY).expect("the standard policy loads"))
        };
    }
    POLICY.with(Arc::clone)
}

/// Creates a store with one key, and its core.
fn core() -> Core {
    let store = Store::new(Registry::new(policy(), None), Quota::default());
    let settings = Settings {
        dialect: Some(Dialect::Sdk),
        ..Settings::default()
    };
    let mut core = Core::in_memory(store, settings);
    let set = resp::request(&[b"SET", b"key", b"value"]);
    ask(&mut core, &set, Some(TIMESTAMP), None, 1);
    core
}

/// Sends a request. `None` if no PUBLISH can contain it, such as a text with U+0000.
fn ask(
    core: &mut Core,
    payload: &[u8],
    timestamp: Option<&str>,
    fencing_token: Option<&str>,
    packet_id: u16,
) -> Option<Effects> {
    let mut properties = PropertiesBuilder::new()
        .response_topic("clients/fuzz/answers")
        .correlation_data(&packet_id.to_be_bytes());
    for (name, reading) in [("__ts", timestamp), ("__ft", fencing_token)] {
        if let Some(reading) = reading {
            properties = properties.user(name, reading);
        }
    }
    let properties = properties.finish().and_then(Properties::parse).ok()?;
    let (peer, payload) = (Peer::numbered("fuzz", 1), Bytes::copy_from_slice(payload));
    let incoming = Incoming {
        delivery: Delivery::new(&peer, packet_id, true),
        ..Incoming::new(&peer, &payload, &properties)
    };
    // No request here expires, so the instant does not matter.
    let now = Now {
        ms: NOW_MS,
        instant: Instant::now(),
    };
    Some(core.handle(Input::Publish(&incoming), now).effects)
}

/// Asserts that a request has an answer of one line or more, and that the policy did not fail.
fn check(effects: &Effects) -> Bytes {
    assert_eq!(effects.failures, 0, "{:?}", effects.failed);
    let Some(answer) = &effects.answer else {
        panic!("a request without an answer");
    };
    assert!(b"+-:$*".contains(&answer.payload[0]) && answer.payload.ends_with(b"\r\n"));
    answer.payload.clone()
}

/// Sends a request and its redelivery.
pub(crate) fn requests(data: &[u8]) {
    let mut core = core();
    let mut send = || ask(&mut core, data, Some(TIMESTAMP), None, 2);
    let (Some(first), Some(again)) = (send(), send()) else {
        panic!("its properties are valid");
    };
    let answer = check(&first);
    if first.handled.is_some_and(|it| it.repeatable) {
        assert!(again.handled.is_none(), "a request had two effects");
        assert_eq!(check(&again), answer);
    }
    check(&again);
    let state = core.store().state();
    let weight: u64 = state.table.range(b"", None).map(|it| it.weight()).sum();
    assert_eq!(state.table.bytes(), weight);
}

pub(crate) fn request_seeds() -> Vec<Vec<u8>> {
    let commands: [&[&[u8]]; 9] = [
        &[b"GET", b"key"],
        &[b"SET", b"key", b"other"],
        &[b"SET", b"key", b"value", b"NX", b"PX", b"1000"],
        &[
            b"SET",
            b"new",
            b"value",
            b"NEX",
            b"PX",
            b"18446744073709551615",
        ],
        &[b"DEL", b"key"],
        &[b"VDEL", b"key", b"value"],
        &[b"KEYNOTIFY", b"key"],
        &[b"KEYNOTIFY", b"key", b"STOP"],
        &[b"SCAN", b"0", b"MATCH", b"k[a-z]?*", b"COUNT", b"10"],
    ];
    commands.map(resp::request).to_vec()
}

/// Uses a text as a timestamp and as a fencing token. A parsed reading must be the same after
/// formatting and parsing.
pub(crate) fn clocks(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else {
        return;
    };
    if let Ok(reading) = hlc::parse(text) {
        let written = hlc::format(reading.wall, reading.counter, reading.node);
        assert_eq!(hlc::parse(&written), Ok(reading));
    }
    let mut core = core();
    let set = resp::request(&[b"SET", b"key", b"next"]);
    let version = |core: &Core| {
        let entry = core.store().state().table.get(b"key");
        entry.map(|it| it.version())
    };
    let before = version(&core);
    for (timestamp, fencing_token, packet_id) in [(text, None, 2), (TIMESTAMP, Some(text), 3)] {
        let Some(effects) = ask(&mut core, &set, Some(timestamp), fencing_token, packet_id) else {
            return;
        };
        check(&effects);
    }
    assert!(version(&core) >= before, "a version decreased");
}

pub(crate) fn clock_seeds() -> Vec<Vec<u8>> {
    let texts = [
        TIMESTAMP,
        "1:0:n",
        "18446744073709551615:4294967295:node",
        "001700000059999:99999:StateStore",
        "001700000060001:00000:a:b",
    ];
    texts.map(|text| text.as_bytes().to_vec()).to_vec()
}
