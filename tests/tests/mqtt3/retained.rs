//! Retained messages (section 3.3.1.3).

use statehouse_tests::Publish;

use crate::scene::{Scene, checks};

checks! {
    empty_payload_removes_the_retained_message,
    last_retained_message_reaches_each_new_subscription,
    message_without_retain_changes_no_retained_message,
    retained_message_at_qos_0_replaces_another,
    retained_messages_outlive_the_session,
    subscription_matching_several_gets_each_once,
}

fn last_retained_message_reaches_each_new_subscription(scene: &Scene<'_>) {
    let topic = scene.topic("a");
    let mut existing = scene.subscriber("existing", 2);
    let mut publisher = scene.connect("publisher");
    for (payload, qos) in [("1", 0), ("2", 2), ("3", 1)] {
        publisher.publish(Publish::new(&topic, payload).qos(qos).retained());
        // An existing subscription gets it like any other message.
        let got = existing.take_publish(&topic);
        assert_eq!(got.payload, payload.as_bytes());
        assert_eq!((got.qos, got.retain), (qos, false));
        // A new one gets the last message only, at no more than its QoS.
        for granted in 0..=2 {
            let mut new = scene.subscriber("new", granted);
            let got = new.next_publish();
            assert_eq!((&got.payload[..], got.retain), (payload.as_bytes(), true));
            assert_eq!((got.qos, got.dup), (qos.min(granted), false));
            new.disconnect();
        }
    }
}

fn empty_payload_removes_the_retained_message(scene: &Scene<'_>) {
    let (one, two) = (scene.topic("1"), scene.topic("2"));
    let mut existing = scene.subscriber("existing", 2);
    let mut publisher = scene.connect("publisher");
    for qos in 0..=2 {
        for topic in [&one, &two] {
            publisher.publish(Publish::new(topic, "x").qos(1).retained());
            existing.next_publish();
        }
        publisher.publish(Publish::new(&one, "").qos(qos).retained());
        let got = existing.take_publish(&one);
        assert_eq!(got.payload, b"");
        assert_eq!((got.qos, got.retain), (qos, false));
        existing.ping();
        existing.drain();
        // The other topic keeps its message.
        let mut new = scene.subscriber("new", 1);
        assert_eq!(new.next_publish().topic, two);
        new.expect_nothing();
        new.disconnect();
    }
    // Without the flag, an empty payload removes nothing.
    publisher.publish(Publish::new(&two, "").qos(1));
    assert_eq!(scene.subscriber("last", 0).next_publish().payload, b"x");
}

fn message_without_retain_changes_no_retained_message(scene: &Scene<'_>) {
    let (one, two) = (scene.topic("1"), scene.topic("2"));
    let mut publisher = scene.connect("publisher");
    publisher.publish(Publish::new(&one, "kept").qos(1).retained());
    for qos in 0..=2 {
        for topic in [&one, &two] {
            publisher.publish(Publish::new(topic, "passing").qos(qos));
        }
    }
    publisher.ping();
    let mut new = scene.subscriber("new", 2);
    let got = new.next_publish();
    assert_eq!((got.topic, &got.payload[..]), (one, &b"kept"[..]));
    new.expect_nothing();
}

/// The standard lets a broker discard the new message at any time; Statehouse and Mosquitto do not.
fn retained_message_at_qos_0_replaces_another(scene: &Scene<'_>) {
    let topic = scene.topic("a");
    let mut publisher = scene.connect("publisher");
    publisher.publish(Publish::new(&topic, "old").qos(2).retained());
    publisher.publish(Publish::new(&topic, "new").retained());
    publisher.ping();
    let mut new = scene.subscriber("new", 2);
    let got = new.next_publish();
    assert_eq!((&got.payload[..], got.qos), (&b"new"[..], 0));
    new.expect_nothing();
}

/// Neither a clean session that ends nor a discarded session takes its retained messages along.
fn retained_messages_outlive_the_session(scene: &Scene<'_>) {
    let topic = scene.topic("a");
    let mut publisher = scene.resume("publisher");
    publisher.publish(Publish::new(&topic, "x").qos(1).retained());
    publisher.abort();
    scene.connect("publisher").disconnect();
    assert_eq!(scene.subscriber("new", 1).next_publish().payload, b"x");
    scene.restart();
    assert_eq!(scene.subscriber("new", 1).next_publish().payload, b"x");
}

fn subscription_matching_several_gets_each_once(scene: &Scene<'_>) {
    let mut publisher = scene.connect("publisher");
    for n in 0..20 {
        let topic = scene.topic(&format!("a/{n:02}/b"));
        publisher.publish(Publish::new(&topic, [n]).qos(1).retained());
    }
    publisher.publish(Publish::new(&scene.topic("a/b"), "other").qos(1).retained());
    let mut new = scene.connect("new");
    assert_eq!(new.subscribe(&scene.topic("a/+/b"), 1), 1);
    let mut payloads: Vec<_> = (0..20).map(|_| new.next_publish().payload).collect();
    payloads.sort();
    assert!(
        payloads.iter().zip(0..).all(|(it, n)| *it == [n]),
        "{payloads:?}"
    );
    new.expect_nothing();
}
