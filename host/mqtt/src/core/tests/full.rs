//! A log without room: what would grow the durable state is refused, all else goes on.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use wire::{Packet, PubAckReason, PubRecReason, SubscribeReasonCode};

use crate::{
    Broker, ImageCursor, Limits, Message, NoService, Persistence, QoS, Recovery, persist::Brake,
    testing::*,
};

/// A broker with a log that releases everything at once.
fn broker() -> (Arc<Journal>, Broker, Instant) {
    let (journal, now) = (Journal::new(true), Instant::now());
    let broker = restored(&journal, Limits::default(), Arc::new(NoService), now, now);
    (journal, broker, now)
}

/// Publishes at QoS 1; the reason of the PUBACK.
fn ask(peer: &mut Peer, message: wire::Publish, now: Instant) -> PubAckReason {
    peer.send(&[Packet::Publish(message)], now);
    let packets = peer.receive();
    match &packets[..] {
        [Packet::PubAck(ack)] => ack.reason,
        other => panic!("{other:?} instead of a PUBACK"),
    }
}

fn retained(topic: &str, packet_id: u16, payload: &str) -> wire::Publish {
    let mut message = publish(topic, Q::AtLeastOnce, packet_id, payload);
    message.retain = true;
    message
}

#[test]
fn retained_messages_are_refused_and_removed() {
    let (journal, broker, now) = broker();
    let mut peer = Peer::new(&broker, &Hello::new("a"), now);
    assert_eq!(
        ask(&mut peer, retained("t", 1, "first"), now),
        PubAckReason::NoMatchingSubscribers
    );
    journal.set_full(true);
    let refused = ask(&mut peer, retained("t", 2, "second"), now);
    assert_eq!(refused, PubAckReason::QuotaExceeded);
    let mut message = retained("t", 0, "third");
    message.qos = Q::AtMostOnce;
    peer.send(&[Packet::Publish(message)], now);
    assert_eq!((broker.stats().retained, broker.stats().dropped), (1, 1));
    // A removal makes room.
    let removed = ask(&mut peer, retained("t", 3, ""), now);
    assert_eq!(removed, PubAckReason::NoMatchingSubscribers);
    assert_eq!(broker.stats().retained, 0);
    journal.set_full(false);
    let accepted = ask(&mut peer, retained("t", 4, "fourth"), now);
    assert_eq!(accepted, PubAckReason::NoMatchingSubscribers);
}

#[test]
fn messages_for_durable_sessions_are_refused_and_others_pass() {
    let (journal, broker, now) = broker();
    let mut durable = Peer::new(&broker, &Hello::new("durable"), now);
    let mut transient = Peer::new(&broker, &Hello::new("transient").expiry(0), now);
    durable.subscribe("kept", Q::ExactlyOnce, now);
    durable.subscribe("lost", Q::AtMostOnce, now);
    for filter in ["kept", "lost", "own"] {
        transient.subscribe(filter, Q::AtLeastOnce, now);
    }
    let mut publisher = Peer::new(&broker, &Hello::new("publisher").expiry(0), now);
    journal.set_full(true);
    let before = journal.len();
    let message = |topic| publish(topic, Q::AtLeastOnce, 1, topic);
    let refused = ask(&mut publisher, message("kept"), now);
    assert_eq!(refused, PubAckReason::QuotaExceeded);
    for topic in ["own", "lost"] {
        let accepted = ask(&mut publisher, message(topic), now);
        assert_eq!(accepted, PubAckReason::Success, "{topic}");
    }
    publisher.send(
        &[Packet::Publish(publish("kept", Q::ExactlyOnce, 2, "x"))],
        now,
    );
    assert!(matches!(
        publisher.receive()[..],
        [Packet::PubRec(ref ack)] if ack.reason == PubRecReason::QuotaExceeded
    ));
    // At QoS 0 nothing is kept.
    publisher.send(
        &[Packet::Publish(publish("kept", Q::AtMostOnce, 0, "0"))],
        now,
    );
    assert_eq!(durable.payloads(), ["lost", "0"]);
    assert_eq!(transient.payloads(), ["own", "lost", "0"]);
    // Nor what the embedder says to all.
    broker.batch(|batch| batch.publish(Message::new("kept", "said", QoS::AtLeastOnce)));
    assert!(durable.payloads().is_empty());
    assert_eq!(transient.payloads(), ["said"]);
    assert_eq!(journal.len(), before, "nothing of this is in the log");
}

#[test]
fn a_new_session_ends_with_its_connection_and_an_old_one_is_resumed() {
    let (journal, broker, now) = broker();
    let mut old = Peer::new(&broker, &Hello::new("old"), now);
    old.subscribe("t", Q::AtLeastOnce, now);
    old.lose(now);
    journal.set_full(true);
    let expiry = |peer: &Peer| {
        let properties = peer.connack.properties.as_ref();
        properties.and_then(|it| it.session_expiry_interval)
    };
    let mut new = Peer::new(&broker, &Hello::new("new"), now);
    assert_eq!(expiry(&new), Some(0));
    let granted = new.subscribe("t", Q::AtLeastOnce, now);
    assert_eq!(granted, SubscribeReasonCode::Success(Q::AtLeastOnce));
    let mut old = Peer::new(&broker, &Hello::new("old"), now);
    assert!(old.connack.session_present);
    assert_eq!(expiry(&old), None);
    let refused = old.subscribe("another", Q::AtLeastOnce, now);
    assert_eq!(refused, SubscribeReasonCode::QuotaExceeded);
    let again = old.subscribe("t", Q::AtLeastOnce, now);
    assert_eq!(again, SubscribeReasonCode::Success(Q::AtLeastOnce));
}

/// The will of a resumed session is kept in memory alone; one that is in the log already is published from the reserve.
#[test]
fn wills_take_no_room_that_they_do_not_have() {
    let (journal, broker, now) = broker();
    let mut will = Hello::new("recorded").will("gone", "recorded", 0);
    will.will.as_mut().unwrap().retain = true;
    let recorded = Peer::new(&broker, &will, now);
    Peer::new(&broker, &Hello::new("late"), now).lose(now);
    journal.set_full(true);
    let before = journal.bytes();
    let large = "w".repeat(10_000);
    let late = Peer::new(&broker, &Hello::new("late").will("gone", &large, 0), now);
    assert!(journal.bytes() < before + 100, "the will is recorded");
    let image = {
        let (mut cursor, mut recovery) = (ImageCursor::default(), Recovery::default());
        let mut bytes = 0;
        while let Some(piece) = broker.image(&mut cursor, 1 << 20) {
            bytes += piece.len();
            recovery.apply(&piece).unwrap();
        }
        bytes
    };
    assert!(image < 1000, "the will is in the image of {image} bytes");
    recorded.lose(now);
    assert_eq!(broker.stats().retained, 1);
    late.lose(now);
    assert_eq!(broker.stats().retained, 1);
}

/// A log that is behind, to which this thread has appended so many bytes.
#[derive(Default)]
struct Behind {
    behind: AtomicBool,
    appended: AtomicU64,
}

impl Persistence for Behind {
    fn append(&self, _: &[u8]) -> u64 {
        0
    }

    fn released(&self) -> u64 {
        0
    }

    fn is_behind(&self) -> bool {
        self.behind.load(Ordering::Relaxed)
    }

    fn appended_here(&self) -> u64 {
        self.appended.load(Ordering::Relaxed)
    }
}

#[tokio::test(start_paused = true)]
async fn only_connections_that_add_to_a_log_that_is_behind_pause() {
    let log = Arc::new(Behind::default());
    let mut brake = Brake::new(Some(log.clone()));
    log.behind.store(true, Ordering::Relaxed);
    brake.begin();
    brake.end();
    let at_once = Duration::ZERO;
    assert!(
        tokio::time::timeout(at_once, brake.wait(false))
            .await
            .is_ok()
    );
    let pauses = tokio::time::timeout(Duration::from_secs(1), brake.wait(true)).await;
    assert!(pauses.is_err(), "a large packet waits");
    brake.begin();
    log.appended.fetch_add(1, Ordering::Relaxed);
    brake.end();
    let pauses = tokio::time::timeout(Duration::from_secs(1), brake.wait(false)).await;
    assert!(pauses.is_err(), "a writer waits");
    log.behind.store(false, Ordering::Relaxed);
    assert!(
        tokio::time::timeout(Duration::from_secs(1), brake.wait(true))
            .await
            .is_ok()
    );
}
