//! Containment of failing policies: the host must roll back all staged changes, answer the client
//! with an error, and handle the next request normally.

mod common;

use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use common::{NOW_MS, at, faulty, module};
use statehouse::STANDARD_POLICY;
use statehouse_config::limits;
use statehouse_core::policy::{Engine, Failure, LoadError, Policy, Registry};
use statehouse_core::store::{Effects, Quota, Store, Transaction};
use statehouse_core::{Core, Input};
use statehouse_tests::{assert_contains, policies::described};

fn malformed() -> &'static [u8] {
    static MODULE: OnceLock<Vec<u8>> = OnceLock::new();
    MODULE.get_or_init(|| module("malformed"))
}

fn engine() -> &'static Engine<Transaction> {
    static ENGINE: OnceLock<Engine<Transaction>> = OnceLock::new();
    ENGINE.get_or_init(|| Engine::new().expect("an engine"))
}

fn load(module: &[u8]) -> Arc<Policy<Transaction>> {
    Arc::new(engine().load(module).expect("a policy"))
}

fn core(previous: Option<Arc<Policy<Transaction>>>) -> Core {
    core_under(load(faulty()), previous)
}

fn core_under(
    active: Arc<Policy<Transaction>>,
    previous: Option<Arc<Policy<Transaction>>>,
) -> Core {
    common::core(Store::new(
        Registry::new(active, previous),
        Quota::default(),
    ))
}

fn ask(core: &mut Core, arguments: &[&str]) -> (Effects, Bytes) {
    common::ask(core, "tester", arguments, NOW_MS)
}

/// Sends a request at which the policy fails. Returns its effects.
fn fail(core: &mut Core, arguments: &[&str]) -> Effects {
    let (effects, answer) = ask(core, arguments);
    assert_eq!(answer, "-ERR internal error\r\n", "{arguments:?}");
    assert_eq!(effects.failures, 1, "{arguments:?}");
    effects
}

/// Lets a policy fail in each of these modes. Nothing may change, and the next requests must get
/// these answers.
fn check_contained(module: &[u8], modes: &str, next: &[(&[&str], &str)]) {
    let mut core = core_under(load(module), None);
    assert_eq!(ask(&mut core, &["SET", "kept", "fine"]).1, "+OK\r\n");
    let kept = core.store().state().table.get(b"kept").cloned();
    assert!(kept.is_some());
    let clock = core.store().state().hlc;
    for mode in modes.lines() {
        for key in ["kept", "new"] {
            fail(&mut core, &["SET", key, mode]);
            let state = core.store().state();
            assert_eq!(state.table.keys(), 1, "{mode} left something behind");
            let entry = state.table.get(b"kept").cloned();
            assert_eq!(entry, kept, "{mode} changed something");
            assert_eq!(state.hlc, clock, "{mode} moved the clock");
            for (request, expected) in next {
                assert_eq!(ask(&mut core, request).1, *expected, "{mode}");
            }
        }
    }
    assert_eq!(ask(&mut core, &["SET", "new", "fine"]).1, "+OK\r\n");
}

#[test]
fn every_fault_is_contained() {
    let modes = include_str!("../../tests/policies/faulty/faults.txt");
    // The instance was replaced, even if it only returned an invalid value.
    let next: [(&[&str], _); 2] = [
        (&["COUNT", "-"], ":1\r\n"),
        (&["GET", "kept"], "$4\r\nfine\r\n"),
    ];
    check_contained(faulty(), modes, &next);
}

#[test]
fn values_outside_the_contract_are_contained() {
    let modes = include_str!("../../tests/policies/malformed/malformations.txt");
    assert!(modes.lines().count() > 20);
    check_contained(malformed(), modes, &[(&["GET", "kept"], "+OK\r\n")]);
}

/// Regression test: imports cost no fuel, so a loop over an import blocked all clients until the
/// watchdog ended it.
#[test]
fn loop_over_an_import_ends_when_its_fuel_is_used_up() {
    const MEGABYTE: u64 = 1 << 20;
    let fuel = limits::FUEL_PER_CALL_DEFAULT;
    let moving = fuel * limits::MOVED_BYTES_PER_FUEL / MEGABYTE;
    let named = fuel / (limits::FUEL_PER_KEY_BYTE * MEGABYTE);
    let small = fuel / limits::FUEL_PER_IMPORT;
    // Without the watchdog, so that the fuel ends the loop even on a busy machine.
    let engine = Engine::without_watchdog().expect("an engine");
    let policy = Arc::new(engine.load(faulty()).expect("a policy"));
    let mut core = core_under(policy.clone(), None);
    let mut before = 0;
    for (import, calls_max) in [
        ("load", moving),
        ("matches", moving),
        ("log", moving),
        ("long-key", named),
        ("property", named),
        ("count", named),
        ("unwatch", named),
        ("random", fuel / 1024),
        ("head", small),
        ("keys", small),
    ] {
        let effects = fail(&mut core, &["SET", "k", "repeat", import]);
        assert_eq!(effects.failed, Some(Failure::Fuel), "{import}");
        assert!(effects.fuel >= fuel, "{import}: {}", effects.fuel);
        // There was not enough fuel for the last call.
        let calls = policy.counters.all()["repeated"] - before;
        before += calls;
        assert!((1..=calls_max + 1).contains(&calls), "{import}: {calls}");
        assert_eq!(core.store().state().table.keys(), 0, "{import}");
    }
}

/// Regression: clients and metrics got these unchecked.
#[test]
fn forged_versions_and_commands_are_malformed() {
    let mut core = core(None);
    let (effects, answer) = ask(&mut core, &["SET", "k", "latest"]);
    assert_eq!((effects.failures, answer), (0, "+OK\r\n".into()));
    for (mode, says) in [
        ("ahead", "which the store cannot have assigned"),
        ("wide", ":2147483647, which the store cannot have assigned"),
        ("beyond", "the command 3, and it declares 3 commands"),
    ] {
        let effects = fail(&mut core, &["SET", "new", mode]);
        assert_contains!(effects.failed.expect("it failed").to_string(), says);
        assert_eq!(core.store().state().table.keys(), 1, "{mode}");
        let (_, fresh) = ask(&mut core, &["COUNT", "-"]);
        assert_eq!(fresh, ":1\r\n", "the instance was replaced");
    }
}

#[test]
fn occasional_failure_affects_only_its_own_request() {
    let mut core = core(None);
    let mut failed = Vec::new();
    for number in 1..=3500 {
        let key = number.to_string();
        let (effects, answer) = ask(&mut core, &["SET", &key, "thousandth"]);
        if effects.failures == 0 {
            assert_eq!(answer, "+OK\r\n");
            continue;
        }
        assert_eq!(answer, "-ERR internal error\r\n");
        assert!(core.store().state().table.get(key.as_bytes()).is_none());
        failed.push(number);
    }
    // Each failure starts a new instance, which counts from zero.
    assert_eq!(failed, [1000, 2000, 3000]);
    assert_eq!(core.store().state().table.keys(), 3497);
}

#[test]
fn request_without_notification_is_rolled_back() {
    let mut core = core(None);
    ask(&mut core, &["KEYNOTIFY", "bad-notify"]);
    let effects = fail(&mut core, &["SET", "bad-notify", "fine"]);
    assert!(effects.notifications.is_empty());
    assert_eq!(core.store().state().table.keys(), 0);
    // This key has no watcher, so no notification is needed.
    let (_, answer) = ask(&mut core, &["SET", "bad-notify-2", "fine"]);
    assert_eq!(answer, "+OK\r\n");
}

#[test]
fn expired_key_is_removed_even_if_notify_fails() {
    for previous in [None, Some(load(STANDARD_POLICY))] {
        let falls_back = previous.is_some();
        let mut core = core(previous);
        assert_eq!(ask(&mut core, &["SET", "bad-notify", "fine"]).1, "+OK\r\n");
        ask(&mut core, &["KEYNOTIFY", "bad-notify"]);
        let mut sweep = |ms: u64| {
            let effects = core.handle(Input::Sweep, at(NOW_MS + ms)).effects;
            let keys = core.store().state().table.keys();
            (effects.failures, keys, effects.expired)
        };
        let (failures, keys, _) = sweep(999);
        assert_eq!((failures, keys), (0, 1), "not before its time");
        let (failures, keys, expired) = sweep(1000);
        assert_eq!((failures, keys), (1, 0));
        // If there is a previous policy, it renders the notification, because the waiters of a lock
        // need it.
        assert_eq!(expired.len(), usize::from(falls_back));
        if let Some(notice) = expired.first() {
            assert_eq!(notice.payload, "*2\r\n$6\r\nNOTIFY\r\n$6\r\nDELETE\r\n");
        }
    }
}

#[test]
fn hidden_keys_are_unreadable_and_expire() {
    let mut core = core(None);
    assert_eq!(ask(&mut core, &["HIDE", "books"]).1, "+OK\r\n");
    assert_eq!(ask(&mut core, &["GET", "books"]).1, "$-1\r\n");
    let state = core.store().state();
    assert_eq!((state.hidden.keys(), state.table.keys()), (1, 0));
    assert_eq!(core.store().next_expiry_ms(), Some(NOW_MS + 1000));
    core.handle(Input::Sweep, at(NOW_MS + 1000));
    assert_eq!(core.store().state().hidden.keys(), 0);
    assert_eq!(core.store().next_expiry_ms(), None);
}

fn refused(file: &[u8]) -> LoadError {
    match engine().load(file) {
        Ok(policy) => panic!("{policy} was loaded"),
        Err(error) => error,
    }
}

#[test]
fn policy_with_bad_description_is_refused_with_the_cause() {
    assert!(engine().load(&described("fine")).is_ok());
    for (word, cause) in [
        ("absurd", "out of bounds of memory"),
        ("wild", "out of bounds of memory"),
        ("no-text", "utf-8"),
        ("trap", "unreachable"),
        ("loop", "fuel"),
        ("empty", "its name is empty"),
        ("refuse", "it is never content"),
    ] {
        let error = refused(&described(word)).to_string();
        assert!(error.contains(cause), "{word}: {error}");
    }
    let error = refused(&described("ramble")).to_string();
    assert!(error.len() < 2048, "{} bytes", error.len());
}

/// A component with these sections.
fn component(sections: &[(u8, &[u8])]) -> Vec<u8> {
    let mut bytes = b"\0asm\x0d\0\x01\0".to_vec();
    for (id, content) in sections {
        bytes.extend([*id, u8::try_from(content.len()).expect("a short section")]);
        bytes.extend(*content);
    }
    bytes
}

/// The encoding of the name of an import or export: a kind, its length, its bytes.
fn name(text: &str) -> Vec<u8> {
    let len = u8::try_from(text.len()).expect("a short name");
    [&[0, len], text.as_bytes()].concat()
}

#[test]
fn component_of_another_world_is_refused_with_the_cause() {
    let imports = |interface: &str| {
        // One type, an empty instance, and one import of that type.
        let import = [&[1][..], &name(interface), &[5, 0]].concat();
        component(&[(7, &[1, 0x42, 0]), (10, &import)])
    };
    for interface in [
        "wasi:clocks/monotonic-clock@0.2.0",
        "wasi:cli/environment@0.2.3",
    ] {
        let error = refused(&imports(interface));
        assert!(matches!(error, LoadError::Import(_)), "{error}");
        assert_contains!(error.to_string(), interface, "build it without WASI");
    }
    let error = refused(&imports("other:world/clock@1.0.0"));
    assert!(!error.to_string().contains("WASI"), "{error}");
    let error = refused(&imports("statehouse:policy/table@2.0.0"));
    assert!(matches!(error, LoadError::Version(_)), "{error}");
    // An instance without exports is exported as the handler, so it has no functions.
    let error = refused(&exporting("statehouse:policy/handler@1.0.0", 0, &[]));
    assert!(matches!(error, LoadError::Compile(_)), "{error}");
    assert_contains!(error.to_string(), "describe");
}

/// A component with these sections, and an instance without exports, which it exports.
fn exporting(interface: &str, instance: u8, sections: &[(u8, &[u8])]) -> Vec<u8> {
    let export = [&[1][..], &name(interface), &[5, instance, 0]].concat();
    let own: [(u8, &[u8]); 2] = [(5, &[1, 1, 0]), (11, &export)];
    component(&[sections, &own[..]].concat())
}

/// Regression: the error of a rule advised `policy build`, whose result was the same error. That of
/// a policy was the text of the linker.
#[test]
fn component_for_a_newer_contract_is_refused_with_its_version() {
    let error = refused(&exporting("statehouse:policy/admission@1.1.0", 0, &[]));
    assert!(matches!(error, LoadError::Version(_)), "{error}");
    let error = refused(&exporting("statehouse:policy/admission@1.0.0", 0, &[]));
    assert!(matches!(error, LoadError::Rule), "{error}");
    // The type of an instance with one function, and an import of that type.
    let begin = &[1, 0x42, 2, 1, 0x40, 0, 1, 0, 4][..];
    let function = [begin, &name("newer"), &[1, 0]].concat();
    for (version, is_newer) in [("1.0.0", false), ("1.1.0", true)] {
        let table = name(&format!("statehouse:policy/table@{version}"));
        let import = [&[1][..], &table, &[5, 0]].concat();
        let sections: [(u8, &[u8]); 2] = [(7, &function), (10, &import)];
        let error = refused(&exporting("statehouse:policy/handler@1.0.0", 1, &sections));
        match is_newer {
            true => assert!(matches!(error, LoadError::Version(_)), "{error}"),
            false => assert!(matches!(error, LoadError::Compile(_)), "{error}"),
        }
    }
}

#[test]
fn file_that_is_no_policy_is_refused_with_the_cause() {
    assert!(matches!(refused(b"#!/bin/sh\n"), LoadError::NotWasm));
    assert!(matches!(refused(b""), LoadError::NotWasm));
    // An empty module and an empty component.
    let error = refused(b"\0asm\x01\0\0\0");
    assert!(matches!(error, LoadError::Encode(_) | LoadError::NoHandler));
    let error = refused(b"\0asm\x0d\0\x01\0");
    assert!(matches!(error, LoadError::NoHandler));
    // Truncated files of a component and of a core module, and files with a byte outside all
    // sections.
    for whole in [STANDARD_POLICY, malformed()] {
        for end in [whole.len() / 2, whole.len() - 1, 100, 9] {
            let error = refused(&whole[..end]);
            assert!(matches!(error, LoadError::Cut), "{end}: {error}");
        }
        let longer = [whole, b"\x7f"].concat();
        assert!(matches!(refused(&longer), LoadError::Cut));
    }
    let too_large = vec![0; usize::try_from(limits::POLICY_FILE_BYTES_MAX).unwrap() + 1];
    assert!(matches!(refused(&too_large), LoadError::Size(_)));
}

#[test]
fn policy_of_another_major_version_must_be_rebuilt() {
    // A component contains the names of interfaces as text, so one changed byte changes the
    // version.
    let mut newer = STANDARD_POLICY.to_vec();
    for at in 0..newer.len() {
        if newer[at..].starts_with(b"@1.0.0") {
            newer[at + 1] = b'2';
        }
    }
    let error = refused(&newer);
    assert!(matches!(error, LoadError::Version(_)), "{error}");
    assert_contains!(error.to_string(), "rebuild it");
}
