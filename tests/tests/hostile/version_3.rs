//! Packets that MQTT 3.1.1 forbids. The server must close the connection, and must send no packet
//! that this version does not have.

use statehouse_tests::{Client, packet::packet};

use crate::witness::Witness;

/// A connected attacker that uses MQTT 3.1.1.
fn attacker(witness: &Witness) -> Client {
    let mut attacker = witness.server.open();
    attacker.send(b"\x10\x14\0\x04MQTT\x04\x02\0\0\0\x08attacker");
    assert_eq!(attacker.next().bytes(), [0x20, 2, 0, 0]);
    attacker
}

#[rustfmt::skip]
const FORBIDDEN: &[(&str, &[u8])] = &[
    ("a second CONNECT", b"\x10\x11\0\x04MQTT\x04\x02\0\0\0\x05again"),
    ("a second CONNECT, of MQTT 5", b"\x10\x12\0\x04MQTT\x05\x02\0\0\0\0\x05again"),
    ("CONNACK", b"\x20\x02\0\0"),
    ("SUBACK", b"\x90\x03\0\x01\0"),
    ("UNSUBACK", b"\xB0\x02\0\x01"),
    ("PINGRESP", b"\xD0\x00"),
    ("type 0", b"\x00\x00"),
    ("type 15", b"\xF0\x00"),
    ("PINGREQ with flags", b"\xC1\x00"),
    ("PINGREQ with a body", b"\xC0\x01\0"),
    ("PUBACK with flags", b"\x41\x02\0\x01"),
    ("PUBACK without a packet id", b"\x40\x00"),
    ("PUBACK with packet id 0", b"\x40\x02\0\0"),
    ("PUBACK with a reason", b"\x40\x03\0\x01\0"),
    ("PUBREL without its flag", b"\x60\x02\0\x01"),
    ("PUBREL with properties", b"\x62\x04\0\x01\0\0"),
    ("SUBSCRIBE without its flag", b"\x80\x06\0\x01\0\x01a\0"),
    ("SUBSCRIBE of nothing", b"\x82\x02\0\x01"),
    ("SUBSCRIBE with packet id 0", b"\x82\x06\0\0\0\x01a\0"),
    ("SUBSCRIBE without a QoS", b"\x82\x05\0\x01\0\x01a"),
    ("SUBSCRIBE at QoS 3", b"\x82\x06\0\x01\0\x01a\x03"),
    ("SUBSCRIBE with No Local", b"\x82\x06\0\x01\0\x01a\x04"),
    ("SUBSCRIBE with properties", b"\x82\x07\0\x01\0\0\x01a\0"),
    ("SUBSCRIBE to a filter that is not UTF-8", b"\x82\x06\0\x01\0\x01\xFF\0"),
    ("SUBSCRIBE to a filter with U+0000", b"\x82\x06\0\x01\0\x01\0\0"),
    ("SUBSCRIBE to an empty filter", b"\x82\x05\0\x01\0\0\0"),
    ("SUBSCRIBE to a#", b"\x82\x07\0\x01\0\x02a#\0"),
    ("UNSUBSCRIBE from nothing", b"\xA2\x02\0\x01"),
    ("UNSUBSCRIBE without its flag", b"\xA0\x05\0\x01\0\x01a"),
    ("DISCONNECT with flags", b"\xE1\x00"),
    ("DISCONNECT with a reason", b"\xE0\x01\x04"),
    ("PUBLISH at QoS 3", b"\x36\x05\0\x01a\0\x01"),
    ("PUBLISH with packet id 0", b"\x32\x05\0\x01a\0\0"),
    ("PUBLISH at QoS 0 with DUP", b"\x38\x03\0\x01a"),
    ("PUBLISH without a topic", b"\x30\x00"),
    ("PUBLISH to nowhere", b"\x30\x02\0\0"),
    ("PUBLISH to +", b"\x30\x05\0\x03a/+"),
    ("PUBLISH to #", b"\x30\x03\0\x01#"),
    ("a topic with U+0000", b"\x30\x05\0\x03a\0b"),
    ("a topic of broken UTF-8", b"\x30\x05\0\x03a\xFFb"),
    ("a topic with a surrogate", b"\x30\x05\0\x03\xED\xA0\x80"),
    ("a topic longer than the packet", b"\x30\x03\0\x09a"),
    ("256 MiB", b"\x30\xFF\xFF\xFF\x7F"),
    ("a remaining length of five bytes", b"\x30\xFF\xFF\xFF\xFF\x01"),
];

/// Each packet in one piece, and one byte at a time.
#[test]
fn forbidden_packet_ends_the_connection_without_a_packet() {
    let mut witness = Witness::new();
    for (what, bytes) in FORBIDDEN {
        for piece in [bytes.len(), 1] {
            let mut attacker = attacker(&witness);
            for piece in bytes.chunks(piece) {
                if attacker.try_send(piece).is_err() {
                    break;
                }
            }
            let answer = attacker.expect_closed_after(what);
            assert!(answer.is_none(), "{what} was answered: {answer:?}");
            assert!(attacker.drain().is_empty(), "{what} was answered");
        }
        witness.store.client.expect_nothing();
    }
    witness.unharmed();
}

#[test]
fn forbidden_connect_gets_a_return_code_or_nothing() {
    let mut witness = Witness::new();
    for (connect, code) in [
        // The end of the name, the level, and what follows.
        (&b"T\x04\x03\0\0\0\x01a"[..], None), // reserved flag
        (b"T\x04\x0A\0\0\0\x01a", None),      // will QoS without a will
        (b"T\x04\x1E\0\0\0\x01a\0\x01w\0\0", None), // will QoS 3
        (b"T\x04\x06\0\0\0\x01a\0\x01#\0\0", None), // will topic with a wildcard
        (b"T\x04\x42\0\0\0\x01a\0\x01p", None), // a password without a user
        (b"T\x04\x82\0\0\0\x01a", None),      // no user
        (b"T\x04\x02\0\0\0\x09a", None),      // a false length
        (b"T\x04\x02\0\0\0\x01\0", None),     // U+0000
        (b"T\x04\x02\0\0\0\x01aX", None),     // bytes behind the last field
        (b"t\x04\x02\0\0\0\x01a", None),      // another name
        (b"T\x04\0\0\0\0\0", Some(2)),        // no client id, and a session to keep
    ] {
        let mut attacker = witness.server.open();
        attacker.send(&packet(0x10, &[b"\0\x04MQT", connect].concat()));
        attacker.expect_closed();
        let answers = attacker.drain();
        let bytes: Vec<u8> = answers.iter().flat_map(|it| it.bytes()).collect();
        let expected: Vec<u8> = code.map_or(vec![], |code| vec![0x20, 2, 0, code]);
        assert_eq!(bytes, expected, "to {connect:02X?}");
    }
    witness.unharmed();
}
