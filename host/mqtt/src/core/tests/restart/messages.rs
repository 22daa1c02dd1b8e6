//! Subscriptions, messages and QoS 2 exchanges after a restart.

use wire::Packet;

use super::{Life, SECOND, message};
use crate::{Limits, QoS, dispatch::Turn, testing::*};

#[test]
fn subscriptions_survive_a_restart_with_their_options() {
    let (mut life, now) = Life::new();
    let mut peer = Peer::new(&life.broker, &Hello::new("a"), now);
    assert!(!peer.connack.session_present);
    let mut filter = wire::Filter::new("+/x", Q::ExactlyOnce);
    filter.nolocal = true;
    filter.preserve_retain = true;
    peer.subscribe_with(filter, Some(7), now);
    peer.subscribe("t", Q::AtLeastOnce, now);
    peer.subscribe("gone", Q::AtLeastOnce, now);
    peer.send(&[unsubscribe(&["gone"])], now);
    life.kill(now + SECOND);
    let mut peer = Peer::new(&life.broker, &Hello::new("a"), now + SECOND);
    assert!(peer.connack.session_present);
    assert_eq!(life.broker.stats().subscriptions, 2);
    // No Local: the client's own message is not sent back.
    peer.publish("a/x", Q::AtMostOnce, 0, "own", now + SECOND);
    let mut other = Peer::new(&life.broker, &Hello::new("b"), now + SECOND);
    let retained = retained("a/x", Q::ExactlyOnce, 1, "other");
    other.send(&[retained], now + SECOND);
    other.publish("gone", Q::AtMostOnce, 0, "no", now + SECOND);
    let messages = peer.messages();
    let [message] = &messages[..] else {
        panic!("{messages:?}")
    };
    assert_eq!((message.qos, message.retain), (Q::ExactlyOnce, true));
    assert_eq!(properties(message).subscription_identifiers, [7]);
}

/// The record of the last exchange was lost, and its client still holds the packet id.
#[test]
fn packet_ids_do_not_begin_again_after_a_restart() {
    let (mut life, now) = Life::new();
    let mut peer = Peer::new(&life.broker, &Hello::new("a"), now);
    peer.subscribe("t", Q::ExactlyOnce, now);
    let mut before = Vec::new();
    for restart in 1..=4 {
        let at = now + restart * SECOND;
        life.kill(at);
        let mut peer = Peer::new(&life.broker, &Hello::new("a"), at);
        life.publish(message("new", QoS::ExactlyOnce), at);
        let sent = peer.messages();
        let id = sent[0].pkid;
        assert!(
            before.iter().all(|it: &u16| it.abs_diff(id) > 1),
            "{id} {before:?}"
        );
        before.push(id);
        peer.send(&[pubrec(id)], at);
        peer.send(&[pubcomp(id)], at);
        peer.receive();
    }
}

#[test]
fn queued_and_sent_messages_survive_a_restart() {
    let (mut life, now) = Life::new();
    let narrow = || Hello::new("a").window(3);
    let mut peer = Peer::new(&life.broker, &narrow(), now);
    peer.subscribe("t", Q::ExactlyOnce, now);
    for (payload, qos) in [
        ("1", QoS::AtLeastOnce),
        ("2", QoS::ExactlyOnce),
        ("3", QoS::ExactlyOnce),
        ("4", QoS::AtLeastOnce),
        ("5", QoS::ExactlyOnce),
    ] {
        life.publish(message(payload, qos), now);
    }
    life.publish(message("never", QoS::AtMostOnce), now);
    let sent = peer.messages();
    assert_eq!(sent.len(), 3);
    // The second message has its PUBREC. The first and the third stay unacknowledged.
    peer.send(&[pubrec(sent[1].pkid)], now);
    let mut fourth_id = None;
    for restart in 1..4 {
        let at = now + restart * SECOND;
        life.kill(at);
        let mut peer = Peer::new(&life.broker, &narrow(), at);
        let packets = peer.receive();
        let [
            Packet::Publish(first),
            Packet::PubRel(rel),
            Packet::Publish(third),
            Packet::Publish(fourth),
        ] = &packets[..]
        else {
            panic!("{packets:?}")
        };
        assert_eq!((first.pkid, first.dup), (sent[0].pkid, true));
        assert_eq!(rel.pkid, sent[1].pkid);
        assert_eq!((third.pkid, third.dup), (sent[2].pkid, true));
        assert_eq!(third.payload, "3");
        // The exchange that only lacks its PUBCOMP takes no place in the window.
        let id = *fourth_id.get_or_insert(fourth.pkid);
        assert_eq!((fourth.pkid, fourth.dup), (id, restart > 1));
        assert!(sent.iter().all(|it| it.pkid != id));
        assert_eq!(fourth.payload, "4");
    }
    let at = now + 4 * SECOND;
    life.kill(at);
    let mut peer = Peer::new(&life.broker, &Hello::new("a"), at);
    let messages = peer.messages();
    let [.., fifth] = &messages[..] else {
        panic!("no messages")
    };
    let used = [sent[0].pkid, sent[1].pkid, sent[2].pkid];
    assert!(!fifth.dup && !used.contains(&fifth.pkid) && fourth_id != Some(fifth.pkid));
    assert_eq!((&fifth.payload[..], messages.len()), (&b"5"[..], 4));
}

/// The client may remember the packet id of a QoS 2 message that the new connection cannot take.
#[test]
fn message_too_large_to_redeliver_is_released() {
    let (mut life, now) = Life::new();
    let mut peer = Peer::new(&life.broker, &Hello::new("a"), now);
    peer.subscribe("t", Q::ExactlyOnce, now);
    life.publish(message(&"x".repeat(1000), QoS::ExactlyOnce), now);
    let id = peer.messages()[0].pkid;
    peer.lose(now);
    let small = Hello::new("a").set(|it| it.max_packet_size = Some(200));
    let released = [pubrel(id)];
    let mut peer = Peer::new(&life.broker, &small, now);
    assert_eq!(peer.receive(), released);
    life.kill(now);
    let mut peer = Peer::new(&life.broker, &Hello::new("a"), now);
    assert_eq!(peer.receive(), released);
    assert!(life.broker.stats().queued_bytes > 0);
    peer.send(&[pubcomp(id)], now);
    assert_eq!(life.broker.stats().queued_bytes, 0);
}

#[test]
fn received_packet_id_is_known_until_its_pubrel() {
    let (mut life, now) = Life::new();
    let mut listener = Peer::new(&life.broker, &Hello::new("l"), now);
    listener.subscribe("t", Q::ExactlyOnce, now);
    listener.lose(now);
    let mut peer = Peer::new(&life.broker, &Hello::new("a"), now);
    peer.send(
        &[
            Packet::Publish(publish("t", Q::ExactlyOnce, 5, "x")),
            Packet::Publish(publish("unmatched", Q::ExactlyOnce, 6, "x")),
            Packet::Publish(publish("req/x", Q::ExactlyOnce, 7, "x")),
        ],
        now,
    );
    assert_eq!(peer.receive().len(), 2);
    assert_eq!(life.service.requests.lock().unwrap().len(), 1);
    life.kill(now);
    let mut peer = Peer::new(&life.broker, &Hello::new("a"), now);
    let again = |topic, id| repeated(topic, Q::ExactlyOnce, id, "x");
    peer.send(
        &[again("t", 5), again("unmatched", 6), again("req/x", 7)],
        now,
    );
    let packets = peer.receive();
    let [Packet::PubRec(five), Packet::PubRec(six)] = &packets[..] else {
        panic!("{packets:?}")
    };
    assert_eq!((five.pkid, five.reason), (5, wire::PubRecReason::Success));
    assert_eq!(
        (six.pkid, six.reason),
        (6, wire::PubRecReason::NoMatchingSubscribers)
    );
    // The request was not acknowledged, so the service receives it again.
    assert_eq!(life.service.requests.lock().unwrap().len(), 2);
    peer.send(&[pubrel(5)], now);
    assert_packets!(peer.receive(), [Packet::PubComp(_)]);
    life.kill(now);
    let mut listener = Peer::new(&life.broker, &Hello::new("l"), now);
    assert_eq!(listener.payloads(), ["x"], "once");
    let mut peer = Peer::new(&life.broker, &Hello::new("a"), now);
    // The packet id is free, so this is another message.
    peer.publish("t", Q::ExactlyOnce, 5, "y", now);
    assert_eq!(listener.payloads(), ["y"]);
}

#[test]
fn retained_messages_survive_a_restart_with_their_publishers() {
    let (mut life, now) = Life::new();
    let mut peer = Peer::new(&life.broker, &Hello::new("a"), now);
    for (topic, payload, qos, expiry_s) in [
        ("r/1", "one", Q::AtMostOnce, None),
        ("r/2", "two", Q::AtLeastOnce, Some(10)),
        ("r/3", "three", Q::AtMostOnce, Some(2)),
        ("r/4", "four", Q::AtMostOnce, None),
        ("r/4", "", Q::AtMostOnce, None),
    ] {
        let mut publish = publish(topic, qos, u16::from(qos != Q::AtMostOnce), payload);
        publish.retain = true;
        publish.properties = Some(wire::PublishProperties {
            message_expiry_interval: expiry_s,
            user_properties: vec![("k".to_owned(), "v".to_owned())],
            ..Default::default()
        });
        peer.send(&[Packet::Publish(publish)], now);
    }
    let later = now + 3 * SECOND;
    life.kill(later);
    assert_eq!(life.broker.stats().retained, 2);
    let mut own = Peer::new(&life.broker, &Hello::new("a"), later);
    let mut filter = wire::Filter::new("r/#", Q::AtLeastOnce);
    filter.nolocal = true;
    own.subscribe_with(filter, None, later);
    assert_eq!(own.payloads(), Vec::<String>::new());
    let mut other = Peer::new(&life.broker, &Hello::new("b"), later);
    other.subscribe("r/#", Q::AtLeastOnce, later);
    let messages = other.messages();
    let seen: Vec<_> = messages
        .iter()
        .map(|message| {
            let properties = properties(message);
            assert_eq!(properties.user_properties.len(), 1);
            assert!(message.retain);
            (&message.payload[..], properties.message_expiry_interval)
        })
        .collect();
    assert_eq!(seen, [(&b"one"[..], None), (b"two", Some(7))]);
}

/// The client takes one message at a time, and the server restarts before it has sent them all.
#[test]
fn retained_messages_that_were_not_sent_yet_survive_a_restart() {
    let (mut life, now) = Life::new();
    let small = || Limits {
        queue_bytes_max: 4096,
        queue_bytes_reserve: 1,
        ..Limits::default()
    };
    life.kill_with(small(), now);
    let mut publisher = Peer::new(&life.broker, &Hello::new("p"), now);
    let payloads: Vec<String> = (0..30).map(|n| format!("{n:0>500}")).collect();
    for (n, payload) in payloads.iter().enumerate() {
        let (topic, id) = (format!("r/{n:02}"), n as u16 + 1);
        publisher.send(&[retained(&topic, Q::AtLeastOnce, id, payload)], now);
    }
    let narrow = || Hello::new("a").window(1);
    let take = |peer: &mut Peer, count: usize| -> Vec<String> {
        let mut taken = Vec::new();
        while taken.len() < count {
            let messages = peer.messages();
            assert!(!messages.is_empty(), "after {taken:?}");
            for message in messages {
                assert!(message.retain);
                taken.push(String::from_utf8(message.payload.to_vec()).unwrap());
                peer.send(&[puback(message.pkid)], now);
            }
        }
        taken
    };
    let mut peer = Peer::new(&life.broker, &narrow(), now);
    let turn = peer.send(&[subscribe("r/#", Q::AtLeastOnce)], now);
    assert_eq!(turn, Turn::Paused);
    let mut received = take(&mut peer, 5);
    assert_eq!(received, payloads[..5]);
    // Twice: the second restart recovers what the first one did, and a snapshot of it.
    for _ in 0..2 {
        life.kill_with(small(), now);
        let image = recovered(&image(&life.broker, 1000));
        assert_eq!(image, life.log.recovery());
        let mut peer = Peer::new(&life.broker, &narrow(), now);
        assert!(peer.connack.session_present);
        peer.send(&[], now);
        // Those that were queued are first, and then all are sent again.
        let taken = take(&mut peer, 10);
        assert!(payloads[..10].contains(&taken[9]), "{taken:?}");
        received.extend(taken);
    }
    let mut peer = Peer::new(&life.broker, &narrow(), now);
    peer.send(&[], now);
    while received.last() != payloads.last() {
        received.extend(take(&mut peer, 1));
    }
    assert!(payloads.iter().all(|payload| received.contains(payload)));
    // The search is over, and so it is after a restart.
    life.kill_with(small(), now);
    let mut peer = Peer::new(&life.broker, &narrow(), now);
    peer.send(&[], now);
    assert_eq!(peer.messages().len(), 0);
}
