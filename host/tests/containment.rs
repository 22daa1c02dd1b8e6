//! A policy may do whatever it likes: nothing it staged stays, the client is told, the next request works.

mod common;

use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use common::{NOW_MS, faulty, module};
use statehouse::{STANDARD_POLICY, limits};
use statehouse_core::policy::{Engine, Failure, LoadError, Policy, Registry};
use statehouse_core::store::{Effects, Event, Quota, Store, Transaction};

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

fn store(previous: Option<Arc<Policy<Transaction>>>) -> Store {
    store_under(load(faulty()), previous)
}

fn store_under(
    active: Arc<Policy<Transaction>>,
    previous: Option<Arc<Policy<Transaction>>>,
) -> Store {
    Store::new(Registry::new(active, previous), Quota::default())
}

fn ask(store: &mut Store, arguments: &[&str], now_ms: u64) -> (Effects, Bytes) {
    common::ask(store, "tester", arguments, now_ms)
}

#[test]
fn every_fault_is_contained() {
    let mut store = store(None);
    assert_eq!(
        ask(&mut store, &["SET", "kept", "fine"], NOW_MS).1,
        "+OK\r\n"
    );
    let kept = store
        .state()
        .table
        .get(b"kept")
        .expect("it was set")
        .clone();
    let clock = store.state().hlc;
    for mode in include_str!("../../tests/policies/faulty/faults.txt").lines() {
        for key in ["kept", "new"] {
            let (effects, answer) = ask(&mut store, &["SET", key, mode], NOW_MS);
            assert_eq!(answer, "-ERR internal error\r\n", "{mode}");
            assert_eq!(effects.failures, 1, "{mode}");
            assert_eq!(
                store.state().table.keys(),
                1,
                "{mode} left something behind"
            );
            assert_eq!(
                store.state().table.get(b"kept"),
                Some(&kept),
                "{mode} changed something"
            );
            assert_eq!(store.state().hlc, clock, "{mode} moved the clock");
            // The instance was replaced, also where it only returned nonsense.
            assert_eq!(
                ask(&mut store, &["COUNT", "-"], NOW_MS).1,
                ":1\r\n",
                "{mode}"
            );
            assert_eq!(
                ask(&mut store, &["GET", "kept"], NOW_MS).1,
                "$4\r\nfine\r\n",
                "{mode}"
            );
        }
    }
}

/// Host calls burnt no fuel, so a loop over them held every client up until the watchdog came.
#[test]
fn a_loop_over_an_import_ends_when_its_fuel_has_paid_for_the_hosts_work() {
    const MEGABYTE: u64 = 1 << 20;
    let fuel = limits::FUEL_PER_CALL_DEFAULT;
    let moving = fuel * limits::MOVED_BYTES_PER_FUEL / MEGABYTE;
    let named = fuel / (limits::FUEL_PER_KEY_BYTE * MEGABYTE);
    let small = fuel / limits::FUEL_PER_IMPORT;
    // Also on a busy machine it is the fuel that ends it.
    let engine = Engine::without_watchdog().expect("an engine");
    let policy = Arc::new(engine.load(faulty()).expect("a policy"));
    let mut store = store_under(policy.clone(), None);
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
        let (effects, answer) = ask(&mut store, &["SET", "k", "repeat", import], NOW_MS);
        assert_eq!(answer, "-ERR internal error\r\n", "{import}");
        assert_eq!(effects.failed, Some(Failure::Fuel), "{import}");
        assert!(effects.fuel >= fuel, "{import}: {}", effects.fuel);
        // The last one of them was not paid for any more.
        let calls = policy.counters.all()["repeated"] - before;
        before += calls;
        assert!((1..=calls_max + 1).contains(&calls), "{import}: {calls}");
        assert_eq!(store.state().table.keys(), 0, "{import}");
    }
}

#[test]
fn what_is_no_value_of_the_contract_is_contained() {
    let mut store = store_under(load(malformed()), None);
    assert_eq!(
        ask(&mut store, &["SET", "kept", "fine"], NOW_MS).1,
        "+OK\r\n"
    );
    let kept = store.state().table.get(b"kept").cloned();
    let clock = store.state().hlc;
    let modes = include_str!("../../tests/policies/malformed/malformations.txt");
    assert!(modes.lines().count() > 20);
    for mode in modes.lines() {
        for key in ["kept", "new"] {
            let (effects, answer) = ask(&mut store, &["SET", key, mode], NOW_MS);
            assert_eq!(answer, "-ERR internal error\r\n", "{mode}");
            assert_eq!(effects.failures, 1, "{mode}");
        }
        assert_eq!(store.state().table.keys(), 1, "{mode}");
        assert_eq!(store.state().table.get(b"kept").cloned(), kept, "{mode}");
        assert_eq!(store.state().hlc, clock, "{mode} moved the clock");
    }
    assert_eq!(
        ask(&mut store, &["SET", "new", "fine"], NOW_MS).1,
        "+OK\r\n"
    );
}

#[test]
fn what_fails_now_and_then_fails_alone() {
    let mut store = store(None);
    let mut failed = Vec::new();
    for number in 1..=3500 {
        let key = number.to_string();
        let (effects, answer) = ask(&mut store, &["SET", &key, "thousandth"], NOW_MS);
        if effects.failures == 0 {
            assert_eq!(answer, "+OK\r\n");
            continue;
        }
        assert_eq!(answer, "-ERR internal error\r\n");
        assert!(store.state().table.get(key.as_bytes()).is_none());
        failed.push(number);
    }
    // Each time on an instance that begins anew.
    assert_eq!(failed, [1000, 2000, 3000]);
    assert_eq!(store.state().table.keys(), 3497);
}

#[test]
fn a_request_that_cannot_be_told_of_does_not_happen() {
    let mut store = store(None);
    ask(&mut store, &["KEYNOTIFY", "bad-notify"], NOW_MS);
    let (effects, answer) = ask(&mut store, &["SET", "bad-notify", "fine"], NOW_MS);
    assert_eq!(answer, "-ERR internal error\r\n");
    assert!(effects.notifications.is_empty());
    assert_eq!(store.state().table.keys(), 0);
    // Nobody watches this one, so there is nothing to tell.
    assert_eq!(
        ask(&mut store, &["SET", "bad-notify-2", "fine"], NOW_MS).1,
        "+OK\r\n"
    );
}

#[test]
fn an_expired_key_goes_even_where_the_policy_cannot_tell_of_it() {
    for previous in [None, Some(load(STANDARD_POLICY))] {
        let falls_back = previous.is_some();
        let mut store = store(previous);
        assert_eq!(
            ask(&mut store, &["SET", "bad-notify", "fine"], NOW_MS).1,
            "+OK\r\n"
        );
        ask(&mut store, &["KEYNOTIFY", "bad-notify"], NOW_MS);
        let effects = store.step(Event::Sweep, NOW_MS + 999);
        assert_eq!(
            (effects.failures, store.state().table.keys()),
            (0, 1),
            "not before its time"
        );
        let effects = store.step(Event::Sweep, NOW_MS + 1000);
        assert_eq!((effects.failures, store.state().table.keys()), (1, 0));
        // Where there is a policy before the active one, it speaks: a lock's waiters must hear.
        assert_eq!(effects.expired.len(), usize::from(falls_back));
        if let Some(notice) = effects.expired.first() {
            assert_eq!(notice.payload, "*2\r\n$6\r\nNOTIFY\r\n$6\r\nDELETE\r\n");
        }
    }
}

#[test]
fn hidden_keys_are_nobodys_and_expire_too() {
    let mut store = store(None);
    assert_eq!(ask(&mut store, &["HIDE", "books"], NOW_MS).1, "+OK\r\n");
    assert_eq!(ask(&mut store, &["GET", "books"], NOW_MS).1, "$-1\r\n");
    assert_eq!(
        (store.state().hidden.keys(), store.state().table.keys()),
        (1, 0)
    );
    assert_eq!(store.next_expiry_ms(), Some(NOW_MS + 1000));
    store.step(Event::Sweep, NOW_MS + 1000);
    assert_eq!(
        (store.state().hidden.keys(), store.next_expiry_ms()),
        (0, None)
    );
}

fn refused(file: &[u8]) -> LoadError {
    match engine().load(file) {
        Ok(policy) => panic!("{policy} was loaded"),
        Err(error) => error,
    }
}

#[test]
fn a_policy_that_describes_itself_badly_is_refused_in_words() {
    // The word stands in the module with dots behind it.
    let described = |word: &str| {
        let mark = b"description=";
        let mut module = malformed().to_vec();
        let at = module.windows(mark.len()).position(|it| it == mark);
        let at = at.expect("the module says how it describes itself") + mark.len();
        module[at..at + word.len() + 1].copy_from_slice(format!("{word}.").as_bytes());
        module
    };
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

/// A component of two sections: what it imports or exports is an instance of nothing.
fn component(sections: &[(u8, &[u8])]) -> Vec<u8> {
    let mut bytes = b"\0asm\x0d\0\x01\0".to_vec();
    for (id, content) in sections {
        bytes.extend([*id, u8::try_from(content.len()).expect("a short section")]);
        bytes.extend(*content);
    }
    bytes
}

/// How a name of an import or export is written: a kind, its length, its bytes.
fn name(text: &str) -> Vec<u8> {
    let len = u8::try_from(text.len()).expect("a short name");
    [&[0, len], text.as_bytes()].concat()
}

#[test]
fn a_component_of_another_world_is_refused_in_words() {
    let imports = |interface: &str| {
        // One type, an instance of nothing; one import of that type.
        let import = [&[1][..], &name(interface), &[5, 0]].concat();
        component(&[(7, &[1, 0x42, 0]), (10, &import)])
    };
    for interface in [
        "wasi:clocks/monotonic-clock@0.2.0",
        "wasi:cli/environment@0.2.3",
    ] {
        let error = refused(&imports(interface));
        assert!(matches!(error, LoadError::Import(_)), "{error}");
        let text = error.to_string();
        assert!(text.contains(interface) && text.contains("build it without WASI"));
    }
    let error = refused(&imports("statehouse:policy/table@2.0.0"));
    assert!(matches!(error, LoadError::Version(_)), "{error}");
    // One instance of no exports, exported as the handler: there is nothing in it to call.
    let export = [
        &[1][..],
        &name("statehouse:policy/handler@1.0.0"),
        &[5, 0, 0],
    ]
    .concat();
    let error = refused(&component(&[(5, &[1, 1, 0]), (11, &export)]));
    assert!(matches!(error, LoadError::Compile(_)), "{error}");
    assert!(error.to_string().contains("describe"), "{error}");
}

#[test]
fn what_is_no_policy_is_refused_in_words() {
    assert!(matches!(refused(b"#!/bin/sh\n"), LoadError::NotWasm));
    assert!(matches!(refused(b""), LoadError::NotWasm));
    // An empty module and an empty component.
    assert!(matches!(
        refused(b"\0asm\x01\0\0\0"),
        LoadError::Encode(_) | LoadError::NoHandler
    ));
    assert!(matches!(
        refused(b"\0asm\x0d\0\x01\0"),
        LoadError::NoHandler
    ));
    // A component and a core module that are not copied whole yet, and one with a byte that is no section's.
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
fn a_policy_of_another_major_version_is_told_what_to_do() {
    // The names of interfaces stand in the component as text, so a byte makes another version of them.
    let newer: Vec<u8> = {
        let (from, to) = (b"@1.0.0", b"@2.0.0");
        let mut bytes = STANDARD_POLICY.to_vec();
        for at in 0..bytes.len() - from.len() {
            if bytes[at..].starts_with(from) {
                bytes[at..at + to.len()].copy_from_slice(to);
            }
        }
        bytes
    };
    let error = match engine().load(&newer) {
        Ok(policy) => panic!("{policy} was loaded"),
        Err(error) => error,
    };
    assert!(matches!(error, LoadError::Version(_)), "{error}");
    assert!(error.to_string().contains("rebuild it"), "{error}");
}
