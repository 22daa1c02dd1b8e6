//! MQTT sessions over `kill -9` (MQTT 5, section 4.1). A resumed session must have its
//! subscriptions, queued messages and open exchanges.

use std::{
    thread,
    time::{Duration, Instant},
};

use statehouse_tests::{
    Client, Connect, Heard, Property, Publish, Server, Store,
    client::PATIENCE,
    packet::{self, kind},
};

use crate::resumed::{begin, connect, resume};

/// Connects a plain MQTT client with a durable session, and checks Session Present.
fn client(server: &Server, id: &str, present: bool) -> Client {
    let client = Client::connect(server.address(), &connect(id));
    assert_eq!(client.session_present(), present, "of {id}");
    client
}

/// Session Present is correct for a durable session, and for one that ended with its connection, by
/// a DISCONNECT, or by a clean start.
#[test]
fn session_present_after_kills_is_correct() {
    let mut server = Server::restartable(&[]);
    client(&server, "connected", false);
    client(&server, "disconnected", false).disconnect();
    let _connected = client(&server, "connected", true);
    drop(server.connect("of one connection"));
    let mut ended = client(&server, "ended", false);
    ended.send(&packet::disconnect(0, &[Property::SessionExpiry(0)]));
    ended.expect_closed();
    client(&server, "cleaned", false).disconnect();
    server.connect("cleaned").disconnect();
    for _ in 0..2 {
        server.kill_and_restart();
        for (id, present) in [
            ("connected", true),
            ("disconnected", true),
            ("of one connection", false),
            ("ended", false),
            ("cleaned", false),
            ("never seen", false),
        ] {
            let mut connect = Connect::resume(id, 0);
            if present {
                connect = crate::resumed::connect(id);
            }
            let client = Client::connect(server.address(), &connect);
            assert_eq!(client.session_present(), present, "of {id}");
        }
    }
    // A clean start after the kill ends the old session for good.
    let clean = server.connect("disconnected");
    assert!(!clean.session_present());
    clean.disconnect();
    server.kill_and_restart();
    client(&server, "disconnected", false);
}

/// Checks the options and identifiers of subscriptions, and a filter that was unsubscribed.
#[test]
fn subscriptions_survive_kills_with_their_options() {
    let mut server = Server::restartable(&[]);
    let mut one = client(&server, "one", false);
    one.subscribe_with("a/+", 2, &[Property::SubscriptionId(7)]);
    one.subscribe_with("a/#", 1, &[Property::SubscriptionId(300_000)]);
    // No Local, QoS 1.
    one.subscribe("own/#", 0b0000_0101);
    // Retain As Published, QoS 0.
    one.subscribe("kept/#", 0b0000_1000);
    one.subscribe("changed", 0);
    one.subscribe("changed", 1);
    one.subscribe("left", 1);
    let id = one.packet_id();
    one.send(&packet::unsubscribe(id, "left"));
    one.take("an UNSUBACK", |p| p.kind() == kind::UNSUBACK);
    server.kill_and_restart();
    let mut one = client(&server, "one", true);
    let mut other = server.connect("other");
    other.publish(Publish::new("left", "x").qos(1));
    other.publish(Publish::new("a/b", "both").qos(2));
    let both = one.next().publish();
    assert_eq!((both.qos, &both.payload[..]), (2, &b"both"[..]));
    assert_eq!(both.subscription_ids(), [7, 300_000]);
    one.take("its PUBREL", |p| p.kind() == kind::PUBREL);
    one.publish(Publish::new("own/x", "from itself").qos(1));
    other.publish(Publish::new("own/x", "from another").qos(1));
    assert_eq!(one.next().publish().payload, b"from another");
    other.publish(Publish::new("kept/x", "flagged").qos(1).retained());
    let kept = one.next().publish();
    assert_eq!((kept.retain, kept.qos), (true, 0));
    other.publish(Publish::new("changed", "x").qos(1));
    assert_eq!(one.next().publish().qos, 1);
    one.expect_nothing();
}

/// Messages of QoS 1 and 2 wait for an absent client, in order and with their properties.
#[test]
fn messages_for_an_absent_client_survive_in_order() {
    let mut server = Server::restartable(&[]);
    let mut absent = client(&server, "absent", false);
    absent.subscribe("a/#", 2);
    absent.disconnect();
    let mut publisher = server.connect("publisher");
    let user = Property::user("n", "\u{1F980}");
    for n in 0..50_u8 {
        let message = Publish::new(&format!("a/{n}"), [n, 0, 0xFF]).qos(1 + n % 2);
        publisher.publish(message.with(user.clone()));
        if n == 24 {
            server.kill_and_restart();
            publisher = server.connect("publisher");
        }
    }
    server.kill_and_restart();
    let mut absent = client(&server, "absent", true);
    for n in 0..50_u8 {
        let publish = absent
            .take("a PUBLISH", |p| p.kind() == kind::PUBLISH)
            .publish();
        assert_eq!(publish.topic, format!("a/{n}"));
        assert_eq!(publish.payload, [n, 0, 0xFF]);
        assert_eq!((publish.qos, publish.dup), (1 + n % 2, false));
        assert_eq!(publish.properties, std::slice::from_ref(&user));
    }
    for _ in 0..25 {
        absent.take("a PUBREL", |p| p.kind() == kind::PUBREL);
    }
    absent.expect_nothing();
    // Acknowledged messages are removed from the queue. The removal is durable as soon as any later
    // write is answered.
    publisher = server.connect("publisher");
    publisher.publish(Publish::new("a/last", "x").qos(1));
    absent.take_publish("a/last");
    absent.ping();
    server.store("other").set("key", "flushed");
    server.kill_and_restart();
    let mut absent = client(&server, "absent", true);
    if let Heard::Packet(packet) = absent.poll(Duration::from_millis(300)) {
        panic!("redelivered: {packet:?}");
    }
}

/// Messages that were sent but not acknowledged are redelivered with DUP and the same packet ids,
/// before any new message.
#[test]
fn unacknowledged_messages_are_redelivered_after_kills() {
    let mut server = Server::restartable(&[]);
    let mut slow = client(&server, "slow", false);
    slow.acknowledges = false;
    slow.subscribe("a", 2);
    let mut publisher = server.connect("publisher");
    for n in 0..6_u8 {
        publisher.publish(Publish::new("a", [n]).qos(1 + n % 2));
    }
    let sent: Vec<Publish> = (0..6).map(|_| slow.next().publish()).collect();
    // The first exchange ends, and the second is half complete.
    slow.send(&packet::acknowledge(kind::PUBACK, sent[0].packet_id));
    slow.send(&packet::acknowledge(kind::PUBREC, sent[1].packet_id));
    slow.take_ack(kind::PUBREL, sent[1].packet_id);
    // Once this SET is answered, everything before it is durable.
    server.store("other").set("key", "value");
    for _ in 0..2 {
        server.kill_and_restart();
        slow = client(&server, "slow", true);
        slow.acknowledges = false;
        assert_eq!(slow.next().ack().packet_id, sent[1].packet_id, "a PUBREL");
        for first in &sent[2..] {
            let again = slow.next().publish();
            assert_eq!(
                again,
                Publish {
                    dup: true,
                    ..first.clone()
                }
            );
        }
    }
    publisher = server.connect("publisher");
    publisher.publish(Publish::new("a", "new").qos(1));
    let new = slow.next().publish();
    assert_eq!((&new.payload[..], new.dup), (&b"new"[..], false));
    assert!(sent[1..].iter().all(|old| old.packet_id != new.packet_id));
    slow.expect_nothing();
}

/// A QoS 2 message from a client is delivered once, although the client redelivers it after each
/// kill.
#[test]
fn qos_2_message_over_kills_is_delivered_once() {
    let mut server = Server::restartable(&[]);
    let mut absent = client(&server, "absent", false);
    absent.subscribe("a", 2);
    absent.disconnect();
    let mut publisher = client(&server, "publisher", false);
    let mut publish = Publish::new("a", "once").qos(2);
    publish.packet_id = 9;
    publisher.send(&publish.bytes());
    assert_eq!(publisher.take_ack(kind::PUBREC, 9).reason, 0);
    for _ in 0..2 {
        server.kill_and_restart();
        publisher = client(&server, "publisher", true);
        publish.dup = true;
        publisher.send(&publish.bytes());
        assert_eq!(publisher.take_ack(kind::PUBREC, 9).reason, 0);
    }
    publisher.send(&packet::acknowledge(kind::PUBREL, 9));
    assert_eq!(publisher.take_ack(kind::PUBCOMP, 9).reason, 0);
    server.kill_and_restart();
    publisher = client(&server, "publisher", true);
    publisher.send(&packet::acknowledge(kind::PUBREL, 9));
    assert_eq!(publisher.take_ack(kind::PUBCOMP, 9).reason, 0x92);
    let mut absent = client(&server, "absent", true);
    assert_eq!(absent.next().publish().payload, b"once");
    absent.take("its PUBREL", |p| p.kind() == kind::PUBREL);
    absent.expect_nothing();
}

#[test]
fn retained_messages_survive_kills() {
    let mut server = Server::restartable(&[]);
    let mut publisher = server.connect("publisher");
    let kept = Publish::new("r/one", "second")
        .qos(1)
        .retained()
        .with(Property::user("who", "publisher"));
    publisher.publish(Publish::new("r/one", "first").qos(1).retained());
    publisher.publish(kept.clone());
    publisher.publish(Publish::new("r/two", "removed").qos(2).retained());
    publisher.publish(Publish::new("r/two", "").qos(1).retained());
    let expiring = Publish::new("r/three", "short").qos(1).retained();
    publisher.publish(expiring.with(Property::MessageExpiry(1)));
    let began = Instant::now();
    server.kill_and_restart();
    thread::sleep(Duration::from_millis(1100).saturating_sub(began.elapsed()));
    let mut subscriber = server.connect("subscriber");
    subscriber.subscribe("r/#", 1);
    let got = subscriber.next().publish();
    assert_eq!((got.topic, got.payload), (kept.topic, kept.payload));
    assert_eq!((got.properties, got.retain), (kept.properties, true));
    subscriber.expect_nothing();
    server
        .connect("publisher")
        .publish(Publish::new("r/one", "").qos(1).retained());
    server.kill_and_restart();
    let mut subscriber = server.connect("subscriber");
    subscriber.subscribe("r/#", 1);
    subscriber.expect_nothing();
}

/// A kill breaks all connections. If a client does not reconnect in time, its will is published
/// after the restart, at once or after its delay.
#[test]
fn wills_of_connections_broken_by_a_kill_are_published() {
    let mut server = Server::restartable(&[]);
    let will = |topic: &str| Publish::new(topic, "gone").qos(1).retained();
    let mut listener = client(&server, "listener", false);
    listener.subscribe("will/#", 1);
    let with = |id: &str, delay_s| connect(id).will(will(&format!("will/{id}")), delay_s);
    let stays = Client::connect(server.address(), &with("stays away", 1));
    let back = Client::connect(server.address(), &with("reconnects", 600));
    let disconnected = Client::connect(server.address(), &with("says goodbye", 0));
    let at_once = Client::connect(server.address(), &with("has no delay", 0));
    disconnected.disconnect();
    // A DISCONNECT has no acknowledgement, but it is durable once a later write is answered.
    server.store("other").set("key", "value");
    server.kill_and_restart();
    drop((stays, back, at_once));
    let back = Client::connect(server.address(), &with("reconnects", 600));
    assert!(back.session_present());
    listener = client(&server, "listener", true);
    let mut topics: Vec<String> = (0..2)
        .map(|_| listener.take_publish("will/").topic)
        .collect();
    topics.sort();
    assert_eq!(topics, ["will/has no delay", "will/stays away"]);
    back.disconnect();
    listener.ping();
    server
        .store("other")
        .set("key", "so that acknowledgements are durable");
    server.kill_and_restart();
    listener = client(&server, "listener", true);
    listener.expect_nothing();
    // The published will is retained, because its RETAIN flag is set.
    let mut later = server.connect("later");
    later.subscribe("will/stays away", 1);
    assert!(later.next().publish().retain);
}

/// Session Expiry continues while the server is down. It counts from the end of the connection, or
/// from the kill if the kill ended the connection.
#[test]
fn sessions_expire_while_the_server_is_down() {
    let mut server = Server::restartable(&[]);
    let short = |id: &str| Connect::resume(id, 2);
    Client::connect(server.address(), &short("left before")).disconnect();
    let connected = Client::connect(server.address(), &short("connected"));
    let began = Instant::now();
    server.kill();
    drop(connected);
    thread::sleep(Duration::from_millis(2100).saturating_sub(began.elapsed()));
    server.restart();
    let left = Client::connect(server.address(), &short("left before"));
    assert!(!left.session_present(), "the session must have expired");
    // One that was connected at the kill ends at the latest two seconds after the restart.
    thread::sleep(Duration::from_millis(2500));
    let connected = Client::connect(server.address(), &short("connected"));
    assert!(
        !connected.session_present(),
        "the session must have expired"
    );
}

/// Watches belong to connections, and the kill ends all connections. It loses a notification that
/// was sent and not acknowledged; FROM finds the change.
#[test]
fn watches_end_with_a_kill() {
    let mut server = Server::restartable(&[]);
    let mut watcher = begin(&server, "watcher");
    let before = server.store("first writer").set("key", "before");
    watcher.watch("key");
    watcher.watch("again");
    watcher.client.acknowledges = false;
    server.store("writer").set("key", "lost");
    watcher.notification();
    server.kill_and_restart();
    let mut watcher = resume(&server, "watcher");
    let mut writer = server.store("writer");
    writer.set("key", "not watched");
    watcher.watch("again");
    writer.set("again", "notified");
    assert!(watcher.notification().payload.ends_with(b"notified\r\n"));
    watcher.expect_nothing();
    let answer = watcher.ask(&["KEYNOTIFY", "key", "FROM", &before.to_string()]);
    assert_eq!(answer.text(), "+OK\\r\\n");
    for missed in ["lost\r\n", "not watched\r\n"] {
        let notification = watcher.notification();
        assert!(notification.payload.ends_with(missed.as_bytes()));
    }
}

/// The connection ends before the kill. A notification that was sent but not acknowledged is
/// redelivered after it. One that waited for room in the Receive Maximum is dropped with the
/// connection.
#[test]
fn unacknowledged_notifications_survive_a_kill() {
    let mut server = Server::restartable(&[]);
    let watcher = begin(&server, "watcher");
    drop(watcher.client);
    let connect = connect("watcher").with(Property::ReceiveMaximum(2));
    let client = Client::connect(server.address(), &connect);
    let mut watcher = Store::on(client, "watcher");
    watcher.watch("key");
    watcher.client.acknowledges = false;
    watcher.client.ping();
    let mut writer = server.store("writer");
    for n in 0..5 {
        writer.set("key", n.to_string());
    }
    let sent: Vec<Publish> = (0..2).map(|_| watcher.notification()).collect();
    assert!(matches!(
        watcher.client.poll(Duration::from_millis(100)),
        Heard::Silence
    ));
    watcher.client.abort();
    writer.set("other", "flushed");
    server.kill_and_restart();
    let mut watcher = resume(&server, "watcher");
    for first in sent {
        let Heard::Packet(again) = watcher.client.poll(PATIENCE) else {
            panic!("nothing came");
        };
        assert_eq!(again.publish(), Publish { dup: true, ..first });
    }
    watcher.expect_nothing();
}
