//! A packet must not leave before the record that it depends on is durable, and a packet that
//! depends on no record leaves at once.

use std::{future::Future, sync::Arc, time::Instant};

use statehouse_protocol::LogPosition;
use wire::Packet;

use crate::{
    Broker, Limits, Message, NoService, Persistence, QoS, ReasonCode, Service, testing::*,
};

pub(super) struct Held {
    pub(super) log: Arc<TestLog>,
    pub(super) broker: Broker,
    pub(super) now: Instant,
}

impl Held {
    pub(super) fn new(service: Arc<dyn Service>) -> Self {
        let (log, now) = (TestLog::new(false), Instant::now());
        let broker = restored(&log, Limits::default(), service, now, now);
        Self { log, broker, now }
    }

    /// A client that has received its CONNACK.
    pub(super) fn peer(&self, hello: &Hello) -> Peer {
        let mut peer = Peer::waiting(&self.broker, hello, self.now);
        self.release();
        assert_packets!(peer.receive(), [Packet::ConnAck(_)]);
        peer
    }

    pub(super) fn subscriber(&self, client: &str, filter: &str, qos: Q) -> Peer {
        let mut peer = self.peer(&Hello::new(client));
        peer.send(&[subscribe(filter, qos)], self.now);
        self.release();
        assert_packets!(peer.receive(), [Packet::SubAck(_)]);
        peer
    }

    /// Ends a connection at the request of the embedder.
    fn disconnect(&self, peer: &Peer) {
        let (to, reason) = (&peer.origin, ReasonCode::ADMINISTRATIVE_ACTION);
        self.broker
            .batch(|batch| batch.disconnect(&to.client, to.connection, reason, None));
    }

    pub(super) fn release(&self) {
        self.log.release_all(&self.broker);
    }

    /// The packets that the client receives only after all records appended so far are released.
    pub(super) fn after_release(&self, peer: &mut Peer) -> Vec<Packet> {
        let appended = self.log.len();
        assert!(appended > self.log.released_len(), "no record is pending");
        assert_eq!(peer.receive(), [], "before the record");
        // Releasing all but the last record is not enough.
        self.log.release(&self.broker, appended - 1);
        assert_eq!(peer.receive(), [], "before the last record");
        self.release();
        let packets = peer.receive();
        assert!(!packets.is_empty());
        packets
    }
}

#[test]
fn connack_suback_and_unsuback_wait_for_their_records() {
    let held = Held::new(Arc::new(NoService));
    let mut peer = Peer::waiting(&held.broker, &Hello::new("a"), held.now);
    assert_packets!(held.after_release(&mut peer), [Packet::ConnAck(ack)] if !ack.session_present);
    peer.send(&[subscribe("t", Q::AtLeastOnce)], held.now);
    assert_packets!(held.after_release(&mut peer), [Packet::SubAck(_)]);
    peer.send(&[unsubscribe(&["t"])], held.now);
    assert_packets!(held.after_release(&mut peer), [Packet::UnsubAck(_)]);
    // Unsubscribing again records nothing and depends on no record.
    let records = held.log.len();
    peer.send(&[unsubscribe(&["t"])], held.now);
    assert_packets!(peer.receive(), [Packet::UnsubAck(_)]);
    assert_eq!(held.log.len(), records);
    peer.lose(held.now);
    let mut again = Peer::waiting(&held.broker, &Hello::new("a"), held.now);
    assert_packets!(held.after_release(&mut again), [Packet::ConnAck(ack)] if ack.session_present);
}

#[test]
fn connack_without_session_waits_for_the_old_sessions_end() {
    let held = Held::new(Arc::new(NoService));
    held.peer(&Hello::new("a")).lose(held.now);
    held.release();
    let fresh = Hello::new("a").clean().expiry(0);
    let mut first = Peer::waiting(&held.broker, &fresh, held.now);
    assert_eq!(first.receive(), []);
    first.lose(held.now);
    // This connection records nothing, but its CONNACK reveals that the old session has ended.
    let mut second = Peer::waiting(&held.broker, &fresh, held.now);
    let packets = held.after_release(&mut second);
    assert_packets!(packets, [Packet::ConnAck(ack)] if !ack.session_present);
}

#[test]
fn acknowledgements_of_routed_messages_wait_for_records() {
    let held = Held::new(Arc::new(NoService));
    held.subscriber("s", "t", Q::AtLeastOnce).lose(held.now);
    held.release();
    // This includes publishers whose session is not durable.
    for expiry_s in [0, 100] {
        let mut publisher = held.peer(&Hello::new("p").expiry(expiry_s));
        publisher.publish("t", Q::AtLeastOnce, 1, "x", held.now);
        assert_packets!(held.after_release(&mut publisher), [Packet::PubAck(_)]);
        publisher.publish("t", Q::ExactlyOnce, 2, "x", held.now);
        assert_packets!(held.after_release(&mut publisher), [Packet::PubRec(_)]);
        publisher.send(&[pubrel(2)], held.now);
        let packets = match expiry_s {
            0 => publisher.receive(),
            _ => held.after_release(&mut publisher),
        };
        assert_packets!(packets, [Packet::PubComp(_)]);
        publisher.send(&[retained("r", Q::AtLeastOnce, 3, "x")], held.now);
        assert_packets!(held.after_release(&mut publisher), [Packet::PubAck(_)]);
        publisher.lose(held.now);
        held.release();
    }
}

#[test]
fn unrecorded_packets_leave_at_once() {
    let held = Held::new(Arc::new(NoService));
    let mut passing = held.peer(&Hello::new("passing").expiry(0));
    let mut peer = held.peer(&Hello::new("p"));
    let records = held.log.len();
    passing.send(&[subscribe("t", Q::ExactlyOnce)], held.now);
    assert_packets!(passing.receive(), [Packet::SubAck(_)]);
    for (qos, packet_id) in [(Q::AtMostOnce, 0), (Q::AtLeastOnce, 1), (Q::AtLeastOnce, 2)] {
        peer.publish("t", qos, packet_id, "x", held.now);
        assert_eq!(passing.messages().len(), 1);
        assert_eq!(peer.receive().len(), packet_id.min(1).into());
    }
    peer.send(&[ping()], held.now);
    assert_eq!(peer.receive().len(), 1);
    assert_eq!(held.log.len(), records);
}

#[test]
fn outgoing_qos_2_waits_at_each_step_and_qos_1_does_not() {
    let held = Held::new(Arc::new(NoService));
    let mut peer = held.subscriber("s", "t", Q::ExactlyOnce);
    let send = |qos| {
        held.broker
            .batch(|batch| batch.publish(Message::new("t", "x", qos)))
    };
    send(QoS::AtLeastOnce);
    let [Packet::Publish(message)] = &peer.receive()[..] else {
        panic!("the QoS 1 message did not leave at once")
    };
    peer.send(&[puback(message.pkid)], held.now);
    send(QoS::ExactlyOnce);
    let packets = held.after_release(&mut peer);
    let [Packet::Publish(message)] = &packets[..] else {
        panic!("{packets:?}")
    };
    let id = message.pkid;
    peer.send(&[pubrec(id)], held.now);
    assert_packets!(held.after_release(&mut peer), [Packet::PubRel(_)]);
    let records = held.log.len();
    peer.send(&[pubcomp(id)], held.now);
    assert_eq!(held.log.len(), records + 1);
    assert_eq!(peer.receive(), []);
}

/// A client that has sent PINGREQ and SUBSCRIBE. The SUBACK waits for its record.
fn waiting_subscriber() -> (Held, Peer) {
    let held = Held::new(Arc::new(NoService));
    let mut peer = held.peer(&Hello::new("a"));
    peer.send(&[ping(), subscribe("t", Q::AtLeastOnce)], held.now);
    (held, peer)
}

#[test]
fn packets_behind_a_waiting_packet_wait_too() {
    let (held, mut peer) = waiting_subscriber();
    let first = held.log.len();
    peer.send(&[ping(), unsubscribe(&["t"]), ping()], held.now);
    assert_eq!(peer.receive(), [Packet::PingResp(wire::PingResp)]);
    held.log.release(&held.broker, first);
    assert_packets!(peer.receive(), [Packet::SubAck(_), Packet::PingResp(_)]);
    held.release();
    assert_packets!(peer.receive(), [Packet::UnsubAck(_), Packet::PingResp(_)]);
}

#[test]
fn log_that_releases_during_append_delays_nothing() {
    /// Releases every record before `append` returns.
    struct Instantly(Arc<TestLog>);
    impl Persistence for Instantly {
        fn append(&self, changes: &[u8]) -> LogPosition {
            self.0.append(changes)
        }
        fn released(&self) -> LogPosition {
            LogPosition(self.0.len() as u64)
        }
    }
    let log = TestLog::new(false);
    let options = crate::Options {
        persistence: Some(Arc::new(Instantly(log.clone()))),
        ..crate::Options::default()
    };
    let broker = Broker::new(options, Arc::new(NoService));
    let now = Instant::now();
    let mut peer = Peer::new(&broker, &Hello::new("a"), now);
    assert_eq!(
        peer.subscribe("t", Q::ExactlyOnce, now),
        wire::SubscribeReasonCode::Success(Q::ExactlyOnce)
    );
    assert_eq!(log.len(), 2);
}

#[test]
fn delivered_messages_are_recorded_when_the_connection_ends() {
    let held = Held::new(Arc::new(NoService));
    let mut peer = held.subscriber("a", "n/#", Q::ExactlyOnce);
    let records = held.log.len();
    let origin = peer.origin.clone();
    let deliver =
        |topic: &'static str, qos| deliver(&held.broker, &origin, Message::new(topic, "x", qos));
    assert!(deliver("n/1", QoS::AtLeastOnce));
    assert!(deliver("n/2", QoS::AtLeastOnce));
    let ids: Vec<u16> = peer.messages().iter().map(|message| message.pkid).collect();
    peer.send(&[puback(ids[0])], held.now);
    assert_eq!(held.log.len(), records);
    // The client remembers the packet id of a QoS 2 message.
    assert!(deliver("n/3", QoS::ExactlyOnce));
    assert_packets!(held.after_release(&mut peer), [Packet::Publish(_)]);
    peer.lose(held.now);
    let recovery = held.log.recovery();
    let messages = &recovery.sessions.values().next().unwrap().messages;
    let kept: Vec<_> = messages
        .values()
        .map(|message| {
            let content = message.content.as_ref().unwrap();
            (content.message.topic.as_ref(), message.packet_id)
        })
        .collect();
    assert_eq!(
        kept,
        [(&b"n/2"[..], Some(ids[1])), (&b"n/3"[..], Some(ids[1] + 1))]
    );
}

#[test]
fn closing_drops_waiting_packets_but_sends_the_disconnect() {
    let (held, mut peer) = waiting_subscriber();
    assert!(!peer.output.cut(), "the output is still open");
    held.disconnect(&peer);
    assert_eq!(peer.receive(), [Packet::PingResp(wire::PingResp)]);
    assert!(peer.output.cut());
    // The SUBACK is dropped.
    let reason = wire::DisconnectReasonCode::AdministrativeAction;
    assert_packets!(peer.receive(), [Packet::Disconnect(it)] if it.reason_code == reason);
    assert!(!peer.output.cut());
    held.release();
    assert_eq!(peer.receive(), []);
}

#[test]
fn disconnect_is_not_sent_before_the_connack() {
    let held = Held::new(Arc::new(NoService));
    let mut peer = Peer::waiting(&held.broker, &Hello::new("a"), held.now);
    held.disconnect(&peer);
    assert!(peer.output.cut());
    assert_eq!(peer.receive(), []);
}

#[test]
fn large_batch_is_split_between_packets() {
    let held = Held::new(Arc::new(NoService));
    held.subscriber("s", "t", Q::AtLeastOnce).lose(held.now);
    held.release();
    let mut peer = held.peer(&Hello::new("p").expiry(0));
    let (records, bytes) = (held.log.len(), held.log.bytes());
    let payload = "x".repeat(100_000);
    let packets: Vec<_> = (1..=40)
        .map(|id| Packet::Publish(publish("t", Q::AtLeastOnce, id, &payload)))
        .collect();
    peer.send(&packets, held.now);
    let records = held.log.len() - records;
    assert!((3..10).contains(&records), "{records}");
    assert!(held.log.bytes() - bytes < 40 * 100_050);
    // Each acknowledgement waits only for its own record.
    held.log.release(&held.broker, held.log.len() - records + 1);
    let first = peer.receive().len();
    assert!((1..40).contains(&first), "{first}");
    held.release();
    assert_eq!(peer.receive().len(), 40 - first);
    // The same in a batch of the embedder.
    let records = held.log.len();
    held.broker.batch(|batch| {
        for _ in 0..40 {
            batch.publish(Message::new("t", payload.clone(), QoS::AtLeastOnce));
        }
    });
    assert!(held.log.len() - records > 2);
}

fn has_room(peer: &Peer) -> bool {
    let room = std::pin::pin!(peer.output.room());
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    room.poll(&mut context).is_ready()
}

#[test]
fn reading_pauses_while_waiting_output_exceeds_the_mark() {
    let log = TestLog::new(false);
    let now = Instant::now();
    let limits = limited(|it| it.output_bytes_high = 200);
    let broker = restored(&log, limits, Arc::new(NoService), now, now);
    let mut peer = Peer::waiting(&broker, &Hello::new("a"), now);
    assert!(has_room(&peer));
    for _ in 0..40 {
        peer.send(&[subscribe("t", Q::AtLeastOnce)], now);
    }
    assert!(!has_room(&peer));
    // The output has no room for this message either, so it stays in the queue.
    broker.batch(|batch| batch.publish(Message::new("t", "x", QoS::AtLeastOnce)));
    log.release_all(&broker);
    assert_eq!(peer.payloads(), ["x"]);
    assert!(has_room(&peer));
}
