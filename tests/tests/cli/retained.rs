//! Tests commands on a data directory without the beginning of its history. The server has replaced
//! the beginning by snapshots, and the commands must say that the history is incomplete.

use std::{thread, time::Duration};

use serde_json::Value;
use statehouse_tests::{Hlc, Server};

use crate::data_directory::{data, files};

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
    let first = data(&server).join("000000000001.log");
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
    as_of("key", first).code(2).says("not kept any more");
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
        assert!(!files(&data(server), "snapshot").is_empty());
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
    server.run(&["snapshot", "backup"]).code(0);
    server
        .run(&["restore", "backup", "--data", "restored"])
        .code(0);
    let found = server
        .run(&["doctor", "restored", "--json"])
        .code(0)
        .object();
    assert_eq!(found["holds"]["keys"], 3);
}
