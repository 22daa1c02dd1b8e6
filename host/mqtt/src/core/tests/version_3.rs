//! Clients of MQTT 3.1.1, alone, with clients of MQTT 5, and as the same client.

mod client;
mod publishing;

use std::time::{Duration, Instant};

use client::{Client, connect, packet};
use rumqttc::mqttbytes::{QoS as Q3, v4};
use v4::Packet as P;

use crate::{Limits, Message, NoService, QoS, dispatch::Turn, testing::*};

const SECOND: Duration = Duration::from_secs(1);

#[test]
fn clean_session_ends_with_its_connection() {
    let (broker, now) = (broker(Limits::default()), Instant::now());
    let mut a = Client::new(&broker, "a", false, now);
    assert!(!a.session_present);
    a.subscribe("t", Q3::AtLeastOnce, now);
    a.peer.lose(now);
    let a = Client::new(&broker, "a", false, now);
    assert!(a.session_present);
    a.peer.lose(now);
    let mut a = Client::new(&broker, "a", true, now);
    assert!(!a.session_present, "[MQTT-3.1.2-6]");
    a.subscribe("t", Q3::AtLeastOnce, now);
    a.peer.lose(now);
    assert_eq!(broker.stats().sessions, 0);
    assert!(!Client::new(&broker, "a", false, now).session_present);
}

#[test]
fn kept_session_lasts_for_the_maximum_expiry_and_over_a_restart() {
    let limits = limited(|it| it.session_expiry_max_s = 100);
    let (log, began) = (TestLog::new(true), Instant::now());
    let start = |now| {
        let service = std::sync::Arc::new(NoService);
        restored(&log, limits.clone(), service, began, now)
    };
    let broker = start(began);
    let mut a = Client::new(&broker, "a", false, began);
    a.subscribe("t", Q3::AtLeastOnce, began);
    a.peer.lose(began);
    drop(broker);

    let broker = start(began + 10 * SECOND);
    broker.batch(|batch| batch.publish(Message::new("t", "kept", QoS::ExactlyOnce)));
    let mut a = Client::new(&broker, "a", false, began + 99 * SECOND);
    assert!(a.session_present);
    assert_eq!(a.payloads(), ["kept"]);
    a.peer.lose(began + 99 * SECOND);
    let a = Client::new(&broker, "a", false, began + 199 * SECOND);
    assert!(!a.session_present);
}

#[test]
fn client_without_an_id_gets_one() {
    let (broker, now) = (broker(Limits::default()), Instant::now());
    let a = Client::new(&broker, "", true, now);
    let b = Client::new(&broker, "", true, now);
    assert!(a.peer.origin.client.starts_with("auto-"));
    assert_ne!(a.peer.origin.client, b.peer.origin.client);
}

#[test]
fn keep_alive_is_that_of_the_client() {
    let broker = broker(limited(|it| it.keep_alive_max_s = 30));
    for (asked, silence) in [(0, None), (10, Some(15 * SECOND)), (60, Some(90 * SECOND))] {
        let mut hello = v4::Connect::new("a");
        hello.keep_alive = asked;
        let a = Client::of(&broker, hello, Instant::now());
        assert_eq!(a.peer.silence_max, silence, "[MQTT-3.1.2-24]");
    }
}

#[test]
fn takeover_closes_without_a_packet_and_sends_the_will() {
    let (broker, now) = (broker(Limits::default()), Instant::now());
    let mut watcher = Client::new(&broker, "watcher", true, now);
    watcher.subscribe("w", Q3::AtMostOnce, now);
    let with_will = || {
        let mut hello = connect("a", true);
        hello.last_will = Some(v4::LastWill::new("w", "lost", Q3::AtLeastOnce, false));
        hello
    };
    let mut first = Client::of(&broker, with_will(), now);
    let second = Client::of(&broker, with_will(), now);
    assert_eq!(first.peer.receive_bytes(), b""[..]);
    assert!(first.peer.output.is_closing());
    assert_eq!(watcher.payloads(), ["lost"], "[MQTT-3.1.2-8]");
    second.disconnect(now);
    assert_eq!(watcher.payloads(), [""; 0], "[MQTT-3.1.2-10]");
    Client::of(&broker, with_will(), now).peer.lose(now);
    assert_eq!(watcher.payloads(), ["lost"]);
}

#[test]
fn violation_closes_without_a_packet() {
    let (broker, now) = (broker(Limits::default()), Instant::now());
    let mut a = Client::new(&broker, "a", true, now);
    let mut bytes = packet(&P::PingReq);
    // PUBACK with a reason code.
    bytes.extend_from_slice(b"\x40\x03\0\x01\0");
    assert_eq!(a.peer.send_raw(&bytes, now), Turn::Over);
    assert_eq!(a.receive(), [P::PingResp]);
    assert!(a.peer.output.is_closing());
    assert_eq!(broker.stats().disconnected, 1);
}

#[test]
fn subscriptions_are_answered_by_codes_of_version_3() {
    let (broker, now) = start(limited(|it| it.topic_levels_max = 3));
    let mut a = Client::new(&broker, "a", true, now);
    let filters = [
        ("t", Q3::AtMostOnce),
        ("a/b/c/d", Q3::AtMostOnce),
        ("$share//t", Q3::AtMostOnce),
        ("+", Q3::ExactlyOnce),
    ];
    let filters = filters.map(|(filter, qos)| v4::SubscribeFilter::new(filter.to_owned(), qos));
    let mut subscribe = v4::Subscribe::new_many(filters);
    subscribe.pkid = 5;
    a.send(&[P::Subscribe(subscribe)], now);
    assert_eq!(a.peer.receive_bytes(), b"\x90\x06\0\x05\0\x80\x80\x02"[..]);
    let mut unsubscribe = v4::Unsubscribe::new("t");
    unsubscribe.topics.push("unknown".to_owned());
    unsubscribe.pkid = 6;
    a.send(&[P::Unsubscribe(unsubscribe)], now);
    assert_eq!(a.peer.receive_bytes(), b"\xb0\x02\0\x06"[..]);
}

/// A message in flight must survive changes of the version, at both QoS and in both directions.
#[test]
fn session_changes_the_version_with_its_messages() {
    let (broker, now) = (broker(Limits::default()), Instant::now());
    let send = |qos, payload: &str| {
        let message = Message::new("t", payload.to_owned(), qos);
        broker.batch(|batch| batch.publish(message));
    };
    let mut five = Peer::new(&broker, &Hello::new("a"), now);
    five.subscribe_with(wire::Filter::new("t", Q::ExactlyOnce), Some(9), now);
    send(QoS::AtLeastOnce, "one");
    send(QoS::ExactlyOnce, "two");
    let first = five.messages();
    // An exchange of the client that waits for its PUBREL.
    five.publish("other", Q::ExactlyOnce, 77, "", now);
    five.lose(now);

    let mut three = Client::new(&broker, "a", false, now);
    assert!(three.session_present);
    let again = three.messages();
    let ids: Vec<_> = again.iter().map(|it| it.pkid).collect();
    assert_eq!(ids, [first[0].pkid, first[1].pkid]);
    assert!(again.iter().all(|it| it.dup));
    let mut repeated = v4::Publish::new("other", Q3::ExactlyOnce, "");
    (repeated.pkid, repeated.dup) = (77, true);
    let rel = |id| P::PubRel(v4::PubRel::new(id));
    let packets = [
        P::PubAck(v4::PubAck::new(ids[0])),
        P::PubRec(v4::PubRec::new(ids[1])),
        P::Publish(repeated),
        rel(77),
        rel(78),
    ];
    three.send(&packets, now);
    let comp = |id| P::PubComp(v4::PubComp::new(id));
    let rec = P::PubRec(v4::PubRec::new(77));
    let answers = [rel(ids[1]), rec, comp(77), comp(78)];
    assert_eq!(three.receive(), answers, "handed over once");
    send(QoS::ExactlyOnce, "three");
    assert_eq!(three.payloads(), ["three"]);
    three.peer.lose(now);

    let mut five = Peer::new(&broker, &Hello::new("a").expiry(5), now);
    assert!(five.connack.session_present);
    let packets = five.receive();
    let [wire::Packet::PubRel(rel), wire::Packet::Publish(message)] = &packets[..] else {
        panic!("{packets:?}")
    };
    assert_eq!(
        (rel.pkid, &message.payload[..], message.dup),
        (ids[1], &b"three"[..], true)
    );
    assert_eq!(properties(message).subscription_identifiers, [9]);
}

#[test]
fn operators_see_the_version() {
    let (broker, now) = (broker(Limits::default()), Instant::now());
    let three = Client::new(&broker, "three", true, now);
    let _five = Peer::new(&broker, &Hello::new("five"), now);
    let stats = broker.stats();
    assert_eq!((stats.connections, stats.connections_v311), (2, 1));
    let sessions = broker.session_summaries();
    let versions = sessions.iter().map(|it| {
        let version = it.connection.as_ref().unwrap().version;
        (&*it.client, version.name())
    });
    assert_eq!(
        versions.collect::<Vec<_>>(),
        [("three", "3.1.1"), ("five", "5")]
    );
    three.peer.lose(now);
    assert_eq!(broker.stats().connections_v311, 0);
}
