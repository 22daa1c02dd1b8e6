//! Tests which subscribers get a message, and how often (MQTT 5, sections 3.8 and 4.7).

use statehouse_tests::{Client, Connect, Property, Publish, Server, packet};

#[test]
fn filters_match_topics_as_specified() {
    let server = Server::start();
    let mut publisher = server.connect("publisher");
    let cases: [(&str, &[&str], &[&str]); 9] = [
        ("a/b", &["a/b"], &["a", "a/b/c", "a/c", "A/b"]),
        ("a/+", &["a/b", "a/"], &["a", "a/b/c"]),
        ("a/#", &["a", "a/b", "a/b/c", "a/"], &["b", "ab"]),
        ("#", &["a", "/a", "a/b/c"], &["$x", "$x/a"]),
        ("+", &["a"], &["/a", "a/b", "$x"]),
        ("+/+", &["a/b", "/a"], &["a", "a/b/c", "$x/a"]),
        ("/+", &["/a"], &["a", "/a/b"]),
        ("+/b/#", &["a/b", "a/b/c"], &["a/c", "$x/b"]),
        ("$x/#", &["$x", "$x/a"], &["a", "x"]),
    ];
    for (n, (filter, matching, other)) in cases.into_iter().enumerate() {
        let mut subscriber = server.connect(&format!("subscriber{n}"));
        assert_eq!(subscriber.subscribe(filter, 0), 0);
        for topic in matching.iter().chain(other) {
            publisher.publish(Publish::new(topic, *topic).qos(1));
        }
        for topic in matching {
            let got = subscriber.next().publish();
            assert_eq!(got.topic, *topic, "{filter}");
            assert_eq!(got.payload, topic.as_bytes());
        }
        subscriber.expect_nothing();
    }
}

#[test]
fn unsubscribe_ends_delivery() {
    let server = Server::start();
    let mut client = server.connect("client");
    client.subscribe("a/#", 0);
    client.send(&packet::unsubscribe(7, "a/#"));
    let (id, reasons) = client.next().suback();
    assert_eq!((id, &reasons[..]), (7, &[0][..]));
    client.send(&packet::unsubscribe(8, "a/#"));
    assert_eq!(client.next().suback().1, [0x11], "no subscription existed");
    client.publish(Publish::new("a/b", "x").qos(1));
    client.expect_nothing();
}

#[test]
fn suback_has_one_reason_per_filter_in_order() {
    let server = Server::start();
    let mut client = server.connect("client");
    let filters = [("a", 0), ("b", 1), ("c", 2), ("$share//d", 0), ("e", 1)];
    client.send(&packet::subscribe(3, &[], &filters));
    assert_eq!(client.next().suback(), (3, vec![0, 1, 2, 0x8F, 1]));
}

/// Section 4.8.2, also across kill -9: the store restores the sessions of a group and their queued
/// messages.
#[test]
fn shared_subscription_survives_a_kill() {
    const GROUP: &str = "$share/group/jobs/#";
    let mut server = Server::restartable(&[]);
    let open =
        |server: &Server, id: &str| Client::connect(server.address(), &Connect::resume(id, 600));
    let (mut one, mut two) = (open(&server, "one"), open(&server, "two"));
    let mut publisher = server.connect("publisher");
    for (n, member) in [&mut one, &mut two].into_iter().enumerate() {
        let id = Property::SubscriptionId(n as u32 + 1);
        assert_eq!(member.subscribe_with(GROUP, 1, &[id]), 1);
    }
    for n in 0..4_u8 {
        publisher.publish(Publish::new("jobs/x", [n]).qos(1));
        let (member, other, id) = match n % 2 {
            0 => (&mut one, &mut two, 1),
            _ => (&mut two, &mut one, 2),
        };
        let got = member.take_publish("jobs/x");
        assert_eq!((got.qos, &got.payload[..]), (1, &[n][..]));
        assert_eq!(got.properties, [Property::SubscriptionId(id)]);
        other.expect_nothing();
    }
    one.abort();
    two.abort();
    let absent = publisher.publish(Publish::new("jobs/x", "kept").qos(1));
    assert_eq!(absent.reason, 0);
    server.kill_and_restart();
    let (mut one, mut two) = (open(&server, "one"), open(&server, "two"));
    assert!(one.session_present() && two.session_present());
    // The broker chooses the absent member that queues a message (section 4.8.2).
    one.ping();
    let waiting = one.drain();
    let (keeper, other) = match waiting.is_empty() {
        true => (&mut two, &mut one),
        false => (&mut one, &mut two),
    };
    keeper.put_back(waiting);
    assert_eq!(keeper.take_publish("jobs/x").payload, b"kept");
    other.expect_nothing();
    let mut publisher = server.connect("publisher");
    for _ in 0..2 {
        publisher.publish(Publish::new("jobs/x", "again").qos(1));
    }
    for member in [&mut one, &mut two] {
        assert_eq!(member.take_publish("jobs/x").payload, b"again");
        member.expect_nothing();
    }
}

/// The broker must not forward requests to the store to any subscriber.
#[test]
fn requests_do_not_reach_shared_subscriptions() {
    let server = Server::start();
    let mut eavesdropper = server.connect("eavesdropper");
    eavesdropper.subscribe("$share/g/statestore/#", 1);
    server.store("client").set("k", "v");
    eavesdropper.expect_nothing();
}

#[test]
fn no_local_excludes_own_messages() {
    let server = Server::start();
    let (mut one, mut two) = (server.connect("one"), server.connect("two"));
    const NO_LOCAL: u8 = 4;
    one.subscribe("a", NO_LOCAL);
    two.subscribe("a", 0);
    one.publish(Publish::new("a", "mine").qos(1));
    assert_eq!(two.next().publish().payload, b"mine");
    one.expect_nothing();
    two.publish(Publish::new("a", "yours").qos(1));
    assert_eq!(one.next().publish().payload, b"yours");
    one.expect_nothing();
}

/// The store publishes an answer, not the client that sent the request.
#[test]
fn no_local_does_not_exclude_answers_of_the_store() {
    let server = Server::start();
    let mut client = server.connect("client");
    client.subscribe("clients/client/#", 1 | 4);
    let mut store = server.store("other");
    let mut request = store.command(&["GET", "k"]);
    request.response_topic = Some("clients/client/answers".into());
    client.publish(request.publish());
    let answer = client.take_publish("clients/client/answers");
    assert_eq!(answer.payload, b"$-1\r\n");
}

/// The one copy has the highest QoS and every subscription identifier.
#[test]
fn overlapping_filters_deliver_one_copy() {
    let server = Server::start();
    let mut client = server.connect("client");
    for (id, filter, qos) in [(5, "a/+", 0), (300, "a/#", 1), (70_000, "#", 0)] {
        client.subscribe_with(filter, qos, &[Property::SubscriptionId(id)]);
    }
    let mut publisher = server.connect("publisher");
    publisher.publish(Publish::new("a/b", "x").qos(1));
    let got = client.next().publish();
    assert_eq!(got.qos, 1);
    assert_eq!(got.subscription_ids(), [5, 300, 70_000]);
    client.expect_nothing();
}

#[test]
fn delivery_uses_the_lower_qos() {
    let server = Server::start();
    let mut publisher = server.connect("publisher");
    for granted in 0..=2 {
        let mut client = server.connect(&format!("client{granted}"));
        assert_eq!(client.subscribe("a", granted), granted);
        for qos in 0..=2 {
            publisher.publish(Publish::new("a", [qos]).qos(qos));
            let got = client.take_publish("a");
            assert_eq!((got.qos, &got.payload[..]), (qos.min(granted), &[qos][..]));
            assert!(!got.retain && !got.dup);
        }
        // Only PUBREL packets of the QoS 2 handshakes remain.
        client.ping();
        let rest = client.drain();
        assert!(rest.iter().all(|it| it.kind() == packet::kind::PUBREL));
    }
}

/// MQTT 5, section 4.6.
#[test]
fn messages_of_one_publisher_keep_their_order() {
    let server = Server::start();
    let mut client = server.connect("client");
    client.subscribe("a/#", 1);
    let mut publisher = server.connect("publisher");
    for n in 0..500_u32 {
        publisher.start(Publish::new(&format!("a/{}", n % 3), n.to_be_bytes()).qos(1));
    }
    for n in 0..500_u32 {
        assert_eq!(client.next().publish().payload, n.to_be_bytes());
    }
}

/// Clients that restore their subscriptions send many in one packet.
#[test]
fn a_thousand_filters_in_one_packet_are_all_granted() {
    let server = Server::start();
    let mut client = server.connect("client");
    let filters: Vec<_> = (0..1000).map(|number| format!("many/{number}")).collect();
    let filters: Vec<_> = filters.iter().map(|it| (it.as_str(), 1)).collect();
    client.send(&packet::subscribe(1, &[], &filters));
    let suback = client.take("SUBACK", |it| it.kind() == packet::kind::SUBACK);
    assert_eq!(suback.suback(), (1, vec![1; 1000]));
    client.publish(Publish::new("many/999", "x").qos(1));
    assert_eq!(client.take_publish("many/").topic, "many/999");
}
