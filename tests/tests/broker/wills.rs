//! Last wills and their delay (MQTT 5, section 3.1.2.5).

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
fn a_broken_connection_publishes_it() {
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

    // So does DISCONNECT 0x04, and a protocol error; a plain DISCONNECT does not.
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
fn a_retained_will_stays() {
    let server = Server::start();
    let mut listener = listener(&server);
    let connect = Connect::new("client").will(will().retained(), 0);
    Client::connect(server.address(), &connect).abort();
    listener.next();
    let mut later = server.connect("later");
    later.subscribe("will", 0);
    assert!(later.next().publish().retain);
}

/// Whoever is back before the delay is over leaves none; whoever is not, does, and not before.
#[test]
fn the_delay() {
    let server = Server::start();
    let mut listener = listener(&server);
    let connect = Connect::resume("client", 60).will(will(), 2);
    Client::connect(server.address(), &connect).abort();
    let back = Client::connect(server.address(), &connect);
    assert!(back.session_present());
    let left = Instant::now();
    back.abort();
    assert_eq!(listener.next().publish().topic, "will");
    // Had the first will not been cancelled, it would have come before.
    assert!(left.elapsed() >= Duration::from_millis(1900), "too early");
    listener.expect_nothing();
}

/// The end of the session publishes it where that is earlier than the delay.
#[test]
fn the_end_of_the_session_comes_first() {
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

/// A will to the store's request topic is not a request: nobody is there for the answer.
#[test]
fn a_will_may_be_a_request_or_not_but_harms_nobody() {
    let server = Server::start();
    let mut store = server.store("other");
    store.set("k", "v");
    let request = store.command(&["SET", "k", "from the grave"]).publish();
    let connect = Connect::new("client").will(request, 0);
    // It is refused at CONNECT, or runs, or is dropped; the server goes on in each case.
    let mut client = Client::open(server.address());
    client.send(&connect.bytes());
    client.next();
    client.abort();
    assert!(store.get("k").is_some());
}
