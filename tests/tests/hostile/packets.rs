//! Packets that MQTT 5 forbids. The server must close the connection. After CONNECT, it must first
//! send a DISCONNECT with the reason.

use statehouse_tests::{
    Connect, Property,
    packet::{self, packet},
    property::{sized, variable},
};

use crate::witness::Witness;

/// MQTT 5 reason codes.
const MALFORMED: u8 = 0x81;
const PROTOCOL_ERROR: u8 = 0x82;
const TOPIC_NAME_INVALID: u8 = 0x90;
const TOPIC_ALIAS_INVALID: u8 = 0x94;
const PACKET_TOO_LARGE: u8 = 0x95;
const QOS_NOT_SUPPORTED: u8 = 0x9B;

/// A PUBLISH at QoS 0 with a raw topic and raw properties.
fn publish(head: u8, topic: &[u8], properties: &[u8]) -> Vec<u8> {
    let mut body = sized(topic);
    body.extend(variable(u32::try_from(properties.len()).unwrap()));
    body.extend(properties);
    packet(head, &body)
}

#[test]
fn other_packet_before_connect_closes_unanswered() {
    let mut witness = Witness::new();
    for kind in 0..=15_u8 {
        if kind == packet::kind::CONNECT {
            continue;
        }
        for bytes in [
            vec![kind << 4, 0],
            packet(kind << 4 | 2, &[0, 1]),
            packet(kind << 4, &[0; 40]),
        ] {
            let mut attacker = witness.server.open();
            attacker.send(&bytes);
            attacker.expect_closed();
            assert!(attacker.drain().is_empty(), "an answer before CONNECT");
        }
    }
    witness.unharmed();
}

#[test]
fn malformed_connect_is_refused() {
    let mut witness = Witness::new();
    let good = Connect::new("attacker").bytes();
    let changed = |at: usize, byte: u8| {
        let mut bytes = good.clone();
        bytes[at] = byte;
        bytes
    };
    let with = |property: Property| {
        Connect::new("attacker")
            .with(property.clone())
            .with(property)
            .bytes()
    };
    let body = |rest: &[u8]| {
        let mut body = b"\0\x04MQTT\x05\x02\0\0".to_vec();
        body.extend_from_slice(rest);
        packet(0x10, &body)
    };
    let bad = [
        // fixed header flags, name, version, reserved flag
        changed(0, 0x11),
        changed(4, b'X'),
        changed(3, 3),
        changed(8, 9),
        changed(9, 3),
        // will QoS 3, will QoS without a will, password and user flags without the fields
        changed(9, 2 | 4 | 0x18),
        changed(9, 2 | 8),
        changed(9, 2 | 0x40),
        changed(9, 2 | 0x80),
        // properties: duplicate, of another packet, forbidden values, too long, a false length
        with(Property::ReceiveMaximum(5)),
        with(Property::SessionExpiry(5)),
        Connect::new("a").with(Property::TopicAlias(1)).bytes(),
        Connect::new("a").with(Property::ReceiveMaximum(0)).bytes(),
        Connect::new("a")
            .with(Property::MaximumPacketSize(0))
            .bytes(),
        Connect::new("a")
            .with(Property::RequestProblemInfo(2))
            .bytes(),
        body(b"\x05\x11\0\0\0\0"),
        body(b"\x7F"),
        body(b"\xFF\xFF\xFF\xFF\x01"),
        // client id: not UTF-8, with U+0000, a surrogate, longer than the packet; bytes after it
        body(b"\0\0\x02\xFF\xFE"),
        body(b"\0\0\x01\0"),
        body(b"\0\0\x03\xED\xA0\x80"),
        body(b"\0\0\x09a"),
        body(b"\0\0\x01aX"),
        body(b""),
        packet(0x10, &[]),
        vec![0x10, 0x80, 0x80, 0x80, 0x80, 0x01],
        vec![0x10, 0xFF, 0xFF, 0xFF, 0xFF, 0x7F],
    ];
    for bytes in bad {
        let mut attacker = witness.server.open();
        attacker.send(&bytes);
        attacker.expect_closed();
        for answer in attacker.drain() {
            assert_eq!(answer.kind(), packet::kind::CONNACK, "to {bytes:02X?}");
            assert!(answer.ack().reason >= 0x80, "to {bytes:02X?}: {answer:?}");
        }
    }
    witness.unharmed();
}

#[test]
fn unsupported_protocol_version_is_refused_as_such() {
    let mut witness = Witness::new();
    for (name, level) in [("MQTT", 4_u8), ("MQIsdp", 3), ("MQTT", 6)] {
        let mut body = sized(name.as_bytes());
        body.extend([level, 2, 0, 60]);
        body.extend(sized(b"old"));
        let mut attacker = witness.server.open();
        attacker.send(&packet(0x10, &body));
        attacker.expect_closed();
        let answers = attacker.drain();
        assert_eq!(answers.len(), 1, "{answers:?}");
        match level {
            // "Unacceptable protocol version" in the format of MQTT 3.
            3 | 4 => assert_eq!(answers[0].bytes(), [0x20, 2, 0, 1]),
            _ => assert_eq!(answers[0].ack().reason, 0x84, "{answers:?}"),
        }
    }
    witness.unharmed();
}

/// Forbidden packets, each with the reason codes that the standard allows.
fn forbidden() -> Vec<(&'static str, Vec<u8>, &'static [u8])> {
    let wrong: &[u8] = &[MALFORMED, PROTOCOL_ERROR];
    let topic: &[u8] = &[TOPIC_NAME_INVALID, MALFORMED, PROTOCOL_ERROR];
    let subscribe = |filters: &[(&str, u8)]| packet::subscribe(1, &[], filters);
    vec![
        (
            "a second CONNECT",
            Connect::new("again").bytes(),
            &[PROTOCOL_ERROR],
        ),
        ("CONNACK", packet(0x20, &[0, 0, 0]), wrong),
        ("SUBACK", packet(0x90, &[0, 1, 0, 0]), wrong),
        ("UNSUBACK", packet(0xB0, &[0, 1, 0, 0]), wrong),
        ("PINGRESP", packet(0xD0, &[]), wrong),
        ("AUTH", packet(0xF0, &[]), wrong),
        ("AUTH with a reason", packet(0xF0, &[0x18, 0]), wrong),
        ("type 0", packet(0x00, &[]), wrong),
        ("PINGREQ with flags", packet(0xC1, &[]), wrong),
        ("PINGREQ with a body", packet(0xC0, &[0]), wrong),
        ("PUBACK with flags", packet(0x41, &[0, 1]), wrong),
        ("PUBACK without a packet id", packet(0x40, &[]), wrong),
        ("PUBACK with half a packet id", packet(0x40, &[0]), wrong),
        ("PUBREL without its flag", packet(0x60, &[0, 1]), wrong),
        (
            "SUBSCRIBE without its flag",
            packet(0x80, &[0, 1, 0, 0, 1, b'a', 0]),
            wrong,
        ),
        ("SUBSCRIBE of nothing", packet(0x82, &[0, 1, 0]), wrong),
        (
            "SUBSCRIBE with packet id 0",
            packet(0x82, &[0, 0, 0, 0, 1, b'a', 0]),
            wrong,
        ),
        (
            "SUBSCRIBE without options",
            packet(0x82, &[0, 1, 0, 0, 1, b'a']),
            wrong,
        ),
        ("SUBSCRIBE at QoS 3", subscribe(&[("a", 3)]), wrong),
        (
            "SUBSCRIBE with reserved bits",
            subscribe(&[("a", 0x40)]),
            wrong,
        ),
        (
            "SUBSCRIBE with No Local to a shared subscription",
            subscribe(&[("$share/g/a", 4)]),
            wrong,
        ),
        (
            "SUBSCRIBE with retain handling 3",
            subscribe(&[("a", 0x30)]),
            wrong,
        ),
        (
            "SUBSCRIBE with identifier 0",
            packet(0x82, &[0, 1, 2, 0x0B, 0, 0, 1, b'a', 0]),
            wrong,
        ),
        (
            "SUBSCRIBE with two identifiers",
            packet::subscribe(
                1,
                &[Property::SubscriptionId(1), Property::SubscriptionId(2)],
                &[("a", 0)],
            ),
            wrong,
        ),
        ("UNSUBSCRIBE from nothing", packet(0xA2, &[0, 1, 0]), wrong),
        (
            "UNSUBSCRIBE without its flag",
            packet(0xA0, &[0, 1, 0, 0, 1, b'a']),
            wrong,
        ),
        ("DISCONNECT with flags", packet(0xE1, &[]), wrong),
        (
            "DISCONNECT that begins to expire",
            packet::disconnect(0, &[Property::SessionExpiry(9)]),
            &[PROTOCOL_ERROR],
        ),
        (
            "PUBLISH at QoS 3",
            packet(0x36, b"\0\x01a\0\x01\0"),
            &[MALFORMED, PROTOCOL_ERROR, QOS_NOT_SUPPORTED],
        ),
        (
            "PUBLISH with packet id 0",
            packet(0x32, b"\0\x01a\0\0\0"),
            wrong,
        ),
        ("PUBLISH at QoS 0 with DUP", publish(0x38, b"a", b""), wrong),
        ("PUBLISH without a topic", packet(0x30, &[]), wrong),
        ("PUBLISH to nowhere", publish(0x30, b"", b""), topic),
        ("PUBLISH to +", publish(0x30, b"a/+", b""), topic),
        ("PUBLISH to #", publish(0x30, b"#", b""), topic),
        ("a topic with U+0000", publish(0x30, b"a\0b", b""), topic),
        (
            "a topic of broken UTF-8",
            publish(0x30, b"a\xFFb", b""),
            topic,
        ),
        (
            "a topic with a surrogate",
            publish(0x30, b"\xED\xA0\x80", b""),
            topic,
        ),
        ("an overlong topic", publish(0x30, b"\xC0\xAF", b""), topic),
        (
            "a topic longer than the packet",
            packet(0x30, b"\0\x09a"),
            wrong,
        ),
        (
            "properties longer than the packet",
            packet(0x30, b"\0\x01a\x09"),
            wrong,
        ),
        (
            "a property length of five bytes",
            packet(0x30, b"\0\x01a\xFF\xFF\xFF\xFF\x01"),
            wrong,
        ),
        ("an unknown property", publish(0x30, b"a", b"\x7F\0"), wrong),
        (
            "a property of another packet",
            publish(0x30, b"a", b"\x13\0\x05"),
            wrong,
        ),
        ("half a property", publish(0x30, b"a", b"\x02\0"), wrong),
        (
            "a property twice",
            publish(0x30, b"a", b"\x02\0\0\0\x01\x02\0\0\0\x01"),
            wrong,
        ),
        ("payload format 2", publish(0x30, b"a", b"\x01\x02"), wrong),
        (
            "a user property of broken UTF-8",
            publish(0x30, b"a", b"\x26\0\x01\xFF\0\x01v"),
            wrong,
        ),
        (
            "a user property without a value",
            publish(0x30, b"a", b"\x26\0\x01k"),
            wrong,
        ),
        (
            "a response topic with a wildcard",
            publish(0x30, b"a", b"\x08\0\x03a/+"),
            topic,
        ),
        (
            "a subscription identifier from a client",
            publish(0x30, b"a", b"\x0B\x01"),
            wrong,
        ),
        (
            "topic alias 0",
            publish(0x30, b"a", b"\x23\0\0"),
            &[TOPIC_ALIAS_INVALID],
        ),
        (
            "topic alias 65535",
            publish(0x30, b"a", b"\x23\xFF\xFF"),
            &[TOPIC_ALIAS_INVALID],
        ),
        (
            "an alias that stands for nothing",
            publish(0x30, b"", b"\x23\0\x01"),
            wrong,
        ),
        (
            "256 MiB",
            vec![0x30, 0xFF, 0xFF, 0xFF, 0x7F],
            &[PACKET_TOO_LARGE],
        ),
        (
            "a remaining length of five bytes",
            vec![0x30, 0xFF, 0xFF, 0xFF, 0xFF, 0x01],
            &[MALFORMED],
        ),
        (
            "a remaining length without an end",
            vec![0x30, 0x80, 0x80, 0x80, 0x80, 0x80],
            &[MALFORMED],
        ),
    ]
}

#[test]
fn forbidden_packet_ends_the_connection_with_a_reason() {
    let mut witness = Witness::new();
    for (what, bytes, reasons) in forbidden() {
        let mut attacker = witness.attacker();
        attacker.send(&bytes);
        let disconnect = attacker.expect_closed_after(what);
        let disconnect = disconnect.unwrap_or_else(|| panic!("{what}: closed without a reason"));
        assert!(
            reasons.contains(&disconnect.reason),
            "{what}: {:#04x} {:?}",
            disconnect.reason,
            disconnect.text()
        );
        assert!(attacker.drain().is_empty(), "{what} was answered");
        witness.store.client.expect_nothing();
    }
    witness.unharmed();
}

/// The same packets, one byte at a time. Malformed packets must be detected however they are cut.
#[test]
fn forbidden_packet_byte_by_byte_ends_the_connection() {
    let mut witness = Witness::new();
    for (what, bytes, _) in forbidden() {
        let mut attacker = witness.attacker();
        for byte in bytes {
            if attacker.try_send(&[byte]).is_err() {
                break;
            }
        }
        attacker.expect_closed_after(what);
        assert!(attacker.drain().is_empty(), "{what} was answered");
    }
    witness.unharmed();
}
