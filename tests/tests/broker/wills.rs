//! Tests wills and their delay (MQTT 5, section 3.1.2.5).

use std::time::{Duration, Instant};

use statehouse_tests::{Client, Connect, Property, Publish, Server, packet};

fn will() -> Publish {
    Publish::new("will", "gone")
        .qos(1)
        .with(Property::user("who", "client"))
}

fn listener(server: &Server) -> Client {
    let mut listener = server.connect("listener");
    listener.subscribe("#", 1);
    listener
}

#[test]
fn will_is_published_unless_the_client_disconnects() {
    let server = Server::start();
    let mut listener = listener(&server);
    let connect = Connect::new("client").will(will(), 0);
    Client::connect(server.address(), &connect).abort();
    let got = listener.next().publish();
    assert_eq!(
        (got.topic.as_str(), &got.payload[..]),
        ("will", &b"gone"[..])
    );
    assert_eq!(got.properties, [Property::user("who", "client")]);

    // DISCONNECT 0x04 and a protocol error publish the will too. A plain DISCONNECT does not.
    let mut client = Client::connect(server.address(), &connect);
    client.send(&packet::disconnect(4, &[]));
    assert_eq!(listener.next().publish().topic, "will");
    let mut client = Client::connect(server.address(), &connect);
    client.send(&[0, 0]);
    assert_eq!(listener.next().publish().topic, "will");
    Client::connect(server.address(), &connect).disconnect();
    listener.expect_nothing();
}

#[test]
fn retained_will_is_retained() {
    let server = Server::start();
    let mut listener = listener(&server);
    let connect = Connect::new("client").will(will().retained(), 0);
    Client::connect(server.address(), &connect).abort();
    listener.next();
    let mut later = server.connect("later");
    later.subscribe("will", 0);
    assert!(later.next().publish().retain);
}

/// A client that reconnects before the delay is over cancels its will.
#[test]
fn will_is_published_after_its_delay() {
    let server = Server::start();
    let mut listener = listener(&server);
    let connect = Connect::resume("client", 60).will(will(), 2);
    Client::connect(server.address(), &connect).abort();
    let back = Client::connect(server.address(), &connect);
    assert!(back.session_present());
    let left = Instant::now();
    back.abort();
    assert_eq!(listener.next().publish().topic, "will");
    // A first will that was not cancelled would have arrived earlier.
    assert!(left.elapsed() >= Duration::from_millis(1900), "too early");
    listener.expect_nothing();
}

/// The session ends before the delay of its will.
#[test]
fn will_is_published_when_its_session_ends() {
    let server = Server::start();
    let mut listener = listener(&server);
    let delayed = |client: &str, expiry_s| Connect::resume(client, expiry_s).will(will(), 600);
    Client::connect(server.address(), &delayed("one", 1)).abort();
    assert_eq!(listener.next().publish().topic, "will");
    // A clean start ends the old session.
    Client::connect(server.address(), &delayed("two", 600)).abort();
    let two = server.connect("two");
    assert_eq!(listener.next().publish().topic, "will");
    two.disconnect();
    listener.expect_nothing();
}

/// Such a will need not be executed as a request, since no client waits for the answer.
#[test]
fn will_to_the_request_topic_does_not_stop_the_server() {
    let server = Server::start();
    let mut store = server.store("other");
    store.set("k", "v");
    let request = store.command(&["SET", "k", "from the grave"]).publish();
    let connect = Connect::new("client").will(request, 0);
    // The server may refuse the CONNECT, or execute or drop the will, but must go on.
    let mut client = Client::open(server.address());
    client.send(&connect.bytes());
    client.next();
    client.abort();
    assert!(store.get("k").is_some());
}
