//! Changes limits of a store behind a foreign broker in its settings file. The limits of the store
//! must change at once; limits of clients belong to the broker. A message above a limit of the
//! broker must not affect other messages.

use std::{fs, path::PathBuf};

use statehouse_tests::{Mosquitto, Server, Store};
use tempfile::TempDir;

const QUOTA: &[u8] = b"-ERR the quota has been exceeded\r\n";

/// A broker, and a store that is attached to it and has a settings file.
struct Site {
    host: Server,
    _broker: Mosquitto,
    settings: PathBuf,
    _directory: TempDir,
}

impl Site {
    fn start(settings: &str) -> Site {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("statehouse.toml");
        fs::write(&path, settings).unwrap();
        let broker = Mosquitto::start();
        let given = [("presence", "off"), ("config", path.to_str().unwrap())];
        Site {
            host: Server::attached(&broker.url(), broker.address(), &given),
            _broker: broker,
            settings: path,
            _directory: directory,
        }
    }

    fn change(&self, settings: &str) {
        self.host.change_file(&self.settings, settings);
    }

    fn limit(&self, setting: &str) -> Option<u64> {
        self.host
            .metric_if_any(&format!("limit{{setting=\"{setting}\"}}"))
    }
}

fn set(store: &mut Store, key: &str, value: &str) -> Vec<u8> {
    store.ask(&["SET", key, value]).payload().to_vec()
}

#[test]
fn changed_limit_applies_at_once_and_deletes_nothing() {
    let mut site = Site::start("max_keys = 1\n");
    let mut store = site.host.store("client");
    store.set("1", "value");
    assert_eq!(set(&mut store, "2", "value"), QUOTA);

    site.change("max_keys = 2\nmax_client_watches = 1\n");
    assert_eq!(site.limit("max_keys"), Some(2));
    store.set("2", "value");
    store.watch("1");
    assert_eq!(store.ask(&["KEYNOTIFY", "2"]).payload(), QUOTA);

    site.change("max_keys = 1\nmax_value_bytes = 3\n");
    assert!(set(&mut store, "1", "value").starts_with(b"-ERR the value is longer than 3 bytes"));
    assert_eq!(set(&mut store, "3", "v"), QUOTA);
    assert_eq!(store.get("2").as_deref(), Some(&b"value"[..]));
    store.watch("2");

    // A restart reads the same file.
    site.host.kill();
    site.host.restart();
    assert_eq!(site.limit("max_keys"), Some(1));
    assert_eq!(store.get("2").as_deref(), Some(&b"value"[..]));
    assert_eq!(set(&mut store, "3", "v"), QUOTA);
}

/// The store announces its maximum packet size when it connects, so a change needs a restart.
/// Limits of clients belong to the broker, so the store has no metrics for them.
#[test]
fn packet_limit_changes_at_restart_only() {
    let site = Site::start("max_packet_bytes = 100000\n");
    let mut store = site.host.store("client");
    let longest = site.limit("max_value_bytes").unwrap();
    assert!(longest < 100_000);
    site.change("max_packet_bytes = 1000000\nmax_keys = 5\nmax_client_in_flight = 1\n");
    let line = site.host.wait_for_log("counts from the next start on");
    assert!(line.contains(" max_packet_bytes counts"), "{line}");
    assert_eq!(site.limit("max_keys"), Some(5));
    assert_eq!(site.limit("max_value_bytes"), Some(longest));
    for broker_limit in [
        "max_packet_bytes",
        "max_client_in_flight",
        "max_connections",
    ] {
        assert_eq!(site.limit(broker_limit), None, "{broker_limit}");
    }
    store.set("1", "value");
}

/// The payloads that this broker takes have at most 1000 bytes. Mosquitto answers a longer PUBLISH
/// with PUBACK 0x95.
fn with_short_messages() -> (Mosquitto, Server) {
    let broker = Mosquitto::with(&["message_size_limit 1000"]);
    let host = Server::attached(&broker.url(), broker.address(), &[("presence", "off")]);
    (broker, host)
}

/// Regression: the store published the response again over each new connection, for ever.
#[test]
fn response_above_the_limit_of_the_broker_becomes_an_error() {
    let (_broker, host) = with_short_messages();
    let mut store = host.store("client");
    for n in 0..30 {
        store.set(format!("{n:050}"), "value");
    }
    for _ in 0..3 {
        let scan = store.ask(&["SCAN", "*"]);
        assert_eq!(scan.payload(), b"-ERR internal error\r\n");
        assert_eq!(store.get(format!("{:050}", 7)), Some(b"value".to_vec()));
    }
    let line = host.wait_for_log("trying again");
    assert!(line.contains("message_size_limit"), "{line}");
    // The store does not publish a message of that size again.
    assert!(host.metric("broker_connections_total") <= 3);
}

#[test]
fn notification_above_the_limit_of_the_broker_blocks_no_other() {
    let (_broker, host) = with_short_messages();
    let (mut writer, mut watcher) = (host.store("writer"), host.store("watcher"));
    watcher.watch("k");
    // The request has less than 1000 bytes, and the notification has more.
    writer.set("k", "x".repeat(960));
    writer.set("k", "short");
    let notification = watcher.notification();
    assert!(notification.payload.ends_with(b"$5\r\nshort\r\n"));
    assert!(host.metric("broker_refused_total") >= 1);
}
