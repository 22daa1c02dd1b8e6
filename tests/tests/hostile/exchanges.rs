//! QoS 2 exchanges that a client opens but does not complete. Their memory must be limited, and a
//! repeated PUBLISH must stay one message.

use statehouse_tests::{
    Property, Publish,
    packet::{acknowledge, kind},
};

use crate::witness::Witness;

const RECEIVE_MAXIMUM: u8 = 0x93;

/// More unanswered QoS 2 handshakes than the server's Receive Maximum.
#[test]
fn qos_2_over_the_receive_maximum_disconnects() {
    let mut witness = Witness::new();
    let mut attacker = witness.attacker();
    let connack = attacker.connack.clone().unwrap();
    let mut properties = connack.properties.iter();
    let maximum = properties.find_map(|property| match property {
        Property::ReceiveMaximum(n) => Some(*n),
        _ => None,
    });
    let mut bytes = Vec::new();
    for id in 1..=maximum.expect("the server limits it") + 1 {
        let mut publish = Publish::new("no/subscriber", "").qos(2);
        publish.packet_id = id;
        bytes.extend(publish.bytes());
    }
    // The server may close the connection before the client has sent everything.
    let _ = attacker.try_send(&bytes);
    attacker.expect_disconnect(RECEIVE_MAXIMUM);
    witness.unharmed();
}

/// Sends the same PUBLISH `times` times. In CVE-2023-28366, mosquitto kept each of them forever.
fn repeat(times: u32) {
    /// The number of packets that are sent before the client reads the answers.
    const BATCH: u32 = 1000;
    let mut witness = Witness::new();
    let mut listener = witness.server.connect("listener");
    listener.subscribe("repeated", 1);
    let mut attacker = witness.attacker();
    let mut message = Publish::new("repeated", vec![b'x'; 1000]).qos(2);
    message.packet_id = 7;
    let mut send = |times: u32| {
        for _ in 0..times / BATCH {
            attacker.send(&message.bytes().repeat(BATCH as usize));
            attacker.ping();
            for answer in attacker.drain() {
                assert_eq!(answer.kind(), kind::PUBREC);
                assert_eq!(answer.ack().packet_id, 7);
            }
        }
    };
    send(10 * BATCH);
    let before_kib = witness.server.memory_kib();
    send(times);
    witness.assert_grown_less_than(before_kib, 8 * 1024);
    // All of them were one message, and the PUBREL ends the exchange.
    assert_eq!(listener.take_publish("repeated").payload.len(), 1000);
    listener.expect_nothing();
    attacker.send(&acknowledge(kind::PUBREL, 7));
    assert_eq!(attacker.take_ack(kind::PUBCOMP, 7).reason, 0);
    attacker.disconnect();
    listener.disconnect();
    witness.unharmed();
}

#[test]
fn publish_repeated_100_000_times_is_one_message() {
    repeat(100_000);
}

#[test]
#[ignore = "a gigabyte takes a minute"]
fn publish_repeated_a_million_times_is_one_message() {
    repeat(1_000_000);
}
