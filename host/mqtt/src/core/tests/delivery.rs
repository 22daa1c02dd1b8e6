//! Send windows, redeliveries, QoS 2 towards the client, and limited queues.

use std::time::Duration;

use wire::{DisconnectReasonCode, Packet, PubRec, PubRecReason};

use crate::{Broker, Limits, Message, QoS, testing::*};

fn flood(broker: &Broker, count: usize, qos: QoS) {
    broker.batch(|batch| {
        for number in 0..count {
            batch.publish(Message::new("t", number.to_string(), qos));
        }
    });
}

#[test]
fn the_clients_receive_maximum_is_its_window() {
    let (broker, now) = start(Limits::default());
    let mut a = Peer::new(&broker, &Hello::new("a").window(3), now);
    a.subscribe("t", Q::AtLeastOnce, now);
    flood(&broker, 5, QoS::AtLeastOnce);
    let first = a.messages();
    assert_eq!(first.len(), 3);
    a.send(&[puback(first[1].pkid)], now);
    assert_eq!(a.payloads(), ["3"]);
    a.send(&[puback(first[1].pkid), puback(999)], now);
    assert_eq!(
        a.payloads(),
        [""; 0],
        "a duplicate acknowledgement does not open the window"
    );
    a.send(&[puback(first[0].pkid)], now);
    assert_eq!(a.payloads(), ["4"]);
    assert!(broker.stats().queued_bytes > 0);
    a.send(&[puback(first[2].pkid), puback(4), puback(5)], now);
    assert_eq!(broker.stats().queued_bytes, 0);
}

#[test]
fn resumed_session_redelivers_in_order_with_the_same_ids() {
    let (broker, now) = start(Limits::default());
    let mut a = Peer::new(&broker, &Hello::new("a"), now);
    a.subscribe("t", Q::ExactlyOnce, now);
    flood(&broker, 3, QoS::AtLeastOnce);
    flood(&broker, 2, QoS::ExactlyOnce);
    let before = a.messages();
    assert_eq!(before.len(), 5);
    // The second message is acknowledged, and the fourth has its PUBREC.
    a.send(&[puback(before[1].pkid), pubrec(before[3].pkid)], now);
    assert_eq!(a.receive(), [pubrel(before[3].pkid)]);
    a.lose(now);
    flood(&broker, 1, QoS::AtLeastOnce);

    let mut a = Peer::new(&broker, &Hello::new("a").window(2), now);
    let repeated = |index: usize| {
        let mut message = before[index].clone();
        message.dup = true;
        Packet::Publish(message)
    };
    let again = [repeated(0), repeated(2), pubrel(before[3].pkid)];
    assert_eq!(a.receive(), again);
    a.send(&[puback(before[0].pkid)], now);
    assert_eq!(
        a.receive(),
        [repeated(4)],
        "redeliveries respect the new window"
    );
    a.send(&[pubcomp(before[3].pkid), puback(before[2].pkid)], now);
    let newer = a.messages();
    assert_eq!(
        (newer.len(), newer[0].dup),
        (1, false),
        "new messages follow the redeliveries"
    );
}

#[test]
fn outgoing_qos_2_exchange_follows_the_standard() {
    let (broker, now) = start(Limits::default());
    let mut a = Peer::new(&broker, &Hello::new("a").window(1), now);
    a.subscribe("t", Q::ExactlyOnce, now);
    flood(&broker, 3, QoS::ExactlyOnce);
    let id = a.messages()[0].pkid;
    a.send(&[pubrec(id)], now);
    assert_eq!(a.receive(), [pubrel(id)], "the window opens at PUBCOMP");
    a.send(&[pubrec(id), pubcomp(id)], now);
    assert_eq!(a.receive().len(), 2, "PUBREL again, and the next message");
    // A PUBREC with an error ends the exchange at once.
    let mut refused = PubRec::new(2, None);
    refused.reason = PubRecReason::QuotaExceeded;
    a.send(&[Packet::PubRec(refused)], now);
    assert_eq!(a.payloads(), ["2"]);
    a.send(&[pubrec(77)], now);
    let Some(Packet::PubRel(rel)) = a.receive().pop() else {
        panic!("no PUBREL")
    };
    assert_eq!(rel.reason, wire::PubRelReason::PacketIdentifierNotFound);
    a.send(&[puback(3)], now);
    // A PUBACK for a QoS 2 message.
    a.assert_disconnected(DisconnectReasonCode::ProtocolError);
}

#[test]
fn connected_client_with_a_full_queue_is_disconnected() {
    let limits = Limits {
        queue_bytes_max: 10_000,
        in_flight_max: 2,
        ..Limits::default()
    };
    let (broker, now) = start(limits);
    let mut slow = Peer::new(&broker, &Hello::new("slow"), now);
    slow.subscribe("t", Q::AtLeastOnce, now);
    let mut quick = Peer::new(&broker, &Hello::new("quick"), now);
    quick.subscribe("t", Q::AtMostOnce, now);
    flood(&broker, 100, QoS::AtLeastOnce);
    assert_eq!(quick.messages().len(), 100);
    slow.assert_disconnected(DisconnectReasonCode::QuotaExceeded);
    assert!(broker.stats().queued_bytes <= 10_000);
    assert_eq!(broker.stats().disconnected, 1);
    slow.lose(now);
    let mut slow = Peer::new(&broker, &Hello::new("slow"), now);
    assert!(
        slow.connack.session_present,
        "the session is kept by its expiry"
    );
    assert_eq!(slow.payloads(), ["0", "1"]);
}

#[test]
fn full_queue_of_an_absent_client_drops_the_newest() {
    let (broker, now) = start(limited(|it| it.queue_bytes_max = 2000));
    Peer::leave_subscribed(&broker, "a", now);
    flood(&broker, 100, QoS::AtLeastOnce);
    let stats = broker.stats();
    assert!(stats.queued_bytes <= 2000 && stats.dropped > 90);
    let mut a = Peer::new(&broker, &Hello::new("a"), now);
    let kept = a.payloads();
    assert_eq!(kept.len() as u64, 100 - stats.dropped);
    assert_eq!(kept[0], "0");
}

#[test]
fn all_queues_together_are_bounded() {
    let limits = Limits {
        queue_bytes_max: 5000,
        queue_bytes_total_max: 12_000,
        ..Limits::default()
    };
    let (broker, now) = start(limits);
    for client in ["a", "b", "c"] {
        Peer::leave_subscribed(&broker, client, now);
    }
    flood(&broker, 100, QoS::AtLeastOnce);
    assert!((5000..=6000).contains(&broker.stats().queued_bytes));
    for client in ["a", "b", "c"] {
        Peer::new(&broker, &Hello::new(client).clean().expiry(0), now).lose(now);
    }
    assert_eq!(
        broker.stats().queued_bytes,
        0,
        "an ended session frees its bytes"
    );
}

/// Regression: absent clients filled the total limit, and a connected client that read everything
/// was disconnected.
#[test]
fn backlog_of_absent_clients_does_not_block_present_ones() {
    let limits = Limits {
        queue_bytes_max: 5000,
        queue_bytes_total_max: 6000,
        queue_bytes_reserve: 4000,
        ..Limits::default()
    };
    let (broker, now) = start(limits);
    for client in ["a", "b", "c"] {
        Peer::leave_subscribed(&broker, client, now);
    }
    flood(&broker, 100, QoS::AtLeastOnce);
    assert!(
        broker.stats().queued_bytes <= 3000,
        "absent clients may use half"
    );
    let mut present = Peer::new(&broker, &Hello::new("present"), now);
    present.subscribe("t", Q::AtLeastOnce, now);
    // More than the absent clients have left of the total, and less than the reserve.
    flood(&broker, 14, QoS::AtLeastOnce);
    let expected: Vec<String> = (0..14).map(|number| number.to_string()).collect();
    assert_eq!(present.payloads(), expected);
    assert_eq!(broker.stats().disconnected, 0);
}

#[test]
fn output_above_its_mark_waits_in_the_queue_and_keeps_its_order() {
    let (broker, now) = start(limited(|it| it.output_bytes_high = 500));
    let mut a = Peer::new(&broker, &Hello::new("a"), now);
    a.subscribe("t", Q::AtLeastOnce, now);
    flood(&broker, 1000, QoS::AtMostOnce);
    assert!(
        broker.stats().queued_bytes > 0,
        "some messages stay in the queue"
    );
    let expected: Vec<String> = (0..1000).map(|number| number.to_string()).collect();
    assert_eq!(a.payloads(), expected);
    assert_eq!(broker.stats().queued_bytes, 0);
}

#[test]
fn packet_ids_wrap_around_and_skip_ids_in_use() {
    let (broker, now) = start(Limits::default());
    let mut a = Peer::new(&broker, &Hello::new("a").window(2), now);
    a.subscribe("t", Q::AtLeastOnce, now);
    flood(&broker, 1, QoS::AtLeastOnce);
    assert_eq!(a.messages()[0].pkid, 1, "this id is never acknowledged");
    let mut last = 1;
    for _ in 0..70_000 {
        flood(&broker, 1, QoS::AtLeastOnce);
        let id = a.messages()[0].pkid;
        assert_eq!(id, if last == u16::MAX { 2 } else { last + 1 });
        a.send(&[puback(id)], now);
        last = id;
    }
}

/// Regression: a queue full of expired messages dropped the new ones.
#[test]
fn expired_messages_do_not_keep_fresh_ones_out() {
    let (broker, now) = start(limited(|it| it.queue_bytes_max = 5000));
    Peer::leave_subscribed(&broker, "a", now);
    let publish = |text: &str, expires, at| {
        let mut message = Message::new("t", text.to_owned(), QoS::AtLeastOnce);
        message.expires = expires;
        publish_at(&broker, message, at);
    };
    for _ in 0..100 {
        publish("old", Some(now + Duration::from_secs(1)), now);
    }
    let later = now + Duration::from_secs(2);
    publish("fresh", None, later);
    let mut back = Peer::new(&broker, &Hello::new("a"), later);
    assert_eq!(back.payloads(), ["fresh"]);
}

/// Regression: a filter of sixty levels took sixty nodes in the router, which no limit counted.
#[test]
fn subscriptions_are_limited_by_their_memory() {
    let limits = Limits {
        subscription_bytes_per_session_max: 30_000,
        subscription_bytes_total_max: 60_000,
        ..Limits::default()
    };
    let (broker, now) = start(limits);
    let full = wire::SubscribeReasonCode::QuotaExceeded;
    let granted = wire::SubscribeReasonCode::Success(Q::AtLeastOnce);
    let deep = |n: usize| format!("{n}/{}+", "x/".repeat(30));
    let mut a = Peer::new(&broker, &Hello::new("a"), now);
    assert_eq!(a.subscribe(&deep(1), Q::AtLeastOnce, now), granted);
    assert_eq!(a.subscribe(&deep(2), Q::AtLeastOnce, now), full);
    let limit = |client: &str, n| broker.subscription_limit(client, deep(n).as_bytes());
    let of_session = "the subscriptions of the session would exceed their limit of bytes";
    assert_eq!((limit("a", 2), limit("a", 1)), (Some(of_session), None));
    // Subscribing again costs nothing, and ending a session frees its cost.
    assert_eq!(a.subscribe(&deep(1), Q::AtLeastOnce, now), granted);
    let mut b = Peer::new(&broker, &Hello::new("b"), now);
    assert_eq!(b.subscribe(&deep(3), Q::AtLeastOnce, now), granted);
    let mut c = Peer::new(&broker, &Hello::new("c"), now);
    assert_eq!(
        c.subscribe(&deep(4), Q::AtLeastOnce, now),
        full,
        "all sessions together are limited too"
    );
    let of_all = "subscriptions of this user or address, or of all clients, exceed their limit";
    assert_eq!(limit("c", 4), Some(of_all));
    assert_eq!(c.subscribe("plain/one", Q::AtLeastOnce, now), granted);
    Peer::new(&broker, &Hello::new("a").clean().expiry(0), now).lose(now);
    assert_eq!(c.subscribe(&deep(4), Q::AtLeastOnce, now), granted);
}

/// Regression: a thousand identifiers on each queued message were not counted.
#[test]
fn subscription_identifiers_of_queued_messages_count() {
    let queued = |ids: usize| {
        let (broker, now) = start(Limits::default());
        let mut a = Peer::new(&broker, &Hello::new("a"), now);
        for (id, filter) in ["t", "+", "#", "t/#"].iter().take(ids).enumerate() {
            let filter = wire::Filter::new(*filter, Q::AtLeastOnce);
            a.subscribe_with(filter, Some(id + 1), now);
        }
        a.lose(now);
        flood(&broker, 1, QoS::AtLeastOnce);
        broker.stats().queued_bytes
    };
    assert_eq!(queued(4) - queued(1), 3 * size_of::<u32>());
}

/// A repeated message may have been delivered before, and a refusal would deny that.
#[test]
fn rates_do_not_refuse_what_a_resumed_session_repeats() {
    let (broker, now) = start(Limits {
        publishes_per_second_max: 4,
        publishes_per_second_total_max: 6,
        ..Limits::default()
    });
    let accepted = |peer: &mut Peer, dup, count, now| {
        let mut accepted = 0;
        for id in 1..=count {
            let mut message = publish("t", Q::AtLeastOnce, id, "x");
            message.dup = dup;
            peer.send(&[Packet::Publish(message)], now);
            let answer = peer.receive().pop();
            accepted += u16::from(matches!(
                answer,
                Some(Packet::PubAck(ack)) if ack.reason != wire::PubAckReason::QuotaExceeded
            ));
        }
        accepted
    };
    let mut a = Peer::new(&broker, &Hello::new("a"), now);
    assert_eq!(accepted(&mut a, true, 10, now), 4, "the session is new");
    a.lose(now);
    let mut a = Peer::new(&broker, &Hello::new("a"), now);
    assert_eq!(accepted(&mut a, true, 10, now), 10);
    assert_eq!(accepted(&mut a, false, 1, now), 0);
    // Others pay for no more than a second.
    let now = now + Duration::from_secs(1);
    let mut b = Peer::new(&broker, &Hello::new("b"), now);
    assert_eq!(accepted(&mut b, false, 10, now), 4);
    assert_eq!(
        accepted(&mut a, false, 1, now),
        0,
        "a has used its own limit"
    );
}
