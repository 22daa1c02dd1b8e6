//! QoS 2 over `kill -9`: a request runs once, at its PUBLISH, wherever in the exchange the process died (MQTT 5,
//! section 4.3.3; the protocol, section 9).

use std::time::{Duration, Instant};

use statehouse_tests::{
    Request, Server, Store,
    packet::{acknowledge, kind},
};

use crate::resumed::{begin, resume};

const ID: u16 = 77;

/// A request whose second run would show.
fn request(store: &mut Store) -> Request {
    let mut request = store.command(&["SET", "key", "value", "NX"]);
    request.qos = 2;
    request
}

fn publish(store: &mut Store, request: &Request, dup: bool) {
    let mut publish = request.publish();
    (publish.packet_id, publish.dup) = (ID, dup);
    store.client.start(publish);
}

fn restart(server: &mut Server) -> Store {
    server.kill();
    server.restart();
    resume(server, "client")
}

/// Waits until a request of the client has run, without reading what the client got.
fn wait_until_set(server: &Server) {
    let mut other = server.store("other");
    let end = Instant::now() + Duration::from_secs(10);
    while other.get("key").is_none() {
        assert!(Instant::now() < end, "the request did not run");
    }
}

fn finish(store: &mut Store) {
    store.client.send(&acknowledge(kind::PUBREL, ID));
    assert_eq!(store.client.take_ack(kind::PUBCOMP, ID).reason, 0);
    assert_eq!(store.get("key"), Some(b"value".to_vec()));
    // The packet id is free, and another request with it is another request.
    let mut next = store.command(&["SET", "key", "value", "NX"]);
    next.qos = 2;
    publish(store, &next, false);
    assert_eq!(store.finish(&next, ID).payload(), b":-1\r\n");
    store.expect_nothing();
}

/// Neither the answer nor the PUBREC was read: the client sends again, the server sends the answer again.
#[test]
fn killed_before_the_pubrec_was_read() {
    for dup in [true, false] {
        let mut server = Server::restartable(&[]);
        let mut store = begin(&server, "client");
        let request = request(&mut store);
        publish(&mut store, &request, false);
        wait_until_set(&server);
        let mut store = restart(&mut server);
        publish(&mut store, &request, dup);
        assert_eq!(store.client.take_ack(kind::PUBREC, ID).reason, 0);
        let answer = store.client.take_publish("clients/client/");
        assert_eq!(answer.payload, b"+OK\r\n");
        finish(&mut store);
    }
}

/// Answer and PUBREC were read: the exchange goes on with the PUBREL, and once more where that was lost.
#[test]
fn killed_before_the_pubrel() {
    let mut server = Server::restartable(&[]);
    let mut store = begin(&server, "client");
    let request = request(&mut store);
    publish(&mut store, &request, false);
    let answer = store.client.take_publish("clients/client/");
    assert_eq!(answer.payload, b"+OK\r\n");
    assert_eq!(store.client.take_ack(kind::PUBREC, ID).reason, 0);
    // The answer's acknowledgement has arrived and is kept, so the answer does not come again.
    store.client.ping();
    let _ = store.set("flushed", "with what came before");
    let mut store = restart(&mut server);
    // A client that did not get the PUBREC in its own books sends the PUBLISH again.
    publish(&mut store, &request, true);
    assert_eq!(store.client.take_ack(kind::PUBREC, ID).reason, 0);
    finish(&mut store);
}

/// Whether the PUBREL came through is not known: it is sent again, and found or not found.
#[test]
fn killed_before_the_pubcomp_was_read() {
    let mut server = Server::restartable(&[]);
    let mut store = begin(&server, "client");
    let request = request(&mut store);
    publish(&mut store, &request, false);
    assert_eq!(store.client.take_ack(kind::PUBREC, ID).reason, 0);
    store.client.send(&acknowledge(kind::PUBREL, ID));
    let mut store = restart(&mut server);
    store.client.send(&acknowledge(kind::PUBREL, ID));
    let reason = store.client.take_ack(kind::PUBCOMP, ID).reason;
    assert!([0, 0x92].contains(&reason), "{reason:#04x}");
    assert_eq!(store.get("key"), Some(b"value".to_vec()));
}

/// The exchange was over: its packet id is free, also after the kill.
#[test]
fn killed_after_the_pubcomp() {
    let mut server = Server::restartable(&[]);
    let mut store = begin(&server, "client");
    let request = request(&mut store);
    publish(&mut store, &request, false);
    let answer = store.finish(&request, ID);
    assert_eq!(answer.payload(), b"+OK\r\n");
    let mut store = restart(&mut server);
    store.client.send(&acknowledge(kind::PUBREL, ID));
    assert_eq!(store.client.take_ack(kind::PUBCOMP, ID).reason, 0x92);
    let mut next = store.command(&["DEL", "key"]);
    next.qos = 2;
    publish(&mut store, &next, false);
    assert_eq!(store.finish(&next, ID).payload(), b":1\r\n");
}
