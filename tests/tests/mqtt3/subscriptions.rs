//! Subscriptions and topic matching (sections 3.8 to 3.11 and 4.7).

use statehouse_tests::{
    Client3, Packet, Publish,
    packet::{acknowledge, kind, packet},
    packet3,
};

use crate::scene::{Scene, checks};

checks! {
    leading_wildcard_matches_no_dollar_topic,
    messages_in_flight_are_completed_after_unsubscribe,
    pingreq_is_answered,
    qos_is_the_lower_of_message_and_subscription,
    suback_has_a_code_for_each_filter_in_order,
    subscribing_again_replaces_the_subscription,
    topics_are_compared_character_by_character,
    topics_below_sys_are_not_for_clients,
    unsubscribe_removes_exactly_the_named_filters,
    wildcards_match_whole_levels;
    not mosquitto:
    overlapping_subscriptions_get_the_highest_qos,
}

fn pingreq_is_answered(scene: &Scene<'_>) {
    let mut client = scene.connect("client");
    for _ in 0..3 {
        client.send(&statehouse_tests::packet::PINGREQ);
        assert_eq!(client.next().bytes(), [0xD0, 0]);
    }
}

fn suback_has_a_code_for_each_filter_in_order(scene: &Scene<'_>) {
    let mut client = scene.connect("client");
    let filters = ["a", "b/#", "+/c", "$x/a", "a"].map(|it| scene.topic(it));
    let filters: Vec<_> = filters
        .iter()
        .map(|it| &**it)
        .zip([2, 0, 1, 1, 0])
        .collect();
    for id in [1, 0x1234, 0xFFFF] {
        client.send(&packet3::subscribe(id, &filters));
        assert_eq!(client.next().suback3(), (id, vec![2, 0, 1, 1, 0]));
    }
    // As if each filter had come alone: the last one replaces the first.
    client.publish(Publish::new(&scene.topic("a"), "x").qos(1));
    assert_eq!(client.next_publish().qos, 0);
    client.expect_nothing();
}

fn qos_is_the_lower_of_message_and_subscription(scene: &Scene<'_>) {
    let mut client = scene.connect("client");
    let topics = [0, 1, 2].map(|qos| scene.topic(&qos.to_string()));
    for (topic, granted) in topics.iter().zip(0..) {
        assert_eq!(client.subscribe(topic, granted), granted);
    }
    let mut publisher = scene.connect("publisher");
    for (topic, granted) in topics.iter().zip(0..) {
        for qos in 0..=2 {
            publisher.publish(Publish::new(topic, [qos]).qos(qos));
            let got = client.take_publish(topic);
            assert_eq!((&got.payload[..], got.qos), (&[qos][..], qos.min(granted)));
            assert!(!got.retain && !got.dup);
        }
    }
    client.expect_nothing();
}

/// The QoS of each copy of a message that matches these filters.
fn copies(scene: &Scene<'_>, filters: &[(&str, u8)]) -> Vec<u8> {
    let mut client = scene.connect("client");
    for (filter, qos) in filters {
        assert_eq!(client.subscribe(&scene.topic(filter), *qos), *qos);
    }
    client.publish(Publish::new(&scene.topic("a/b"), "x").qos(2));
    client.ping();
    let publishes = client
        .drain()
        .into_iter()
        .filter(|it| it.kind() == kind::PUBLISH);
    publishes.map(|it| it.publish3().qos).collect()
}

/// The standard allows further copies, one for each further subscription. Statehouse sends none.
fn overlapping_subscriptions_get_the_highest_qos(scene: &Scene<'_>) {
    for (filters, highest) in [
        (&[("#", 0), ("a/+", 2), ("a/b", 1)][..], 2),
        (&[("a/b", 0), ("#", 1)], 1),
        (&[("+/b", 2), ("+/+", 0)], 2),
    ] {
        assert_eq!(copies(scene, filters), [highest], "{filters:?}");
    }
}

fn subscribing_again_replaces_the_subscription(scene: &Scene<'_>) {
    let topic = scene.topic("a");
    let mut publisher = scene.connect("publisher");
    publisher.publish(Publish::new(&topic, "kept").qos(2).retained());
    let mut client = scene.connect("client");
    for qos in [0, 2, 1, 1] {
        assert_eq!(client.subscribe(&topic, qos), qos);
        // Retained messages are sent again.
        let got = client.next_publish();
        assert_eq!(got.payload, b"kept");
        assert_eq!((got.qos, got.retain), (qos, true));
        publisher.publish(Publish::new(&topic, "live").qos(2));
        let got = client.next_publish();
        assert_eq!(got.payload, b"live");
        assert_eq!((got.qos, got.retain), (qos, false));
        client.expect_nothing();
    }
}

/// Publishes to topics below the check's name. Returns those that a subscription to `filter` gets.
fn matched(client: &mut Client3, scene: &Scene<'_>, filter: &str, topics: &[&str]) -> Vec<String> {
    assert_eq!(client.subscribe(&scene.topic(filter), 0), 0, "{filter}");
    for topic in topics {
        client.publish(Publish::new(&scene.topic(topic), "x"));
    }
    client.ping();
    let got = client.drain().into_iter().map(|it| it.publish3().topic);
    let got = got
        .map(|it| it[scene.topic("").len()..].to_owned())
        .collect();
    client.unsubscribe(&[&scene.topic(filter)]);
    got
}

fn wildcards_match_whole_levels(scene: &Scene<'_>) {
    let mut client = scene.connect("client");
    let topics = [
        "s", "s/", "/s", "s/p", "s/p/", "s/p/q", "t", "t/p", "s/pq", "//",
    ];
    for (filter, expected) in [
        ("s/#", &["s", "s/", "s/p", "s/p/", "s/p/q", "s/pq"][..]),
        ("s/+", &["s/", "s/p", "s/pq"]),
        ("s/+/#", &["s/", "s/p", "s/p/", "s/p/q", "s/pq"]),
        ("+", &["s", "t"]),
        ("+/+", &["s/", "/s", "s/p", "t/p", "s/pq"]),
        ("+/p", &["s/p", "t/p"]),
        ("/+", &["/s"]),
        ("+/+/+", &["s/p/", "s/p/q", "//"]),
        ("s/p/+", &["s/p/", "s/p/q"]),
        ("#", &topics),
    ] {
        let got = matched(&mut client, scene, filter, &topics);
        assert_eq!(got, expected, "{filter}");
    }
}

fn topics_are_compared_character_by_character(scene: &Scene<'_>) {
    let mut client = scene.connect("client");
    // The two forms of é are different topics.
    let topics = [
        "a", "A", "a ", " a", "a/", "/a", "e\u{301}", "é", "a b", "$a", "ａ",
    ];
    for topic in topics {
        assert_eq!(matched(&mut client, scene, topic, &topics), [topic]);
    }
}

/// A topic of the first level `$…` for the clients' own use is allowed, though not recommended.
fn leading_wildcard_matches_no_dollar_topic(scene: &Scene<'_>) {
    let mut client = scene.connect("client");
    let own = scene.topic("a");
    let dollar = format!("${own}");
    let level = dollar.split('/').next().unwrap();
    for filter in ["#", "+/#", "+/a"] {
        assert_eq!(client.subscribe(filter, 0), 0);
    }
    client.publish(Publish::new(&dollar, "x").retained());
    client.publish(Publish::new(&own, "x"));
    // Other checks publish, too.
    client.take_publish(&own);
    client.ping();
    let hidden = |it: &Packet| it.kind() != kind::PUBLISH || !it.publish3().topic.starts_with('$');
    assert!(client.drain().iter().all(hidden));
    for filter in [format!("{level}/#"), format!("{level}/+"), dollar.clone()] {
        let mut client = scene.connect("other");
        assert_eq!(client.subscribe(&filter, 0), 0);
        assert_eq!(client.next_publish().topic, dollar, "{filter}");
    }
    client.publish(Publish::new(&dollar, "").retained());
    client.ping();
}

fn topics_below_sys_are_not_for_clients(scene: &Scene<'_>) {
    let topic = format!("$SYS/{}", scene.topic("a"));
    let mut client = scene.connect("client");
    for qos in 0..=2 {
        client.publish(Publish::new(&topic, "x").qos(qos).retained());
        assert_eq!(client.subscribe(&topic, qos), qos);
    }
    client.expect_nothing();
}

fn unsubscribe_removes_exactly_the_named_filters(scene: &Scene<'_>) {
    let filters = ["a/+", "a/#", "a/b", "b"].map(|it| scene.topic(it));
    let mut client = scene.connect("client");
    for filter in &filters {
        assert_eq!(client.subscribe(filter, 1), 1);
    }
    let gets = |client: &mut Client3, topic: &str| {
        client.publish(Publish::new(&scene.topic(topic), "x").qos(1));
        client.ping();
        let got = client.drain();
        got.iter().any(|it| it.kind() == kind::PUBLISH)
    };
    // Without a subscription to remove, and by a filter that only matches, nothing changes.
    for id in [0x0100, 0xFFFF] {
        let matching = [scene.topic("+/+"), scene.topic("none"), scene.topic("#")];
        client.send(&packet3::unsubscribe(
            id,
            &matching.each_ref().map(|it| &**it),
        ));
        assert_eq!(client.next(), unsuback(id));
    }
    assert!(gets(&mut client, "a/b") && gets(&mut client, "b"));
    // Several filters with one UNSUBACK.
    client.send(&packet3::unsubscribe(
        7,
        &[&filters[0], &filters[3], &filters[2]],
    ));
    assert_eq!(client.next(), unsuback(7));
    assert!(gets(&mut client, "a/b") && !gets(&mut client, "b"));
    client.unsubscribe(&[&filters[1]]);
    assert!(!gets(&mut client, "a/b"));
}

fn unsuback(id: u16) -> Packet {
    Packet::cut(&mut packet(0xB0, &id.to_be_bytes())).unwrap()
}

/// New messages do not follow; those that the broker has begun to send are delivered to the end,
/// also over a reconnect.
fn messages_in_flight_are_completed_after_unsubscribe(scene: &Scene<'_>) {
    let topic = scene.topic("a");
    let mut client = scene.silent("client");
    assert_eq!(client.subscribe(&topic, 2), 2);
    let mut publisher = scene.connect("publisher");
    let [one, two] = [1, 2].map(|qos| {
        publisher.publish(Publish::new(&topic, "begun").qos(qos));
        client.next_publish()
    });
    client.unsubscribe(&[&topic]);
    publisher.publish(Publish::new(&topic, "later").qos(1));
    client.expect_nothing();
    client.send(&acknowledge(kind::PUBREC, two.packet_id));
    assert_eq!(client.next_ack(kind::PUBREL), two.packet_id);
    client.abort();
    let mut client = scene.resume("client");
    let again = client.next_publish();
    assert_eq!((again.packet_id, again.dup), (one.packet_id, true));
    client.take_ack(kind::PUBREL, two.packet_id);
    client.expect_nothing();
}
