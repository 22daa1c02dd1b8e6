//! A store behind Mosquitto: durable watches, and requests that are remembered by identity.

use std::path::Path;

use serde_json::{Value, json};
use statehouse_tests::{Hlc, Mosquitto, Server, Store};

use super::{
    archive::{Archive, copy_all},
    exchange,
};

/// Without presence the store does not learn which clients disconnected, and keeps their watches.
const WITHOUT_PRESENCE: (&str, &str) = ("presence", "off");

/// Fills a store, and copies its data to `directory`. Returns what its clients saw.
pub(super) fn make(directory: &Path) -> Value {
    let broker = Mosquitto::start();
    let mut server = Server::attached(&broker.url(), broker.address(), &[WITHOUT_PRESENCE]);
    let mut watcher = server.store("watcher");
    watcher.watch("line/speed");
    watcher.watch_prefix("plant/");
    let mut asker = server.store("asker");
    let mut exchanges = Vec::new();
    for command in [
        &["SET", "line/speed", "70"][..],
        &["SET", "once", "1", "NX"],
        &["DEL", "once"],
        &["SET", "plant/1", "on"],
    ] {
        exchange::ask(&mut asker, &mut exchanges, command);
    }
    let version = asker.set("line/speed", "900");
    server.kill();
    let data = server.data_directory();
    copy_all(&data, &directory.join("attached"));
    json!({ "exchanges": exchanges, "version": version.to_string() })
}

/// Opens the data directory behind another broker.
pub(super) fn check(archive: &Archive) {
    let (_directory, data) = archive.copy("attached");
    let expected = &archive.expected["attached"];
    let clock = archive.clock();
    let broker = Mosquitto::start();
    let mut watcher = Store::behind(broker.connect("watcher"), "watcher");
    let mut asker = Store::behind(broker.connect("asker"), "asker");
    let settings = [WITHOUT_PRESENCE, ("data", data.to_str().unwrap())];
    let environment = clock.environment();
    let server = Server::attached_in(&broker.url(), broker.address(), &settings, &environment);
    let speed = asker.ask(&["GET", "line/speed"]);
    assert_eq!(speed.text(), "$3\\r\\n900\\r\\n");
    assert_eq!(speed.version().unwrap().to_string(), expected["version"]);
    exchange::redeliver(&mut asker, &expected["exchanges"]);
    assert_eq!(asker.get("line/speed"), Some(b"900".to_vec()));
    for key in ["line/speed", "plant/2"] {
        let set = asker.command(&["SET", key, "later"]).without("__ts");
        let set = set.with("__ts", Hlc::now(-archive.age_ms()));
        assert_eq!(asker.call(&set).text(), "+OK\\r\\n");
        // The store may repeat notifications of the released program, which it knows no end of.
        loop {
            let notified = watcher.notification();
            if notified.payload.ends_with(b"later\r\n") {
                let hex = statehouse_tests::store::hex(key.as_bytes());
                assert!(notified.topic.ends_with(&hex), "{}", notified.topic);
                break;
            }
        }
    }
    drop(server);
}
