//! Exchanges at QoS 2 that are begun and not ended: what they keep has a bound, and a message is one message.

use statehouse_tests::{
    Property, Publish,
    packet::{acknowledge, kind},
};

use crate::witness::Witness;

const RECEIVE_MAXIMUM: u8 = 0x93;

/// More unanswered QoS 2 handshakes than the server's Receive Maximum.
#[test]
fn over_the_receive_maximum() {
    let mut witness = Witness::new();
    let mut attacker = witness.attacker();
    let connack = attacker.connack.clone().unwrap();
    let maximum = connack
        .properties
        .iter()
        .find_map(|property| match property {
            Property::ReceiveMaximum(n) => Some(*n),
            _ => None,
        })
        .unwrap_or(u16::MAX);
    // At 65535 there is no packet id left to break it with.
    if maximum < u16::MAX {
        let mut bytes = Vec::new();
        for id in 1..=maximum + 1 {
            let mut publish = Publish::new("nobody/listens", "").qos(2);
            publish.packet_id = id;
            bytes.extend(publish.bytes());
        }
        // The server may close in the middle of it.
        let _ = attacker.try_send(&bytes);
        attacker.expect_disconnect(RECEIVE_MAXIMUM);
    } else {
        attacker.disconnect();
    }
    witness.unharmed();
}

/// mosquitto's CVE-2023-28366 kept each of these for ever.
fn repeat(times: u32) {
    /// Sent together, and answered before the next.
    const TOGETHER: u32 = 1000;
    let mut witness = Witness::new();
    let mut listener = witness.server.connect("listener");
    listener.subscribe("heard", 1);
    let mut attacker = witness.attacker();
    let mut message = Publish::new("heard", vec![b'x'; 1000]).qos(2);
    message.packet_id = 7;
    let mut send = |times: u32| {
        for _ in 0..times / TOGETHER {
            attacker.send(&message.bytes().repeat(TOGETHER as usize));
            attacker.ping();
            for answer in attacker.drain() {
                assert_eq!(answer.kind(), kind::PUBREC);
                assert_eq!(answer.ack().packet_id, 7);
            }
        }
    };
    send(10 * TOGETHER);
    let before_kib = witness.server.memory_kib();
    send(times);
    witness.assert_grown_less_than(before_kib, 8 * 1024);
    // It was one message, and is over with its PUBREL.
    assert_eq!(listener.take_publish("heard").payload.len(), 1000);
    listener.expect_nothing();
    attacker.send(&acknowledge(kind::PUBREL, 7));
    assert_eq!(attacker.take_ack(kind::PUBCOMP, 7).reason, 0);
    attacker.disconnect();
    listener.disconnect();
    witness.unharmed();
}

#[test]
fn a_message_sent_a_hundred_thousand_times_is_one_message() {
    repeat(100_000);
}

#[test]
#[ignore = "a gigabyte takes a minute"]
fn a_message_sent_a_million_times_is_one_message() {
    repeat(1_000_000);
}
