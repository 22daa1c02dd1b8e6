//! Subscriptions and their options, retained messages, and properties in transit.

use std::time::{Duration, Instant};

use wire::{Filter, Packet, PubAckReason, RetainForwardRule, SubscribeReasonCode};

use crate::{Limits, Message, PropertiesBuilder, QoS, dispatch::Turn, testing::*};

fn two(limits: Limits) -> (Peer, Peer, Instant) {
    let (broker, now) = start(limits);
    (
        Peer::new(&broker, &Hello::new("a"), now),
        Peer::new(&broker, &Hello::new("b"), now),
        now,
    )
}

#[test]
fn lower_qos_applies_and_puback_reports_missing_subscribers() {
    let (mut a, mut b, now) = two(Limits::default());
    assert_eq!(
        b.subscribe("t/+", Q::AtLeastOnce, now),
        SubscribeReasonCode::Success(Q::AtLeastOnce)
    );
    for (qos, id, expected) in [
        (Q::AtMostOnce, 0, Q::AtMostOnce),
        (Q::AtLeastOnce, 1, Q::AtLeastOnce),
    ] {
        a.publish("t/1", qos, id, "x", now);
        assert_eq!(b.messages()[0].qos, expected);
    }
    assert_eq!(a.receive(), [puback(1)]);
    a.publish("t/1", Q::ExactlyOnce, 2, "x", now);
    assert_eq!(b.messages()[0].qos, Q::AtLeastOnce);
    a.receive();
    a.publish("unmatched", Q::AtLeastOnce, 3, "x", now);
    let mut none = wire::PubAck::new(3, None);
    none.reason = PubAckReason::NoMatchingSubscribers;
    assert_eq!(a.receive(), [Packet::PubAck(none)]);
}

#[test]
fn overlapping_subscriptions_give_one_copy_with_highest_qos() {
    let (mut a, mut b, now) = two(Limits::default());
    b.subscribe_with(Filter::new("t/#", Q::ExactlyOnce), Some(7), now);
    b.subscribe_with(Filter::new("t/1", Q::AtMostOnce), Some(300), now);
    b.subscribe_with(Filter::new("+/1", Q::AtLeastOnce), None, now);
    a.publish("t/1", Q::ExactlyOnce, 1, "x", now);
    let messages = b.messages();
    assert_eq!(messages.len(), 1);
    assert_eq!(messages[0].qos, Q::ExactlyOnce);
    let mut ids = properties(&messages[0]).subscription_identifiers.clone();
    ids.sort_unstable();
    assert_eq!(ids, [7, 300]);
}

#[test]
fn no_local_and_retain_as_published() {
    let (mut a, mut b, now) = two(Limits::default());
    let no_local = Filter {
        nolocal: true,
        ..Filter::new("t", Q::AtLeastOnce)
    };
    let as_published = Filter {
        preserve_retain: true,
        ..no_local.clone()
    };
    a.subscribe_with(no_local.clone(), None, now);
    b.subscribe_with(as_published, None, now);
    a.send(&[retained("t", Q::AtLeastOnce, 1, "x")], now);
    assert_eq!(
        a.receive(),
        [puback(1)],
        "No Local: not sent to the publisher"
    );
    assert!(b.messages()[0].retain);
    // No Local also applies to retained messages (section 3.8.3.1).
    a.subscribe_with(no_local, None, now);
    assert_eq!(a.payloads(), [""; 0]);
    // No Local does not apply to messages of the broker itself.
    a.broker
        .batch(|batch| assert_eq!(batch.publish(Message::new("t", "y", QoS::AtMostOnce)), 2));
    assert_eq!(a.payloads(), ["y"]);
    assert_eq!(b.payloads(), ["y"]);
    b.subscribe("t", Q::AtMostOnce, now);
    b.receive();
    a.send(&[retained("t", Q::AtMostOnce, 0, "z")], now);
    assert!(
        !b.messages()[0].retain,
        "without the option the flag is cleared"
    );
}

#[test]
fn retained_messages_by_retain_handling() {
    let (mut a, mut b, now) = two(Limits::default());
    a.send(&[retained("r/1", Q::AtLeastOnce, 1, "kept")], now);
    let filter = |rule| Filter {
        retain_forward_rule: rule,
        ..Filter::new("r/#", Q::AtMostOnce)
    };
    b.subscribe_with(filter(RetainForwardRule::Never), None, now);
    assert_eq!(b.payloads(), [""; 0]);
    b.subscribe_with(filter(RetainForwardRule::OnNewSubscribe), None, now);
    assert_eq!(b.payloads(), [""; 0], "the subscription existed");
    b.subscribe_with(filter(RetainForwardRule::OnEverySubscribe), Some(5), now);
    let messages = b.messages();
    assert!(messages[0].retain && messages[0].qos == Q::AtMostOnce);
    assert_eq!(properties(&messages[0]).subscription_identifiers, [5]);
    let mut other = Peer::new(&a.broker, &Hello::new("c"), now);
    other.subscribe_with(filter(RetainForwardRule::OnNewSubscribe), None, now);
    assert_eq!(other.payloads(), ["kept"]);
    a.send(&[retained("r/1", Q::AtLeastOnce, 2, "")], now);
    assert_eq!(other.payloads(), [""], "the empty message itself is routed");
    assert_eq!(b.payloads(), [""]);
    b.subscribe_with(filter(RetainForwardRule::OnEverySubscribe), None, now);
    assert_eq!(b.payloads(), [""; 0]);
    assert_eq!(a.broker.stats().retained, 0);
}

/// A publisher at QoS 1 can send its message again. A will and a message at QoS 0 reach the
/// subscribers that are there, and no older message is left for later ones (section 3.3.1.3).
#[test]
fn retained_messages_have_a_quota() {
    let (mut a, mut b, now) = two(Limits {
        retained_max: 1,
        retained_bytes_max: 500,
        ..Limits::default()
    });
    b.subscribe("#", Q::AtMostOnce, now);
    let long = "y".repeat(1000);
    a.send(&[retained("r/1", Q::AtLeastOnce, 1, "old")], now);
    assert_eq!(b.payloads(), ["old"]);
    for (topic, id, payload) in [("r/2", 2, "x"), ("r/1", 3, &long)] {
        a.send(&[retained(topic, Q::AtLeastOnce, id, payload)], now);
        let ack = a.last_puback();
        assert_eq!((ack.pkid, ack.reason), (id, PubAckReason::QuotaExceeded));
        let text = ack.properties.and_then(|it| it.reason_string);
        assert!(text.is_some_and(|it| it.starts_with("retained messages of this user")));
    }
    assert_eq!((b.payloads(), a.broker.stats().retained), (vec![], 1));
    a.send(&[retained("r/2", Q::AtMostOnce, 0, "x")], now);
    assert_eq!(
        (b.payloads(), a.broker.stats().retained),
        (vec!["x".into()], 1)
    );
    a.send(&[retained("r/1", Q::AtMostOnce, 0, &long)], now);
    assert_eq!(
        (b.payloads(), a.broker.stats().retained),
        (vec![long.clone()], 0)
    );

    a.send(&[retained("r/1", Q::AtLeastOnce, 4, "online")], now);
    let mut hello = Hello::new("c").will("r/1", &long, 0);
    hello.will.as_mut().unwrap().retain = true;
    Peer::new(&a.broker, &hello, now).lose(now);
    assert_eq!(b.payloads(), ["online", &long]);
    assert_eq!(
        (a.broker.stats().retained, a.broker.stats().dropped),
        (0, 0)
    );
}

#[test]
fn refused_filters_do_not_end_the_connection() {
    let limits = Limits {
        subscriptions_per_session_max: 2,
        topic_levels_max: 3,
        ..Limits::default()
    };
    let (mut a, _, now) = two(limits);
    let granted = SubscribeReasonCode::Success(Q::AtMostOnce);
    for (filter, expected) in [
        ("a/#/b", SubscribeReasonCode::TopicFilterInvalid),
        ("a/b/c/d", SubscribeReasonCode::TopicFilterInvalid),
        ("1", granted),
        ("2", granted),
        ("2", granted),
        ("3", SubscribeReasonCode::QuotaExceeded),
    ] {
        let answer = a.subscribe(filter, Q::AtMostOnce, now);
        assert_eq!(answer, expected, "{filter}");
    }
    let limit = |filter: &str| a.broker.subscription_limit("a", filter.as_bytes());
    let text = "the session has as many subscriptions as it may have";
    assert_eq!((limit("3"), limit("2")), (Some(text), None));
    assert_eq!(a.broker.stats().subscriptions, 2);
    a.send(&[unsubscribe(&["2", "3"])], now);
    let Some(Packet::UnsubAck(ack)) = a.receive().pop() else {
        panic!("no UNSUBACK")
    };
    assert_eq!(
        ack.reasons,
        [
            wire::UnsubAckReason::Success,
            wire::UnsubAckReason::NoSubscriptionExisted
        ]
    );
    a.publish("a/b/c/d", Q::AtLeastOnce, 4, "", now);
    assert_eq!(a.last_puback().reason, PubAckReason::TopicNameInvalid);
}

/// A PUBLISH at QoS 0 with these raw properties.
fn raw_publish(topic: &str, properties: &[u8], payload: &str) -> Vec<u8> {
    let mut body = vec![0, topic.len() as u8];
    body.extend_from_slice(topic.as_bytes());
    body.push(properties.len() as u8);
    body.extend_from_slice(properties);
    body.extend_from_slice(payload.as_bytes());
    let mut packet = vec![0x30, body.len() as u8];
    packet.extend_from_slice(&body);
    packet
}

#[test]
fn properties_pass_bit_for_bit_but_for_topic_alias() {
    let (mut a, mut b, now) = two(Limits::default());
    b.subscribe("t", Q::AtMostOnce, now);
    // Repeated, empty and unordered user properties, an explicit payload format 0, and an alias in
    // the middle.
    let before = b"\x26\0\x01a\0\x012\x01\0\x03\0\0\x26\0\0\0\0\x09\0\x02\xff\0";
    let after = b"\x26\0\x01a\0\x02\xc3\xbc\x08\0\x01r\x26\0\x01a\0\x012";
    let sent = [&before[..], b"\x23\0\x04", after].concat();
    assert_eq!(
        a.send_raw(&raw_publish("t", &sent, "x"), now),
        Turn::Drained
    );
    assert_eq!(
        b.output.drain(),
        raw_publish("t", &[&before[..], after].concat(), "x")
    );
    // The alias stands for the topic now.
    a.send_raw(&raw_publish("", b"\x23\0\x04", "y"), now);
    assert_eq!(b.output.drain(), raw_publish("t", b"", "y"));
}

#[test]
fn message_expiry_counts_down_and_ends() {
    let (mut a, mut b, now) = two(Limits::default());
    let second = Duration::from_secs(1);
    b.subscribe("t", Q::AtLeastOnce, now);
    b.lose(now);
    let a_sends = |a: &mut Peer, expiry: u32, id| {
        let mut message = publish("t", Q::AtLeastOnce, id, &format!("{expiry}"));
        message.properties = Some(wire::PublishProperties {
            message_expiry_interval: Some(expiry),
            ..Default::default()
        });
        a.send(&[Packet::Publish(message)], now);
    };
    a_sends(&mut a, 2, 1);
    a_sends(&mut a, 6, 2);
    let mut b = Peer::new(&a.broker, &Hello::new("b"), now + 2 * second + second / 2);
    let messages = b.messages();
    assert_eq!(messages.len(), 1);
    assert_eq!(properties(&messages[0]).message_expiry_interval, Some(4));
    assert_eq!(a.broker.stats().dropped, 1);
}

#[test]
fn message_expiry_counts_while_a_publish_waits_in_dispatch() {
    let limits = Limits {
        queue_bytes_max: 2000,
        queue_bytes_reserve: 0,
        ..Limits::default()
    };
    let (broker, now) = start(limits);
    let mut a = Peer::new(&broker, &Hello::new("a").window(1), now);
    a.subscribe("t", Q::AtLeastOnce, now);
    let packets = [(1, None), (2, None), (3, None), (4, Some(100))].map(|(id, expiry)| {
        let mut message = publish("t", Q::AtLeastOnce, id, &"x".repeat(400));
        message.properties = Some(wire::PublishProperties {
            message_expiry_interval: expiry,
            ..Default::default()
        });
        Packet::Publish(message)
    });
    assert_eq!(a.send(&packets, now), Turn::Paused);
    let later = now + Duration::from_secs(5);
    let messages = a.read_all(later).into_iter();
    let expiries = messages.filter_map(|it| it.properties?.message_expiry_interval);
    assert_eq!(expiries.collect::<Vec<_>>(), [95]);
}

#[test]
fn unknown_or_excessive_topic_aliases_are_refused() {
    for (alias, topic, expected) in [
        (0_u16, "t", wire::DisconnectReasonCode::TopicAliasInvalid),
        (33, "t", wire::DisconnectReasonCode::TopicAliasInvalid),
        (3, "", wire::DisconnectReasonCode::ProtocolError),
    ] {
        let (mut a, _, now) = two(Limits::default());
        let [high, low] = alias.to_be_bytes();
        a.send_raw(&raw_publish(topic, &[0x23, high, low], "x"), now);
        assert_eq!(disconnected(&a.receive()), Some(expected), "alias {alias}");
    }
}

#[test]
fn a_message_too_large_for_a_client_is_not_sent_to_it() {
    let (broker, now) = start(Limits::default());
    let mut a = Peer::new(&broker, &Hello::new("a"), now);
    let small = Hello::new("b").set(|it| it.max_packet_size = Some(100));
    let mut b = Peer::new(&broker, &small, now);
    b.subscribe("t", Q::AtLeastOnce, now);
    for (id, size) in [(1, 200), (2, 10), (3, 91), (4, 92)] {
        a.publish("t", Q::AtLeastOnce, id, &"x".repeat(size), now);
    }
    let sizes: Vec<usize> = b
        .messages()
        .iter()
        .map(|message| message.payload.len())
        .collect();
    assert_eq!(
        sizes,
        [10, 91, 92],
        "2 of fixed header, 3 of topic, 2 of identifier, 1 of properties and the payload"
    );
    a.publish("t", Q::AtMostOnce, 0, &"x".repeat(200), now);
    assert_eq!(b.payloads(), [""; 0]);
    assert_eq!(broker.stats().dropped, 2);
}

#[test]
fn embedder_messages_keep_their_properties() {
    let (mut a, _, now) = two(Limits::default());
    a.subscribe_with(Filter::new("t", Q::AtLeastOnce), Some(9), now);
    let properties = PropertiesBuilder::new()
        .correlation_data(b"\0\xff")
        .user("k", "v")
        .user("k", "w");
    let mut message = Message::new("t", "x", QoS::AtLeastOnce);
    message.properties = properties
        .content_type("application/octet-stream")
        .finish()
        .unwrap();
    message.expires = Some(Instant::now() + OPEN);
    a.broker.batch(|batch| batch.publish(message));
    let got = a.messages().remove(0).properties.unwrap();
    assert_eq!(got.correlation_data.unwrap(), &b"\0\xff"[..]);
    assert_eq!(
        got.user_properties,
        [
            ("k".to_owned(), "v".to_owned()),
            ("k".to_owned(), "w".to_owned())
        ]
    );
    assert_eq!(got.content_type.unwrap(), "application/octet-stream");
    assert_eq!(
        (got.subscription_identifiers, got.message_expiry_interval),
        (vec![9], Some(1000))
    );
}
