//! The order of messages and acknowledgements (section 4.6).

use statehouse_tests::{
    Publish,
    packet::{acknowledge, kind},
};

use crate::scene::{Scene, checks};

checks! {
    acknowledgements_follow_the_order_of_publishes,
    messages_follow_the_order_of_their_publisher,
    pubrels_follow_the_order_of_pubrecs,
    redelivery_follows_the_order_of_the_first_delivery,
}

fn acknowledgements_follow_the_order_of_publishes(scene: &Scene<'_>) {
    let mut publisher = scene.connect("publisher");
    for (qos, answer) in [(1, kind::PUBACK), (2, kind::PUBREC)] {
        let ids = [30_u16, 10, 20, 65_535, 1];
        let bytes = ids.map(|id| {
            let mut publish = Publish::new(&scene.topic("a"), "x").qos(qos);
            publish.packet_id = id;
            publish.bytes3()
        });
        publisher.send(&bytes.concat());
        assert_eq!(ids.map(|_| publisher.next_ack(answer)), ids);
        if qos == 2 {
            publisher.send(&ids.map(|id| acknowledge(kind::PUBREL, id)).concat());
            assert_eq!(ids.map(|_| publisher.next_ack(kind::PUBCOMP)), ids);
        }
    }
}

/// Per topic and QoS, to a connected client and to a session without a connection.
fn messages_follow_the_order_of_their_publisher(scene: &Scene<'_>) {
    let topics = [0, 1, 2].map(|qos| scene.topic(&qos.to_string()));
    let mut absent = scene.resume("absent");
    assert_eq!(absent.subscribe(&scene.topic("+"), 2), 2);
    absent.disconnect();
    let mut connected = scene.subscriber("connected", 2);
    let mut publisher = scene.connect("publisher");
    for n in 0..30 {
        for (qos, topic) in (0..).zip(&topics) {
            publisher.publish(Publish::new(topic, [n]).qos(qos));
        }
    }
    for n in 0..30 {
        for topic in &topics {
            assert_eq!(connected.take_publish(topic).payload, [n], "{topic}");
        }
    }
    let mut absent = scene.resume("absent");
    for n in 0..30 {
        // QoS 0 need not be stored.
        for topic in &topics[1..] {
            assert_eq!(absent.take_publish(topic).payload, [n], "{topic}");
        }
    }
}

fn redelivery_follows_the_order_of_the_first_delivery(scene: &Scene<'_>) {
    let mut client = scene.silent("client");
    assert_eq!(client.subscribe(&scene.topic("#"), 2), 2);
    let mut publisher = scene.connect("publisher");
    for n in 0..9 {
        publisher.publish(Publish::new(&scene.topic("a"), [n]).qos(1 + n % 2));
    }
    let mut sent: Vec<_> = (0..9).map(|_| client.next_publish()).collect();
    for (n, publish) in (0..).zip(&sent) {
        assert_eq!(publish.payload, [n]);
    }
    // One in the middle is acknowledged.
    client.send(&acknowledge(kind::PUBACK, sent[4].packet_id));
    client.ping();
    sent.remove(4);
    client.abort();
    publisher.publish(Publish::new(&scene.topic("a"), "new").qos(1));
    let mut client = scene.silent("client");
    for publish in sent {
        let again = client.next_publish();
        let expected = Publish {
            dup: true,
            ..publish
        };
        assert_eq!(again, expected);
    }
    let new = client.next_publish();
    assert_eq!((&new.payload[..], new.dup), (&b"new"[..], false));
}

/// Also if the client does not follow the order of the messages.
fn pubrels_follow_the_order_of_pubrecs(scene: &Scene<'_>) {
    let topic = scene.topic("a");
    let mut client = scene.connect("client");
    client.acknowledges = false;
    assert_eq!(client.subscribe(&topic, 2), 2);
    let mut publisher = scene.connect("publisher");
    let ids = [0, 1, 2, 3].map(|n| {
        publisher.publish(Publish::new(&topic, [n]).qos(2));
        client.next_publish().packet_id
    });
    let order = [ids[0], ids[2], ids[1], ids[3]];
    client.send(&order.map(|id| acknowledge(kind::PUBREC, id)).concat());
    assert_eq!(order.map(|_| client.next_ack(kind::PUBREL)), order);
}
