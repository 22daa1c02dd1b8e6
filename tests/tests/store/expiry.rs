//! A key is gone at its time, and its watchers are told: not before it, and without anybody touching it.

use std::time::{Duration, Instant};

use statehouse_tests::{Server, property, store};

#[test]
fn the_delete_event_comes_by_itself_and_not_early() {
    let server = Server::start();
    let mut watcher = server.store("watcher");
    let mut writer = server.store("writer");
    watcher.watch("key");
    let began = Instant::now();
    let answer = writer.ask(&["SET", "key", "value", "PX", "400"]);
    let set = answer.version().unwrap();
    let heard = watcher.notification();
    assert_eq!(store::version(&heard), Some(set.clone()));

    let gone = watcher.notification();
    // The store's clock has whole milliseconds.
    assert!(
        began.elapsed() >= Duration::from_millis(399),
        "early: after {:?}",
        began.elapsed()
    );
    assert_eq!(gone.payload, b"*2\r\n$6\r\nNOTIFY\r\n$6\r\nDELETE\r\n");
    assert_eq!(gone.topic, store::notification_topic("watcher", b"key"));
    assert_eq!((gone.qos, gone.retain, gone.dup), (1, false, false));
    let version = store::version(&gone).unwrap();
    assert!(version > set);
    assert_eq!(
        property::users(&gone.properties),
        [("__ts".to_string(), version.to_string())]
    );
    // Once only, and the key is gone for everybody.
    assert_eq!(writer.get("key"), None);
    watcher.expect_nothing();
}

/// Many keys end at about one time; each watcher hears of its own, each once, in any order.
#[test]
fn many_expire_together() {
    let server = Server::start();
    let mut watcher = server.store("watcher");
    let mut writer = server.store("writer");
    let keys: Vec<String> = (0..600).map(|n| format!("key{n:03}")).collect();
    for key in &keys {
        watcher.watch(key);
    }
    for key in &keys {
        assert_eq!(
            writer.ask(&["SET", key, "v", "PX", "700"]).text(),
            "+OK\\r\\n"
        );
    }
    let mut deleted = Vec::new();
    let mut set = 0;
    while deleted.len() < keys.len() {
        let heard = watcher.notification();
        if heard.payload.ends_with(b"DELETE\r\n") {
            deleted.push(heard.topic);
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

/// Written again before its time, a key lives by the new one: no event comes for the old one.
#[test]
fn a_renewal_moves_the_time() {
    let server = Server::start();
    let mut watcher = server.store("watcher");
    let mut holder = server.store("holder");
    watcher.watch("lease");
    let mut last = Instant::now();
    for _ in 0..5 {
        last = Instant::now();
        let renewed = holder.ask(&["SET", "lease", "holder", "NEX", "PX", "1000"]);
        // A machine that stood still for a second would have lost it.
        assert_eq!(renewed.text(), "+OK\\r\\n");
        let heard = watcher.notification();
        assert!(
            !heard.payload.ends_with(b"DELETE\r\n"),
            "it ended too early"
        );
        std::thread::sleep(Duration::from_millis(300));
    }
    let gone = watcher.notification();
    assert!(gone.payload.ends_with(b"DELETE\r\n"));
    assert!(last.elapsed() >= Duration::from_millis(999), "early");
    watcher.expect_nothing();
}

/// A deleted key does not expire as well, and neither does one that was set for ever.
#[test]
fn no_event_for_what_is_no_more() {
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
    // Later than both would have been.
    watcher.ask(&["SET", "marker", "v", "PX", "500"]);
    watcher.notification();
    let next = watcher.notification();
    assert_eq!(next.topic, store::notification_topic("watcher", b"marker"));
    assert_eq!(watcher.get("kept"), Some(b"w".to_vec()));
    watcher.expect_nothing();
}
