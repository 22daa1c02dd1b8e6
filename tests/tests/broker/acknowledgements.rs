//! Tests acknowledgements and their order (MQTT 5, sections 4.3 and 4.6).

use statehouse_tests::{
    Publish, Server,
    packet::{acknowledge, kind},
};

#[test]
fn publish_without_subscribers_gets_reason_0x10() {
    let server = Server::start();
    let mut client = server.connect("client");
    for qos in [1, 2] {
        let ack = client.publish(Publish::new("unused", "x").qos(qos));
        assert_eq!(ack.reason, 0x10, "no matching subscribers");
        client.subscribe("used", 0);
        let ack = client.publish(Publish::new("used", "x").qos(qos));
        assert_eq!(ack.reason, 0);
        client.take_publish("used");
    }
    client.expect_nothing();
}

/// The client sends a QoS 2 message again before its release.
#[test]
fn repeated_qos_2_message_is_delivered_once() {
    let server = Server::start();
    let mut subscriber = server.connect("subscriber");
    subscriber.subscribe("a", 0);
    let mut client = server.connect("client");
    let mut publish = Publish::new("a", "once").qos(2);
    publish.packet_id = 9;
    for dup in [false, true, true] {
        publish.dup = dup;
        client.send(&publish.bytes());
        assert_eq!(client.take_ack(kind::PUBREC, 9).reason, 0);
    }
    client.send(&acknowledge(kind::PUBREL, 9));
    assert_eq!(client.take_ack(kind::PUBCOMP, 9).reason, 0);
    // After the release the packet id is unknown, so a message may use it again.
    client.send(&acknowledge(kind::PUBREL, 9));
    assert_eq!(client.take_ack(kind::PUBCOMP, 9).reason, 0x92);
    publish.dup = false;
    publish.payload = b"next".to_vec();
    client.publish(publish);
    assert_eq!(subscriber.next().publish().payload, b"once");
    assert_eq!(subscriber.next().publish().payload, b"next");
    subscriber.expect_nothing();
}

/// A QoS 2 request is executed at its PUBLISH. A duplicate before the release gets the same PUBREC.
#[test]
fn request_at_qos_2_is_executed_once() {
    let server = Server::start();
    let mut store = server.store("client");
    let mut request = store.command(&["SET", "key", "one", "NX"]);
    request.qos = 2;
    let mut publish = request.publish();
    publish.packet_id = 77;
    store.client.send(&publish.bytes());
    assert_eq!(store.client.take_ack(kind::PUBREC, 77).reason, 0);
    publish.dup = true;
    store.client.send(&publish.bytes());
    assert_eq!(store.client.take_ack(kind::PUBREC, 77).reason, 0);
    store.client.send(&acknowledge(kind::PUBREL, 77));
    assert_eq!(store.client.take_ack(kind::PUBCOMP, 77).reason, 0);
    let answer = store.client.take_publish("clients/client/");
    assert_eq!(answer.payload, b"+OK\r\n");
    store.expect_nothing();
}

/// Acknowledgements must have the order of the PUBLISH packets, for requests and ordinary messages
/// mixed.
#[test]
fn acknowledgements_keep_the_order_of_messages() {
    let server = Server::start();
    let mut store = server.store("client");
    let mut bytes = Vec::new();
    for n in 1..=200_u16 {
        let mut publish = match n % 3 {
            0 => Publish::new("unused", "x").qos(1),
            1 => store.command(&["SET", "key", &n.to_string()]).publish(),
            _ => store.command(&["GET", "key"]).publish(),
        };
        publish.packet_id = n + 1000;
        bytes.extend(publish.bytes());
    }
    store.client.send(&bytes);
    let mut acknowledged = Vec::new();
    let mut answers = 0;
    while acknowledged.len() < 200 {
        let packet = store.client.next();
        match packet.kind() {
            kind::PUBACK => acknowledged.push(packet.ack().packet_id),
            _ => answers += 1,
        }
    }
    assert_eq!(acknowledged, (1001..=1200).collect::<Vec<u16>>());
    assert_eq!(answers, 134);
    store.expect_nothing();
}
