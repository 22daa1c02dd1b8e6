//! One session over several connections, against a scripted broker.
// A failed step fails the test.
#![allow(clippy::unwrap_used)]

mod broker;
mod owner;
mod places;

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use statehouse_link::{Accepted, Arrival, End, Options, Owner, Place, Verdict};
use statehouse_tests::{
    Property, Publish,
    broker::{Broker, Greeting},
    packet::{kind, puback, suback},
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::mpsc;

use broker::{Peer, Seen};
use owner::{Note, Tester, note};

/// The address of a broker, without a login.
fn place(broker: &Broker) -> Place {
    Place {
        host: "127.0.0.1".into(),
        port: broker.address().port(),
        tls: None,
        websocket: None,
        login: None,
    }
}

/// A reason code that MQTT 5 does not define for a PUBACK. Mosquitto sends it all the same.
const PACKET_TOO_LARGE: u8 = 0x95;

const SESSION_TAKEN_OVER: [u8; 4] = [0xe0, 2, 0x8e, 0];

struct SessionTest {
    broker: Broker,
    owner: Arc<Tester>,
    arrivals: mpsc::UnboundedReceiver<Arrival>,
    /// Whether the link resumes the session of an earlier process.
    resume: bool,
}

impl SessionTest {
    async fn start() -> Self {
        Self::start_with(true).await
    }

    async fn start_with(resume: bool) -> Self {
        let broker = Broker::start().await;
        let (arrived, arrivals) = mpsc::unbounded_channel();
        let owner = Arc::new(Tester {
            arrived: Some(arrived),
            ..Tester::default()
        });
        let options = Options {
            place: place(&broker),
            client_id: "tester".into(),
            keep_alive: Duration::from_secs(5),
            connect_timeout: Duration::from_secs(1),
            session_expiry: Duration::from_secs(60),
            resume,
            receive_max: 16,
            in_flight_max: 64,
            packet_bytes_max: 1 << 20,
            sent_bytes_max: u32::MAX,
            by_hand: true,
            pauses: (Duration::from_millis(5), Duration::from_millis(20)),
        };
        tokio::spawn(statehouse_link::run(owner.clone(), options));
        Self {
            broker,
            owner,
            arrivals,
            resume,
        }
    }

    /// Accepts the next connection up to SUBACK. The resends of a resumed session precede its
    /// SUBSCRIBE.
    async fn accept(&self, greeting: Greeting) -> Peer {
        let mut peer = Peer {
            mqtt: self.broker.accept().await,
            early: Vec::new(),
        };
        assert_eq!(peer.mqtt.clean_start, !self.resume);
        peer.mqtt.greet(&greeting).await;
        loop {
            let packet = peer.mqtt.read().await;
            if packet.kind() == kind::SUBSCRIBE {
                let (packet_id, _) = packet.subscribe();
                peer.mqtt.send(&suback(packet_id, &[1])).await;
                return peer;
            }
            peer.early.push(packet);
        }
    }

    fn add(&self, notes: impl IntoIterator<Item = Note>) {
        self.owner.with(|outlet| {
            for note in notes {
                outlet.add(None, |_| note);
            }
            outlet.flush();
        });
    }

    /// The receipt of the next message that the link received.
    async fn receipt(&mut self) -> u64 {
        loop {
            if let Arrival::Message(_, receipt) = self.arrivals.recv().await.unwrap() {
                return receipt.unwrap();
            }
        }
    }

    fn settle(&self, receipt: u64) {
        self.owner.with(|outlet| {
            outlet.settle(receipt);
            outlet.flush();
        });
    }
}

#[tokio::test]
async fn requests_are_acknowledged_after_their_responses() {
    let mut test = SessionTest::start().await;
    let mut peer = test.accept(Greeting::default()).await;
    for packet_id in [31, 32, 33] {
        peer.publish(packet_id).await;
    }
    let (first, second, third) = (
        test.receipt().await,
        test.receipt().await,
        test.receipt().await,
    );
    test.settle(second);
    assert!(peer.is_silent().await, "the first is not settled");
    test.owner.with(|outlet| {
        for (of, text) in [(None, "a"), (Some(first), "b"), (Some(first), "c")] {
            outlet.add(of, |_| note(text));
        }
        outlet.flush();
    });
    test.settle(first);
    test.settle(third);
    let mut sent = Vec::new();
    for _ in 0..3 {
        sent.push(peer.text_and_packet_id().await);
    }
    assert!(sent.iter().map(|it| &*it.0).eq(["a", "b", "c"]));
    peer.acknowledge(sent[1].1).await;
    assert!(peer.is_silent().await, "c has not been taken");
    // The PUBACK waits for the messages that the request caused, and `a` is not one of them.
    peer.acknowledge(sent[2].1).await;
    for packet_id in [31, 32, 33] {
        assert_eq!(peer.next().await, Seen::PubAck(packet_id));
    }
}

#[tokio::test]
async fn responses_to_lost_requests_precede_acknowledgements() {
    for skipped in [false, true] {
        let mut test = SessionTest::start().await;
        let mut peer = test.accept(Greeting::default()).await;
        peer.publish(31).await;
        let lost = test.receipt().await;
        test.owner.with(|outlet| {
            for (of, text) in [(Some(lost), "a"), (None, "b")] {
                outlet.add(of, |_| note(text));
            }
            outlet.flush();
        });
        let before = [
            peer.text_and_packet_id().await,
            peer.text_and_packet_id().await,
        ];
        drop(peer);
        let greeting = Greeting::resumed();
        let mut peer = test.accept(greeting).await;
        peer.publish(31).await;
        let again = test.receipt().await;
        test.settle(again);
        for sent in &before {
            assert_eq!(peer.text_and_packet_id().await, *sent);
        }
        assert!(peer.is_silent().await, "a is of the request that was lost");
        // A broker sends acknowledgements in order, so an earlier one that was skipped will not
        // follow.
        peer.acknowledge(before[usize::from(skipped)].1).await;
        assert_eq!(peer.next().await, Seen::PubAck(31));
    }
}

#[tokio::test]
async fn acknowledgement_of_an_earlier_connection_is_not_sent() {
    let mut test = SessionTest::start().await;
    let mut peer = test.accept(Greeting::default()).await;
    peer.publish(31).await;
    let before = test.receipt().await;
    drop(peer);
    let mut peer = test.accept(Greeting::resumed()).await;
    peer.publish(31).await;
    let again = test.receipt().await;
    test.settle(before);
    assert!(peer.is_silent().await);
    test.settle(again);
    assert_eq!(peer.next().await, Seen::PubAck(31));
}

#[tokio::test]
async fn acknowledgements_continue_when_the_window_is_full() {
    let mut test = SessionTest::start().await;
    let greeting = Greeting::default().with(Property::ReceiveMaximum(3));
    let mut peer = test.accept(greeting).await;
    peer.publish(31).await;
    let receipt = test.receipt().await;
    test.settle(receipt);
    assert_eq!(peer.next().await, Seen::PubAck(31));
    peer.publish(32).await;
    let receipt = test.receipt().await;
    // The request was completed before these messages were added.
    test.settle(receipt);
    test.add(["a", "b", "c", "d"].map(note));
    let mut texts = Vec::new();
    for _ in 0..3 {
        match peer.next().await {
            Seen::Publish { text, .. } => texts.push(text),
            Seen::PubAck(packet_id) => assert_eq!(packet_id, 32),
        }
    }
    assert_eq!(texts, ["a", "b"]);
    // The window is as full as it gets.
    peer.publish(33).await;
    let receipt = test.receipt().await;
    test.settle(receipt);
    assert_eq!(peer.next().await, Seen::PubAck(33));
}

#[tokio::test]
async fn unacknowledged_messages_are_resent_first() {
    let test = SessionTest::start().await;
    let greeting = Greeting::default().with(Property::ReceiveMaximum(3));
    let mut peer = test.accept(greeting).await;
    test.add(["a", "b", "c"].map(note));
    let sent = [
        peer.text_and_packet_id().await,
        peer.text_and_packet_id().await,
    ];
    drop(peer);
    let mut peer = test
        .accept(Greeting::resumed().with(Property::ReceiveMaximum(3)))
        .await;
    for (text, packet_id) in sent.clone() {
        let again = Seen::Publish {
            text,
            packet_id,
            dup: true,
        };
        assert_eq!(peer.next().await, again);
    }
    assert!(peer.is_silent().await);
    peer.acknowledge(sent[0].1).await;
    assert_eq!(peer.text().await, "c");
}

#[tokio::test]
async fn expired_message_is_not_sent_and_blocks_nothing() {
    let mut test = SessionTest::start().await;
    let mut peer = test.accept(Greeting::default()).await;
    peer.publish(31).await;
    let receipt = test.receipt().await;
    let late = Note {
        expired: true,
        ..note("late")
    };
    test.owner.with(|outlet| {
        outlet.add(Some(receipt), |_| late);
        outlet.settle(receipt);
        outlet.flush();
    });
    assert_eq!(peer.next().await, Seen::PubAck(31));
    assert!(test.owner.with(|outlet| outlet.is_empty()));
}

#[tokio::test]
async fn oversized_message_is_replaced_or_removed() {
    let test = SessionTest::start().await;
    let mut peer = test.accept(Greeting::default()).await;
    let long = || note(vec![b'x'; 200]);
    let replaceable = Note {
        shorter: true,
        ..long()
    };
    test.add([long(), replaceable, note("short")]);
    for length in [200, 200, 5] {
        assert_eq!(peer.text().await.len(), length);
    }
    drop(peer);
    // The broker reconnects with a limit that these messages exceed.
    let mut peer = test
        .accept(Greeting::resumed().with(Property::MaximumPacketSize(100)))
        .await;
    assert_eq!(
        [peer.text().await, peer.text().await],
        ["too long", "short"]
    );
    assert_eq!(test.owner.with(|outlet| outlet.len()), 2);
}

#[tokio::test]
async fn oversized_replacement_is_removed() {
    let test = SessionTest::start().await;
    // One byte less than the shorter message, but more than the SUBSCRIBE.
    let greeting = Greeting::default().with(Property::MaximumPacketSize(19));
    let mut peer = test.accept(greeting).await;
    test.owner.subscribed.notified().await;
    let replaceable = Note {
        shorter: true,
        ..note(vec![b'x'; 200])
    };
    test.add([replaceable]);
    assert!(peer.is_silent().await);
    assert!(test.owner.with(|outlet| outlet.is_empty()));
}

/// Publishes a message for which the broker answers `reply` each time, between other messages.
/// Returns the number of connections that it ended.
async fn publish_rejected_message(reply: &[u8]) -> usize {
    let mut test = SessionTest::start().await;
    let mut peer = test.accept(Greeting::default()).await;
    peer.publish(31).await;
    let receipt = test.receipt().await;
    test.add(["good", "rejected", "fine"].map(note));
    test.settle(receipt);
    let mut taken: Vec<String> = Vec::new();
    let mut ended = 0;
    while taken.len() < 2 {
        let (text, packet_id) = peer.text_and_packet_id().await;
        if text != "rejected" {
            // The first PUBACK is not sent in time during the first connections.
            if ended >= 3 {
                peer.acknowledge(packet_id).await;
                taken.push(text);
            }
            continue;
        }
        let stream = &mut peer.mqtt.stream;
        stream.write_all(reply).await.unwrap();
        stream.shutdown().await.unwrap();
        while stream.read_buf(&mut Vec::new()).await.unwrap_or(0) > 0 {}
        ended += 1;
        assert!(ended < 20, "it is sent again for ever");
        peer = test.accept(Greeting::resumed()).await;
    }
    assert_eq!(taken, ["good", "fine"]);
    assert_eq!(*test.owner.hopeless.lock().unwrap(), ["rejected"]);
    // The request that caused the message is acknowledged.
    peer.publish(31).await;
    let receipt = test.receipt().await;
    test.settle(receipt);
    assert_eq!(peer.next().await, Seen::PubAck(31));
    ended
}

#[tokio::test]
async fn message_that_ends_connections_does_not_block_others() {
    assert_eq!(publish_rejected_message(&[0xe0, 2, 0x82, 0]).await, 4);
}

/// Mosquitto's DISCONNECT has no length of properties, so rumqttc does not parse it.
#[tokio::test]
async fn message_is_found_if_the_broker_gives_no_reason() {
    assert_eq!(publish_rejected_message(&[0xe0, 1, 0x82]).await, 8);
}

/// Refuses a message, and waits until the client has closed the connection.
async fn refuse(peer: &mut Peer, packet_id: u16) {
    let refused = puback(packet_id, PACKET_TOO_LARGE, &[]);
    peer.mqtt.send(&refused).await;
    peer.mqtt.rest().await;
}

/// rumqttc cannot read such a PUBACK.
#[tokio::test]
async fn message_refused_with_an_unknown_reason_is_removed() {
    let test = SessionTest::start().await;
    let mut peer = test.accept(Greeting::default()).await;
    test.add(["good", "refused", "fine"].map(note));
    let mut taken: Vec<String> = Vec::new();
    let mut ended = 0;
    while taken.len() < 2 {
        let (text, packet_id) = peer.text_and_packet_id().await;
        if text != "refused" {
            peer.acknowledge(packet_id).await;
            taken.push(text);
            continue;
        }
        refuse(&mut peer, packet_id).await;
        ended += 1;
        // Several messages may be in flight during the first connection.
        assert!(ended <= 2, "it is sent again");
        peer = test.accept(Greeting::resumed()).await;
    }
    assert_eq!(taken, ["good", "fine"]);
    let unacceptable = test.owner.unacceptable.lock().unwrap().clone();
    let [(payload, code)] = &unacceptable[..] else {
        panic!("{unacceptable:?}");
    };
    assert_eq!((&payload[..], *code), (&b"refused"[..], PACKET_TOO_LARGE));
    assert!(test.owner.hopeless.lock().unwrap().is_empty());
    let lost = test.owner.lost.lock().unwrap().concat();
    assert!(
        lost.contains("refused a message with reason 0x95"),
        "{lost}"
    );
}

#[tokio::test]
async fn payload_as_long_as_a_refused_one_is_replaced() {
    let test = SessionTest::start().await;
    let mut peer = test.accept(Greeting::default()).await;
    let long = || Note {
        shorter: true,
        ..note(vec![b'x'; 200])
    };
    test.add([long()]);
    let (_, packet_id) = peer.text_and_packet_id().await;
    refuse(&mut peer, packet_id).await;
    let mut peer = test.accept(Greeting::resumed()).await;
    test.add([long(), note(vec![b'x'; 199])]);
    assert_eq!(peer.text().await, "too long");
    assert_eq!(peer.text().await.len(), 199);
}

#[tokio::test]
async fn connection_is_stable_after_an_acknowledgement() {
    let mut test = SessionTest::start().await;
    let mut peer = test.accept(Greeting::default()).await;
    let is_stable = |test: &SessionTest| test.owner.with(|outlet| outlet.is_stable());
    test.add([note("a")]);
    let (_, packet_id) = peer.text_and_packet_id().await;
    // The broker may close each connection at this point.
    assert!(!is_stable(&test));
    peer.acknowledge(packet_id).await;
    test.arrivals.recv().await.unwrap();
    assert!(is_stable(&test));
    drop(peer);
    let _peer = test.accept(Greeting::resumed()).await;
    assert!(!is_stable(&test));
}

#[tokio::test]
async fn broker_without_retained_messages_is_reported() {
    for (given, available) in [(None, true), (Some(0), false), (Some(1), true)] {
        let test = SessionTest::start().await;
        let mut greeting = Greeting::default();
        greeting
            .properties
            .extend(given.map(Property::RetainAvailable));
        let _peer = test.accept(greeting).await;
        let expected = Accepted {
            session_present: false,
            retain_available: available,
        };
        assert_eq!(*test.owner.accepted.lock().unwrap(), Some(expected));
    }
}

#[tokio::test]
async fn rejected_subscription_is_retried() {
    let test = SessionTest::start().await;
    let refused = Verdict::TryAgain("it is not allowed".into());
    test.owner.verdicts.lock().unwrap().push(refused);
    let mut peer = test.accept(Greeting::default()).await;
    assert!(peer.mqtt.rest().await.is_empty());
    let mut peer = test.accept(Greeting::default()).await;
    test.add([note("a")]);
    assert_eq!(peer.text().await, "a");
    assert_eq!(*test.owner.lost.lock().unwrap(), ["it is not allowed"]);
}

#[tokio::test]
async fn packets_after_a_rejected_subscription_are_dropped() {
    let mut test = SessionTest::start().await;
    let refused = Verdict::TryAgain("it is not allowed".into());
    test.owner.verdicts.lock().unwrap().push(refused);
    let mut peer = test.broker.accept().await;
    peer.greet(&Greeting::default()).await;
    let mut packets = suback(peer.read().await.subscribe().0, &[0x87]);
    packets.extend(Publish::new("requests", "lost").bytes());
    // A DISCONNECT in the same read.
    packets.extend([0xe0, 2, 0x8b, 0]);
    peer.send(&packets).await;
    let mut peer = test.accept(Greeting::default()).await;
    peer.publish(8).await;
    match test.arrivals.recv().await.unwrap() {
        Arrival::Message(publish, _) => assert_eq!(publish.pkid, 8),
        Arrival::Acknowledged(..) => panic!("no message was sent"),
    }
}

/// rumqttc blocks for ever in a write without room, and sends no PINGREQ then.
#[tokio::test]
async fn broker_that_does_not_read_is_disconnected() {
    let test = SessionTest::start().await;
    let mut stuck = test.accept(Greeting::default()).await;
    test.add((0..60).map(|_| note(vec![b'x'; 512 << 10])));
    stuck.text().await;
    // The broker reads nothing more, so the system's buffers are soon full.
    tokio::time::sleep(Duration::from_millis(300)).await;
    tokio::time::pause();
    tokio::time::advance(Duration::from_secs(12)).await;
    tokio::time::resume();
    let mut peer = test.accept(Greeting::default()).await;
    assert_eq!(peer.text().await.len(), 512 << 10);
    let lost = test.owner.lost.lock().unwrap().concat();
    assert_eq!(lost, "the broker does not read any more");
}

#[tokio::test]
async fn owner_decides_whether_a_taken_over_session_ends() {
    let test = SessionTest::start().await;
    test.owner.takes_back.store(true, Relaxed);
    let mut peer = test.accept(Greeting::default()).await;
    test.add([note("a")]);
    assert_eq!(peer.text().await, "a");
    peer.mqtt.send(&SESSION_TAKEN_OVER).await;
    let mut peer = test.accept(Greeting::resumed()).await;
    assert_eq!(peer.text().await, "a", "like any lost connection");
    let lost = test.owner.lost.lock().unwrap().concat();
    assert_eq!(lost, "the broker closed it (session taken over)");

    test.owner.takes_back.store(false, Relaxed);
    peer.mqtt.send(&SESSION_TAKEN_OVER).await;
    assert!(peer.mqtt.rest().await.is_empty());
    tokio::task::yield_now().await;
    let ended = test.owner.ended.lock().unwrap().clone();
    assert!(matches!(ended, Some(End::TakenOver(_))), "{ended:?}");
}

#[tokio::test]
async fn end_of_a_session_for_one_process_unsubscribes() {
    let test = SessionTest::start_with(false).await;
    let mut peer = test.accept(Greeting::default()).await;
    test.owner.subscribed.notified().await;
    test.owner.stopping.notify_one();
    let rest = peer.mqtt.rest().await;
    let filter = rest
        .strip_suffix(&[0xe0, 0])
        .expect("a DISCONNECT at the end");
    assert!(filter.starts_with(&[0xa2]) && filter.ends_with(b"\0\x08requests"));
}

#[tokio::test]
async fn requested_end_sends_disconnect() {
    let test = SessionTest::start().await;
    let mut peer = test.accept(Greeting::default()).await;
    test.owner.subscribed.notified().await;
    test.owner.stopping.notify_one();
    assert_eq!(peer.mqtt.rest().await, [0xe0, 0]);
    tokio::task::yield_now().await;
    assert_eq!(*test.owner.ended.lock().unwrap(), Some(End::Closed));
}
