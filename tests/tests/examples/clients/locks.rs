//! Locks: handed over between the languages, renewed, and free after the crash of their holder.

use std::{
    thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use statehouse_tests::{Server, wait::until};

use super::driver::{Driver, LANGUAGES, Language, hex};

/// A machine with busy cores must renew within two thirds of it.
const LEASE: Duration = Duration::from_secs(3);

fn lock(wait_ms: u64) -> Value {
    json!({"do": "lock", "name": "nightly", "lease_ms": LEASE.as_millis() as u64, "wait_ms": wait_ms})
}

fn write(token: &Value) -> Value {
    json!({"do": "set", "key": hex("protected"), "value": hex("data"), "token": token})
}

/// The order of fencing tokens is that of their text, because they are padded.
fn text(token: &Value) -> &str {
    token.as_str().expect("a fencing token")
}

fn assert_handover(from: Language, to: Language) {
    let server = Server::start();
    let [mut first, mut second] = [from, to].map(|it| Driver::connect(it, server.address()));
    let first_token = first.ask(lock(10_000));
    first.ask(write(&first_token));
    second.begin(lock(60_000));
    // Longer than the lease, so only renewals hold the lock.
    thread::sleep(LEASE + LEASE / 3);
    let mut third = Driver::connect(to, server.address());
    assert_eq!(third.ask(lock(0)), Value::Null, "the lock is not held");
    assert_eq!(first.ask(json!({"do": "held", "name": "nightly"})), true);
    assert_eq!(first.ask(json!({"do": "release", "name": "nightly"})), true);
    let second_token = second.end()["ok"].take();
    assert!(text(&second_token) > text(&first_token));
    second.ask(write(&second_token));
    let fenced = first.attempt(write(&first_token));
    assert_eq!(fenced["error"], "refused", "{fenced}");
    let released = second.ask(json!({"do": "release", "name": "nightly"}));
    assert_eq!(released, true);
}

#[test]
fn lock_is_handed_over_from_python_to_javascript() {
    assert_handover(Language::Python, Language::JavaScript);
}

#[test]
fn lock_is_handed_over_from_javascript_to_python() {
    assert_handover(Language::JavaScript, Language::Python);
}

#[test]
fn lock_of_a_crashed_holder_is_free_after_its_lease() {
    let server = Server::start();
    for language in LANGUAGES {
        let mut holder = Driver::connect(language, server.address());
        holder.ask(lock(10_000));
        holder.kill();
        let mut next = Driver::connect(language, server.address());
        assert!(next.ask(lock(60_000)).is_string(), "{language:?}");
        next.ask(json!({"do": "release", "name": "nightly"}));
    }
}

/// JavaScript has no clock that counts suspensions.
#[test]
fn python_lock_is_not_held_after_a_suspension() {
    let server = Server::start();
    let mut holder = Driver::connect(Language::Python, server.address());
    holder.ask(lock(10_000));
    holder.ask(json!({"do": "suspend", "ms": 2 * LEASE.as_millis() as u64}));
    assert_eq!(holder.ask(json!({"do": "held", "name": "nightly"})), false);
}

/// Another client takes the lock's key. The holder must notice at its next renewal.
#[test]
fn lost_lock_is_not_reported_as_held() {
    let server = Server::start();
    for language in LANGUAGES {
        let mut holder = Driver::connect(language, server.address());
        holder.ask(lock(10_000));
        server.store("thief").set("nightly", "thief");
        let stolen = Instant::now();
        until(&format!("{language:?} notices"), || {
            holder.ask(json!({"do": "held", "name": "nightly"})) == false
        });
        assert!(stolen.elapsed() < 2 * LEASE, "{language:?}");
        let released = holder.ask(json!({"do": "release", "name": "nightly"}));
        assert_eq!(released, false);
        assert_eq!(server.store("thief").get("nightly").unwrap(), b"thief");
        server.store("thief").ask(&["DEL", "nightly"]);
    }
}
