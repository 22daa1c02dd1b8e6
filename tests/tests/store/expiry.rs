//! Expiry of keys. The store must delete a key when its time is over and never earlier, and must
//! notify the watchers without any request on the key.

use std::time::{Duration, Instant};

use statehouse_tests::{Server, property, store};

#[test]
fn expired_key_unrequested_notifies_watchers_not_early() {
    let server = Server::start();
    let mut watcher = server.store("watcher");
    let mut writer = server.store("writer");
    watcher.watch("key");
    let began = Instant::now();
    let answer = writer.ask(&["SET", "key", "value", "PX", "400"]);
    let set = answer.version().unwrap();
    let change = watcher.notification();
    assert_eq!(store::version(&change), Some(set.clone()));

    let expired = watcher.notification();
    // The store's clock counts whole milliseconds.
    let took = began.elapsed();
    assert!(took >= Duration::from_millis(399), "early: after {took:?}");
    assert_eq!(expired.payload, b"*2\r\n$6\r\nNOTIFY\r\n$6\r\nDELETE\r\n");
    assert_eq!(expired.topic, store::notification_topic("watcher", b"key"));
    assert_eq!(expired.qos, 1);
    assert!(!expired.retain && !expired.dup);
    let version = store::version(&expired).unwrap();
    assert!(version > set);
    assert_eq!(
        property::users(&expired.properties),
        [("__ts".to_string(), version.to_string())]
    );
    // The watcher is notified only once, and other clients no longer see the key.
    assert_eq!(writer.get("key"), None);
    watcher.expect_nothing();
}

/// Many keys expire at about the same time. The watcher is notified once of each, in any order.
#[test]
fn keys_expiring_together_notify_once_each() {
    let server = Server::start();
    let mut watcher = server.store("watcher");
    let mut writer = server.store("writer");
    let keys: Vec<String> = (0..600).map(|n| format!("key{n:03}")).collect();
    for key in &keys {
        watcher.watch(key);
    }
    for key in &keys {
        let answer = writer.ask(&["SET", key, "v", "PX", "700"]);
        assert_eq!(answer.payload(), b"+OK\r\n");
    }
    let mut deleted = Vec::new();
    let mut set = 0;
    while deleted.len() < keys.len() {
        let change = watcher.notification();
        if change.payload.ends_with(b"DELETE\r\n") {
            deleted.push(change.topic);
        } else {
            set += 1;
        }
    }
    deleted.sort();
    let expected: Vec<String> = keys
        .iter()
        .map(|key| store::notification_topic("watcher", key.as_bytes()))
        .collect();
    assert_eq!(deleted, expected);
    assert_eq!(set, keys.len());
    watcher.expect_nothing();
    assert_eq!(writer.ask(&["SCAN", "*"]).payload(), b"*1\r\n*0\r\n");
}

/// A key that is written again before it expires takes the new expiry. The store sends no DELETE at
/// the old time.
#[test]
fn renewed_key_expires_at_its_new_time_only() {
    let server = Server::start();
    let mut watcher = server.store("watcher");
    let mut holder = server.store("holder");
    watcher.watch("lease");
    let mut last = Instant::now();
    for _ in 0..5 {
        last = Instant::now();
        let renewed = holder.ask(&["SET", "lease", "holder", "NEX", "PX", "1000"]);
        // If the machine stalls for a second, the lease expires and this fails.
        assert_eq!(renewed.text(), "+OK\\r\\n");
        let change = watcher.notification();
        assert!(
            !change.payload.ends_with(b"DELETE\r\n"),
            "the lease expired too early"
        );
        std::thread::sleep(Duration::from_millis(300));
    }
    let expired = watcher.notification();
    assert!(expired.payload.ends_with(b"DELETE\r\n"));
    assert!(last.elapsed() >= Duration::from_millis(999), "early");
    watcher.expect_nothing();
}

/// A deleted key does not expire in addition. Neither does a key that was then set without an
/// expiry.
#[test]
fn deleted_or_overwritten_key_sends_no_expiry_event() {
    let server = Server::start();
    let mut watcher = server.store("watcher");
    watcher.watch("deleted");
    watcher.watch("kept");
    watcher.watch("marker");
    for key in ["deleted", "kept"] {
        watcher.ask(&["SET", key, "v", "PX", "200"]);
        watcher.notification();
    }
    watcher.ask(&["DEL", "deleted"]);
    watcher.notification();
    watcher.set("kept", "w");
    watcher.notification();
    // The marker expires later than both keys would have expired.
    watcher.ask(&["SET", "marker", "v", "PX", "500"]);
    watcher.notification();
    let next = watcher.notification();
    assert_eq!(next.topic, store::notification_topic("watcher", b"marker"));
    assert_eq!(watcher.get("kept"), Some(b"w".to_vec()));
    watcher.expect_nothing();
}
