//! False lengths of packets, and integers that do not end, over TCP and WebSocket. A WebSocket
//! frame has a length of its own. The server must not allocate memory for a claimed length, or read
//! beyond the bytes that arrived.

use std::{
    io::{ErrorKind, Read, Write},
    net::{SocketAddr, TcpStream},
};

use statehouse_tests::{
    Client, Connect, Property, Publish, Server,
    packet::{Packet, kind, packet, subscribe},
    websocket::{self, BINARY, frame},
};

use crate::witness::Witness;

const MALFORMED: u8 = 0x81;
const PACKET_TOO_LARGE: u8 = 0x95;

/// The remaining length of a packet of 256 MiB.
const CLAIM: [u8; 4] = [0xFF, 0xFF, 0xFF, 0x7F];

/// A server with a second listener, for WebSocket, and the address of that.
fn witness() -> (Witness, SocketAddr) {
    let server = Server::with("", &["--listen", "ws://127.0.0.1:0"]);
    let websocket = server.addresses()[1];
    (Witness::of(server), websocket)
}

/// The MQTT packets that the server sends over WebSocket until it closes the connection.
fn answers(socket: &mut TcpStream) -> Vec<Packet> {
    let mut bytes = Vec::new();
    loop {
        let mut head = [0; 2];
        match socket.read_exact(&mut head) {
            Ok(()) if head[0] != 0x88 => {}
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                panic!("the connection was not closed");
            }
            // A close frame, or the end of the stream.
            _ => break,
        }
        assert!(head[1] < 126, "a longer answer than a refusal");
        let mut payload = vec![0; head[1].into()];
        socket.read_exact(&mut payload).unwrap();
        bytes.extend(payload);
    }
    std::iter::from_fn(|| Packet::cut(&mut bytes)).collect()
}

/// In CVE-2017-7651 and CVE-2023-0809, mosquitto allocated the size that the first packet claimed,
/// whether or not it was a CONNECT.
#[test]
fn first_packet_claiming_256_mib_allocates_no_memory() {
    let mut witness = Witness::new();
    let before_kib = witness.server.memory_kib();
    let mut attackers = Vec::new();
    for kind in 0..=15_u8 {
        for _ in 0..10 {
            let mut attacker = witness.server.open();
            attacker.send(&[&[kind << 4], &CLAIM[..], b"\0\x04MQTT\x05"].concat());
            attackers.push((kind, attacker));
        }
    }
    for (first, attacker) in &mut attackers {
        assert_eq!(attacker.expect_closed(), None, "an answer before CONNECT");
        let answers = attacker.drain();
        match *first {
            kind::CONNECT => assert_eq!(answers[0].ack().reason, PACKET_TOO_LARGE),
            _ => assert!(answers.is_empty(), "an answer before CONNECT"),
        }
    }
    witness.assert_grown_less_than(before_kib, 16 * 1024);
    drop(attackers);
    witness.unharmed();
}

/// The largest will makes its CONNECT larger than 64 KiB.
#[test]
fn connect_above_its_limit_gets_a_reason_in_each_version() {
    let mut witness = Witness::new();
    let largest = Publish::new("will", vec![b'x'; 65_535]);
    let connect = Connect::new("attacker").will(largest, 0);
    for bytes in [connect.bytes(), connect.bytes3()] {
        let mut attacker = witness.server.open();
        attacker.send(&bytes);
        attacker.expect_closed();
        let answers = attacker.drain();
        assert_eq!(answers.len(), 1, "{answers:?}");
        match bytes == connect.bytes() {
            true => assert_eq!(answers[0].ack().reason, PACKET_TOO_LARGE),
            false => assert_eq!(answers[0].bytes(), [0x20, 2, 0, 3]),
        }
    }
    witness.unharmed();
}

/// In CVE-2026-25627, NanoMQ read beyond the end of the received bytes.
#[test]
fn packet_shorter_than_its_length_is_not_executed() {
    let (mut witness, websocket) = witness();
    let first = [&[0x10, 0x80, 0x20][..], b"\0\x04M"].concat();
    let mut hello = Connect::new("attacker").bytes();
    hello.extend([0x30, 0x80, 0x20]);
    hello.extend(b"\0\x01a");
    for (what, bytes, connected) in [("CONNECT", first, false), ("PUBLISH", hello, true)] {
        // Cuts the packet at each position.
        for at in 0..bytes.len() {
            let mut attacker = witness.server.open();
            attacker.send(&bytes[..at]);
            attacker.send(&bytes[at..]);
            attacker.finish();
            attacker.expect_closed_after(what);
            assert_eq!(attacker.drain().len(), usize::from(connected), "{what}");

            let mut attacker = websocket::upgraded(websocket);
            attacker.write_all(&frame(BINARY, &bytes[..at])).unwrap();
            attacker.write_all(&frame(BINARY, &bytes[at..])).unwrap();
            // The WebSocket ends in the middle of the packet.
            attacker.write_all(&frame(0x88, &[])).unwrap();
            let answers = answers(&mut attacker);
            // The server may close before it sends the CONNACK.
            let connacks = answers.iter().filter(|it| it.kind() == kind::CONNACK);
            assert_eq!(connacks.count(), answers.len(), "{what}: {answers:?}");
            assert!(answers.len() <= usize::from(connected), "{what}");
        }
    }
    witness.unharmed();
}

/// Bytes after the stated end of a packet belong to the next packet.
#[test]
fn packet_with_a_field_beyond_its_end_is_malformed() {
    let (mut witness, websocket) = witness();
    let hello = Connect::new("attacker").bytes();
    // A topic of nine bytes in a packet of three; six of them follow.
    let short = b"\x30\x03\0\x09aaaaaaaa";
    let mut attacker = witness.server.open();
    attacker.send(&[&hello, &short[..]].concat());
    attacker.expect_disconnect(MALFORMED);
    let mut attacker = websocket::upgraded(websocket);
    attacker.write_all(&frame(BINARY, &hello)).unwrap();
    attacker.write_all(&frame(BINARY, short)).unwrap();
    let answers = answers(&mut attacker);
    assert_eq!(answers.len(), 2, "{answers:?}");
    assert_eq!(answers[1].kind(), kind::DISCONNECT);
    assert_eq!(answers[1].ack().reason, MALFORMED);
    witness.unharmed();
}

/// A variable byte integer has at most four bytes, in each field (NanoMQ's CVE-2026-21888).
#[test]
fn integer_of_five_bytes_in_any_field_is_malformed() {
    const FIVE: [u8; 5] = [0xFF, 0xFF, 0xFF, 0xFF, 0x7F];
    let (mut witness, websocket) = witness();
    let after = |head: u8, before: &[u8], behind: &[u8]| {
        packet(head, &[before, &FIVE[..], behind].concat())
    };
    for (what, bytes) in [
        ("remaining length", [&[0x30], &FIVE[..]].concat()),
        ("property length", after(0x30, b"\0\x01a", b"")),
        (
            "subscription identifier",
            after(0x82, b"\0\x01\x06\x0B", b"\0\x01a\0"),
        ),
    ] {
        let mut attacker = witness.attacker();
        attacker.send(&bytes);
        let end = attacker.expect_closed_after(what);
        assert_eq!(end.expect(what).reason, MALFORMED, "{what}");

        let mut attacker = websocket::upgraded(websocket);
        let hello = Connect::new("attacker").bytes();
        attacker
            .write_all(&frame(BINARY, &[hello, bytes].concat()))
            .unwrap();
        let answers = answers(&mut attacker);
        assert_eq!(answers.len(), 2, "{what}: {answers:?}");
        assert_eq!(answers[1].ack().reason, MALFORMED, "{what}");
    }
    witness.unharmed();
}

/// Packets of the largest allowed size that never arrive completely. They take memory only for the
/// bytes that arrived.
#[test]
fn incomplete_packets_take_memory_for_their_bytes_only() {
    let mut witness = Witness::new();
    let before_kib = witness.server.memory_kib();
    let attackers: Vec<Client> = (0..100)
        .map(|n| {
            let mut attacker = witness.server.connect(&format!("attacker{n}"));
            // A PUBLISH of 1.5 MiB, of which only 100 bytes follow.
            attacker.send(&[0x30, 0x80, 0x80, 0x60, 0, 1, b'a', 0]);
            attacker.send(&[b'x'; 100]);
            attacker
        })
        .collect();
    witness.still_served();
    witness.assert_grown_less_than(before_kib, 50 * 1024);
    drop(attackers);
    witness.unharmed();
}

/// Sends every prefix of a valid conversation, then ends the stream.
#[test]
fn conversation_cut_anywhere_is_closed() {
    let mut witness = Witness::new();
    let mut conversation = Connect::new("attacker").bytes();
    conversation.extend(subscribe(1, &[], &[("attacker/#", 1)]));
    conversation.extend(
        Publish::new("attacker/x", "hello")
            .qos(1)
            .with(Property::user("a", "b"))
            .bytes(),
    );
    for at in 0..conversation.len() {
        let mut attacker = witness.server.open();
        attacker.send(&conversation[..at]);
        attacker.finish();
        attacker.expect_closed();
    }
    witness.unharmed();
}

/// A client falls silent in the middle of a WebSocket frame. The timeout for CONNECT ends the
/// connection.
#[test]
fn half_a_websocket_frame_times_out() {
    let (mut witness, websocket) = witness();
    let mut attacker = websocket::upgraded(websocket);
    let whole = frame(BINARY, &Connect::new("attacker").bytes());
    attacker.write_all(&whole[..whole.len() / 2]).unwrap();
    assert!(answers(&mut attacker).is_empty());
    witness.unharmed();
}
