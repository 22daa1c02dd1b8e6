//! A policy may do whatever it likes: nothing it staged stays, the client is told, the next request works.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use statehouse::policy::{Engine, LoadError, Policy, Registry};
use statehouse::request::{Delivery, Dialect, Request};
use statehouse::store::{Effects, Event, Peer, Quota, Store, Transaction};
use statehouse::{STANDARD_POLICY, limits};
use statehouse_mqtt::Properties;

const NOW_MS: u64 = 1_700_000_000_000;

/// The module of tests/policies/faulty, built once.
fn faulty() -> &'static [u8] {
    static MODULE: OnceLock<Vec<u8>> = OnceLock::new();
    MODULE.get_or_init(|| {
        let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let target: PathBuf = Path::new(env!("CARGO_TARGET_TMPDIR")).join("policies");
        let built = Command::new(env!("CARGO"))
            .current_dir(workspace)
            .args([
                "build",
                "--package",
                "faulty",
                "--profile",
                "guest",
                "--locked",
                "--quiet",
            ])
            .args(["--target", "wasm32-unknown-unknown", "--target-dir"])
            .arg(&target)
            .status()
            .expect("cargo runs");
        assert!(built.success(), "tests/policies/faulty does not build");
        fs::read(target.join("wasm32-unknown-unknown/guest/faulty.wasm")).expect("cargo built it")
    })
}

fn engine() -> &'static Engine<Transaction> {
    static ENGINE: OnceLock<Engine<Transaction>> = OnceLock::new();
    ENGINE.get_or_init(|| Engine::new().expect("an engine"))
}

fn load(module: &[u8]) -> Arc<Policy<Transaction>> {
    Arc::new(engine().load(module).expect("a policy"))
}

fn store(previous: Option<Arc<Policy<Transaction>>>) -> Store {
    let quota = Quota {
        keys_max: limits::KEYS_MAX_DEFAULT,
        bytes_max: limits::BYTES_MAX_DEFAULT,
        key_bytes_max: limits::KEY_BYTES_MAX_DEFAULT,
        value_bytes_max: limits::VALUE_BYTES_MAX_DEFAULT,
        journal_full: false,
    };
    Store::new(Registry::new(load(faulty()), previous), quota)
}

fn ask(store: &mut Store, arguments: &[&str], now_ms: u64) -> (Effects, Bytes) {
    let arguments: Vec<&[u8]> = arguments.iter().map(|text| text.as_bytes()).collect();
    let payload = Bytes::from(statehouse_policy::resp::request(&arguments));
    let peer = Peer {
        client: "tester".into(),
        connection: 1,
        session: 1,
    };
    let properties = Properties::default();
    let request = Request {
        dialect: Dialect::Sdk,
        payload: &payload,
        timestamp: None,
        fencing_token: None,
        peer: &peer,
        properties: &properties,
        delivery: Delivery::default(),
    };
    let mut effects = store.step(Event::Request(&request), now_ms);
    let answer = effects.answer.take().expect("every request has an answer");
    (effects, answer.payload)
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

#[test]
fn a_request_that_cannot_be_told_of_does_not_happen() {
    let mut store = store(None);
    ask(&mut store, &["KEYNOTIFY", "bad-notify"], NOW_MS);
    let (effects, answer) = ask(&mut store, &["SET", "bad-notify", "fine"], NOW_MS);
    assert_eq!(answer, "-ERR internal error\r\n");
    assert!(effects.notices.is_empty());
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

#[test]
fn what_is_no_policy_is_refused_in_words() {
    let refused = |file: &[u8]| match engine().load(file) {
        Ok(policy) => panic!("{policy} was loaded"),
        Err(error) => error,
    };
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
    let whole = STANDARD_POLICY;
    assert!(matches!(
        refused(&whole[..whole.len() / 2]),
        LoadError::Compile(_)
    ));
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
