//! Session state over a restart of the broker (section 4.1).

use statehouse_tests::{
    Publish,
    packet::{acknowledge, kind},
};

use crate::scene::{Scene, checks};

checks! {
    session_state_survives_a_restart,
    unfinished_qos_2_exchanges_survive_a_restart,
}

/// Subscriptions, messages in the queue, and messages in flight.
fn session_state_survives_a_restart(scene: &Scene<'_>) {
    let topic = scene.topic("a");
    let mut client = scene.silent("client");
    assert_eq!(client.subscribe(&topic, 2), 2);
    let mut publisher = scene.connect("publisher");
    publisher.publish(Publish::new(&topic, "in flight").qos(1));
    let sent = client.next_publish();
    client.abort();
    publisher.publish(Publish::new(&topic, "queued").qos(2));
    drop(scene.connect("clean"));
    scene.restart();
    assert!(!scene.resume("clean").session_present());
    let mut client = scene.resume("client");
    assert!(client.session_present());
    let again = client.next_publish();
    assert_eq!((again.packet_id, again.dup), (sent.packet_id, true));
    assert_eq!(again.payload, b"in flight");
    assert_eq!(client.next_publish().payload, b"queued");
    scene.publish(&topic, "live");
    assert_eq!(client.next_publish().payload, b"live");
}

/// In both directions.
fn unfinished_qos_2_exchanges_survive_a_restart(scene: &Scene<'_>) {
    let topic = scene.topic("a");
    let mut client = scene.silent("client");
    assert_eq!(client.subscribe(&topic, 2), 2);
    scene
        .connect("publisher")
        .publish(Publish::new(&topic, "to").qos(2));
    let id = client.next_publish().packet_id;
    client.send(&acknowledge(kind::PUBREC, id));
    assert_eq!(client.next_ack(kind::PUBREL), id);
    let mut subscriber = scene.resume("subscriber");
    assert_eq!(subscriber.subscribe(&scene.topic("b"), 1), 1);
    subscriber.disconnect();
    let mut publish = Publish::new(&scene.topic("b"), "from").qos(2);
    publish.packet_id = 77;
    client.start(publish.clone());
    client.take_ack(kind::PUBREC, 77);
    client.abort();
    scene.restart();
    let mut client = scene.silent("client");
    assert_eq!(client.next_ack(kind::PUBREL), id);
    client.send(&acknowledge(kind::PUBCOMP, id));
    publish.dup = true;
    client.start(publish);
    client.take_ack(kind::PUBREC, 77);
    client.send(&acknowledge(kind::PUBREL, 77));
    client.take_ack(kind::PUBCOMP, 77);
    client.expect_nothing();
    let mut subscriber = scene.resume("subscriber");
    assert_eq!(subscriber.next_publish().payload, b"from");
    subscriber.expect_nothing();
}
