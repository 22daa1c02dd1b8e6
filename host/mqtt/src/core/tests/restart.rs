//! State that survives a restart: sessions with all their state, retained messages, wills and
//! deadlines.

use std::{
    borrow::Cow,
    sync::Arc,
    time::{Duration, Instant},
};

use wire::{DisconnectReasonCode, Packet, PubRec, PubRel};

use crate::{
    Broker, Limits, Message, NoService, QoS, clock::Clock, limits::WILL_GRACE, testing::*,
};

const SECOND: Duration = Duration::from_secs(1);

/// A broker whose log releases every record at once, and which can be killed and restarted.
struct Life {
    journal: Arc<Journal>,
    broker: Broker,
    began: Instant,
    recorder: Arc<Recorder>,
}

impl Life {
    fn new() -> (Self, Instant) {
        let (journal, began) = (Journal::new(true), Instant::now());
        let recorder = Arc::new(Recorder::default());
        let broker = restored(&journal, Limits::default(), recorder.clone(), began, began);
        let life = Self {
            journal,
            broker,
            began,
            recorder,
        };
        (life, began)
    }

    fn kill(&mut self, now: Instant) {
        self.kill_with(Limits::default(), now);
    }

    fn kill_with(&mut self, limits: Limits, now: Instant) {
        let service = self.recorder.clone();
        self.broker = restored(&self.journal, limits, service, self.began, now);
    }

    fn publish(&self, message: Message, now: Instant) -> usize {
        let source = crate::core::Source::default();
        self.broker
            .lock()
            .publish(Cow::Owned(message), source, now)
            .unwrap()
    }
}

fn message(payload: &str, qos: QoS) -> Message {
    Message::new("t", payload.to_owned(), qos)
}

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
    peer.send(
        &[Packet::Unsubscribe({
            let mut unsubscribe = wire::Unsubscribe::new("gone", None);
            unsubscribe.pkid = 5;
            unsubscribe
        })],
        now,
    );
    life.kill(now + SECOND);
    let mut peer = Peer::new(&life.broker, &Hello::new("a"), now + SECOND);
    assert!(peer.connack.session_present);
    assert_eq!(life.broker.stats().subscriptions, 2);
    // No Local: the client's own message is not sent back.
    peer.send(
        &[Packet::Publish(publish("a/x", Q::AtMostOnce, 0, "own"))],
        now + SECOND,
    );
    let mut other = Peer::new(&life.broker, &Hello::new("b"), now + SECOND);
    let mut retained = publish("a/x", Q::ExactlyOnce, 1, "other");
    retained.retain = true;
    other.send(&[Packet::Publish(retained)], now + SECOND);
    other.send(
        &[Packet::Publish(publish("gone", Q::AtMostOnce, 0, "no"))],
        now + SECOND,
    );
    let messages = peer.messages();
    let [message] = &messages[..] else {
        panic!("{messages:?}")
    };
    assert_eq!((message.qos, message.retain), (Q::ExactlyOnce, true));
    let ids = &message
        .properties
        .as_ref()
        .unwrap()
        .subscription_identifiers;
    assert_eq!(ids, &[7]);
}

#[test]
fn exchange_room_survives_a_restart_with_a_lower_limit() {
    let (mut life, now) = Life::new();
    let mut peer = Peer::new(&life.broker, &Hello::new("a"), now);
    assert_eq!(peer.begin_exchanges(1..21, now), None);
    let lower = Limits {
        receive_max: 2,
        ..Limits::default()
    };
    life.kill_with(lower, now + SECOND);
    let mut peer = Peer::new(&life.broker, &Hello::new("a"), now + SECOND);
    assert!(peer.connack.session_present);
    assert_eq!(peer.begin_exchanges(21..23, now + SECOND), None);
    peer.lose(now + SECOND);
    let mut peer = Peer::new(&life.broker, &Hello::new("a"), now + SECOND);
    assert_eq!(peer.begin_exchanges(23..25, now + SECOND), None);
    peer.lose(now + SECOND);
    let mut peer = Peer::new(&life.broker, &Hello::new("a"), now + SECOND);
    let full = Some(DisconnectReasonCode::ReceiveMaximumExceeded);
    assert_eq!(
        peer.begin_exchanges(25..26, now + SECOND),
        full,
        "forgotten exchanges do not pile up"
    );
    let higher = Limits {
        receive_max: 15,
        ..Limits::default()
    };
    life.broker.set_limits(higher);
    let mut peer = Peer::new(&life.broker, &Hello::new("a"), now + SECOND);
    assert_eq!(peer.begin_exchanges(26..41, now + SECOND), None);
}

#[test]
fn queued_and_sent_messages_survive_a_restart() {
    let (mut life, now) = Life::new();
    let narrow = || Hello::new("a").set(|hello| hello.receive_maximum = Some(3));
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
    peer.send(&[Packet::PubRec(PubRec::new(sent[1].pkid, None))], now);
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
        assert_eq!((fourth.pkid, fourth.dup), (sent[2].pkid + 1, restart > 1));
        assert_eq!(fourth.payload, "4");
    }
    let at = now + 4 * SECOND;
    life.kill(at);
    let mut peer = Peer::new(&life.broker, &Hello::new("a"), at);
    let messages = peer.messages();
    let [.., fifth] = &messages[..] else {
        panic!("no messages")
    };
    assert_eq!((fifth.pkid, fifth.dup), (sent[2].pkid + 2, false));
    assert_eq!((&fifth.payload[..], messages.len()), (&b"5"[..], 4));
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
    assert_eq!(life.recorder.requests.lock().unwrap().len(), 1);
    life.kill(now);
    let mut peer = Peer::new(&life.broker, &Hello::new("a"), now);
    let again = |topic, id| {
        let mut publish = publish(topic, Q::ExactlyOnce, id, "x");
        publish.dup = true;
        Packet::Publish(publish)
    };
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
    assert_eq!(life.recorder.requests.lock().unwrap().len(), 2);
    peer.send(&[Packet::PubRel(PubRel::new(5, None))], now);
    assert!(matches!(peer.receive()[..], [Packet::PubComp(_)]));
    life.kill(now);
    let mut listener = Peer::new(&life.broker, &Hello::new("l"), now);
    assert_eq!(listener.payloads(), ["x"], "once");
    let mut peer = Peer::new(&life.broker, &Hello::new("a"), now);
    // The packet id is free, so this is another message.
    peer.send(
        &[Packet::Publish(publish("t", Q::ExactlyOnce, 5, "y"))],
        now,
    );
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
            let properties = message.properties.as_ref().unwrap();
            assert_eq!(properties.user_properties.len(), 1);
            assert!(message.retain);
            (&message.payload[..], properties.message_expiry_interval)
        })
        .collect();
    assert_eq!(seen, [(&b"one"[..], None), (b"two", Some(7))]);
}

#[test]
fn messages_expire_while_the_broker_is_down() {
    let (mut life, now) = Life::new();
    let mut peer = Peer::new(&life.broker, &Hello::new("a"), now);
    peer.subscribe("t", Q::AtLeastOnce, now);
    peer.lose(now);
    for (payload, seconds) in [("short", 2), ("long", 60)] {
        let mut message = message(payload, QoS::AtLeastOnce);
        message.expires = Some(now + seconds * SECOND);
        life.publish(message, now);
    }
    let later = now + 10 * SECOND;
    life.kill(later);
    let mut peer = Peer::new(&life.broker, &Hello::new("a"), later);
    let messages = peer.messages();
    let [only] = &messages[..] else {
        panic!("{messages:?}")
    };
    assert_eq!(only.payload, "long");
    let expiry = only.properties.as_ref().unwrap().message_expiry_interval;
    assert_eq!(expiry, Some(50));
}

#[test]
fn sessions_expire_by_the_wall_clock() {
    let (mut life, now) = Life::new();
    let present = |life: &Life, client: &str, at| {
        let peer = Peer::new(&life.broker, &Hello::new(client).expiry(0), at);
        peer.connack.session_present
    };
    Peer::new(&life.broker, &Hello::new("away").expiry(20), now).lose(now);
    Peer::new(&life.broker, &Hello::new("short").expiry(5), now).lose(now);
    let connected = Peer::new(&life.broker, &Hello::new("connected").expiry(20), now);
    let brief = Peer::new(&life.broker, &Hello::new("brief").expiry(0), now);
    assert_eq!(life.broker.sessions().len(), 4);
    drop((connected, brief));
    // The connection of this session ends at the restart, and its expiry interval begins then.
    // Another restart must not begin it again.
    life.kill(now + 10 * SECOND);
    assert_eq!(life.broker.sessions().len(), 3);
    life.kill(now + 15 * SECOND);
    life.broker.lock().run_deadlines(now + 15 * SECOND);
    assert_eq!(life.broker.sessions().len(), 2);
    let before_the_end = now + 29 * SECOND;
    life.broker.lock().run_deadlines(before_the_end);
    assert!(!present(&life, "away", before_the_end));
    assert!(!present(&life, "short", before_the_end));
    assert!(!present(&life, "brief", before_the_end));
    assert_eq!(life.broker.sessions().len(), 4);
    life.kill(before_the_end);
    life.broker.lock().run_deadlines(now + 31 * SECOND);
    assert_eq!(
        life.broker.sessions(),
        Vec::<u64>::new(),
        "its session ends at second 30"
    );
    let mut ended = life.recorder.ended.lock().unwrap().clone();
    ended.sort_unstable();
    assert_eq!(ended.len(), 3, "each session once: {ended:?}");
}

#[test]
fn wall_clock_set_back_does_not_extend_sessions() {
    let (mut life, now) = Life::new();
    let lost = now + 100 * SECOND;
    Peer::new(&life.broker, &Hello::new("a").expiry(5), now).lose(lost);
    // The wall clock shows the time of the beginning again.
    life.kill(now);
    life.broker.lock().run_deadlines(now + 4 * SECOND);
    assert_eq!(life.broker.sessions().len(), 1);
    life.broker.lock().run_deadlines(now + 5 * SECOND);
    assert_eq!(life.broker.sessions().len(), 0);
}

#[test]
fn wall_clock_step_forward_expires_nothing_early() {
    let (mut life, began) = Life::new();
    let mut peer = Peer::new(&life.broker, &Hello::new("a").expiry(20), began);
    peer.subscribe("t", Q::AtLeastOnce, began);
    // A gateway without a clock learns the time: from here on the wall clock is a hundred seconds
    // ahead.
    let step = 100 * SECOND;
    let wall_ms = WALL_MS + (10 * SECOND + step).as_millis() as u64;
    let now = began + 10 * SECOND;
    life.broker.lock().set_clock(Clock::at(now, wall_ms));
    peer.lose(now);
    let mut message = message("waits", QoS::AtLeastOnce);
    message.expires = Some(now + 50 * SECOND);
    life.publish(message, now);
    life.began = began - step;
    let later = now + 15 * SECOND;
    life.kill(later);
    life.broker.lock().run_deadlines(later);
    let mut peer = Peer::new(&life.broker, &Hello::new("a"), later);
    assert!(peer.connack.session_present);
    let messages = peer.messages();
    let [only] = &messages[..] else {
        panic!("{messages:?}")
    };
    let left_s = only.properties.as_ref().unwrap().message_expiry_interval;
    assert_eq!(left_s, Some(35));
}

#[test]
fn will_waits_for_its_client_after_a_restart() {
    let (mut life, now) = Life::new();
    let mut listener = Peer::new(&life.broker, &Hello::new("l"), now);
    listener.subscribe("will", Q::AtLeastOnce, now);
    // Five wills: connected at the crash and without delay; lost long ago; disconnected normally;
    // with a delay above the grace period; and one whose client returns in time.
    let at_once = Peer::new(&life.broker, &Hello::new("a").will("will", "a", 0), now);
    Peer::new(&life.broker, &Hello::new("b").will("will", "b", 5), now).lose(now);
    Peer::new(&life.broker, &Hello::new("c").will("will", "c", 0), now)
        .disconnect(DisconnectReasonCode::NormalDisconnection, now);
    let late = Peer::new(&life.broker, &Hello::new("d").will("will", "d", 60), now);
    let back = Peer::new(&life.broker, &Hello::new("e").will("will", "e", 0), now);
    drop((listener, at_once, late, back));
    let restart = now + 6 * SECOND;
    life.kill(restart);
    let received = |life: &Life, at: Instant| {
        life.broker.lock().run_deadlines(at);
        let mut listener = Peer::new(&life.broker, &Hello::new("l"), at);
        let messages = listener.messages();
        for message in &messages {
            assert_eq!(
                message.properties.as_ref().unwrap().user_properties.len(),
                1
            );
            listener.send(&[puback(message.pkid)], at);
        }
        messages
            .into_iter()
            .map(|message| String::from_utf8(message.payload.to_vec()).unwrap())
            .collect::<Vec<_>>()
    };
    let nothing: [String; 0] = [];
    assert_eq!(received(&life, restart), nothing);
    let before = restart + WILL_GRACE - SECOND;
    assert_eq!(received(&life, before), nothing);
    Peer::new(&life.broker, &Hello::new("e"), before);
    let mut both = received(&life, restart + WILL_GRACE);
    both.sort();
    assert_eq!(both, ["a", "b"]);
    life.kill(restart + WILL_GRACE);
    assert_eq!(
        received(&life, restart + 59 * SECOND),
        nothing,
        "each will once"
    );
    assert_eq!(received(&life, restart + 61 * SECOND), ["d"]);
}

#[test]
fn session_expired_during_downtime_publishes_its_will() {
    let (mut life, now) = Life::new();
    let mut listener = Peer::new(&life.broker, &Hello::new("l"), now);
    listener.subscribe("will", Q::AtLeastOnce, now);
    let hello = Hello::new("a").expiry(5).will("will", "a", 1000);
    Peer::new(&life.broker, &hello, now).lose(now);
    let restart = now + 6 * SECOND;
    life.kill(restart);
    life.broker.lock().run_deadlines(restart);
    let mut listener = Peer::new(&life.broker, &Hello::new("l"), restart);
    assert_eq!(listener.payloads(), ["a"]);
    life.kill(restart);
    assert_eq!(life.broker.sessions().len(), 1);
}

#[test]
fn will_survives_a_crash_after_a_disconnect_with_will() {
    let (mut life, now) = Life::new();
    let mut listener = Peer::new(&life.broker, &Hello::new("l"), now);
    listener.subscribe("will", Q::AtLeastOnce, now);
    let mut peer = Peer::new(&life.broker, &Hello::new("a").will("will", "a", 50), now);
    let mut disconnect = wire::Disconnect::new(DisconnectReasonCode::DisconnectWithWillMessage);
    disconnect.properties = Some(wire::DisconnectProperties {
        session_expiry_interval: Some(0),
        reason_string: None,
        user_properties: Vec::new(),
        server_reference: None,
    });
    peer.send(&[Packet::Disconnect(disconnect)], now);
    // The crash comes before the connection's task has seen the end.
    life.kill(now);
    life.broker.lock().run_deadlines(now);
    let mut listener = Peer::new(&life.broker, &Hello::new("l"), now);
    assert_eq!(listener.payloads(), ["a"]);
}

#[test]
fn wills_of_a_shutdown_are_sent_after_the_next_start() {
    let (mut life, now) = Life::new();
    let mut listener = Peer::new(&life.broker, &Hello::new("l"), now);
    listener.subscribe("will", Q::AtLeastOnce, now);
    let peer = Peer::new(&life.broker, &Hello::new("a").will("will", "a", 0), now);
    life.broker.lock().shut_down();
    listener.lose(now);
    peer.lose(now);
    life.kill(now);
    life.broker.lock().run_deadlines(now + WILL_GRACE);
    let mut listener = Peer::new(&life.broker, &Hello::new("l"), now + WILL_GRACE);
    assert_eq!(listener.payloads(), ["a"]);
}

#[test]
fn session_numbers_last_and_connection_numbers_never_repeat() {
    let (mut life, now) = Life::new();
    let first = Peer::new(&life.broker, &Hello::new("a"), now);
    let other = Peer::new(&life.broker, &Hello::new("b"), now);
    let (first, other) = (first.origin.clone(), other.origin.clone());
    assert_ne!(first.session, other.session);
    assert_eq!(first.connection, 1, "run 0");
    let run = life.journal.len() as u64;
    life.kill(now);
    let again = Peer::new(&life.broker, &Hello::new("a"), now).origin;
    assert_eq!(again.session, first.session);
    assert!(
        again.connection > run << 32 && again.connection < (run + 1) << 32,
        "{again:?}"
    );
    let fresh = Peer::new(&life.broker, &Hello::new("a").clean(), now).origin;
    assert!(fresh.session > other.session);
    assert_eq!(
        *life.recorder.ended.lock().unwrap(),
        [],
        "the service does not know yet that its connection has ended"
    );
    life.broker.lock().disconnect_reported(again.session);
    assert_eq!(*life.recorder.ended.lock().unwrap(), [again.session]);
    life.kill(now);
    let mut sessions = life.broker.sessions();
    sessions.sort_unstable();
    assert_eq!(sessions, [other.session, fresh.session]);
}

#[test]
fn session_numbers_do_not_repeat_without_run_numbers() {
    let (life, now) = Life::new();
    let old = Peer::new(&life.broker, &Hello::new("a"), now).origin;
    let broker = Broker::restore(
        crate::Options::default(),
        Arc::new(NoService),
        life.journal.recovery(),
    );
    let new = Peer::new(&broker, &Hello::new("b"), now).origin;
    assert!(new.session > old.session);
}

#[test]
fn lower_limits_after_a_restart_keep_what_fits() {
    let (mut life, now) = Life::new();
    for (number, client) in ["a", "b", "c"].into_iter().enumerate() {
        let expiry_s = 1000 - number as u32 * 100;
        let mut peer = Peer::new(&life.broker, &Hello::new(client).expiry(expiry_s), now);
        peer.subscribe("t", Q::ExactlyOnce, now);
        peer.subscribe("u/+", Q::ExactlyOnce, now);
        if client == "a" {
            life.publish(message("sent", QoS::ExactlyOnce), now);
            assert_eq!(peer.payloads().len(), 1);
        }
        peer.lose(now);
    }
    for number in 0..5 {
        life.publish(message(&number.to_string(), QoS::AtLeastOnce), now);
        let mut retained = Message::new(format!("r/{number}"), "x", QoS::AtLeastOnce);
        retained.retain = true;
        life.publish(retained, now);
    }
    let small = Limits {
        sessions_max: 2,
        subscriptions_per_session_max: 1,
        queue_bytes_max: 600,
        retained_max: 3,
        session_expiry_max_s: 950,
        ..Limits::default()
    };
    life.kill_with(small, now);
    let stats = life.broker.stats();
    assert_eq!(
        (stats.sessions, stats.subscriptions, stats.retained),
        (2, 2, 3)
    );
    assert!(
        stats.queued_bytes <= 2 * 600 && stats.queued_bytes > 600,
        "{stats:?}"
    );
    assert!(stats.dropped > 0);
    // Dropped state stays dropped, even if the limits are raised again.
    life.kill(now);
    let again = life.broker.stats();
    assert_eq!(
        (
            again.sessions,
            again.subscriptions,
            again.retained,
            again.queued_bytes
        ),
        (
            stats.sessions,
            stats.subscriptions,
            stats.retained,
            stats.queued_bytes
        )
    );
    let mut a = Peer::new(&life.broker, &Hello::new("a"), now);
    assert!(
        a.connack.session_present,
        "the session that would have lasted longest"
    );
    let packets = a.receive();
    assert!(
        matches!(&packets[..], [Packet::Publish(sent), ..] if sent.dup),
        "{packets:?}"
    );
    // Even the message in flight does not fit. Its exchange is completed without it.
    life.kill_with(
        Limits {
            queue_bytes_max: 10,
            ..Limits::default()
        },
        now,
    );
    let mut a = Peer::new(&life.broker, &Hello::new("a"), now);
    assert!(matches!(a.receive()[..], [Packet::PubRel(_)]));
    life.broker.lock().run_deadlines(now + 951 * SECOND);
    assert_eq!(
        life.broker.stats().sessions,
        1,
        "the lowered session expiry applies"
    );
}

#[test]
fn transient_sessions_are_not_recorded() {
    let (life, now) = Life::new();
    let begin = life.journal.len();
    let mut peer = Peer::new(
        &life.broker,
        &Hello::new("a").expiry(0).will("w", "w", 0),
        now,
    );
    peer.subscribe("t", Q::ExactlyOnce, now);
    life.publish(message("x", QoS::ExactlyOnce), now);
    let id = peer.messages()[0].pkid;
    peer.send(
        &[
            Packet::PubRec(PubRec::new(id, None)),
            Packet::Publish(publish("unmatched", Q::ExactlyOnce, 1, "x")),
            Packet::PubRel(PubRel::new(1, None)),
        ],
        now,
    );
    peer.lose(now);
    assert_eq!(life.journal.len(), begin);
    // A session that is resumed without an expiry stops being durable.
    Peer::new(&life.broker, &Hello::new("b"), now).lose(now);
    let mut peer = Peer::new(&life.broker, &Hello::new("b").expiry(0), now);
    let ended = life.journal.len();
    peer.subscribe("t", Q::ExactlyOnce, now);
    assert_eq!(life.journal.len(), ended);
    assert_eq!(life.journal.recovery(), crate::Recovery::default());
    let broker = Broker::new(crate::Options::default(), Arc::new(NoService));
    let mut cursor = crate::ImageCursor::default();
    let mut peer = Peer::new(&broker, &Hello::new("a"), now);
    peer.subscribe("t", Q::ExactlyOnce, now);
    assert!(broker.image(&mut cursor, 1 << 20).is_some());
    assert!(broker.image(&mut cursor, 1 << 20).is_none());
}
