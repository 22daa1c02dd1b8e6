//! The modes of `--durability`. Each answer must state where the write is stored, and the write
//! must survive accordingly.

use std::{fs, thread, time::Duration};

use statehouse_tests::{Hlc, Server, Store, assert_contains};

use crate::resumed::{begin, resume};

/// Sends a SET with the value `asks` of `aio-persistence`, if any. Returns the value of `persisted`
/// in the answer.
fn set(store: &mut Store, key: &str, asks: Option<&str>) -> Option<String> {
    let mut request = store.command(&["SET", key, "value"]);
    if let Some(asks) = asks {
        request = request.with("aio-persistence", asks);
    }
    let answer = store.call(&request);
    assert_eq!(answer.payload(), b"+OK\r\n");
    let mut found = answer
        .user()
        .into_iter()
        .filter(|(name, _)| name == "persisted");
    let persisted = found.next().map(|(_, value)| value);
    assert_eq!(found.next(), None);
    persisted
}

#[test]
fn answer_to_a_write_states_where_it_is_stored() {
    for (mode, asked, not_asked) in [
        ("always", "disk", "disk"),
        ("interval", "disk", "interval"),
        ("memory", "memory", "memory"),
    ] {
        let server = Server::restartable(&[("durability", mode)]);
        let mut store = server.store("client");
        for (asks, expected) in [
            (Some("true"), Some(asked)),
            (Some("false"), Some(not_asked)),
            (None, None),
        ] {
            let persisted = set(&mut store, "key", asks);
            assert_eq!(persisted.as_deref(), expected, "{mode} {asks:?}");
        }
        // Only the answer to a SET that took effect has the property.
        for command in [
            &["GET", "key"][..],
            &["SET", "key", "v", "NX"],
            &["DEL", "key"],
        ] {
            let request = store.command(command).with("aio-persistence", "true");
            let answer = store.call(&request);
            assert!(
                answer.user().iter().all(|(name, _)| name != "persisted"),
                "{command:?}"
            );
        }
    }
}

#[test]
fn memory_mode_writes_no_file() {
    let mut server = Server::restartable(&[("durability", "memory")]);
    assert!(server.stdout()[2].contains("in memory: a restart forgets everything"));
    let mut store = begin(&server, "client");
    let persisted = set(&mut store, "key", Some("true"));
    assert_eq!(persisted.as_deref(), Some("memory"));
    let left: Vec<_> = fs::read_dir(server.directory()).unwrap().collect();
    assert!(left.is_empty(), "{left:?}");
    server.kill_and_restart();
    // No session survived either.
    assert_eq!(begin(&server, "client").get("key"), None);
}

/// The interval between two flushes is an hour. A write that requests the disk survives, and so
/// does every write before it.
#[test]
fn write_requesting_the_disk_survives_with_earlier_ones() {
    let settings = [("durability", "interval"), ("sync_interval", "1h")];
    let mut server = Server::restartable(&settings);
    assert_contains!(server.stdout()[2], "--durability interval");
    let mut store = begin(&server, "client");
    for n in 0..20 {
        set(&mut store, &format!("before {n}"), None);
    }
    let persisted = set(&mut store, "asked", Some("true"));
    assert_eq!(persisted.as_deref(), Some("disk"));
    set(&mut store, "after", None);
    server.kill_and_restart();
    let mut store = server.store("other");
    assert_eq!(store.get("asked"), Some(b"value".to_vec()));
    for n in 0..20 {
        assert_eq!(store.get(format!("before {n}")), Some(b"value".to_vec()));
    }
}

/// The clock of the client is ahead, so the lost versions were ahead of the store's clock.
#[test]
fn versions_increase_although_writes_are_lost() {
    let settings = [("durability", "interval"), ("sync_interval", "1h")];
    for ahead_ms in [500, 5_000] {
        let mut server = Server::restartable(&settings);
        let mut store = begin(&server, "client");
        let mut last = None;
        for n in 0..3 {
            let set = store.command(&["SET", "key", "value"]).without("__ts");
            let version = store.call(&set.with("__ts", Hlc::now(ahead_ms))).version();
            assert!(version > last, "{n} {ahead_ms}");
            last = version;
            server.kill_and_restart();
            store = server.store("client");
        }
        assert!(Some(store.set("key", "value")) > last);
    }
}

/// An orderly stop loses nothing, in any mode with a disk.
#[test]
fn orderly_stop_loses_nothing() {
    for mode in ["always", "interval"] {
        let mut server = Server::restartable(&[("durability", mode), ("sync_interval", "1h")]);
        let mut store = begin(&server, "client");
        let version = store.set("key", "value");
        server.stop();
        server.restart();
        let mut store = resume(&server, "client");
        let answer = store.ask(&["GET", "key"]);
        assert_eq!(
            (answer.payload(), answer.version()),
            (&b"$5\r\nvalue\r\n"[..], Some(version)),
            "{mode}"
        );
    }
}

/// Keys expire by the wall clock, even while the server is down. Watches of the restarted server
/// get no event of a key that had expired before.
#[test]
fn keys_expire_while_the_server_is_down() {
    let mut server = Server::restartable(&[]);
    let mut store = server.store("client");
    let px = |key: &str, ms: &str| ["SET", key, "value", "PX", ms].map(String::from);
    store.ask(&px("short", "1000"));
    store.ask(&px("long", "4000"));
    store.ask(&px("very long", "600000"));
    store.ask(&px("cleared", "1000"));
    let cleared = store.set("cleared", "value");
    server.kill();
    thread::sleep(Duration::from_millis(1200));
    server.restart();
    let mut store = server.store("client");
    for key in ["short", "long", "very long", "cleared"] {
        store.watch(key);
    }
    assert_eq!(store.get("short"), None);
    assert_eq!(
        store.ask(&["SET", "short", "new", "NX"]).payload(),
        b"+OK\r\n"
    );
    assert!(store.notification().payload.ends_with(b"new\r\n"));
    // The first expiry event is that of the key `long`.
    let expired = store.notification();
    assert!(expired.payload.ends_with(b"$6\r\nDELETE\r\n"));
    assert_eq!(
        expired.topic,
        statehouse_tests::store::notification_topic("client", b"long")
    );
    assert_eq!(store.get("very long"), Some(b"value".to_vec()));
    assert_eq!(store.ask(&["GET", "cleared"]).version(), Some(cleared));
    store.expect_nothing();
}

/// Versions rise over any number of restarts, even after a request whose clock is nearly a minute
/// ahead.
#[test]
fn versions_rise_and_fences_survive_over_kills() {
    let mut server = Server::restartable(&[]);
    let mut store = server.store("client");
    let ahead = store
        .command(&["SET", "ahead", "value"])
        .without("__ts")
        .with("__ts", Hlc::now(50_000));
    let mut last = store.call(&ahead).version().unwrap();
    let fence = Hlc::now(0);
    let fenced = store.command(&["SET", "fenced", "0"]).with("__ft", &fence);
    assert_eq!(store.call(&fenced).payload(), b"+OK\r\n");
    for round in 0..5 {
        let version = store.set("key", round.to_string());
        assert!(version > last, "{version} after {last}");
        last = version;
        server.kill_and_restart();
        store = server.store("client");
        assert_eq!(store.ask(&["GET", "key"]).version(), Some(last.clone()));
        let bare = store.ask(&["SET", "fenced", "bare"]);
        assert!(bare.text().contains("is required"), "{}", bare.text());
        let old = store
            .command(&["SET", "fenced", "old"])
            .with("__ft", fence.moved(-1));
        let old = store.call(&old);
        assert!(old.text().contains("lower version"), "{}", old.text());
    }
    let equal = store
        .command(&["SET", "fenced", "equal"])
        .with("__ft", &fence);
    assert_eq!(store.call(&equal).payload(), b"+OK\r\n");
}

/// Keys and values may consist of any bytes, and have any size within the limits.
#[test]
fn keys_and_values_of_any_bytes_survive_kills() {
    let mut server = Server::restartable(&[]);
    let mut store = server.store("client");
    let entries: [(Vec<u8>, Vec<u8>); 5] = [
        (b"\0\xFF\r\n".to_vec(), b"\r\n\0\xFF$-1\r\n".to_vec()),
        (b"empty".to_vec(), Vec::new()),
        (vec![b'k'; 30_000], vec![0; 1 << 20]),
        (vec![0xFF], (0..=255).collect()),
        ("\u{1F980}".into(), "\u{1F980}".into()),
    ];
    let versions: Vec<Hlc> = entries
        .iter()
        .map(|(key, value)| store.set(key, value))
        .collect();
    for _ in 0..2 {
        server.kill_and_restart();
        let mut store = server.store("client");
        for ((key, value), version) in entries.iter().zip(&versions) {
            assert_eq!(store.get(key).as_ref(), Some(value));
            let answer = store.ask(&[b"GET", &key[..]]);
            assert_eq!(answer.version().as_ref(), Some(version));
        }
    }
}
