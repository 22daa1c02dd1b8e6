//! The three levels of QoS in both directions (sections 3.3, 4.3 and 4.4).

use statehouse_tests::{
    Client3, Packet, Publish,
    packet::{acknowledge, kind},
};

use crate::scene::{Scene, checks};

checks! {
    acknowledged_packet_id_is_for_a_new_message,
    dup_of_the_publisher_is_not_forwarded,
    forwarded_topic_and_payload_are_unchanged,
    packet_id_in_flight_is_not_used_again,
    qos_0_is_sent_once_without_packet_id,
    qos_1_is_redelivered_until_acknowledged,
    qos_2_from_a_client_is_delivered_once,
    qos_2_from_a_client_is_delivered_once_over_a_reconnect,
    qos_2_to_a_client_is_redelivered_step_by_step,
}

/// A message with this packet id.
fn message(topic: &str, payload: &str, qos: u8, packet_id: u16) -> Publish {
    let mut publish = Publish::new(topic, payload).qos(qos);
    publish.packet_id = packet_id;
    publish
}

/// The messages that `subscriber` has got, by payload.
fn received(subscriber: &mut Client3) -> Vec<String> {
    subscriber.ping();
    let publishes = subscriber.drain().into_iter();
    publishes
        .filter(|it| it.kind() == kind::PUBLISH)
        .map(|it| String::from_utf8(it.publish3().payload).unwrap())
        .collect()
}

fn qos_0_is_sent_once_without_packet_id(scene: &Scene<'_>) {
    let mut subscriber = scene.subscriber("subscriber", 2);
    let mut publisher = scene.connect("publisher");
    publisher.publish(Publish::new(&scene.topic("a"), "x"));
    publisher.expect_nothing();
    let got = subscriber.next();
    assert_eq!(got.head, 0x30, "{got:?}");
    assert_eq!(got.publish3().payload, b"x");
    subscriber.expect_nothing();
}

fn forwarded_topic_and_payload_are_unchanged(scene: &Scene<'_>) {
    let mut subscriber = scene.subscriber("subscriber", 2);
    let mut publisher = scene.connect("publisher");
    for (n, size) in [0, 1, 100, 200, 20_000].into_iter().enumerate() {
        let mut publish = Publish::new(&scene.topic(&format!("a//{n}/")), vec![n as u8; size]);
        publish.qos = n as u8 % 3;
        publisher.publish(publish.clone());
        let got = subscriber.take_publish(&scene.topic(""));
        assert_eq!((got.topic, got.qos), (publish.topic, publish.qos));
        assert_eq!(got.payload, publish.payload);
    }
}

fn dup_of_the_publisher_is_not_forwarded(scene: &Scene<'_>) {
    let mut subscriber = scene.subscriber("subscriber", 2);
    let mut publisher = scene.connect("publisher");
    for qos in [1, 2] {
        let mut repeated = Publish::new(&scene.topic("a"), "x").qos(qos);
        repeated.dup = true;
        publisher.publish(repeated);
        let got = subscriber.take_publish(&scene.topic("a"));
        assert_eq!((got.qos, got.dup), (qos, false));
    }
}

/// A second PUBLISH with the same packet id and DUP, after its PUBACK, is another message.
fn acknowledged_packet_id_is_for_a_new_message(scene: &Scene<'_>) {
    let topic = scene.topic("a");
    let mut subscriber = scene.subscriber("subscriber", 1);
    let mut publisher = scene.connect("publisher");
    for dup in [false, true, false] {
        let mut publish = message(&topic, "x", 1, 0x1234);
        publish.dup = dup;
        publisher.start(publish);
        assert_eq!(publisher.next_ack(kind::PUBACK), 0x1234);
        assert_eq!(subscriber.next_publish().payload, b"x");
    }
    for payload in ["first", "second"] {
        publisher.publish(message(&topic, payload, 2, 0xFFFF));
        assert_eq!(subscriber.next_publish().payload, payload.as_bytes());
    }
}

fn qos_2_from_a_client_is_delivered_once(scene: &Scene<'_>) {
    let topic = scene.topic("a");
    let mut subscriber = scene.subscriber("subscriber", 1);
    let mut publisher = scene.connect("publisher");
    let mut publish = message(&topic, "once", 2, 5);
    for _ in 0..2 {
        publisher.start(publish.clone());
        assert_eq!(publisher.next_ack(kind::PUBREC), 5);
        publish.dup = true;
    }
    for _ in 0..2 {
        publisher.send(&acknowledge(kind::PUBREL, 5));
        assert_eq!(publisher.next_ack(kind::PUBCOMP), 5);
    }
    assert_eq!(subscriber.next_publish().payload, b"once");
    subscriber.expect_nothing();
}

fn qos_2_from_a_client_is_delivered_once_over_a_reconnect(scene: &Scene<'_>) {
    let topic = scene.topic("a");
    let mut subscriber = scene.subscriber("subscriber", 1);
    let mut publish = message(&topic, "once", 2, 5);
    let mut publisher = scene.resume("publisher");
    publisher.start(publish.clone());
    assert_eq!(publisher.next_ack(kind::PUBREC), 5);
    publisher.abort();
    publish.dup = true;
    for _ in 0..2 {
        let mut publisher = scene.resume("publisher");
        publisher.start(publish.clone());
        assert_eq!(publisher.next_ack(kind::PUBREC), 5);
        publisher.abort();
    }
    let mut publisher = scene.resume("publisher");
    publisher.send(&acknowledge(kind::PUBREL, 5));
    assert_eq!(publisher.next_ack(kind::PUBCOMP), 5);
    assert_eq!(subscriber.next_publish().payload, b"once");
    assert_eq!(received(&mut subscriber), [""; 0]);
}

fn qos_1_is_redelivered_until_acknowledged(scene: &Scene<'_>) {
    let topic = scene.topic("a");
    let mut client = scene.silent("subscriber");
    assert_eq!(client.subscribe(&topic, 1), 1);
    let mut publisher = scene.connect("publisher");
    publisher.publish(Publish::new(&topic, "x").qos(1));
    let sent = client.next_publish();
    assert!(!sent.dup && sent.packet_id > 0, "{sent:?}");
    // Not on the same connection.
    client.expect_nothing();
    for _ in 0..2 {
        client.abort();
        client = scene.silent("subscriber");
        let again = client.next_publish();
        assert_eq!((again.packet_id, again.dup), (sent.packet_id, true));
        assert_eq!((again.payload, again.qos), (sent.payload.clone(), 1));
    }
    client.send(&acknowledge(kind::PUBACK, sent.packet_id));
    client.ping();
    client.abort();
    client = scene.silent("subscriber");
    client.expect_nothing();
}

fn qos_2_to_a_client_is_redelivered_step_by_step(scene: &Scene<'_>) {
    let topic = scene.topic("a");
    let mut client = scene.silent("subscriber");
    assert_eq!(client.subscribe(&topic, 2), 2);
    let mut publisher = scene.connect("publisher");
    publisher.publish(Publish::new(&topic, "x").qos(2));
    let sent = client.next_publish();
    assert_eq!((sent.qos, sent.dup), (2, false));
    let id = sent.packet_id;
    client.expect_nothing();
    client.abort();
    client = scene.silent("subscriber");
    let again = client.next_publish();
    assert_eq!((again.packet_id, again.dup, again.qos), (id, true, 2));
    client.send(&acknowledge(kind::PUBREC, id));
    assert_eq!(client.next_ack(kind::PUBREL), id);
    // After the PUBREL only the PUBREL, until the PUBCOMP.
    for _ in 0..2 {
        client.abort();
        client = scene.silent("subscriber");
        assert_eq!(client.next_ack(kind::PUBREL), id);
        client.expect_nothing();
    }
    client.send(&acknowledge(kind::PUBCOMP, id));
    client.ping();
    client.abort();
    client = scene.silent("subscriber");
    client.expect_nothing();
}

fn packet_id_in_flight_is_not_used_again(scene: &Scene<'_>) {
    let topic = scene.topic("a");
    let mut client = scene.connect("subscriber");
    client.acknowledges = false;
    assert_eq!(client.subscribe(&topic, 2), 2);
    let mut publisher = scene.connect("publisher");
    let mut in_flight = Vec::new();
    for n in 0..15 {
        publisher.publish(Publish::new(&topic, [n]).qos(1 + n % 2));
        let got = client.next_publish();
        assert!(
            got.packet_id > 0 && !in_flight.contains(&got.packet_id),
            "{got:?}"
        );
        in_flight.push(got.packet_id);
        // Frees some of them.
        if n % 5 == 4 && got.qos == 1 {
            client.send(&acknowledge(kind::PUBACK, got.packet_id));
            in_flight.pop();
        }
    }
    // The client may use the same ids for its own messages.
    let id = in_flight[0];
    client.start(message(&scene.topic("b"), "x", 1, id));
    let wanted = |it: &Packet| it.kind() == kind::PUBACK;
    assert_eq!(client.take("a PUBACK", wanted).ack3(), id);
}
