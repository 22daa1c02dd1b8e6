//! Packets that violate the standard. The broker must close the connection that sent them (section
//! 4.8), must publish its will, and must not act on the packet.

use statehouse_tests::{
    Connect, Publish,
    packet::{acknowledge, kind, packet},
    packet3::{self, DISCONNECT},
    property::sized,
};

use crate::scene::{Scene, checks};

checks! {
    malformed_connect_closes_without_connack,
    malformed_publish_closes,
    malformed_subscribe_closes,
    malformed_unsubscribe_closes,
    reserved_flags_close,
    text_with_any_other_character_is_kept,
    unknown_packet_closes;
    not mosquitto:
    dup_at_qos_0_closes,
    packet_for_clients_or_with_a_superfluous_body_closes,
    reserved_flags_of_acknowledgements_and_pingreq_close,
}

/// A CONNECT with these flags and this payload.
fn connect(flags: u8, payload: &[&[u8]]) -> Vec<u8> {
    let mut body = sized(b"MQTT");
    body.extend([4, flags, 0, 0]);
    body.extend(payload.iter().flat_map(|it| sized(it)));
    packet(0x10, &body)
}

fn malformed_connect_closes_without_connack(scene: &Scene<'_>) {
    let id = scene.id("client");
    let id = id.as_bytes();
    const BAD: &[u8] = b"\xC3\x28";
    for (what, bytes) in [
        ("the reserved flag", connect(0x03, &[id])),
        (
            "flags of the packet",
            [&[0x11], &connect(2, &[id])[1..]].concat(),
        ),
        ("no client id", connect(0x02, &[])),
        ("a will QoS without a will", connect(0x0A, &[id])),
        ("will retain without a will", connect(0x22, &[id])),
        ("will QoS 3", connect(0x1E, &[id, b"will", b"x"])),
        ("no will", connect(0x06, &[id])),
        ("no will message", connect(0x06, &[id, b"will"])),
        (
            "a will without its flag",
            connect(0x02, &[id, b"will", b"x"]),
        ),
        ("no user name", connect(0x82, &[id])),
        (
            "a user name without its flag",
            connect(0x02, &[id, b"user"]),
        ),
        ("no password", connect(0xC2, &[id, b"user"])),
        (
            "a password without its flag",
            connect(0x82, &[id, b"user", b"secret"]),
        ),
        (
            "a password without a user name",
            connect(0x42, &[id, b"secret"]),
        ),
        ("an ill-formed client id", connect(0x02, &[BAD])),
        ("a client id with U+0000", connect(0x02, &[b"a\0b"])),
        ("an ill-formed will topic", connect(0x06, &[id, BAD, b"x"])),
        (
            "a will topic with a wildcard",
            connect(0x06, &[id, b"a/#", b"x"]),
        ),
        ("an ill-formed user name", connect(0x82, &[id, BAD])),
    ] {
        let mut client = scene.open();
        client.send(&bytes);
        client.expect_closed_after(what);
        assert_eq!(client.drain(), [], "{what}");
    }
    // The same CONNECT without a fault, with every field.
    let mut client = scene.open();
    client.send(&connect(0xC6, &[id, b"will", b"x", b"user", b"\0\xFF"]));
    assert_eq!(client.take_connack(), 0);
    client.disconnect();
}

/// Sends each packet on a connection of its own, which the broker must close. It must publish the
/// will.
fn each_closes(scene: &Scene<'_>, packets: &[(&str, Vec<u8>)]) {
    let will = scene.topic("will");
    let mut subscriber = scene.connect("wills");
    assert_eq!(subscriber.subscribe(&will, 0), 0);
    for (what, bytes) in packets {
        let connect = scene.clean("violator").will(Publish::new(&will, what), 0);
        let mut client = scene.accept(&connect);
        client.send(bytes);
        client.expect_closed_after(what);
        assert_eq!(client.drain(), [], "{what}");
        let got = subscriber.take_publish(&will).payload;
        assert_eq!(got.escape_ascii().to_string(), *what);
    }
}

/// The packet with these flags.
fn with_flags(mut bytes: Vec<u8>, flags: u8) -> Vec<u8> {
    bytes[0] = bytes[0] & 0xF0 | flags;
    bytes
}

fn reserved_flags_close(scene: &Scene<'_>) {
    let topic = scene.topic("a");
    let pubrel = acknowledge(kind::PUBREL, 1);
    let subscribe = |flags| with_flags(packet3::subscribe(1, &[(&topic, 0)]), flags);
    let unsubscribe = |flags| with_flags(packet3::unsubscribe(1, &[&topic]), flags);
    each_closes(
        scene,
        &[
            ("PUBREL 0", with_flags(pubrel, 0)),
            ("SUBSCRIBE 0", subscribe(0)),
            ("SUBSCRIBE 3", subscribe(3)),
            ("UNSUBSCRIBE 0", unsubscribe(0)),
            ("UNSUBSCRIBE 6", unsubscribe(6)),
            ("DISCONNECT 1", with_flags(DISCONNECT.to_vec(), 1)),
        ],
    );
}

fn reserved_flags_of_acknowledgements_and_pingreq_close(scene: &Scene<'_>) {
    let ack = |kind, flags| with_flags(acknowledge(kind, 1), flags);
    each_closes(
        scene,
        &[
            ("PUBACK 1", ack(kind::PUBACK, 1)),
            ("PUBREC 2", ack(kind::PUBREC, 2)),
            ("PUBCOMP 8", ack(kind::PUBCOMP, 8)),
            ("PINGREQ 1", vec![0xC1, 0]),
        ],
    );
}

fn dup_at_qos_0_closes(scene: &Scene<'_>) {
    let mut publish = Publish::new(&scene.topic("a"), "x").retained();
    publish.dup = true;
    each_closes(scene, &[("DUP at QoS 0", publish.bytes3())]);
    scene.subscriber("subscriber", 2).expect_nothing();
}

fn malformed_publish_closes(scene: &Scene<'_>) {
    let topic = scene.topic("a");
    let publish = |qos: u8| Publish::new(&topic, "x").qos(qos).retained();
    let named = |name: &[u8]| packet(0x31, &[&sized(name)[..], b"x"].concat());
    let mut reserved = publish(1).bytes3();
    reserved[0] |= 6;
    each_closes(
        scene,
        &[
            ("QoS 3", reserved),
            ("packet id 0 at QoS 1", publish(1).bytes3()),
            ("packet id 0 at QoS 2", publish(2).bytes3()),
            ("no packet id", packet(0x33, &sized(topic.as_bytes()))),
            ("no topic", named(b"")),
            ("topic with #", named(&[topic.as_bytes(), b"/#"].concat())),
            ("topic with +", named(&[topic.as_bytes(), b"/+"].concat())),
            (
                "ill-formed topic",
                named(&[topic.as_bytes(), b"\xFF"].concat()),
            ),
            (
                "surrogate",
                named(&[topic.as_bytes(), b"\xED\xA0\x80"].concat()),
            ),
            ("overlong", named(&[topic.as_bytes(), b"\xC0\xAF"].concat())),
            ("U+0000", named(&[topic.as_bytes(), b"\0"].concat())),
            ("topic beyond the packet", packet(0x31, &[0, 9, b'a'])),
        ],
    );
    scene.subscriber("subscriber", 2).expect_nothing();
}

fn malformed_subscribe_closes(scene: &Scene<'_>) {
    let topic = scene.topic("a");
    let filter = |filter: &[u8]| packet(0x82, &[&[0, 1], &sized(filter)[..], &[0]].concat());
    each_closes(
        scene,
        &[
            ("packet id 0", packet3::subscribe(0, &[(&topic, 0)])),
            ("no filter", packet(0x82, &[0, 1])),
            (
                "no QoS",
                packet(0x82, &[&[0, 1], &sized(topic.as_bytes())[..]].concat()),
            ),
            ("QoS 3", packet3::subscribe(1, &[(&topic, 3)])),
            ("reserved bits", packet3::subscribe(1, &[(&topic, 4)])),
            (
                "reserved bits of a second filter",
                packet3::subscribe(1, &[("a", 0), ("b", 0x80)]),
            ),
            ("empty filter", filter(b"")),
            ("# before the end", filter(b"a/#/b")),
            ("# behind a character", filter(b"a/b#")),
            ("+ behind a character", filter(b"a/b+")),
            ("+ before a character", filter(b"+a/b")),
            ("ill-formed filter", filter(b"a\xC3\x28")),
            ("filter with U+0000", filter(b"a\0b")),
        ],
    );
}

fn malformed_unsubscribe_closes(scene: &Scene<'_>) {
    each_closes(
        scene,
        &[
            ("packet id 0", packet3::unsubscribe(0, &["a"])),
            ("no filter", packet(0xA2, &[0, 1])),
            ("no packet id", packet(0xA2, &[])),
            ("ill-formed filter", packet(0xA2, b"\0\x01\0\x02\xC3\x28")),
            ("filter beyond the packet", packet(0xA2, b"\0\x01\0\x05a")),
        ],
    );
}

fn unknown_packet_closes(scene: &Scene<'_>) {
    each_closes(
        scene,
        &[
            ("type 0", vec![0x00, 0]),
            ("type 15", vec![0xF0, 0]),
            ("CONNACK", packet(0x20, &[0, 0])),
            (
                "a length of five bytes",
                vec![0x30, 0xFF, 0xFF, 0xFF, 0xFF, 1],
            ),
        ],
    );
}

fn packet_for_clients_or_with_a_superfluous_body_closes(scene: &Scene<'_>) {
    each_closes(
        scene,
        &[
            ("SUBACK", packet(0x90, &[0, 1, 0])),
            ("UNSUBACK", packet(0xB0, &[0, 1])),
            ("PINGRESP", vec![0xD0, 0]),
            ("PINGREQ with a body", vec![0xC0, 1, 0]),
            ("DISCONNECT with a body", vec![0xE0, 1, 0]),
            ("PUBACK with a reason", packet(0x40, &[0, 1, 0])),
        ],
    );
}

/// U+FEFF, characters of four bytes, and the longest topic.
fn text_with_any_other_character_is_kept(scene: &Scene<'_>) {
    let mut client = scene.accept(&Connect::new(&scene.id("\u{FEFF}𪛔")));
    assert_eq!(client.subscribe(&scene.topic("#"), 0), 0);
    let name = scene.topic("");
    let long = format!("{name}{}", "é".repeat((65_535 - name.len()) / 2));
    for topic in [scene.topic("\u{FEFF}a"), scene.topic("a𪛔"), long] {
        client.publish(Publish::new(&topic, "x"));
        assert_eq!(client.next_publish().topic, topic);
    }
    // U+FEFF is part of the name.
    assert_eq!(client.subscribe(&scene.topic("b"), 0), 0);
    client.publish(Publish::new(&format!("\u{FEFF}{}", scene.topic("b")), "x"));
    client.expect_nothing();
}
