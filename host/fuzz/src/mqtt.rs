//! Targets for the broker: packets of both versions, properties, and conversations of several
//! clients.

use std::sync::Arc;

use bytes::BytesMut;
use statehouse_mqtt::simulation::Wire;
use statehouse_mqtt::{Broker, NoService, Options, Properties, PropertiesBuilder};

use Level::{Five, Four};

/// Clients of a conversation.
const CLIENTS: usize = 3;

fn broker() -> Broker {
    Broker::new(Options::default(), Arc::new(NoService))
}

fn push_text(out: &mut Vec<u8>, text: &[u8]) {
    // All texts are short.
    out.extend_from_slice(&(text.len() as u16).to_be_bytes());
    out.extend_from_slice(text);
}

/// A packet of less than 128 bytes.
fn packet(first: u8, body: &[u8]) -> Vec<u8> {
    let mut bytes = vec![first, body.len().min(127) as u8];
    bytes.extend_from_slice(&body[..body.len().min(127)]);
    bytes
}

/// The protocol level of a version.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Level {
    /// MQTT 3.1.1.
    Four = 4,
    /// MQTT 5.
    Five,
}

impl Level {
    /// Property sections without properties.
    fn no_properties(self) -> &'static [u8] {
        match self {
            Four => &[],
            Five => &[0],
        }
    }
}

fn connect(level: Level, client: usize, clean_start: bool, expiry_s: u8) -> Vec<u8> {
    let flags = u8::from(clean_start) << 1;
    let mut body = vec![0, 4, b'M', b'Q', b'T', b'T', level as u8, flags, 0, 0];
    if level == Five {
        // Session Expiry Interval (section 3.1.2.11.2).
        body.extend_from_slice(&[5, 0x11, 0, 0, 0, expiry_s]);
    }
    push_text(&mut body, &[b'a' + client as u8]);
    packet(0x10, &body)
}

fn subscribe(level: Level, filter: &[u8], options: u8) -> Vec<u8> {
    let mut body = [&[0, 1], level.no_properties()].concat();
    push_text(&mut body, filter);
    body.push(options);
    packet(0x82, &body)
}

fn unsubscribe(level: Level, filter: &[u8]) -> Vec<u8> {
    let mut body = [&[0, 2], level.no_properties()].concat();
    push_text(&mut body, filter);
    packet(0xA2, &body)
}

fn publish(level: Level, topic: &[u8], flags: u8, id: u8, payload: &[u8]) -> Vec<u8> {
    let mut body = Vec::new();
    push_text(&mut body, topic);
    if flags & 6 != 0 {
        body.extend_from_slice(&[0, id]);
    }
    body.extend_from_slice(level.no_properties());
    body.extend_from_slice(payload);
    packet(0x30 | flags, &body)
}

/// Asserts that the output of a broker is a sequence of packets of this version.
fn check_written(level: Level, mut bytes: &[u8]) {
    while let Some((first, rest)) = bytes.split_first() {
        let types = match level {
            // A server of MQTT 3.1.1 sends neither DISCONNECT nor AUTH.
            Four => 2..=13,
            Five => 2..=15,
        };
        assert!(types.contains(&(first >> 4)), "packet type {}", first >> 4);
        let (mut length, mut at) = (0, 0);
        loop {
            let byte = rest[at];
            length |= usize::from(byte & 127) << (7 * at);
            at += 1;
            if byte & 128 == 0 {
                break;
            }
            assert!(at < 4, "a Variable Byte Integer of five bytes");
        }
        bytes = &rest[at + length..];
    }
}

/// Sends the bytes on a connection: as its first bytes, after a CONNECT, and in pieces.
pub(crate) fn packets(data: &[u8]) {
    _ = Wire::connect(&broker(), data);
    let (whole, third) = (data.len().max(1), 1 + data.len() / 3);
    for (level, piece) in [(Five, whole), (Five, third), (Four, whole), (Four, third)] {
        let broker = broker();
        let Ok(mut wire) = Wire::connect(&broker, &connect(level, 0, true, 0)) else {
            panic!("a good CONNECT is refused");
        };
        for piece in data.chunks(piece) {
            if !wire.send(BytesMut::from(piece)) {
                break;
            }
        }
        check_written(level, &wire.receive());
    }
}

pub(crate) fn packet_seeds() -> Vec<Vec<u8>> {
    let conversation = |level| {
        [
            subscribe(level, b"a", 2),
            publish(level, b"a", 0x5, 7, b"retained"),
            publish(level, b"a", 2, 8, b"b"),
            unsubscribe(level, b"a"),
        ]
        .concat()
    };
    vec![
        connect(Five, 0, true, 9),
        connect(Four, 0, true, 0),
        subscribe(Five, b"a/+/#", 1),
        conversation(Five),
        conversation(Four),
        [
            packet(0x40, &[0, 1]),
            packet(0x50, &[0, 1]),
            packet(0x62, &[0, 1, 0x92, 0]),
        ]
        .concat(),
        [
            packet(0xA2, &[0, 2, 0, 0, 1, b'a']),
            vec![0xC0, 0],
            vec![0xE0, 0],
        ]
        .concat(),
        packet(0xF0, &[0x19, 0]),
    ]
}

/// Decodes the properties of a PUBLISH. They must be the same after encoding and decoding.
pub(crate) fn properties(data: &[u8]) {
    let Ok(properties) = Properties::parse(bytes::Bytes::copy_from_slice(data)) else {
        return;
    };
    let mut builder = PropertiesBuilder::new();
    if let Some(topic) = properties.response_topic() {
        builder = builder.response_topic(topic);
    }
    if let Some(correlation_data) = properties.correlation_data() {
        builder = builder.correlation_data(correlation_data);
    }
    for (name, value) in properties.user() {
        builder = builder.user(name, value);
    }
    let Ok(written) = builder.finish() else {
        panic!("decoded properties cannot be encoded");
    };
    let Ok(again) = Properties::parse(written) else {
        panic!("encoded properties cannot be decoded");
    };
    assert_eq!(again.response_topic(), properties.response_topic());
    assert_eq!(again.correlation_data(), properties.correlation_data());
    assert!(again.user().eq(properties.user()));
}

pub(crate) fn property_seeds() -> Vec<Vec<u8>> {
    let built = PropertiesBuilder::new()
        .response_topic("clients/a/answers")
        .correlation_data(b"0123456789abcdef")
        .user("__ts", "001696374425000:00001:Client1")
        .user("__ft", "001696374425000:00001:StateStore")
        .finish()
        .unwrap_or_default();
    vec![
        built.to_vec(),
        // Payload format, message expiry, content type, topic alias.
        b"\x01\x01\x02\0\0\0\x09\x03\0\x04text\x23\0\x01".to_vec(),
    ]
}

/// Runs a conversation. One or more bytes select a client and its action.
pub(crate) fn sessions(data: &[u8]) {
    const TOPICS: [&[u8]; 4] = [b"a", b"a/b", b"$x", b"b"];
    const FILTERS: [&[u8]; 6] = [b"a", b"a/+", b"#", b"+/b", b"$share/g/a", b"b/#"];
    let broker = broker();
    let mut wires: [Option<Wire>; CLIENTS] = Default::default();
    let mut levels = [Five; CLIENTS];
    let mut rest = data.iter().copied();
    while let Some(byte) = rest.next() {
        let client = usize::from(byte) % CLIENTS;
        let action = usize::from(byte) / CLIENTS;
        let more = rest.next().unwrap_or(0);
        let level = levels[client];
        let bytes = match action % 8 {
            0 => {
                // The client loses its connection and connects again, with either version.
                wires[client] = None;
                levels[client] = if more & 0x40 == 0 { Five } else { Four };
                let hello = connect(levels[client], client, more & 1 == 1, more >> 1);
                wires[client] = Wire::connect(&broker, &hello).ok();
                continue;
            }
            1 => {
                // The client takes over its session, with either version. The old connection is
                // closed and ends late.
                let before = levels[client];
                levels[client] = if more & 0x40 == 0 { Five } else { Four };
                let hello = connect(levels[client], client, false, 9);
                let new = Wire::connect(&broker, &hello).ok();
                if let Some(mut old) = std::mem::replace(&mut wires[client], new) {
                    check_written(before, &old.receive());
                    assert!(
                        !old.send(BytesMut::from(&[0xC0, 0][..])),
                        "two connections have the session"
                    );
                }
                continue;
            }
            2 => subscribe(level, FILTERS[usize::from(more) % FILTERS.len()], more >> 6),
            3 => unsubscribe(level, FILTERS[usize::from(more) % FILTERS.len()]),
            4 | 5 => {
                let topic = TOPICS[usize::from(more) % TOPICS.len()];
                // Any DUP, QoS and RETAIN.
                publish(level, topic, more >> 4, more >> 2 & 3, &[byte; 9])
            }
            6 => {
                let first = [0x40, 0x50, 0x62, 0x70][usize::from(more) % 4];
                packet(first, &[0, more >> 2])
            }
            _ => rest.by_ref().take(usize::from(more) % 16).collect(),
        };
        if let Some(wire) = &mut wires[client]
            && !wire.send(BytesMut::from(&bytes[..]))
        {
            wires[client] = None;
        }
        for (wire, level) in wires.iter_mut().zip(levels) {
            if let Some(wire) = wire {
                check_written(level, &wire.receive());
            }
        }
        assert!(broker.sessions().len() <= CLIENTS);
    }
    drop(wires);
    assert_eq!(broker.stats().connections, 0);
}

pub(crate) fn session_seeds() -> Vec<Vec<u8>> {
    // The client, the action and the byte behind them.
    let steps = |steps: &[(usize, usize, u8)]| -> Vec<u8> {
        steps
            .iter()
            .flat_map(|&(client, action, more)| [(client + action * CLIENTS) as u8, more])
            .collect()
    };
    vec![
        // One client subscribes at QoS 1, another publishes, the first reconnects and acknowledges.
        steps(&[
            (0, 0, 19),
            (1, 0, 19),
            (0, 2, 0x40),
            (1, 4, 0x24),
            (0, 0, 18),
            (0, 6, 4),
        ]),
        // QoS 2 both ways, a takeover in between.
        steps(&[
            (0, 0, 19),
            (0, 2, 0x82),
            (0, 5, 0x44),
            (0, 1, 0),
            (0, 6, 6),
            (0, 6, 5),
            (0, 6, 7),
        ]),
        // A session that MQTT 5 begins, MQTT 3.1.1 takes over amid QoS 2, and MQTT 5 resumes.
        steps(&[
            (0, 0, 19),
            (0, 2, 0x82),
            (0, 5, 0x44),
            (0, 1, 0x40),
            (0, 6, 6),
            (0, 5, 0x44),
            (0, 0, 0x12),
            (0, 6, 7),
        ]),
        // A shared subscription of two.
        steps(&[
            (0, 0, 19),
            (1, 0, 19),
            (0, 2, 0x44),
            (1, 2, 0x44),
            (2, 0, 1),
            (2, 4, 0x24),
            (2, 4, 0x28),
            (0, 0, 19),
        ]),
        [&steps(&[(0, 0, 19), (0, 7, 4)])[..], &[0xC0, 0, 0xE0, 0]].concat(),
    ]
}
