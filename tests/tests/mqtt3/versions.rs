//! Clients of MQTT 3.1.1 and MQTT 5 on one broker.

use statehouse_tests::{Client, Connect, Property, Publish, packet::kind};

use crate::scene::{Scene, checks};

checks! {
    messages_travel_between_the_versions,
    properties_are_left_out_for_older_clients,
    retained_messages_travel_between_the_versions,
    session_is_resumed_by_the_other_version,
    takeover_and_wills_work_between_the_versions,
}

fn messages_travel_between_the_versions(scene: &Scene<'_>) {
    let topic = scene.topic("a");
    let (mut old, mut new) = (scene.subscriber("old", 2), scene.connect5("new"));
    assert_eq!(new.subscribe(&topic, 2), 2);
    for qos in 0..=2 {
        for payload in ["old", "new"] {
            let publish = Publish::new(&topic, payload).qos(qos);
            match payload {
                "old" => old.publish(publish),
                _ => drop(new.publish(publish)),
            }
            let (to_old, to_new) = (old.take_publish(&topic), new.take_publish(&topic));
            assert_eq!((&to_old.payload[..], to_old.qos), (payload.as_bytes(), qos));
            assert_eq!((&to_new.payload[..], to_new.qos), (payload.as_bytes(), qos));
            assert_eq!(to_new.properties, []);
        }
    }
}

fn properties_are_left_out_for_older_clients(scene: &Scene<'_>) {
    let topic = scene.topic("a");
    let mut old = scene.subscriber("old", 1);
    let mut new = scene.connect5("new");
    let publish = Publish::new(&topic, "x")
        .qos(1)
        .with(Property::MessageExpiry(100))
        .with(Property::ContentType("text/plain".into()))
        .with(Property::ResponseTopic("answers".into()))
        .with(Property::CorrelationData(b"\0\xFF".to_vec()))
        .with(Property::user("k", "v"));
    new.publish(publish.clone().retained());
    // A topic alias stays between the sender and the broker.
    let mut alias = publish.with(Property::TopicAlias(1));
    new.publish(alias.clone());
    alias.topic = String::new();
    alias.properties = vec![Property::TopicAlias(1)];
    new.publish(alias);
    for _ in 0..3 {
        let got = old.next_publish();
        assert_eq!((&*got.topic, &got.payload[..]), (&*topic, &b"x"[..]));
    }
    assert_eq!(scene.subscriber("later", 1).next_publish().payload, b"x");
}

fn retained_messages_travel_between_the_versions(scene: &Scene<'_>) {
    let (one, two) = (scene.topic("1"), scene.topic("2"));
    let (mut old, mut new) = (scene.connect("old"), scene.connect5("new"));
    old.publish(Publish::new(&one, "old").qos(1).retained());
    new.publish(Publish::new(&two, "new").qos(1).retained());
    assert_eq!(old.subscribe(&two, 1), 1);
    assert_eq!(new.subscribe(&one, 1), 1);
    let (to_old, to_new) = (old.next_publish(), new.take_publish(&one));
    assert_eq!((&to_old.payload[..], to_old.retain), (&b"new"[..], true));
    assert_eq!((&to_new.payload[..], to_new.retain), (&b"old"[..], true));
}

/// A session belongs to the client id. A message that was in flight is redelivered.
fn session_is_resumed_by_the_other_version(scene: &Scene<'_>) {
    let topic = scene.topic("a");
    let newer = Connect::resume(&scene.id("client"), 100);
    let mut publisher = scene.connect("publisher");
    let mut old = scene.silent("client");
    assert_eq!(old.subscribe(&topic, 2), 2);
    publisher.publish(Publish::new(&topic, "1").qos(1));
    let sent = old.next_publish();
    old.abort();
    publisher.publish(Publish::new(&topic, "2").qos(2));

    let mut new = Client::connect(scene.at.plain, &newer);
    new.acknowledges = false;
    assert!(new.session_present());
    let again = new.next().publish();
    assert_eq!((again.packet_id, again.dup), (sent.packet_id, true));
    let second = new.next().publish();
    assert_eq!((&second.payload[..], second.qos), (&b"2"[..], 2));
    new.send(&statehouse_tests::packet::acknowledge(
        kind::PUBACK,
        sent.packet_id,
    ));
    new.ping();
    new.abort();

    let mut old = scene.resume("client");
    assert!(old.session_present());
    let again = old.next_publish();
    assert_eq!((again.packet_id, again.dup), (second.packet_id, true));
    old.expect_nothing();
}

fn takeover_and_wills_work_between_the_versions(scene: &Scene<'_>) {
    let topic = scene.topic("will");
    let (mut subscriber, mut subscriber5) = (scene.subscriber("old", 1), scene.connect5("new"));
    assert_eq!(subscriber5.subscribe(&topic, 1), 1);
    let will = |payload| Publish::new(&topic, payload).qos(1);
    let mut old = scene.accept(&scene.clean("client").will(will("old"), 0));
    let connect = scene.clean("client").will(will("new"), 0);
    let mut new = Client::connect(scene.at.plain, &connect);
    old.expect_closed();
    let newest = scene.connect("client");
    new.expect_closed();
    newest.disconnect();
    for payload in ["old", "new"] {
        assert_eq!(subscriber.next_publish().payload, payload.as_bytes());
        assert_eq!(subscriber5.take_publish(&topic).payload, payload.as_bytes());
    }
    subscriber.expect_nothing();
}
