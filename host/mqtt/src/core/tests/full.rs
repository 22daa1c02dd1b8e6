//! A log without room: growth of the durable state is refused, and everything else continues.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use statehouse_protocol::LogPosition;
use tokio::time::timeout;
use wire::{Packet, PubAckReason, PubRecReason, SubscribeReasonCode};

use crate::{
    Broker, Limits, Message, NoService, Options, Persistence, QoS, limits::BRAKE_TIME_MAX,
    persist::Brake, testing::*,
};

/// Publishes at QoS 1 and returns the reason of the PUBACK.
fn ask(peer: &mut Peer, message: Packet, now: Instant) -> PubAckReason {
    peer.send(&[message], now);
    let packets = peer.receive();
    match &packets[..] {
        [Packet::PubAck(ack)] => ack.reason,
        other => panic!("{other:?} instead of a PUBACK"),
    }
}

#[test]
fn full_log_refuses_retained_messages_but_not_removals() {
    let (log, broker, now) = logged(Limits::default());
    let mut peer = Peer::new(&broker, &Hello::new("a"), now);
    let accepted = PubAckReason::NoMatchingSubscribers;
    for (is_full, payload, expected, left) in [
        (false, "first", accepted, 1),
        (true, "second", PubAckReason::QuotaExceeded, 1),
        // A removal needs no room.
        (true, "", accepted, 0),
        (false, "fourth", accepted, 1),
    ] {
        log.set_full(is_full);
        let reason = ask(&mut peer, retained("t", Q::AtLeastOnce, 1, payload), now);
        let count = broker.stats().retained;
        assert_eq!((reason, count), (expected, left), "{payload:?}");
    }
}

#[test]
fn full_log_refuses_messages_for_durable_sessions_only() {
    let (log, broker, now) = logged(Limits::default());
    let mut durable = Peer::new(&broker, &Hello::new("durable"), now);
    let mut transient = Peer::new(&broker, &Hello::new("transient").expiry(0), now);
    durable.subscribe("kept", Q::ExactlyOnce, now);
    durable.subscribe("lost", Q::AtMostOnce, now);
    for filter in ["kept", "lost", "own"] {
        transient.subscribe(filter, Q::AtLeastOnce, now);
    }
    let mut publisher = Peer::new(&broker, &Hello::new("publisher").expiry(0), now);
    log.set_full(true);
    let before = log.len();
    let message = |topic| Packet::Publish(publish(topic, Q::AtLeastOnce, 1, topic));
    let refused = ask(&mut publisher, message("kept"), now);
    assert_eq!(refused, PubAckReason::QuotaExceeded);
    for topic in ["own", "lost"] {
        let accepted = ask(&mut publisher, message(topic), now);
        assert_eq!(accepted, PubAckReason::Success, "{topic}");
    }
    publisher.publish("kept", Q::ExactlyOnce, 2, "x", now);
    let refused = PubRecReason::QuotaExceeded;
    assert_packets!(publisher.receive(), [Packet::PubRec(ack)] if ack.reason == refused);
    // QoS 0 messages are not stored, so they pass.
    publisher.publish("kept", Q::AtMostOnce, 0, "0", now);
    assert_eq!(durable.payloads(), ["lost", "0"]);
    assert_eq!(transient.payloads(), ["own", "lost", "0"]);
    // Messages of the embedder, which cannot be told, reach connected clients unrecorded.
    broker.batch(|batch| batch.publish(Message::new("kept", "said", QoS::AtLeastOnce)));
    for subscriber in [&mut durable, &mut transient] {
        assert_eq!(subscriber.payloads(), ["said"]);
    }
    assert_eq!(log.len(), before, "no message is in the log");
}

/// Its message was taken before, and its PUBREC says so.
#[test]
fn full_log_does_not_refuse_the_repetition_of_a_taken_message() {
    let (log, broker, now) = logged(Limits::default());
    Peer::leave_subscribed(&broker, "reader", now);
    let mut publisher = Peer::new(&broker, &Hello::new("publisher"), now);
    publisher.publish("t", Q::ExactlyOnce, 1, "x", now);
    log.set_full(true);
    publisher.send(&[repeated("t", Q::ExactlyOnce, 1, "x")], now);
    let packets = publisher.receive();
    assert_eq!(packets.len(), 2, "{packets:?}");
    for packet in packets {
        assert!(matches!(packet, Packet::PubRec(ack) if ack.reason == PubRecReason::Success));
    }
    assert!(broker.refusals().is_empty());
    publisher.publish("t", Q::ExactlyOnce, 2, "y", now);
    assert_eq!(broker.refusals().len(), 1);
}

/// A message that no member could be sent again after a crash is not acknowledged.
#[test]
fn full_log_refuses_messages_for_groups_of_durable_sessions_only() {
    let (log, broker, now) = logged(Limits::default());
    let mut durable = Peer::new(&broker, &Hello::new("durable"), now);
    let mut transient = Peer::new(&broker, &Hello::new("transient").expiry(0), now);
    let mut plain = Peer::new(&broker, &Hello::new("plain").expiry(0), now);
    durable.subscribe("$share/g/durable", Q::AtLeastOnce, now);
    plain.subscribe("durable", Q::AtLeastOnce, now);
    durable.subscribe("$share/g/mixed", Q::AtLeastOnce, now);
    transient.subscribe("$share/g/mixed", Q::AtLeastOnce, now);
    let mut publisher = Peer::new(&broker, &Hello::new("publisher").expiry(0), now);
    log.set_full(true);
    let before = log.len();
    let message = |topic| Packet::Publish(publish(topic, Q::AtLeastOnce, 1, topic));
    let refused = ask(&mut publisher, message("durable"), now);
    assert_eq!(refused, PubAckReason::QuotaExceeded);
    for _ in 0..2 {
        let accepted = ask(&mut publisher, message("mixed"), now);
        assert_eq!(accepted, PubAckReason::Success);
    }
    assert_eq!(durable.payloads(), [""; 0]);
    assert_eq!(plain.payloads(), [""; 0]);
    assert_eq!(transient.payloads(), ["mixed"; 2]);
    assert_eq!((log.len(), broker.stats().dropped), (before, 0));
    log.set_full(false);
    let accepted = ask(&mut publisher, message("durable"), now);
    assert_eq!(accepted, PubAckReason::Success);
    assert_eq!(durable.payloads(), ["durable"]);
}

/// A log that has no room after it was asked a number of times.
struct Filling {
    log: Arc<TestLog>,
    questions_left: AtomicU64,
}

impl Persistence for Filling {
    fn append(&self, changes: &[u8]) -> LogPosition {
        self.log.append(changes)
    }

    fn released(&self) -> LogPosition {
        self.log.released()
    }

    fn has_room(&self) -> bool {
        let (left, order) = (&self.questions_left, Ordering::Relaxed);
        left.fetch_update(order, order, |left| left.checked_sub(1))
            .is_ok()
    }
}

#[test]
fn log_that_fills_during_a_publish_holds_all_its_messages() {
    let log = Arc::new(Filling {
        log: TestLog::new(true),
        questions_left: AtomicU64::new(u64::MAX),
    });
    let options = Options {
        persistence: Some(log.clone()),
        ..Options::default()
    };
    let (broker, now) = (Broker::new(options, Arc::new(NoService)), Instant::now());
    for client in ["a", "b", "c"] {
        Peer::leave_subscribed(&broker, client, now);
    }
    let mut member = Peer::new(&broker, &Hello::new("member"), now);
    member.subscribe("$share/g/t", Q::AtLeastOnce, now);
    member.lose(now);
    let mut publisher = Peer::new(&broker, &Hello::new("publisher").expiry(0), now);
    log.questions_left.store(1, Ordering::Relaxed);
    let message = Packet::Publish(publish("t", Q::AtLeastOnce, 1, "kept"));
    assert_eq!(ask(&mut publisher, message, now), PubAckReason::Success);
    assert_eq!(log.log.recovery().sessions.len(), 4);
    for session in log.log.recovery().sessions.values() {
        assert_eq!(session.messages.len(), 1, "{}", session.client);
    }
}

/// A client that renews a subscription of its durable session gets the retained messages, unless
/// their QoS needs records.
#[test]
fn full_log_does_not_withhold_retained_messages() {
    for (qos, expected) in [(Q::AtLeastOnce, &["kept"][..]), (Q::ExactlyOnce, &[])] {
        let (log, broker, now) = logged(Limits::default());
        let mut durable = Peer::new(&broker, &Hello::new("durable"), now);
        durable.subscribe("t", qos, now);
        let mut publisher = Peer::new(&broker, &Hello::new("publisher"), now);
        publisher.send(&[retained("t", qos, 1, "kept")], now);
        assert_eq!(durable.payloads(), ["kept"]);
        log.set_full(true);
        let before = log.len();
        durable.subscribe("t", qos, now);
        assert_eq!(durable.payloads(), expected);
        assert_eq!(log.len(), before);
    }
}

/// The broker granted no expiry, so the client does not raise a zero of its own (section
/// 3.14.2.2.2).
#[test]
fn full_log_does_not_turn_a_normal_disconnect_into_a_violation() {
    let (log, broker, now) = logged(Limits::default());
    let mut watcher = Peer::new(&broker, &Hello::new("watcher").expiry(0), now);
    watcher.subscribe("gone", Q::AtMostOnce, now);
    log.set_full(true);
    for (asked, expected) in [(3600, &[][..]), (0, &["lost"][..])] {
        let hello = Hello::new("new").expiry(asked).will("gone", "lost", 0);
        let mut new = Peer::new(&broker, &hello, now);
        let reason = wire::DisconnectReasonCode::NormalDisconnection;
        new.send(&[disconnect(reason, 3600)], now);
        new.lose(now);
        assert_eq!(watcher.payloads(), expected, "{asked} s");
    }
}

/// The Session Expiry Interval of the CONNACK.
fn expiry(peer: &Peer) -> Option<u32> {
    let properties = peer.connack.properties.as_ref();
    properties.and_then(|it| it.session_expiry_interval)
}

/// A session that ends at the CONNECT of its client is not resumed.
#[test]
fn full_log_makes_sessions_transient_that_replace_others() {
    let (log, broker, now) = logged(Limits::default());
    let _lost = Peer::new(&broker, &Hello::new("lost").expiry(0), now);
    Peer::leave_subscribed(&broker, "taken", now);
    log.set_full(true);
    let again = Peer::new(&broker, &Hello::new("lost"), now);
    assert!(!again.connack.session_present);
    assert_eq!(expiry(&again), Some(0));
    accept(&broker, &Hello::new("taken"), Some("another user"), now).unwrap();
    assert_eq!(log.recovery().sessions.len(), 0);
}

#[test]
fn full_log_makes_new_sessions_transient_and_resumes_old_ones() {
    let (log, broker, now) = logged(Limits::default());
    Peer::leave_subscribed(&broker, "old", now);
    log.set_full(true);
    let mut new = Peer::new(&broker, &Hello::new("new"), now);
    assert_eq!(expiry(&new), Some(0));
    let granted = new.subscribe("t", Q::AtLeastOnce, now);
    assert_eq!(granted, SubscribeReasonCode::Success(Q::AtLeastOnce));
    let mut old = Peer::new(&broker, &Hello::new("old"), now);
    assert!(old.connack.session_present);
    assert_eq!(expiry(&old), None);
    let refused = old.subscribe("another", Q::AtLeastOnce, now);
    assert_eq!(refused, SubscribeReasonCode::QuotaExceeded);
    let limit = |client| broker.subscription_limit(client, b"another");
    let text = "the log has no room on the disk for this subscription";
    assert_eq!((limit("old"), limit("new")), (Some(text), None));
    let again = old.subscribe("t", Q::AtLeastOnce, now);
    assert_eq!(again, SubscribeReasonCode::Success(Q::AtLeastOnce));
}

/// The will of a resumed session is kept in memory only. A will that is already in the log may be
/// retained.
#[test]
fn full_log_keeps_new_wills_in_memory_only() {
    let (log, broker, now) = logged(Limits::default());
    let mut will = Hello::new("recorded").will("gone", "recorded", 0);
    will.will.as_mut().unwrap().retain = true;
    let recorded = Peer::new(&broker, &will, now);
    Peer::new(&broker, &Hello::new("late"), now).lose(now);
    log.set_full(true);
    let before = log.bytes();
    let large = "w".repeat(10_000);
    let late = Peer::new(&broker, &Hello::new("late").will("gone", &large, 0), now);
    assert!(log.bytes() < before + 100, "the will is recorded");
    let pieces = image(&broker, 1 << 20);
    recovered(&pieces);
    let image: usize = pieces.iter().map(Vec::len).sum();
    assert!(image < 1000, "the will is in the snapshot of {image} bytes");
    recorded.lose(now);
    assert_eq!(broker.stats().retained, 1);
    late.lose(now);
    assert_eq!(broker.stats().retained, 1);
}

/// A log that is behind, and how many bytes this thread has appended to it.
#[derive(Default)]
struct Behind {
    behind: AtomicBool,
    appended: AtomicU64,
}

impl Persistence for Behind {
    fn append(&self, _: &[u8]) -> LogPosition {
        LogPosition::NONE
    }

    fn released(&self) -> LogPosition {
        LogPosition::NONE
    }

    fn is_behind(&self) -> bool {
        self.behind.load(Ordering::Relaxed)
    }

    fn appended_here(&self) -> u64 {
        self.appended.load(Ordering::Relaxed)
    }
}

#[tokio::test(start_paused = true)]
async fn brake_pauses_only_connections_that_append() {
    let log = Arc::new(Behind::default());
    let mut brake = Brake::new(Some(log.clone()));
    log.behind.store(true, Ordering::Relaxed);
    brake.begin();
    brake.end(false);
    assert!(timeout(Duration::ZERO, brake.wait(false)).await.is_ok());
    let second = Duration::from_secs(1);
    let pauses = timeout(second, brake.wait(true)).await;
    assert!(pauses.is_err(), "a large packet waits");
    brake.begin();
    log.appended.fetch_add(1, Ordering::Relaxed);
    brake.end(false);
    let pauses = timeout(second, brake.wait(false)).await;
    assert!(pauses.is_err(), "a writer waits");
    log.behind.store(false, Ordering::Relaxed);
    assert!(timeout(second, brake.wait(true)).await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn packet_in_many_reads_pauses_as_long_as_in_one() {
    let log = Arc::new(Behind::default());
    log.behind.store(true, Ordering::Relaxed);
    let mut brake = Brake::new(Some(log));
    let second = Duration::from_secs(1);
    // The first read brings enough to pause. The turns handle no packet.
    for most in [BRAKE_TIME_MAX + second, Duration::ZERO, Duration::ZERO] {
        let paused = timeout(most, brake.wait(true)).await;
        assert!(paused.is_ok(), "the packet pauses longer than {most:?}");
        brake.begin();
        brake.end(false);
    }
    // The last one completes the packet.
    brake.begin();
    brake.end(true);
    let paused = timeout(second, brake.wait(true)).await;
    assert!(paused.is_err(), "the next large packet waits");
}
