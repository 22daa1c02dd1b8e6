//! Watches. The store must notify the connection that registered a watch, once for each change, and
//! no other connection.

use statehouse_tests::{
    Client, Connect, Property, Server, Store,
    packet::{self, Packet, kind},
    store::{NOTIFICATION_PREFIX, hex, notification_topic, version},
};

fn resumed(server: &Server, id: &str) -> Store {
    let client = Client::connect(server.address(), &Connect::resume(id, 60));
    Store::new(client, id)
}

/// Asserts that no notification arrives, but any other packet may.
fn assert_no_notification(client: &mut Client) {
    client.ping();
    let rest = client.drain();
    let is_notification = |packet: &Packet| {
        packet.kind() == kind::PUBLISH && packet.publish().topic.starts_with(NOTIFICATION_PREFIX)
    };
    assert!(!rest.iter().any(is_notification), "{rest:?}");
}

/// The watch of a key, and that of a prefix.
#[test]
fn watch_ends_with_its_connection() {
    let server = Server::start();
    let mut writer = server.store("writer");
    for how in ["disconnect", "abort"] {
        let mut watcher = resumed(&server, how);
        watcher.watch("key");
        watcher.watch_prefix("k");
        // Every acknowledgement has arrived, so the server redelivers nothing.
        watcher.client.ping();
        match how {
            "disconnect" => watcher.client.disconnect(),
            _ => watcher.client.abort(),
        }
        let mut watcher = resumed(&server, how);
        assert!(watcher.client.session_present());
        writer.set("key", "v");
        watcher.expect_nothing();
        for stop in [&["key", "STOP"][..], &["k", "PREFIX", "STOP"]] {
            let stopped = watcher.ask(&[&["KEYNOTIFY"], stop].concat());
            assert_eq!(stopped.payload(), b":0\r\n", "{stop:?}");
        }
        // A new registration is notified.
        watcher.watch("key");
        let set = writer.set("key", "w");
        assert_eq!(version(&watcher.notification()), Some(set));
    }
}

#[test]
fn watch_ends_with_a_take_over() {
    let server = Server::start();
    let mut writer = server.store("writer");
    let mut old = resumed(&server, "watcher");
    old.watch("key");
    // Every acknowledgement has arrived, so the server redelivers nothing.
    old.client.ping();
    let mut new = resumed(&server, "watcher");
    old.client.expect_disconnect(0x8E);
    writer.set("key", "before the watch");
    new.expect_nothing();
    new.watch("key");
    let set = writer.set("key", "after the watch");
    assert_eq!(version(&new.notification()), Some(set));
    new.expect_nothing();
}

/// A notification that was sent but not acknowledged is redelivered, as MQTT requires. Later
/// changes are not, because the watch ended with the connection.
#[test]
fn unacknowledged_notification_is_redelivered() {
    let server = Server::start();
    let mut writer = server.store("writer");
    let mut watcher = resumed(&server, "watcher");
    watcher.watch("key");
    watcher.client.ping();
    watcher.client.acknowledges = false;
    let set = writer.set("key", "v");
    let first = watcher.notification();
    assert_eq!(version(&first), Some(set.clone()));
    watcher.client.abort();
    let mut client = Client::connect(server.address(), &Connect::resume("watcher", 60));
    writer.set("key", "without a watch");
    let again = client.take_publish(NOTIFICATION_PREFIX);
    assert_eq!(version(&again), Some(set));
    assert_eq!((again.dup, again.packet_id), (true, first.packet_id));
    assert_no_notification(&mut client);
}

/// A watcher gets one copy of a notification, with or without matching subscriptions. A matching
/// subscription determines the QoS and the identifier.
#[test]
fn watcher_with_subscriptions_gets_one_copy() {
    let server = Server::start();
    let mut writer = server.store("writer");
    let mut plain = server.store("plain");
    plain.watch("key");
    let mut subscribed = server.store("subscribed");
    let id = [Property::SubscriptionId(77)];
    let filter = format!("{NOTIFICATION_PREFIX}/{}/#", hex(b"subscribed"));
    subscribed.client.subscribe_with(&filter, 2, &id);
    subscribed.watch("key");
    subscribed.watch("key");
    let mut twice = server.store("twice");
    for filter in ["#", &notification_topic("twice", b"key")] {
        assert_eq!(twice.client.subscribe(filter, 1), 1);
    }
    twice.watch("key");
    twice.client.ping();
    twice.client.drain();

    let set = writer.set("key", "v");
    for watcher in [&mut plain, &mut subscribed, &mut twice] {
        let change = watcher.notification();
        assert_eq!(version(&change), Some(set.clone()), "{}", watcher.id);
        assert_eq!(change.qos, 1, "{}", watcher.id);
        let has_id = change.properties.contains(&id[0]);
        assert_eq!(has_id, watcher.id == "subscribed");
        assert_no_notification(&mut watcher.client);
    }
}

/// A subscription that matches another client's notifications receives none of them.
#[test]
fn subscription_to_foreign_notifications_gets_none() {
    let server = Server::start();
    let mut watcher = server.store("watcher");
    watcher.watch("key");
    let mut curious = server.connect("curious");
    for filter in [
        "clients/statestore/#",
        &notification_topic("watcher", b"key"),
        "+/statestore/#",
    ] {
        assert_eq!(curious.subscribe(filter, 1), 1);
    }
    server.store("writer").set("key", "v");
    watcher.notification();
    curious.expect_nothing();
}

/// An UNSUBSCRIBE does not end a watch.
#[test]
fn watch_continues_after_an_unsubscribe() {
    let server = Server::start();
    let mut watcher = server.store("watcher");
    let topic = notification_topic("watcher", b"key");
    watcher.client.subscribe(&topic, 1);
    watcher.watch("key");
    watcher.client.send(&packet::unsubscribe(9, &topic));
    let client = &mut watcher.client;
    client.take("an UNSUBACK", |it| it.kind() == kind::UNSUBACK);
    let mut writer = server.store("writer");
    let set = writer.set("key", "v");
    assert_eq!(version(&watcher.notification()), Some(set));
    watcher.expect_nothing();
}

/// The notification topic of such a key would not fit into an MQTT string.
#[test]
fn watch_on_a_key_too_long_for_a_topic_is_refused() {
    let server = Server::start();
    let mut client = server.store("client");
    let key = vec![b'k'; 32 * 1024];
    client.set(&key, "v");
    let answer = client.ask(&[b"KEYNOTIFY", &key[..]]);
    assert_eq!(answer.payload(), b"-ERR syntax error\r\n");
    assert_eq!(client.get(&key), Some(b"v".to_vec()));
    // The longest key that fits: the topic has 65 535 bytes, and each key byte takes two of them.
    let rest = notification_topic("client", b"").len();
    let longest = vec![b'k'; (65_535 - rest) / 2];
    client.watch(&longest);
    client.set(&longest, "v");
    let topic = client.notification().topic;
    assert_eq!(topic, notification_topic("client", &longest));
    let beyond = vec![b'k'; longest.len() + 1];
    let answer = client.ask(&[b"KEYNOTIFY", &beyond[..]]);
    assert_eq!(answer.payload(), b"-ERR syntax error\r\n");
    let answer = client.ask(&[b"KEYNOTIFY", &beyond[..], b"STOP"]);
    assert_eq!(answer.payload(), b":0\r\n");
}

/// A prefix also covers keys that are too long for a topic. A SET of one must succeed, and the
/// watch must continue.
#[test]
fn prefix_watch_skips_keys_too_long_for_a_topic() {
    let server = Server::start();
    let (mut watcher, mut writer) = (server.store("watcher"), server.store("writer"));
    watcher.watch_prefix("k");
    writer.set(vec![b'k'; 32 * 1024], "v");
    let set = writer.set("key", "v");
    let notification = watcher.notification();
    assert_eq!(notification.topic, notification_topic("watcher", b"key"));
    assert_eq!(version(&notification), Some(set));
    watcher.expect_nothing();
}

#[test]
fn prefix_watches_share_the_limits_of_watches() {
    let server = Server::with_config("max_watches = 3\nmax_client_watches = 2\n");
    let (mut one, mut other) = (server.store("one"), server.store("other"));
    let quota = b"-ERR the quota has been exceeded\r\n";
    one.watch("a");
    one.watch_prefix("a");
    one.watch_prefix("a");
    assert_eq!(one.ask(&["KEYNOTIFY", "b", "PREFIX"]).payload(), quota);
    assert_eq!(one.ask(&["KEYNOTIFY", "b"]).payload(), quota);
    other.watch_prefix("a");
    assert_eq!(other.ask(&["KEYNOTIFY", "b", "PREFIX"]).payload(), quota);
    let stop = one.ask(&["KEYNOTIFY", "a", "PREFIX", "STOP"]);
    assert_eq!(stop.payload(), b"+OK\r\n");
    other.watch_prefix("b");
    let long = vec![b'p'; 1025];
    let refused = other.ask(&[b"KEYNOTIFY", &long[..], b"PREFIX"]).text();
    assert_eq!(refused, "-ERR the prefix is longer than 1024 bytes\\r\\n");
}
