//! Messages between versions, and PUBLISHes of MQTT 3.1.1 that the broker refuses.

use std::{
    sync::{Arc, Mutex},
    time::Instant,
};

use rumqttc::mqttbytes::{QoS as Q3, v4};
use v4::Packet as P;

use super::client::{Client, publish as publish_3};
use crate::{
    Access, Anyone, Attempt, Broker, Deciding, Limits, NoService, Options, Origin, ReasonCode,
    Refusal, Refused, dispatch::Turn, testing::*,
};

#[test]
fn properties_stay_with_version_5() {
    let (broker, now) = (broker(Limits::default()), Instant::now());
    let mut five = Peer::new(&broker, &Hello::new("five"), now);
    five.subscribe("#", Q::AtLeastOnce, now);
    let mut three = Client::new(&broker, "three", true, now);
    three.subscribe("#", Q3::AtLeastOnce, now);
    let mut message = publish("t", Q::AtLeastOnce, 1, "from five");
    message.properties = Some(wire::PublishProperties {
        message_expiry_interval: Some(60),
        content_type: Some("text".to_owned()),
        user_properties: vec![("a".to_owned(), "b".to_owned())],
        ..Default::default()
    });
    five.send(&[wire::Packet::Publish(message)], now);
    assert_eq!(
        three.messages(),
        [publish_3("t", Q3::AtLeastOnce, 1, "from five")]
    );
    five.receive();
    let message = publish_3("t", Q3::AtLeastOnce, 1, "from three");
    three.send(&[P::Publish(message)], now);
    assert_eq!(three.receive().len(), 2, "the message and its PUBACK");
    let mut got = five.messages();
    let properties = got[0].properties.take().unwrap_or_default();
    assert_eq!(properties, wire::PublishProperties::default());
    assert_eq!(five.payloads(), [""; 0]);
}

#[test]
fn expired_message_is_not_sent_to_version_3() {
    let (broker, now) = (broker(Limits::default()), Instant::now());
    let mut three = Client::new(&broker, "three", false, now);
    three.subscribe("t", Q3::AtLeastOnce, now);
    three.peer.lose(now);
    let mut five = Peer::new(&broker, &Hello::new("five"), now);
    for (expiry_s, payload) in [(1, "expires"), (60, "stays")] {
        let mut message = publish("t", Q::AtLeastOnce, 1, payload);
        message.properties = Some(wire::PublishProperties {
            message_expiry_interval: Some(expiry_s),
            ..Default::default()
        });
        five.send(&[wire::Packet::Publish(message)], now);
    }
    let later = now + 2 * super::SECOND;
    assert_eq!(
        Client::new(&broker, "three", false, later).payloads(),
        ["stays"]
    );
}

#[test]
fn retain_flag_distinguishes_stored_messages_from_live_ones() {
    let (broker, now) = (broker(Limits::default()), Instant::now());
    let mut a = Client::new(&broker, "a", true, now);
    a.subscribe("t", Q3::AtMostOnce, now);
    let mut message = publish_3("t", Q3::AtMostOnce, 0, "x");
    message.retain = true;
    a.send(&[P::Publish(message)], now);
    let flags = |a: &mut Client| a.messages().iter().map(|it| it.retain).collect::<Vec<_>>();
    assert_eq!(flags(&mut a), [false], "[MQTT-3.3.1-9]");
    for _ in 0..2 {
        a.subscribe("t", Q3::AtMostOnce, now);
        assert_eq!(flags(&mut a), [true], "[MQTT-3.3.1-8], [MQTT-3.8.4-3]");
    }
}

/// Access control that forbids to publish below `forbidden/`, and keeps what the broker reports.
#[derive(Default)]
struct Rules(Mutex<Vec<String>>);

impl Access for Rules {
    fn admit(&self, attempt: Attempt) -> Deciding {
        Anyone.admit(attempt)
    }
    fn may_publish(&self, _: &Origin, topic: &[u8]) -> bool {
        !topic.starts_with(b"forbidden/")
    }
    fn may_subscribe(&self, _: &Origin, _: &[u8]) -> bool {
        true
    }
    fn refused(&self, refusal: &Refusal<'_>) {
        let text = refusal.text.unwrap_or_default();
        let line = format!("{} {} {text}", refusal.client, refusal.what.name());
        self.0.lock().unwrap().push(line);
    }
}

fn count(broker: &Broker, what: Refused, reason: ReasonCode) -> u64 {
    let counts = broker.refusals();
    let own = counts
        .iter()
        .filter(|it| (it.what, it.reason) == (what, reason));
    own.map(|it| it.count).sum()
}

#[test]
fn requests_are_acknowledged_and_refused_by_name() {
    let service = Arc::new(RecordingService::default());
    let rules = Arc::new(Rules::default());
    let options = Options {
        access: rules.clone(),
        ..Options::default()
    };
    let (broker, now) = (Broker::new(options, service.clone()), Instant::now());
    let mut a = Client::new(&broker, "a", true, now);
    let ask = |qos, id| P::Publish(publish_3("req/x", qos, id, ""));
    let packets = [
        ask(Q3::AtMostOnce, 0),
        ask(Q3::AtLeastOnce, 1),
        ask(Q3::ExactlyOnce, 2),
        P::PubRel(v4::PubRel::new(2)),
        P::Publish(publish_3("no/x", Q3::AtLeastOnce, 3, "")),
        P::Publish(publish_3("forbidden/x", Q3::AtLeastOnce, 4, "")),
    ];
    assert_eq!(a.send(&packets, now), Turn::Drained);
    let ack = |id| P::PubAck(v4::PubAck::new(id));
    let (rec, comp) = (
        P::PubRec(v4::PubRec::new(2)),
        P::PubComp(v4::PubComp::new(2)),
    );
    assert_eq!(
        a.receive(),
        [ack(1), rec, comp, ack(3), ack(4)],
        "[MQTT-3.3.5-2]"
    );
    assert!(service.requests.lock().unwrap().is_empty());
    assert_eq!(broker.stats().dropped, 1, "the request at QoS 0");
    let reason = ReasonCode::IMPLEMENTATION_SPECIFIC_ERROR;
    assert_eq!(count(&broker, Refused::Publish, reason), 3);
    assert_eq!(
        count(&broker, Refused::Publish, ReasonCode::NOT_AUTHORIZED),
        2
    );
    let reported = rules.0.lock().unwrap();
    assert_eq!(
        reported[0],
        "a publish a request needs properties, which MQTT 3.1.1 does not have: connect with MQTT 5 \
         (topic req/x)"
    );
}

/// An acknowledgement would take responsibility for a message that the broker does not keep.
#[test]
fn message_over_a_limit_closes_the_connection() {
    for qos in [Q3::AtLeastOnce, Q3::ExactlyOnce] {
        let (log, broker, now) = logged(Limits::default());
        let mut a = Client::new(&broker, "a", false, now);
        log.set_full(true);
        let mut message = publish_3("t", qos, 7, "x");
        message.retain = true;
        a.send(&[P::Publish(message.clone())], now);
        assert_eq!(a.receive(), [], "[MQTT-4.8.0-2]");
        assert!(a.peer.output.is_closing());
        for what in [Refused::Publish, Refused::Connection] {
            assert_eq!(count(&broker, what, ReasonCode::QUOTA_EXCEEDED), 1);
        }
        a.peer.lose(now);

        log.set_full(false);
        let mut a = Client::new(&broker, "a", false, now);
        message.dup = true;
        a.send(&[P::Publish(message)], now);
        assert_eq!(a.receive().len(), 1, "accepted when it is sent again");
        assert_eq!(broker.stats().retained, 1);
    }
}

/// MQTT 3.1.1 has no Receive Maximum, so a client may send all PUBRELs behind all messages.
#[test]
fn exactly_once_messages_are_not_limited_by_the_receive_maximum() {
    let (broker, now) = start(limited(|it| it.receive_max = 2));
    let mut a = Client::new(&broker, "a", true, now);
    let ids = 1..=u16::MAX;
    for id in ids.clone() {
        let ask = P::Publish(publish_3("t", Q3::ExactlyOnce, id, ""));
        assert_eq!(a.send(&[ask], now), Turn::Drained);
        assert_eq!(a.receive(), [P::PubRec(v4::PubRec::new(id))]);
    }
    for id in ids {
        a.send(&[P::PubRel(v4::PubRel::new(id))], now);
        assert_eq!(a.receive(), [P::PubComp(v4::PubComp::new(id))]);
    }
}

/// A client of MQTT 3.1.1 may repeat a PUBLISH on the same connection (section 4.4).
#[test]
fn repetition_before_its_pubrel_is_no_new_message_though_it_waits() {
    let (broker, now) = start(Limits {
        queue_bytes_reserve: 1000,
        queue_bytes_max: 10_000,
        ..Limits::default()
    });
    let mut subscriber = Client::new(&broker, "subscriber", true, now);
    subscriber.subscribe("t", Q3::AtMostOnce, now);
    let mut a = Client::new(&broker, "a", true, now);
    a.subscribe("a", Q3::AtLeastOnce, now);
    let ask = |id, payload| P::Publish(publish_3("t", Q3::ExactlyOnce, id, payload));
    let rec = |id| P::PubRec(v4::PubRec::new(id));
    let rel = |id| P::PubRel(v4::PubRel::new(id));
    let comp = |id| P::PubComp(v4::PubComp::new(id));
    a.send(&[ask(1, "one"), ask(2, "two")], now);
    assert_eq!(a.receive(), [rec(1), rec(2)]);
    // The client's PUBLISHes wait while it does not acknowledge this message.
    let large = publish_3("a", Q3::AtLeastOnce, 1, &"x".repeat(6000));
    subscriber.send(&[P::Publish(large)], now);
    let unacknowledged = a.messages()[0].pkid;
    // In two reads, and in one.
    assert_eq!(a.send(&[ask(1, "one")], now), Turn::Paused);
    a.send(&[rel(1)], now);
    assert_eq!(a.receive(), [rec(1), comp(1)]);
    assert_eq!(a.send(&[ask(2, "two"), rel(2)], now), Turn::Paused);
    assert_eq!(a.receive(), [rec(2), comp(2)]);
    let ack = P::PubAck(v4::PubAck::new(unacknowledged));
    assert_eq!(a.send(&[ack, ask(3, "three")], now), Turn::Drained);
    assert_eq!(a.receive(), [rec(3)]);
    assert_eq!(subscriber.payloads(), ["one", "two", "three"]);
}

/// MQTT 3.1.1 has no code for a refusal, so the publisher is not disconnected for slow members.
#[test]
fn message_for_a_full_group_is_acknowledged_and_dropped() {
    let (broker, now) = start(Limits {
        queue_bytes_max: 4000,
        queue_bytes_reserve: 0,
        ..Limits::default()
    });
    let mut slow = Client::new(&broker, "slow", false, now);
    slow.subscribe("$share/g/jobs", Q3::AtLeastOnce, now);
    let mut a = Client::new(&broker, "a", true, now);
    for id in 1..=10 {
        let message = publish_3("jobs", Q3::AtLeastOnce, id, &"x".repeat(1000));
        assert_eq!(a.send(&[P::Publish(message)], now), Turn::Drained);
        assert_eq!(a.receive(), [P::PubAck(v4::PubAck::new(id))]);
    }
    let delivered = slow.messages().len() as u64;
    assert_eq!(broker.stats().dropped, 10 - delivered);
}

/// Regression: the report had the reason code alone, so it named no cause.
#[test]
fn refusals_by_limits_are_reported_with_their_cause() {
    let rules = Arc::new(Rules::default());
    let limits = Limits {
        shared_subscriptions_per_session_max: 1,
        queue_bytes_max: 4000,
        queue_bytes_reserve: 0,
        ..Limits::default()
    };
    let options = Options {
        access: rules.clone(),
        limits,
        ..Options::default()
    };
    let (broker, now) = (Broker::new(options, Arc::new(NoService)), Instant::now());
    let mut slow = Peer::new(&broker, &Hello::new("slow"), now);
    slow.subscribe("$share/g/jobs", Q::AtLeastOnce, now);
    slow.subscribe("$share/g/more", Q::AtLeastOnce, now);
    let limit = "slow subscribe the session has as many shared subscriptions as it may have";
    assert_eq!(*rules.0.lock().unwrap(), [limit]);

    let mut a = Peer::new(&broker, &Hello::new("a"), now);
    let mut texts = Vec::new();
    for id in 1..=10 {
        a.publish("jobs", Q::AtLeastOnce, id, &"x".repeat(1000), now);
        let properties = a.last_puback().properties;
        texts.extend(properties.and_then(|it| it.reason_string));
    }
    let full = "no member of a shared subscription has room for this message";
    assert_eq!(texts.last().map(String::as_str), Some(full));
    let last = rules.0.lock().unwrap().last().cloned();
    assert_eq!(last, Some(format!("a publish {full}")));
}
