//! QoS 2 over `kill -9` (MQTT 5, section 4.3.3; protocol, section 9). A request must be executed
//! once, at its PUBLISH, wherever in the exchange the process is killed.

use statehouse_tests::{
    Request, Server, Store,
    packet::{acknowledge, kind},
    wait::until,
};

use crate::resumed::{begin, resume};

const ID: u16 = 77;

/// A request whose second execution would give another answer.
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
    server.kill_and_restart();
    resume(server, "client")
}

/// Waits until the request was executed, without reading from the client's connection.
fn wait_until_set(server: &Server) {
    let mut other = server.store("other");
    until("the request is executed", || other.get("key").is_some());
}

fn finish(store: &mut Store) {
    store.client.send(&acknowledge(kind::PUBREL, ID));
    assert_eq!(store.client.take_ack(kind::PUBCOMP, ID).reason, 0);
    assert_eq!(store.get("key"), Some(b"value".to_vec()));
    // The packet id is free, so another PUBLISH with it is a new request.
    let mut next = store.command(&["SET", "key", "value", "NX"]);
    next.qos = 2;
    publish(store, &next, false);
    assert_eq!(store.finish(&next, ID).payload(), b":-1\r\n");
    store.expect_nothing();
}

/// The client has read neither the answer nor the PUBREC. It redelivers the request, and the server
/// redelivers the answer.
#[test]
fn qos_2_request_killed_before_its_pubrec_runs_once() {
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

/// The client has read the answer and the PUBREC. A redelivered PUBLISH gets another PUBREC, and
/// the exchange continues with the PUBREL.
#[test]
fn qos_2_request_killed_before_its_pubrel_runs_once() {
    let mut server = Server::restartable(&[]);
    let mut store = begin(&server, "client");
    let request = request(&mut store);
    publish(&mut store, &request, false);
    let answer = store.client.take_publish("clients/client/");
    assert_eq!(answer.payload, b"+OK\r\n");
    assert_eq!(store.client.take_ack(kind::PUBREC, ID).reason, 0);
    // The acknowledgement of the answer has arrived and becomes durable, so the server does not
    // redeliver the answer.
    store.client.ping();
    let _ = store.set("flushed", "with everything before");
    let mut store = restart(&mut server);
    // A client that did not record the PUBREC redelivers the PUBLISH.
    publish(&mut store, &request, true);
    assert_eq!(store.client.take_ack(kind::PUBREC, ID).reason, 0);
    finish(&mut store);
}

/// The client cannot know whether its PUBREL arrived. It sends the PUBREL again, and the server may
/// or may not know the packet id.
#[test]
fn qos_2_request_killed_before_its_pubcomp_runs_once() {
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

/// The exchange has ended, so its packet id is free, even after the kill.
#[test]
fn packet_id_killed_after_its_pubcomp_is_free() {
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
