//! PUBLISHes for the service: tokens, the order of acknowledgements, QoS 2 from the client, direct
//! delivery.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Instant,
};

use wire::{DisconnectReasonCode, Filter, Packet, PubAckReason, PubCompReason, PubRecReason};

use crate::{
    Access, Anyone, Attempt, Broker, Deciding, Limits, Message, Options, Origin, QoS, ReasonCode,
    Refusal, Request, testing::*,
};

fn start(limits: Limits) -> (Broker, Arc<RecordingService>, Instant) {
    let service = Arc::new(RecordingService::default());
    let options = Options {
        limits,
        ..Options::default()
    };
    let broker = Broker::new(options, service.clone());
    (broker, service, Instant::now())
}

fn taken(service: &RecordingService) -> Vec<(Origin, Request)> {
    std::mem::take(&mut service.requests.lock().unwrap())
}

fn acknowledge(broker: &Broker, request: &Request, reason: ReasonCode) {
    broker.batch(|batch| batch.acknowledge(request.token.unwrap(), reason, None));
}

#[test]
fn acknowledgements_leave_in_the_order_of_the_messages() {
    let (broker, service, now) = start(Limits::default());
    let mut a = Peer::new(&broker, &Hello::new("a"), now);
    a.subscribe("t", Q::AtMostOnce, now);
    let request = |id| Packet::Publish(publish("req/x", Q::AtLeastOnce, id, &id.to_string()));
    let message = |id| Packet::Publish(publish("t", Q::AtLeastOnce, id, ""));
    let refused = Packet::Publish(publish("no/x", Q::AtLeastOnce, 14, ""));
    a.send(
        &[
            request(10),
            request(11),
            message(12),
            request(13),
            refused,
            ping(),
        ],
        now,
    );
    let requests = taken(&service);
    assert_eq!(
        requests
            .iter()
            .map(|(_, request)| request.packet_id)
            .collect::<Vec<_>>(),
        [10, 11, 13]
    );
    assert!(
        !a.receive()
            .iter()
            .any(|packet| matches!(packet, Packet::PubAck(_))),
        "the first is not acknowledged"
    );
    acknowledge(&broker, &requests[1].1, ReasonCode::SUCCESS);
    assert_eq!(a.receive(), []);
    acknowledge(&broker, &requests[0].1, ReasonCode::SUCCESS);
    assert_eq!(a.receive(), [puback(10), puback(11), puback(12)]);
    let token = requests[2].1.token.unwrap();
    broker.batch(|batch| {
        batch.acknowledge(
            token,
            ReasonCode::IMPLEMENTATION_SPECIFIC_ERROR,
            Some("no response topic"),
        );
        batch.acknowledge(token, ReasonCode::SUCCESS, None);
    });
    let acks = a.receive();
    let [Packet::PubAck(failed), Packet::PubAck(refused)] = &acks[..] else {
        panic!("{acks:?}")
    };
    assert_eq!(
        (failed.pkid, failed.reason),
        (13, PubAckReason::ImplementationSpecificError)
    );
    assert_eq!(
        failed.properties.as_ref().unwrap().reason_string.as_deref(),
        Some("no response topic")
    );
    assert_eq!(
        (refused.pkid, refused.reason),
        (14, PubAckReason::NotAuthorized)
    );
    let properties = refused.properties.as_ref().unwrap();
    assert_eq!(properties.reason_string.as_deref(), Some("not there"));
}

/// Counts the refusals that the broker reports.
#[derive(Default)]
struct Reports(AtomicUsize);

impl Access for Reports {
    fn admit(&self, attempt: Attempt) -> Deciding {
        Anyone.admit(attempt)
    }
    fn may_publish(&self, _: &Origin, _: &[u8]) -> bool {
        true
    }
    fn may_subscribe(&self, _: &Origin, _: &[u8]) -> bool {
        true
    }
    fn refused(&self, _: &Refusal<'_>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// Regression: only the reason `not authorized` was not reported a second time.
#[test]
fn refusal_that_the_service_reported_is_only_counted() {
    let service = Arc::new(RecordingService::default());
    let reports = Arc::new(Reports::default());
    let options = Options {
        access: reports.clone(),
        ..Options::default()
    };
    let (broker, now) = (Broker::new(options, service.clone()), Instant::now());
    let mut a = Peer::new(&broker, &Hello::new("a"), now);
    let reason = ReasonCode::QUOTA_EXCEEDED;
    for (id, reported, seen) in [(1, true, 0), (2, false, 1)] {
        a.publish("req/x", Q::AtLeastOnce, id, "", now);
        let token = taken(&service)[0].1.token.unwrap();
        broker.batch(|batch| match reported {
            true => batch.acknowledge_reported(token, reason, None),
            false => batch.acknowledge(token, reason, None),
        });
        assert_eq!(a.last_puback().reason, PubAckReason::QuotaExceeded);
        assert_eq!(reports.0.load(Ordering::Relaxed), seen);
        let counts = broker.refusals().into_iter();
        assert_eq!(counts.map(|it| it.count).sum::<u64>(), u64::from(id));
    }
}

#[test]
fn reason_strings_are_omitted_without_problem_information() {
    let (broker, service, now) = start(Limits::default());
    let hello = Hello::new("a").set(|it| it.request_problem_info = Some(0));
    let mut a = Peer::new(&broker, &hello, now);
    a.publish("req/x", Q::AtLeastOnce, 1, "", now);
    let token = taken(&service)[0].1.token.unwrap();
    broker.batch(|batch| batch.acknowledge(token, ReasonCode::QUOTA_EXCEEDED, Some("text")));
    let ack = a.last_puback();
    assert_eq!(
        (ack.reason, ack.properties),
        (PubAckReason::QuotaExceeded, None)
    );
}

#[test]
fn more_than_the_receive_maximum_is_a_violation() {
    let (broker, service, now) = start(limited(|it| it.receive_max = 3));
    let mut a = Peer::new(&broker, &Hello::new("a"), now);
    let request = |qos, id| Packet::Publish(publish("req/x", qos, id, ""));
    a.send(
        &[
            request(Q::AtLeastOnce, 1),
            request(Q::AtLeastOnce, 2),
            request(Q::ExactlyOnce, 3),
        ],
        now,
    );
    for (_, request) in taken(&service) {
        acknowledge(&broker, &request, ReasonCode::SUCCESS);
    }
    // The QoS 2 exchange counts until its PUBREL.
    a.send(
        &[request(Q::AtLeastOnce, 1), request(Q::AtLeastOnce, 2)],
        now,
    );
    assert_eq!(disconnected(&a.receive()), None);
    a.send(&[request(Q::AtLeastOnce, 4)], now);
    a.assert_disconnected(DisconnectReasonCode::ReceiveMaximumExceeded);
    assert_eq!(
        taken(&service).len(),
        2,
        "earlier requests are passed to the service"
    );
}

#[test]
fn duplicate_qos_2_messages_keep_no_state() {
    // Mosquitto kept state for each of them (CVE-2023-28366).
    let (broker, service, now) = start(Limits::default());
    let mut a = Peer::new(&broker, &Hello::new("a"), now);
    let packet = Packet::Publish(publish("req/x", Q::ExactlyOnce, 7, ""));
    let repeated = bytes(&vec![packet; 1000]);
    for _ in 0..1000 {
        a.send_raw(&repeated, now);
    }
    let requests = taken(&service);
    assert_eq!(requests.len(), 1, "passed to the service once");
    assert_eq!(a.receive(), [], "the pending PUBREC answers all");
    acknowledge(&broker, &requests[0].1, ReasonCode::SUCCESS);
    assert_eq!(a.receive(), [pubrec(7)]);
    a.send_raw(&repeated, now);
    assert_eq!(a.receive(), vec![pubrec(7); 1000]);
}

#[test]
fn qos_2_requests_are_handed_over_once_across_connections() {
    let (broker, service, now) = start(Limits::default());
    let mut a = Peer::new(&broker, &Hello::new("a"), now);
    let request = Packet::Publish(publish("req/x", Q::ExactlyOnce, 5, "q"));
    a.send(std::slice::from_ref(&request), now);
    let requests = taken(&service);
    a.lose(now);
    // The first duplicate arrives before the answer is known.
    let mut a = Peer::new(&broker, &Hello::new("a"), now);
    a.send(std::slice::from_ref(&request), now);
    assert_eq!(a.receive(), []);
    a.send(&[pubrel(5)], now);
    let Some(Packet::PubComp(comp)) = a.receive().pop() else {
        panic!("no PUBCOMP")
    };
    assert_eq!(
        comp.reason,
        PubCompReason::PacketIdentifierNotFound,
        "the PUBREC was not sent yet"
    );
    acknowledge(&broker, &requests[0].1, ReasonCode::SUCCESS);
    assert_eq!(a.receive(), [pubrec(5)]);
    a.lose(now);
    // The second duplicate arrives after the answer.
    let mut a = Peer::new(&broker, &Hello::new("a"), now);
    a.send(&[request.clone(), pubrel(5)], now);
    assert_eq!(a.receive(), [pubrec(5), pubcomp(5)]);
    assert_eq!(taken(&service).len(), 0);
    // After PUBREL the packet id is new. A failed request frees it without PUBREL.
    for _ in 0..2 {
        a.send(std::slice::from_ref(&request), now);
        acknowledge(&broker, &taken(&service)[0].1, ReasonCode::QUOTA_EXCEEDED);
        let Some(Packet::PubRec(rec)) = a.receive().pop() else {
            panic!("no PUBREC")
        };
        assert_eq!(rec.reason, PubRecReason::QuotaExceeded);
    }
}

#[test]
fn ordinary_qos_2_messages_are_routed_once() {
    let (broker, _, now) = start(Limits::default());
    let mut a = Peer::new(&broker, &Hello::new("a"), now);
    a.subscribe("t", Q::AtMostOnce, now);
    let message = Packet::Publish(publish("t", Q::ExactlyOnce, 5, "x"));
    a.send(&[message.clone(), message.clone()], now);
    assert_eq!(a.messages().len(), 1);
    a.lose(now);
    let mut a = Peer::new(&broker, &Hello::new("a"), now);
    a.send(&[message], now);
    assert_eq!(a.receive(), [pubrec(5)]);
}

#[test]
fn a_stale_token_does_nothing() {
    let (broker, service, now) = start(Limits::default());
    let mut a = Peer::new(&broker, &Hello::new("a"), now);
    a.publish("req/x", Q::AtLeastOnce, 1, "", now);
    a.lose(now);
    let mut a = Peer::new(&broker, &Hello::new("a"), now);
    a.publish("req/x", Q::AtLeastOnce, 1, "", now);
    let requests = taken(&service);
    acknowledge(&broker, &requests[0].1, ReasonCode::SUCCESS);
    assert_eq!(a.receive(), []);
    acknowledge(&broker, &requests[1].1, ReasonCode::SUCCESS);
    acknowledge(&broker, &requests[1].1, ReasonCode::SUCCESS);
    assert_eq!(a.receive(), [puback(1)]);
}

#[test]
fn requests_before_another_packet_are_handed_over_first() {
    let (broker, service, now) = start(Limits::default());
    let mut a = Peer::new(&broker, &Hello::new("a"), now);
    let request = |id| Packet::Publish(publish("req/x", Q::AtLeastOnce, id, ""));
    let leave = Packet::Disconnect(wire::Disconnect::new(
        DisconnectReasonCode::NormalDisconnection,
    ));
    a.send(&[request(1), leave, request(2)], now);
    assert_eq!(
        taken(&service).len(),
        1,
        "packets after DISCONNECT are ignored"
    );
}

#[test]
fn deliver_reaches_one_connection_only_subscribed_or_not() {
    let (broker, _, now) = start(Limits::default());
    let mut a = Peer::new(&broker, &Hello::new("a"), now);
    let mut b = Peer::new(&broker, &Hello::new("b"), now);
    b.subscribe("#", Q::AtLeastOnce, now);
    let deliver = |to: &Peer| {
        let message = Message::new("n/1", "x", QoS::AtLeastOnce);
        deliver(&broker, &to.origin, message)
    };
    assert!(deliver(&a));
    assert_eq!(a.messages()[0].qos, Q::AtLeastOnce);
    assert_eq!(b.payloads(), [""; 0]);
    // A matching subscription sets the QoS and identifiers. No Local does not apply, and there is
    // only one copy.
    let mut no_local = Filter::new("n/1", Q::AtMostOnce);
    no_local.nolocal = true;
    a.subscribe_with(no_local, Some(3), now);
    assert!(deliver(&a));
    let messages = a.messages();
    assert_eq!((messages.len(), messages[0].qos), (1, Q::AtMostOnce));
    assert_eq!(properties(&messages[0]).subscription_identifiers, [3]);
    a.subscribe_with(Filter::new("n/+", Q::AtLeastOnce), Some(4), now);
    assert!(deliver(&a));
    let messages = a.messages();
    assert_eq!((messages.len(), messages[0].qos), (1, Q::AtLeastOnce));
    let ids = &properties(&messages[0]).subscription_identifiers;
    assert_eq!(ids.len(), 2);
}

#[test]
fn deliver_ends_with_the_connection() {
    let (broker, _, now) = start(Limits::default());
    let mut a = Peer::new(&broker, &Hello::new("a").window(1), now);
    let deliver = |to: &Origin, payload: &'static str| {
        let message = Message::new("n/1", payload, QoS::AtLeastOnce);
        deliver(&broker, to, message)
    };
    assert!(deliver(&a.origin, "sent") && deliver(&a.origin, "waits"));
    assert_eq!(a.payloads(), ["sent"]);
    let mut new = Peer::new(&broker, &Hello::new("a"), now);
    assert!(!deliver(&a.origin, "late"), "the connection was taken over");
    let messages = new.messages();
    assert_eq!(
        (messages.len(), messages[0].dup),
        (1, true),
        "unsent messages are dropped, unacknowledged ones redelivered"
    );
    assert_eq!(broker.stats().dropped, 1);
    let origin = new.origin.clone();
    new.lose(now);
    assert!(!deliver(&origin, "later"));
}

#[test]
fn acknowledgement_follows_its_answer_unless_the_window_is_full() {
    let (broker, service, now) = start(limited(|it| it.output_bytes_high = 100));
    let mut a = Peer::new(&broker, &Hello::new("a").window(2), now);
    let ask = |a: &mut Peer, id| {
        a.publish("req/x", Q::AtLeastOnce, id, "", now);
        let (origin, request) = taken(&service).remove(0);
        broker.batch(|batch| {
            // The first message fills the output above its mark, so the second one waits.
            for payload in ["x".repeat(200), "answer".to_owned()] {
                let message = Message::new("n", payload, QoS::AtLeastOnce);
                assert!(batch.deliver(&origin.client, origin.connection, message));
            }
            batch.acknowledge(request.token.unwrap(), ReasonCode::SUCCESS, None);
        });
    };
    ask(&mut a, 1);
    let packets = a.receive();
    assert_eq!(packets.len(), 3);
    assert_eq!(packets[2], puback(1));
    // Now the window is full: the answer waits for the client, but its acknowledgement must not
    // (section 3.3.4).
    ask(&mut a, 2);
    assert_eq!(a.receive(), [puback(2)]);
}

#[test]
fn the_embedder_can_disconnect_a_client() {
    let (broker, _, now) = start(Limits::default());
    let mut a = Peer::new(&broker, &Hello::new("a"), now);
    let to = a.origin.clone();
    broker.batch(|batch| {
        for (reason, text) in [
            (ReasonCode::TOPIC_NAME_INVALID, Some("why")),
            (ReasonCode::NOT_AUTHORIZED, None),
        ] {
            batch.disconnect(&to.client, to.connection, reason, text);
        }
        let message = Message::new("n", "x", QoS::AtMostOnce);
        assert!(!batch.deliver(&to.client, to.connection, message));
    });
    let packets = a.receive();
    let [Packet::Disconnect(disconnect)] = &packets[..] else {
        panic!("{packets:?}")
    };
    assert_eq!(
        disconnect.reason_code,
        DisconnectReasonCode::TopicNameInvalid
    );
    let properties = disconnect.properties.as_ref().unwrap();
    assert_eq!(properties.reason_string.as_deref(), Some("why"));
}

/// Regression: the client was disconnected at its first QoS 2 message on every connection until its
/// session ended.
#[test]
fn forgotten_exchanges_leave_room_after_the_limit_is_lowered() {
    let at_most = |receive_max| limited(|it| it.receive_max = receive_max);
    let (broker, _, now) = start(at_most(20));
    let mut a = Peer::new(&broker, &Hello::new("a"), now);
    assert_eq!(a.begin_exchanges(1..21, now), None);
    a.lose(now);
    broker.set_limits(at_most(2));
    let mut next = 21;
    for _ in 0..10 {
        let mut a = Peer::new(&broker, &Hello::new("a"), now);
        assert_eq!(a.begin_exchanges(next..next + 2, now), None);
        next += 2;
        a.lose(now);
    }
    // Forgotten exchanges do not pile up here either.
    let mut a = Peer::new(&broker, &Hello::new("a"), now);
    let full = Some(DisconnectReasonCode::ReceiveMaximumExceeded);
    assert_eq!(a.begin_exchanges(next..next + 1, now), full);
}

#[test]
fn unfinished_qos_2_exchanges_do_not_pile_up_over_connections() {
    let (broker, _, now) = start(limited(|it| it.receive_max = 3));
    for round in 0..3 {
        let mut a = Peer::new(&broker, &Hello::new("a"), now);
        let first = 1 + round * 3;
        let expected = (round == 2).then_some(DisconnectReasonCode::ReceiveMaximumExceeded);
        assert_eq!(a.begin_exchanges(first..first + 3, now), expected);
        a.lose(now);
    }
}
