//! Tests commands on a data directory without the beginning of its history. The server has replaced
//! the beginning by snapshots, or it is damaged, and the commands must say that the history is
//! incomplete.

use std::{thread, time::Duration};

use serde_json::Value;
use statehouse_tests::{Hlc, Server, assert_contains, files::of_kind, wait::until};

use crate::data_directory::{find, flip, restore_into};

/// The server must remove its first segment within this many rounds of one megabyte.
const ROUNDS_MAX: usize = 100;

/// A store without the beginning of its history.
struct Shortened {
    server: Server,
    /// All versions and values of the key `key`, after the one of the key `steady`.
    versions: Vec<(Hlc, String)>,
}

/// Writes to a store with a minimal history until it has removed its first segment.
fn shortened() -> Shortened {
    let server = Server::restartable(&[("history_bytes", "0"), ("history_retention", "1ms")]);
    let mut store = server.store("client");
    let first = server.data_directory().join("000000000001.log");
    let mut versions = Vec::new();
    // This key never changes, so every snapshot contains it.
    let steady = store.set("steady", "the same");
    versions.push((steady, "the same".to_owned()));
    while first.exists() {
        assert!(versions.len() < ROUNDS_MAX, "the beginning is still there");
        store.set("large", vec![b'x'; 900 << 10]);
        // Refusals are recorded too.
        store.ask(&["SET", "key", "no", "NX"]);
        let value = format!("value {}", versions.len());
        versions.push((store.set("key", &value), value));
        // Another thread writes snapshots and removes old segments.
        thread::sleep(Duration::from_millis(50));
    }
    Shortened { server, versions }
}

#[test]
fn shortened_history_is_exact_and_reported_as_such() {
    let mut shortened = shortened();
    let server = &shortened.server;
    let lines = server.run(&["history", "key", "--json"]).code(0).objects();
    let (beginning, changes) = lines.split_last().unwrap();
    assert!(beginning["since"].is_string(), "{beginning}");
    let written = shortened.versions.len() - 1;
    assert!(changes.len() < written, "{} of {written}", changes.len());
    // The history contains the newest changes without a gap.
    for (change, (version, value)) in changes.iter().zip(shortened.versions.iter().rev()) {
        assert_eq!(change["version"], version.to_string());
        assert_eq!(change["value"], value.clone());
    }
    let before = shortened.versions.len() - 1 - changes.len();
    if let Value::String(version) = &beginning["before"]["version"] {
        assert_eq!(*version, shortened.versions[before].0.to_string());
    }

    let as_of =
        |key: &str, version: &Hlc| server.run(&["get", key, "--as-of", &version.to_string()]);
    let (first, _) = &shortened.versions[1];
    as_of("key", first).fails(2, "not kept any more");
    let oldest = shortened.versions.len() - changes.len();
    for (version, value) in [
        &shortened.versions[oldest],
        shortened.versions.last().unwrap(),
    ] {
        assert_eq!(as_of("key", version).code(0).text(), *value);
        assert_eq!(as_of("steady", version).code(0).text(), "the same");
        as_of(
            "nothing",
            shortened.versions.last().map(|(it, _)| it).unwrap(),
        )
        .code(1);
    }

    for stopped in [false, true] {
        if stopped {
            shortened.server.stop();
        }
        let server = &shortened.server;
        assert!(!of_kind(&server.data_directory(), "snapshot").is_empty());
        let found = server.run(&["doctor", "--json"]).code(0).object();
        assert!(
            found["history"]["from_record"].as_u64().unwrap() > 1,
            "{found:#}"
        );
        assert!(found["blocks"].as_u64().unwrap() > 0);
        assert_eq!(found["holds"]["keys"], 3);
        let ran = server.run(&["replay", "--from", "1", "--json"]);
        let summary = ran.code(0).says("does not reach back that far").object();
        assert_eq!(summary["shortened"], true);
        let same = summary["summary"]["same"].as_u64().unwrap();
        assert!(same >= 3 && same < 3 * written as u64, "{summary}");
        assert_eq!(summary["summary"]["not_comparable"], 0);
        // A replay can also start in the middle of the history.
        let record = changes[changes.len() / 2]["record"].to_string();
        let summary = server
            .run(&["replay", "--from", &record, "--json"])
            .code(0)
            .object();
        assert!(
            summary["summary"]["same"].as_u64().unwrap() > 0,
            "{summary}"
        );
    }
    let server = &shortened.server;
    restore_into(server, "restored");
    let found = server
        .run(&["doctor", "restored", "--json"])
        .code(0)
        .object();
    assert_eq!(found["holds"]["keys"], 3);
}

/// Writes until a snapshot covers the first segment, and stops the server. Returns the version of
/// the first value of the key `key`, which has another value in the snapshot.
fn with_covered_segment() -> (Server, Hlc) {
    // A quarter of it is the log between two snapshots.
    let mut server = Server::restartable(&[("history_bytes", "32MiB")]);
    let mut store = server.store("client");
    let first = store.set("key", "the first value");
    store.set("key", "the second value");
    for _ in 0..120 {
        store.set("large", vec![b'x'; 100_000]);
    }
    until("a snapshot", || {
        !of_kind(&server.data_directory(), "snapshot").is_empty()
    });
    store.set("key", "the last value");
    drop(store);
    server.stop();
    (server, first)
}

/// Regression: all history was refused like damage to the newest state, although the store started.
/// History after a break in the log was reported as removed.
#[test]
fn history_begins_after_its_damage_and_names_it() {
    let (mut server, first) = with_covered_segment();
    let segment = server.data_directory().join("000000000001.log");
    let value_at = find(&segment, b"the first value");
    for (at, reason) in [
        (value_at, "a frame is damaged"),
        (0, "its header is damaged"),
    ] {
        flip(&segment, at);
        let lines = server.run(&["history", "key", "--json"]).code(0).objects();
        let (beginning, changes) = lines.split_last().unwrap();
        assert_eq!(changes[0]["value"], "the last value");
        let damage = beginning["damage"].as_str().unwrap();
        assert!(
            damage.starts_with("000000000001.log is damaged at byte "),
            "{damage}"
        );
        assert!(damage.ends_with(reason), "{damage}");
        let text = server.run(&["history", "key"]).code(0).text();
        let named = format!("; earlier changes cannot be read: {damage}\n");
        assert!(text.ends_with(&named), "{text}");

        let moment = first.to_string();
        let value = server.run(&["get", "key", "--as-of", &moment]).code(2);
        value.says("cannot be read: 000000000001.log is damaged");
        let value = server.run(&["get", "key", "--as-of", "0s"]).code(0);
        assert_eq!(value.text(), "the last value");
        for replay in [&["replay"][..], &["replay", "--from", "1"]] {
            let replay = server.run(replay).code(0);
            replay.says("earlier records cannot be read: 000000000001.log is damaged");
        }
        let found = server.run(&["doctor", "--json"]).code(1).object();
        let problems = found["problems"].to_string();
        assert_contains!(problems, "the history before record ");
        assert!(found["history"]["from_record"].as_u64().unwrap() > 1);
        assert!(found["refused"].is_null(), "{found:#}");
    }
    server.restart();
    let warning = server.wait_for_log("the history before this file cannot be read");
    assert!(warning.contains("000000000001.log"), "{warning}");
}
