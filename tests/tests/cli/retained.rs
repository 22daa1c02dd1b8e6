//! Commands on a directory whose beginning is no longer kept: everything rests on snapshots that a server took while
//! it went on.

use std::{thread, time::Duration};

use serde_json::Value;
use statehouse_tests::{Hlc, Server};

use crate::looking::{data, files, look, object, objects, stop};

/// Beyond this many rounds of a megabyte the server keeps its history for too long.
const ROUNDS_MAX: usize = 100;

struct Past {
    server: Server,
    /// Versions and values of one key.
    versions: Vec<(Hlc, String)>,
}

/// Lets a store that keeps hardly any history go on until its beginning is gone.
fn shortened() -> Past {
    let server = Server::restartable(&[("history_bytes", "0"), ("history_retention", "1ms")]);
    let mut store = server.store("client");
    let first = data(&server).join("000000000001.log");
    let mut versions = Vec::new();
    // What never changes is in every snapshot.
    let steady = store.set("steady", "the same");
    versions.push((steady, "the same".to_owned()));
    while first.exists() {
        assert!(versions.len() < ROUNDS_MAX, "the beginning is still there");
        store.set("large", vec![b'x'; 900 << 10]);
        // Refusals are recorded too.
        store.ask(&["SET", "key", "no", "NX"]);
        let value = format!("value {}", versions.len());
        versions.push((store.set("key", &value), value));
        // The snapshots and what they make unnecessary are the work of another thread.
        thread::sleep(Duration::from_millis(50));
    }
    Past { server, versions }
}

#[test]
fn what_is_kept_is_exact_and_what_is_not_is_said() {
    let mut past = shortened();
    let server = &past.server;
    let lines = objects(&look(server, &["history", "key", "--json"]).code(0));
    let (beginning, changes) = lines.split_last().unwrap();
    assert!(beginning["since"].is_string(), "{beginning}");
    let written = past.versions.len() - 1;
    assert!(changes.len() < written, "{} of {written}", changes.len());
    // The newest ones, without a gap.
    for (change, (version, value)) in changes.iter().zip(past.versions.iter().rev()) {
        assert_eq!(change["version"], version.to_string());
        assert_eq!(change["value"], value.clone());
    }
    let before = past.versions.len() - 1 - changes.len();
    if let Value::String(version) = &beginning["before"]["version"] {
        assert_eq!(*version, past.versions[before].0.to_string());
    }

    let as_of =
        |key: &str, version: &Hlc| look(server, &["get", key, "--as-of", &version.to_string()]);
    let (first, _) = &past.versions[1];
    as_of("key", first).code(2).says("not kept any more");
    let oldest = past.versions.len() - changes.len();
    for (version, value) in [&past.versions[oldest], past.versions.last().unwrap()] {
        assert_eq!(as_of("key", version).code(0).text(), *value);
        assert_eq!(as_of("steady", version).code(0).text(), "the same");
        as_of("nothing", past.versions.last().map(|(it, _)| it).unwrap()).code(1);
    }

    for stopped in [false, true] {
        if stopped {
            stop(&mut past.server);
        }
        let server = &past.server;
        assert!(!files(&data(server), "snapshot").is_empty());
        let found = object(&look(server, &["doctor", "--json"]).code(0));
        assert!(
            found["history"]["from_record"].as_u64().unwrap() > 1,
            "{found:#}"
        );
        assert!(found["blocks"].as_u64().unwrap() > 0);
        assert_eq!(found["holds"]["keys"], 3);
        let ran = look(server, &["replay", "--from", "1", "--json"]);
        let summary = object(&ran.code(0).says("does not reach back that far"));
        assert_eq!(summary["shortened"], true);
        let same = summary["summary"]["same"].as_u64().unwrap();
        assert!(same >= 3 && same < 3 * written as u64, "{summary}");
        assert_eq!(summary["summary"]["not_comparable"], 0);
        // From a place in the middle of what is kept the state is found as well.
        let record = changes[changes.len() / 2]["record"].to_string();
        let summary = object(&look(server, &["replay", "--from", &record, "--json"]).code(0));
        assert!(
            summary["summary"]["same"].as_u64().unwrap() > 0,
            "{summary}"
        );
    }
    let server = &past.server;
    look(server, &["snapshot", "backup"]).code(0);
    look(server, &["restore", "backup", "--data", "restored"]).code(0);
    let found = object(&look(server, &["doctor", "restored", "--json"]).code(0));
    assert_eq!(found["holds"]["keys"], 3);
}
