//! Tests wills and their delay (MQTT 5, section 3.1.2.5).

use std::{
    thread,
    time::{Duration, Instant},
};

use statehouse_tests::{
    Client, Connect, Property, Publish, Server, packet, store::notification_topic,
};

fn will(payload: &str) -> Publish {
    Publish::new("will", payload)
        .qos(1)
        .with(Property::user("who", "client"))
}

fn listener(server: &Server) -> Client {
    let mut listener = server.connect("listener");
    listener.subscribe("#", 1);
    listener
}

/// Waits for the next message, which must be the will with this payload.
fn expect_will(listener: &mut Client, payload: &str) {
    let got = listener.next().publish();
    let expected = Publish {
        packet_id: got.packet_id,
        ..will(payload)
    };
    assert_eq!(got, expected);
}

#[test]
fn will_is_published_unless_the_client_disconnects() {
    let server = Server::start();
    let mut listener = listener(&server);
    let connect = |payload| {
        let connect = Connect::new("client").will(will(payload), 0);
        Client::connect(server.address(), &connect)
    };
    connect("lost").abort();
    expect_will(&mut listener, "lost");
    let mut asking = connect("reason 4");
    asking.send(&packet::disconnect(4, &[]));
    expect_will(&mut listener, "reason 4");
    let mut wrong = connect("protocol error");
    wrong.send(&[0, 0]);
    expect_will(&mut listener, "protocol error");
    connect("plain").disconnect();
    connect("last").abort();
    expect_will(&mut listener, "last");
    listener.expect_nothing();
}

#[test]
fn retained_will_is_retained() {
    let server = Server::start();
    let mut listener = listener(&server);
    let connect = Connect::new("client").will(will("gone").retained(), 0);
    Client::connect(server.address(), &connect).abort();
    expect_will(&mut listener, "gone");
    let mut later = server.connect("later");
    later.subscribe("will", 0);
    let retained = later.next().publish();
    assert!(retained.retain, "{retained:?}");
    assert_eq!(retained.payload, b"gone");
}

/// A client that reconnects before the delay is over cancels its will.
#[test]
fn will_is_published_after_its_delay() {
    let server = Server::start();
    let mut listener = listener(&server);
    let connect = |payload| {
        let connect = Connect::resume("client", 60).will(will(payload), 2);
        Client::connect(server.address(), &connect)
    };
    connect("cancelled").abort();
    thread::sleep(Duration::from_secs(1));
    let back = connect("late");
    assert!(back.session_present());
    let left = Instant::now();
    back.abort();
    // If the first will were not cancelled, it would arrive a second earlier.
    expect_will(&mut listener, "late");
    assert!(left.elapsed() >= Duration::from_millis(1900), "too early");
    listener.expect_nothing();
}

/// The session ends before the delay of its will.
#[test]
fn will_is_published_when_its_session_ends() {
    let server = Server::start();
    let mut listener = listener(&server);
    let connect = |id, expiry_s| {
        let connect = Connect::resume(id, expiry_s).will(will(id), 600);
        Client::connect(server.address(), &connect)
    };
    let client = connect("expired", 1);
    let left = Instant::now();
    client.abort();
    expect_will(&mut listener, "expired");
    assert!(left.elapsed() >= Duration::from_millis(900), "too early");
    connect("ended", 600).abort();
    listener.expect_nothing();
    // A clean start ends the old session.
    let clean = server.connect("ended");
    expect_will(&mut listener, "ended");
    clean.disconnect();
    listener.expect_nothing();
}

/// Otherwise the store would execute a request without a client to answer, or a client could forge
/// a notification.
#[test]
fn will_to_a_topic_of_the_store_is_refused() {
    let server = Server::start();
    let mut store = server.store("other");
    store.set("k", "v");
    store.watch("k");
    let request = store.command(&["SET", "k", "from the grave"]).publish();
    let notification = Publish::new(&notification_topic("other", b"k"), "forged");
    for message in [request, notification] {
        let connect = Connect::new("client").will(message, 0);
        let (_, connack) = Client::try_connect(server.address(), &connect);
        assert_eq!(connack.reason, 0x90, "{connack:?}");
    }
    assert_eq!(store.get("k"), Some(b"v".to_vec()));
    store.expect_nothing();
}
