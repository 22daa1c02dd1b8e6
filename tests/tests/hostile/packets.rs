//! Packets that MQTT 5 forbids. The server must close the connection. After CONNECT, it must first
//! send a DISCONNECT with the reason.

use statehouse_tests::{
    Connect, Property, Publish,
    packet::{self, packet},
    property::sized,
};

use crate::witness::Witness;

/// MQTT 5 reason codes.
const MALFORMED: u8 = 0x81;
const PROTOCOL_ERROR: u8 = 0x82;
const TOPIC_NAME_INVALID: u8 = 0x90;
const TOPIC_ALIAS_INVALID: u8 = 0x94;
const PACKET_TOO_LARGE: u8 = 0x95;
const QOS_NOT_SUPPORTED: u8 = 0x9B;

/// The brokers rumqttd and sol panicked here.
#[test]
fn other_packet_before_connect_closes_unanswered() {
    let mut witness = Witness::new();
    let kinds = (0..=15_u8).filter(|kind| *kind != packet::kind::CONNECT);
    let any = kinds.flat_map(|kind| {
        [
            vec![kind << 4, 0],
            packet(kind << 4, &[0, 1]),
            packet(kind << 4 | 2, &[0, 1]),
            packet(kind << 4, &[0; 40]),
        ]
    });
    let valid = [
        Publish::new("t", "").bytes(),
        packet::connack(false, &[]),
        packet::subscribe(1, &[], &[("t", 0)]),
        packet::suback(1, &[0]),
        packet::unsubscribe(1, "t"),
    ];
    for bytes in any.chain(valid) {
        let mut attacker = witness.server.open();
        attacker.send(&bytes);
        assert_eq!(attacker.expect_closed(), None, "an answer before CONNECT");
        assert!(attacker.drain().is_empty(), "an answer before CONNECT");
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
    for (name, level) in [("MQIsdp", 3_u8), ("MQTT", 6)] {
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
            3 => assert_eq!(answers[0].bytes(), [0x20, 2, 0, 1]),
            _ => assert_eq!(answers[0].ack().reason, 0x84, "{answers:?}"),
        }
    }
    witness.unharmed();
}

/// The forbidden packet, its bytes, and the reason codes that the standard allows.
type Forbidden = (&'static str, &'static [u8], &'static [u8]);

const WRONG: &[u8] = &[MALFORMED, PROTOCOL_ERROR];
const TOPIC: &[u8] = &[TOPIC_NAME_INVALID, MALFORMED, PROTOCOL_ERROR];

#[rustfmt::skip]
const FORBIDDEN: &[Forbidden] = &[
    ("a second CONNECT", b"\x10\x12\0\x04MQTT\x05\x02\0\0\0\0\x05again", &[PROTOCOL_ERROR]),
    ("CONNACK", b"\x20\x03\0\0\0", &[PROTOCOL_ERROR]),
    ("SUBACK", b"\x90\x04\0\x01\0\0", &[PROTOCOL_ERROR]),
    ("UNSUBACK", b"\xB0\x04\0\x01\0\0", &[PROTOCOL_ERROR]),
    ("PINGRESP", b"\xD0\x00", &[PROTOCOL_ERROR]),
    ("AUTH", b"\xF0\x00", &[PROTOCOL_ERROR]),
    ("AUTH with a reason", b"\xF0\x02\x18\0", WRONG),
    ("type 0", b"\x00\x00", WRONG),
    ("PINGREQ with flags", b"\xC1\x00", WRONG),
    ("PINGREQ with a body", b"\xC0\x01\0", WRONG),
    ("PUBACK with flags", b"\x41\x02\0\x01", WRONG),
    ("PUBACK without a packet id", b"\x40\x00", WRONG),
    ("PUBACK with half a packet id", b"\x40\x01\0", WRONG),
    ("PUBREL without its flag", b"\x60\x02\0\x01", WRONG),
    ("SUBSCRIBE without its flag", b"\x80\x07\0\x01\0\0\x01a\0", WRONG),
    ("SUBSCRIBE of nothing", b"\x82\x03\0\x01\0", WRONG),
    ("SUBSCRIBE with packet id 0", b"\x82\x07\0\0\0\0\x01a\0", WRONG),
    ("SUBSCRIBE without options", b"\x82\x06\0\x01\0\0\x01a", WRONG),
    ("SUBSCRIBE at QoS 3", b"\x82\x07\0\x01\0\0\x01a\x03", WRONG),
    ("SUBSCRIBE with reserved bits", b"\x82\x07\0\x01\0\0\x01a\x40", WRONG),
    ("SUBSCRIBE with No Local to a shared subscription",
        b"\x82\x10\0\x01\0\0\x0A$share/g/a\x04", WRONG),
    ("SUBSCRIBE with retain handling 3", b"\x82\x07\0\x01\0\0\x01a\x30", WRONG),
    ("SUBSCRIBE with identifier 0", b"\x82\x09\0\x01\x02\x0B\0\0\x01a\0", WRONG),
    ("SUBSCRIBE with two identifiers", b"\x82\x0B\0\x01\x04\x0B\x01\x0B\x02\0\x01a\0", WRONG),
    ("UNSUBSCRIBE from nothing", b"\xA2\x03\0\x01\0", WRONG),
    ("UNSUBSCRIBE without its flag", b"\xA0\x06\0\x01\0\0\x01a", WRONG),
    ("DISCONNECT with flags", b"\xE1\x00", WRONG),
    ("DISCONNECT that begins to expire", b"\xE0\x07\0\x05\x11\0\0\0\x09", &[PROTOCOL_ERROR]),
    ("PUBLISH at QoS 3",
        b"\x36\x06\0\x01a\0\x01\0", &[MALFORMED, PROTOCOL_ERROR, QOS_NOT_SUPPORTED]),
    ("PUBLISH with packet id 0", b"\x32\x06\0\x01a\0\0\0", WRONG),
    ("PUBLISH at QoS 0 with DUP", b"\x38\x04\0\x01a\0", WRONG),
    ("PUBLISH without a topic", b"\x30\x00", WRONG),
    ("PUBLISH to nowhere", b"\x30\x03\0\0\0", TOPIC),
    ("PUBLISH to +", b"\x30\x06\0\x03a/+\0", TOPIC),
    ("PUBLISH to #", b"\x30\x04\0\x01#\0", TOPIC),
    ("a topic with U+0000", b"\x30\x06\0\x03a\0b\0", TOPIC),
    ("a topic of broken UTF-8", b"\x30\x06\0\x03a\xFFb\0", TOPIC),
    ("a topic with a surrogate", b"\x30\x06\0\x03\xED\xA0\x80\0", TOPIC),
    ("an overlong topic", b"\x30\x05\0\x02\xC0\xAF\0", TOPIC),
    ("a topic longer than the packet", b"\x30\x03\0\x09a", WRONG),
    ("properties longer than the packet", b"\x30\x04\0\x01a\x09", WRONG),
    ("a property length of five bytes", b"\x30\x08\0\x01a\xFF\xFF\xFF\xFF\x01", WRONG),
    ("an unknown property", b"\x30\x06\0\x01a\x02\x7F\0", WRONG),
    ("a property of another packet", b"\x30\x07\0\x01a\x03\x13\0\x05", WRONG),
    ("half a property", b"\x30\x06\0\x01a\x02\x02\0", WRONG),
    ("a property twice", b"\x30\x0E\0\x01a\x0A\x02\0\0\0\x01\x02\0\0\0\x01", WRONG),
    ("payload format 2", b"\x30\x06\0\x01a\x02\x01\x02", WRONG),
    ("a user property of broken UTF-8", b"\x30\x0B\0\x01a\x07\x26\0\x01\xFF\0\x01v", WRONG),
    ("a user property without a value", b"\x30\x08\0\x01a\x04\x26\0\x01k", WRONG),
    ("a response topic with a wildcard", b"\x30\x0A\0\x01a\x06\x08\0\x03a/+", TOPIC),
    ("a subscription identifier from a client", b"\x30\x06\0\x01a\x02\x0B\x01", WRONG),
    ("topic alias 0", b"\x30\x07\0\x01a\x03\x23\0\0", &[TOPIC_ALIAS_INVALID]),
    ("topic alias 65535", b"\x30\x07\0\x01a\x03\x23\xFF\xFF", &[TOPIC_ALIAS_INVALID]),
    ("an alias that stands for nothing", b"\x30\x06\0\0\x03\x23\0\x01", WRONG),
    ("256 MiB", b"\x30\xFF\xFF\xFF\x7F", &[PACKET_TOO_LARGE]),
    ("a remaining length of five bytes", b"\x30\xFF\xFF\xFF\xFF\x01", &[MALFORMED]),
    ("a remaining length without an end", b"\x30\x80\x80\x80\x80\x80", &[MALFORMED]),
];

#[test]
fn forbidden_packet_ends_the_connection_with_a_reason() {
    let mut witness = Witness::new();
    for (what, bytes, reasons) in FORBIDDEN {
        let mut attacker = witness.attacker();
        attacker.send(bytes);
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
    for (what, bytes, _) in FORBIDDEN {
        let mut attacker = witness.attacker();
        for byte in *bytes {
            if attacker.try_send(&[*byte]).is_err() {
                break;
            }
        }
        attacker.expect_closed_after(what);
        assert!(attacker.drain().is_empty(), "{what} was answered");
    }
    witness.unharmed();
}
