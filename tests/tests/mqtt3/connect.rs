//! CONNECT and CONNACK (MQTT 3.1.1, sections 3.1 and 3.2), and the end of connections.

use std::{
    thread,
    time::{Duration, Instant},
};

use statehouse_tests::{
    Connect, Heard, Publish,
    client::PATIENCE,
    packet::{PINGREQ, kind},
    packet3::{self, DISCONNECT},
};

use crate::scene::{Scene, checks};

checks! {
    client_ids_of_1_to_23_characters_connect,
    connack_is_the_first_packet_and_unique,
    disconnect_closes_the_connection,
    empty_client_id_needs_a_clean_session,
    first_packet_other_than_connect_closes,
    foreign_protocol_name_closes,
    packet_after_a_refused_connect_is_ignored,
    second_connect_closes,
    silence_beyond_keep_alive_closes,
    takeover_closes_the_existing_connection,
    unsupported_level_is_refused_with_code_1;
    not mosquitto:
    unacceptable_client_id_is_refused_with_code_2,
}

const IDENTIFIER_REJECTED: u8 = 2;

fn first_packet_other_than_connect_closes(scene: &Scene<'_>) {
    let publish = Publish::new(&scene.topic("a"), "x").retained().bytes3();
    let subscribe = packet3::subscribe(1, &[("a", 0)]);
    for first in [&PINGREQ[..], &publish, &subscribe, &DISCONNECT] {
        let mut client = scene.open();
        client.send(first);
        client.expect_closed();
        assert_eq!(client.drain(), [], "nothing is answered");
    }
    scene.subscriber("subscriber", 0).expect_nothing();
}

fn second_connect_closes(scene: &Scene<'_>) {
    let connect = scene.clean("client");
    let mut client = scene.accept(&connect);
    client.send(&connect.bytes3());
    client.expect_closed();
    assert_eq!(client.drain(), [], "no second CONNACK");
}

fn foreign_protocol_name_closes(scene: &Scene<'_>) {
    let connect = scene.clean("client").bytes3();
    for name in ["MQTX", "mqtt", "HTTP"] {
        let mut bytes = connect.clone();
        let at = bytes.windows(4).position(|it| it == b"MQTT").unwrap();
        bytes[at..at + 4].copy_from_slice(name.as_bytes());
        let mut client = scene.open();
        client.send(&bytes);
        client.expect_closed_after(name);
        assert_eq!(client.drain(), [], "{name}");
    }
}

fn unsupported_level_is_refused_with_code_1(scene: &Scene<'_>) {
    let connect = scene.clean("client").bytes3();
    let at = connect.windows(4).position(|it| it == b"MQTT").unwrap() + 4;
    for level in [2, 3] {
        let mut bytes = connect.clone();
        bytes[at] = level;
        let mut client = scene.open();
        client.send(&bytes);
        assert_eq!(client.take_connack(), 1, "level {level}");
        client.expect_closed();
    }
}

fn client_ids_of_1_to_23_characters_connect(scene: &Scene<'_>) {
    let all = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
    for id in ["0", &all[..23], &all[23..46], &all[39..]] {
        let mut client = scene.accept(&Connect::new(id));
        client.ping();
        client.disconnect();
    }
}

fn empty_client_id_needs_a_clean_session(scene: &Scene<'_>) {
    // Each of them has a session of its own.
    let topic = scene.topic("a");
    let mut clients = [(); 2].map(|()| scene.accept(&Connect::new("")));
    assert_eq!(clients[0].subscribe(&topic, 0), 0);
    clients[1].publish(Publish::new(&topic, "x").qos(1));
    assert_eq!(clients[0].next_publish().payload, b"x");
    clients.iter_mut().for_each(|it| it.expect_nothing());

    let mut connect = Connect::new("");
    connect.clean_start = false;
    let mut client = scene.open();
    client.send(&connect.bytes3());
    assert_eq!(client.take_connack(), IDENTIFIER_REJECTED);
    client.expect_closed();
}

/// A client id may have at most 1024 bytes.
fn unacceptable_client_id_is_refused_with_code_2(scene: &Scene<'_>) {
    let mut client = scene.open();
    client.send(&Connect::new(&"x".repeat(2000)).bytes3());
    assert_eq!(client.take_connack(), IDENTIFIER_REJECTED);
    client.expect_closed();
}

fn packet_after_a_refused_connect_is_ignored(scene: &Scene<'_>) {
    let mut refused = Connect::new("");
    refused.clean_start = false;
    let publish = Publish::new(&scene.topic("a"), "x").retained();
    let mut client = scene.open();
    client.send(&[refused.bytes3(), publish.bytes3()].concat());
    assert_eq!(client.take_connack(), IDENTIFIER_REJECTED);
    client.expect_closed();
    assert_eq!(client.drain(), []);
    scene.subscriber("subscriber", 0).expect_nothing();
}

/// Also if the client sends further packets before it has the CONNACK, or if messages wait for it.
fn connack_is_the_first_packet_and_unique(scene: &Scene<'_>) {
    let topic = scene.topic("a");
    let mut client = scene.resume("client");
    assert_eq!(client.subscribe(&topic, 1), 1);
    client.disconnect();
    scene.publish(&topic, "x");
    let mut client = scene.open();
    let subscribe = packet3::subscribe(7, &[(&scene.topic("b"), 2)]);
    client.send(&[&scene.lasting("client").bytes3()[..], &subscribe, &PINGREQ].concat());
    assert_eq!(client.take_connack(), 0);
    assert!(client.session_present());
    assert_eq!(client.take_publish(&topic).payload, b"x");
    let suback = client.take("a SUBACK", |it| it.kind() == kind::SUBACK);
    assert_eq!(suback.suback3(), (7, vec![2]));
    client.take("a PINGRESP", |it| *it.bytes() == [0xD0, 0]);
    client.expect_nothing();
}

fn takeover_closes_the_existing_connection(scene: &Scene<'_>) {
    let mut old = scene.resume("client");
    let mut new = scene.resume("client");
    old.expect_closed();
    assert_eq!(old.drain(), []);
    assert!(new.session_present());
    new.ping();
    // A clean session ends the old session, too.
    let mut clean = scene.connect("client");
    new.expect_closed();
    assert!(!clean.session_present());
    clean.ping();
}

fn disconnect_closes_the_connection(scene: &Scene<'_>) {
    let topic = scene.topic("a");
    let mut client = scene.connect("client");
    // The broker ignores what follows a DISCONNECT.
    let late = Publish::new(&topic, "late").retained().bytes3();
    client.send(&[&DISCONNECT[..], &late].concat());
    client.expect_closed();
    assert_eq!(client.drain(), []);
    scene.subscriber("subscriber", 0).expect_nothing();
}

/// The broker closes a silent connection after 1.5 times the Keep Alive, as if it had failed, which
/// publishes the will. A client that sends packets in time stays connected, and so does a client
/// without a Keep Alive.
fn silence_beyond_keep_alive_closes(scene: &Scene<'_>) {
    let mut subscriber = scene.subscriber("subscriber", 0);
    let will = Publish::new(&scene.topic("will"), "silent");
    let mut connect = scene.clean("silent").will(will, 0);
    connect.keep_alive_s = 1;
    let begin = Instant::now();
    let mut silent = scene.accept(&connect);
    let mut connect = scene.clean("busy");
    connect.keep_alive_s = 1;
    let mut busy = scene.accept(&connect);
    let mut unlimited = scene.connect("unlimited");
    let end = loop {
        match silent.poll(Duration::from_millis(300)) {
            Heard::Closed => break begin.elapsed(),
            Heard::Silence => assert!(begin.elapsed() < PATIENCE, "the connection stays open"),
            Heard::Packet(packet) => panic!("unexpected: {packet:?}"),
        }
        busy.ping();
    };
    assert!(end >= Duration::from_millis(1400), "closed after {end:?}");
    assert_eq!(subscriber.next_publish().payload, b"silent");
    while begin.elapsed() < Duration::from_millis(2500) {
        thread::sleep(Duration::from_millis(300));
        busy.ping();
    }
    unlimited.ping();
}
