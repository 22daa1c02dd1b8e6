//! Loads policies that fail in every known way, as shadow policies. A policy that is only tried
//! must never affect clients.

use std::fs::{self, File};

use statehouse_tests::{Server, policies};

use crate::{eventually, policy, wasm::bomb};

/// Every request goes to the shadow policy as well, which fails in each of `modes`. The standard
/// policy must still answer.
fn in_shadow(module: &str, name: &str, modes: &str) {
    let mut server = Server::start();
    policy(&server, &["load", module]).code(0);
    policy(&server, &["shadow", name]).code(0);
    let mut store = server.store("client");
    let mut other = server.store("other");
    other.set("kept", "still there");
    for mode in modes.lines() {
        let key = format!("key/{mode}");
        assert_eq!(store.ask(&["SET", &key, mode]).payload(), b"+OK\r\n");
        assert_eq!(store.get(&key), Some(mode.as_bytes().to_vec()));
        assert_eq!(other.get("kept"), Some(b"still there".to_vec()));
    }
    let report = eventually("every request was compared", || {
        let report = policy(&server, &["diff", "--json"]).object();
        let counted = ["compared", "not_comparable", "skipped"]
            .iter()
            .map(|name| report[name].as_u64().unwrap())
            .sum::<u64>();
        // One SET at the start, then a SET and two GETs in each mode.
        (counted > 3 * modes.lines().count() as u64).then_some(report)
    });
    assert!(report["failed"].as_u64().unwrap() > 0, "{report}");
    let examples = report["examples"].as_array().unwrap();
    let causes = examples
        .iter()
        .filter(|example| example["candidate"]["failure"].is_string());
    assert!(causes.count() > 0, "no cause is named: {report}");
    assert!(server.runs());
    policy(&server, &["shadow", "--off"]).code(0);
    policy(&server, &["unload", name]).code(0);
}

#[test]
fn faulty_shadow_does_not_affect_clients() {
    let modes = include_str!("../../policies/faulty/faults.txt");
    in_shadow(policies::faulty(), "faulty", modes);
}

#[test]
fn malformed_shadow_does_not_affect_clients() {
    let module = policies::malformed();
    let modes = include_str!("../../policies/malformed/malformations.txt");
    in_shadow(module.to_str().unwrap(), "malformed", modes);
}

/// The commands refuse the file by its size alone.
#[test]
fn policy_of_100_mib_is_refused_unread() {
    let mut server = Server::start();
    let mut store = server.store("client");
    store.set("kept", "still there");
    let before_kib = server.memory_kib();
    let path = server.directory().join("large.wasm");
    File::create(&path).unwrap().set_len(100 << 20).unwrap();
    let large = path.to_str().unwrap();
    for (command, code) in [("load", 2), ("check", 1)] {
        policy(&server, &[command, large])
            .code(code)
            .says("104857600 bytes, and a policy at most");
    }
    assert_eq!(store.get("kept"), Some(b"still there".to_vec()));
    assert!(server.runs());
    // The store has not read the file into memory.
    assert!(server.memory_kib() < before_kib + (64 << 10));
}

/// Compiling half a megabyte once took more than a gigabyte of the store's memory.
#[test]
fn policy_that_is_costly_to_compile_is_refused_cheaply() {
    let mut server = Server::start();
    let mut store = server.store("client");
    store.set("kept", "still there");
    let path = server.directory().join("bomb.wasm");
    fs::write(&path, bomb(270_000)).unwrap();
    let before_kib = server.memory_peak_kib();
    policy(&server, &["load", path.to_str().unwrap()]).fails(4, "bytes of memory");
    let grown_kib = server.memory_peak_kib() - before_kib;
    assert!(grown_kib < (32 << 10), "{grown_kib} KiB");
    assert_eq!(store.get("kept"), Some(b"still there".to_vec()));
    policy(&server, &["load", policies::faulty()]).code(0);
    assert!(server.runs());
}
