//! When the response to a request, and the acknowledgement of the request, wait for a record.

use std::{sync::Arc, time::Instant};

use wire::{DisconnectReasonCode, Packet};

use super::gating::Held;
use crate::{Message, PropertiesBuilder, QoS, ReasonCode, testing::*};

/// A client that sends requests and subscribes to the answers.
fn requester(hello: Hello) -> (Held, Arc<RecordingService>, Peer) {
    let service = Arc::new(RecordingService::default());
    let held = Held::new(service.clone());
    let mut peer = held.peer(&hello);
    peer.send(&[subscribe("answers", Q::ExactlyOnce)], held.now);
    held.release();
    peer.receive();
    (held, service, peer)
}

fn ask(
    peer: &mut Peer,
    service: &RecordingService,
    qos: Q,
    packet_id: u16,
    now: Instant,
) -> crate::Token {
    peer.publish("req/x", qos, packet_id, "?", now);
    let (_, request) = service.requests.lock().unwrap().pop().unwrap();
    request.token.unwrap()
}

fn answer(held: &Held, token: crate::Token, qos: QoS) -> usize {
    held.broker.batch(|batch| {
        let mut message = Message::new("answers", "!", qos);
        let properties = PropertiesBuilder::new().correlation_data(b"1");
        message.properties = properties.finish().unwrap();
        let sessions = batch.answer(Some(&token), message);
        batch.acknowledge(token, ReasonCode::SUCCESS, None);
        sessions
    })
}

/// The PUBREC of a request at QoS 2 says success, so its answer must not be dropped for want of
/// room in the log. It is sent without a record, as answers at QoS 1 are.
#[test]
fn full_log_drops_no_answer_of_a_qos_2_request() {
    let (held, service, mut peer) = requester(Hello::new("a"));
    held.log.set_full(true);
    let token = ask(&mut peer, &service, Q::ExactlyOnce, 1, held.now);
    assert_eq!(answer(&held, token, QoS::AtLeastOnce), 1);
    held.log.release_all(&held.broker);
    assert_packets!(
        peer.receive(),
        [Packet::Publish(message), Packet::PubRec(_)] if message.topic == "answers"
    );
}

#[test]
fn answer_sent_at_once_is_not_recorded() {
    let (held, service, mut peer) = requester(Hello::new("a"));
    let (records, bytes) = (held.log.len(), held.log.bytes());
    for packet_id in 1..100 {
        let token = ask(&mut peer, &service, Q::AtLeastOnce, packet_id, held.now);
        assert_eq!(answer(&held, token, QoS::AtLeastOnce), 1);
        let packets = peer.receive();
        let [Packet::Publish(message), Packet::PubAck(_)] = &packets[..] else {
            panic!("{packets:?}")
        };
        peer.send(&[puback(message.pkid)], held.now);
    }
    assert_eq!((held.log.len(), held.log.bytes()), (records, bytes));
    // Unacknowledged when the connection ends, so the message is recorded for redelivery.
    let token = ask(&mut peer, &service, Q::AtLeastOnce, 100, held.now);
    answer(&held, token, QoS::AtLeastOnce);
    let id = peer.messages()[0].pkid;
    peer.lose(held.now);
    let recovery = held.log.recovery();
    let session = recovery.sessions.values().next().unwrap();
    let kept: Vec<_> = session.messages.values().collect();
    assert!(matches!(kept[..], [message] if message.packet_id == Some(id)));
}

/// Regression: each request for a value that was set under a higher limit ended the connection.
#[test]
fn answer_longer_than_a_lowered_queue_limit_is_sent() {
    let (held, service, mut peer) = requester(Hello::new("a"));
    held.broker
        .set_limits(limited(|it| it.queue_bytes_max = 2000));
    let answer = |token: crate::Token| {
        held.broker.batch(|batch| {
            let message = Message::new("answers", "x".repeat(10_000), QoS::AtLeastOnce);
            batch.answer(Some(&token), message);
            batch.acknowledge(token, ReasonCode::SUCCESS, None);
        });
    };
    let [first, second] = [1, 2].map(|id| ask(&mut peer, &service, Q::AtLeastOnce, id, held.now));
    answer(first);
    assert_packets!(peer.receive(), [Packet::Publish(_), Packet::PubAck(_)]);
    // The client has not acknowledged the first one.
    answer(second);
    held.release();
    peer.assert_disconnected(DisconnectReasonCode::QuotaExceeded);
}

#[test]
fn puback_waits_for_the_record_of_a_queued_answer() {
    let (held, service, mut peer) = requester(Hello::new("a").window(1));
    let first = ask(&mut peer, &service, Q::AtLeastOnce, 1, held.now);
    answer(&held, first, QoS::AtLeastOnce);
    assert_packets!(peer.receive(), [Packet::Publish(_), Packet::PubAck(_)]);
    let second = ask(&mut peer, &service, Q::AtLeastOnce, 2, held.now);
    answer(&held, second, QoS::AtLeastOnce);
    // The PUBACK does not wait for the answer.
    assert_packets!(held.after_release(&mut peer), [Packet::PubAck(_)]);
    // The acknowledgement waits even if the request is acknowledged later, under another hold of
    // the lock.
    let third = ask(&mut peer, &service, Q::AtLeastOnce, 3, held.now);
    held.broker
        .batch(|batch| batch.answer(Some(&third), Message::new("answers", "!", QoS::AtLeastOnce)));
    held.broker
        .batch(|batch| batch.acknowledge(third, ReasonCode::SUCCESS, None));
    assert_packets!(held.after_release(&mut peer), [Packet::PubAck(_)]);
}

/// The packet id of the PUBLISH and of the PUBACK that follows it.
fn answered(packets: &[Packet]) -> (u16, u16) {
    let [Packet::Publish(message), Packet::PubAck(ack)] = packets else {
        panic!("{packets:?}")
    };
    (message.pkid, ack.pkid)
}

/// Sends requests and answers them at once.
fn ask_and_answer(
    held: &Held,
    peer: &mut Peer,
    service: &RecordingService,
    packet_ids: std::ops::RangeInclusive<u16>,
) {
    for packet_id in packet_ids {
        let token = ask(peer, service, Q::AtLeastOnce, packet_id, held.now);
        answer(held, token, QoS::AtLeastOnce);
    }
}

/// Without its PUBACK the client repeats the request after a crash.
#[test]
fn full_log_makes_a_puback_wait_for_its_queued_answer() {
    let (held, service, mut peer) = requester(Hello::new("a").window(1));
    ask_and_answer(&held, &mut peer, &service, 1..=1);
    let (first, _) = answered(&peer.receive());
    // An answer in the log holds nothing back.
    ask_and_answer(&held, &mut peer, &service, 2..=2);
    assert_packets!(held.after_release(&mut peer), [Packet::PubAck(_)]);
    held.log.set_full(true);
    ask_and_answer(&held, &mut peer, &service, 3..=4);
    assert_eq!(peer.receive(), [], "the answers are not in the log");
    peer.send(&[puback(first)], held.now);
    let packets = peer.receive();
    let [Packet::Publish(second)] = &packets[..] else {
        panic!("{packets:?}")
    };
    let mut unacknowledged = second.pkid;
    for request in 3..=4 {
        peer.send(&[puback(unacknowledged)], held.now);
        let (message, acknowledged) = answered(&peer.receive());
        assert_eq!(acknowledged, request);
        unacknowledged = message;
    }
}

/// The session ends with its connection, so no log could redeliver its answers.
#[test]
fn full_log_delays_no_puback_of_a_transient_session() {
    let (held, service, mut peer) = requester(Hello::new("a").window(1).expiry(0));
    held.log.set_full(true);
    ask_and_answer(&held, &mut peer, &service, 1..=2);
    assert_packets!(
        peer.receive(),
        [Packet::Publish(_), Packet::PubAck(_), Packet::PubAck(_)]
    );
}

#[test]
fn queued_answers_are_recorded_at_a_disconnect_if_there_is_room() {
    let (held, service, mut peer) = requester(Hello::new("a").window(1));
    held.log.set_full(true);
    ask_and_answer(&held, &mut peer, &service, 1..=3);
    held.log.set_full(false);
    peer.lose(held.now);
    let recovery = held.log.recovery();
    let session = recovery.sessions.values().next().unwrap();
    let messages = session.messages.values();
    let sent: Vec<bool> = messages.map(|it| it.packet_id.is_some()).collect();
    assert_eq!(sent, [true, false, false]);
}

#[test]
fn answer_is_recorded_for_others_and_always_at_qos_2() {
    let (held, service, mut peer) = requester(Hello::new("a"));
    let token = ask(&mut peer, &service, Q::AtLeastOnce, 1, held.now);
    answer(&held, token, QoS::ExactlyOnce);
    assert_packets!(
        held.after_release(&mut peer),
        [Packet::Publish(_), Packet::PubAck(_)]
    );
    held.subscriber("other", "answers", Q::AtLeastOnce)
        .lose(held.now);
    held.release();
    let token = ask(&mut peer, &service, Q::AtLeastOnce, 2, held.now);
    assert_eq!(answer(&held, token, QoS::AtLeastOnce), 2);
    // The PUBACK waits.
    assert_packets!(peer.receive(), [Packet::Publish(_)]);
    assert_packets!(held.after_release(&mut peer), [Packet::PubAck(_)]);
    // Acknowledging a QoS 2 request is recorded.
    let token = ask(&mut peer, &service, Q::ExactlyOnce, 3, held.now);
    let records = held.log.len();
    held.broker
        .batch(|batch| batch.acknowledge(token, ReasonCode::SUCCESS, None));
    assert_eq!(held.log.len(), records + 1);
    assert_packets!(held.after_release(&mut peer), [Packet::PubRec(_)]);
    // A duplicate is not passed to the service, since its answer is known.
    peer.send(&[repeated("req/x", Q::ExactlyOnce, 3, "?")], held.now);
    assert!(service.requests.lock().unwrap().is_empty());
    assert_packets!(peer.receive(), [Packet::PubRec(_)]);
}

/// A client that repeats a QoS 2 request receives its PUBREC but no answer, because the packet id
/// is known.
#[test]
fn answer_to_a_qos_2_request_is_recorded_before_its_pubrec() {
    let (held, service, mut peer) = requester(Hello::new("a"));
    let token = ask(&mut peer, &service, Q::ExactlyOnce, 1, held.now);
    answer(&held, token, QoS::AtLeastOnce);
    assert_packets!(peer.receive(), [Packet::Publish(_)]);
    let recovery = held.log.recovery();
    let session = recovery.sessions.values().next().unwrap();
    assert_eq!((session.messages.len(), session.received.len()), (1, 1));
    assert_packets!(held.after_release(&mut peer), [Packet::PubRec(_)]);
}

#[test]
fn pubrec_for_an_earlier_connection_waits_for_its_record() {
    let service = Arc::new(RecordingService::default());
    let held = Held::new(service.clone());
    let mut peer = held.peer(&Hello::new("a"));
    let token = ask(&mut peer, &service, Q::ExactlyOnce, 5, held.now);
    peer.lose(held.now);
    let mut peer = held.peer(&Hello::new("a"));
    held.broker
        .batch(|batch| batch.acknowledge(token, ReasonCode::SUCCESS, None));
    peer.send(&[repeated("req/x", Q::ExactlyOnce, 5, "?")], held.now);
    assert_packets!(held.after_release(&mut peer), [Packet::PubRec(_)]);
}
