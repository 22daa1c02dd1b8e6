//! Clients that send faster than they read. The broker must take their requests at the rate at
//! which they take its answers.

#![allow(clippy::unwrap_used, reason = "tests fail by panicking")]

mod common;

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use common::*;
use statehouse_mqtt::{Broker, Limits, Message, QoS};
use tokio::{io::DuplexStream, net::TcpStream};
use wire::{DisconnectReasonCode as Reason, Packet};

const ANSWER_BYTES: usize = 1 << 20;
const QUEUE_BYTES: usize = 8 << 20;

fn limits() -> Limits {
    Limits {
        queue_bytes_max: QUEUE_BYTES,
        ..Limits::default()
    }
}

/// Requests with the packet identifiers from `from`.
fn requests(from: u16, count: u16) -> Vec<Packet> {
    (from..from + count)
        .map(|id| request("req/large", Q::AtLeastOnce, id))
        .collect()
}

/// A broker with large answers, and a client that subscribed to them.
async fn with_large_answers() -> (Broker, Client<TcpStream>) {
    let broker = Large::broker(limits(), ANSWER_BYTES);
    let mut client = Client::tcp(listen(&broker).await).await.hello("a", 0).await;
    client.listen_to("answers", Q::AtLeastOnce).await;
    (broker, client)
}

/// A client whose will is `gone`, and which takes this many messages before it acknowledges one.
async fn with_will(broker: &Broker, window: u16) -> Client<DuplexStream> {
    let mut connect = greeting("a", true, 0, 60);
    connect.properties.as_mut().unwrap().receive_maximum = Some(window);
    let will = wire::LastWill::new("will", "gone", Q::AtMostOnce, false, None);
    let mut client = Client::duplex(broker, 4096);
    client
        .send(&[Packet::Connect(connect, Some(will), None)])
        .await;
    client.connack().await;
    client
}

/// Sends DISCONNECT and closes without reading. Returns when the broker has ended the connection.
async fn leave(mut client: Client<DuplexStream>, broker: &Broker) {
    let reason = Reason::NormalDisconnection;
    let disconnect = Packet::Disconnect(wire::Disconnect::new(reason));
    client.send(&[disconnect]).await;
    drop(client);
    until(|| broker.stats().connections <= 1).await;
}

#[tokio::test]
async fn pipelined_requests_with_large_answers_are_all_answered() {
    let (broker, mut client) = with_large_answers().await;
    // The answers are eight times as large as the limit of the client's queue. The client
    // acknowledges each answer when it arrives.
    client.send(&requests(1, 64)).await;
    let (mut answers, mut acknowledged, mut most) = (0, 0, 0);
    while answers + acknowledged < 128 {
        match client.next().await {
            Some(Packet::Publish(answer)) => {
                assert_eq!(answer.payload.len(), ANSWER_BYTES);
                answers += 1;
                most = most.max(broker.stats().queued_bytes);
                client.send(&[puback(answer.pkid)]).await;
            }
            Some(Packet::PubAck(_)) => acknowledged += 1,
            other => panic!("{other:?} after {answers} answers"),
        }
    }
    assert!(most < QUEUE_BYTES, "{most}");
}

#[tokio::test]
async fn acknowledgements_behind_paused_requests_are_read() {
    let (_broker, mut client) = with_large_answers().await;
    client.send(&requests(1, 16)).await;
    let mut unacknowledged = Vec::new();
    let mut asked = 16;
    let mut answers = 0;
    while answers < 48 {
        match client.next().await {
            Some(Packet::Publish(answer)) => {
                answers += 1;
                unacknowledged.push(answer.pkid);
            }
            Some(Packet::PubAck(_)) => continue,
            other => panic!("{other:?} after {answers} answers"),
        }
        // Behind further requests, and a few at a time.
        if unacknowledged.len() == 4 {
            let mut packets = requests(asked + 1, if asked < 48 { 4 } else { 0 });
            asked += packets.len() as u16;
            packets.extend(unacknowledged.drain(..).map(puback));
            packets.push(Packet::PingReq(wire::PingReq));
            client.send(&packets).await;
            // The ping is answered although requests wait.
            while match client.next().await {
                Some(Packet::PingResp(_)) => false,
                Some(Packet::Publish(answer)) => {
                    answers += 1;
                    unacknowledged.push(answer.pkid);
                    true
                }
                Some(Packet::PubAck(_)) => true,
                other => panic!("{other:?}"),
            } {}
        }
    }
}

#[tokio::test]
async fn disconnect_behind_a_paused_publish_drops_the_will() {
    let limits = Limits {
        queue_bytes_max: 2000,
        queue_bytes_reserve: 0,
        ..Limits::default()
    };
    let broker = broker(limits);
    let mut watcher = Client::duplex(&broker, 4096).hello("watcher", 0).await;
    watcher.listen_to("will", Q::AtMostOnce).await;
    for waits in [false, true] {
        let handled = broker.stats().messages_in;
        let mut client = with_will(&broker, 1).await;
        client.listen_to("own", Q::AtLeastOnce).await;
        // The client does not acknowledge its messages, so the last PUBLISH waits.
        for id in 1..=4 {
            let message = publish("own", Q::AtLeastOnce, id, vec![0; 400]);
            client.send(&[message]).await;
        }
        if waits {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        leave(client, &broker).await;
        assert!(
            broker.stats().messages_in <= handled + 3,
            "a PUBLISH waited"
        );
        watcher.ping().await;
    }
}

#[tokio::test(start_paused = true)]
async fn disconnect_before_a_failed_write_drops_the_will() {
    let broker = broker(Limits::default());
    let mut watcher = Client::duplex(&broker, 4096).hello("watcher", 0).await;
    watcher.listen_to("will", Q::AtMostOnce).await;
    let mut client = with_will(&broker, u16::MAX).await;
    client.listen_to("t", Q::AtMostOnce).await;
    // More than the client reads, so after the PINGREQ the broker reads nothing either.
    broker.batch(|batch| batch.publish(Message::new("t", vec![0; 1 << 20], QoS::AtMostOnce)));
    client.send(&[Packet::PingReq(wire::PingReq)]).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    leave(client, &broker).await;
    watcher.ping().await;
}

#[tokio::test]
async fn packets_behind_a_paused_request_keep_their_order() {
    let (_broker, mut client) = with_large_answers().await;
    let mut packets = requests(1, 12);
    packets.push(publish(
        "own",
        Q::AtMostOnce,
        0,
        "lost: no subscription yet",
    ));
    packets.push(subscribe("own", Q::AtMostOnce));
    packets.push(publish("own", Q::AtMostOnce, 0, "kept"));
    client.send(&packets).await;
    let mut seen = Vec::new();
    let mut answers = 0;
    while answers < 12 || seen.len() < 2 {
        match client.next().await.unwrap() {
            Packet::Publish(message) if message.topic == "answers" => {
                answers += 1;
                client.send(&[puback(message.pkid)]).await;
            }
            Packet::Publish(message) => {
                seen.push(String::from_utf8_lossy(&message.payload).into_owned())
            }
            Packet::SubAck(_) => seen.push("subscribed".to_owned()),
            Packet::PubAck(_) => {}
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(seen, ["subscribed", "kept"]);
}

#[tokio::test]
async fn malformed_packet_behind_paused_requests_disconnects() {
    let (_broker, mut client) = with_large_answers().await;
    client.send(&requests(1, 3)).await;
    tokio::io::AsyncWriteExt::write_all(&mut client.stream, &[0x00, 0x00])
        .await
        .unwrap();
    assert_eq!(client.disconnected().await, Some(Reason::MalformedPacket));
}

#[tokio::test(start_paused = true)]
async fn client_that_never_reads_its_answers_is_disconnected() {
    let broker = Large::broker(limits(), ANSWER_BYTES);
    let mut client = Client::duplex(&broker, 1 << 20).hello("a", 0).await;
    client.listen_to("answers", Q::AtLeastOnce).await;
    client.send(&requests(1, 64)).await;
    tokio::time::sleep(Duration::from_secs(19)).await;
    let stats = broker.stats();
    assert_eq!(stats.connections, 1);
    assert!(stats.queued_bytes < QUEUE_BYTES, "{stats:?}");
    until(|| broker.stats().connections == 0).await;
}

/// A client that writes in one order, also its acknowledgements: behind everything before them.
struct Fifo {
    reader: Client<tokio::io::Join<tokio::io::ReadHalf<TcpStream>, tokio::io::Sink>>,
    writer: tokio::sync::mpsc::UnboundedSender<Packet>,
}

impl Fifo {
    async fn new(broker: &Broker) -> Self {
        let mut client = Client::tcp(listen(broker).await).await.hello("a", 0).await;
        client.listen_to("answers", Q::AtLeastOnce).await;
        let (reader, mut stream) = tokio::io::split(client.stream);
        let (writer, mut packets) = tokio::sync::mpsc::unbounded_channel();
        tokio::spawn(async move {
            while let Some(packet) = packets.recv().await {
                let packet = bytes(&[packet]);
                let sent = tokio::io::AsyncWriteExt::write_all(&mut stream, &packet).await;
                if sent.is_err() {
                    return;
                }
            }
        });
        Self {
            reader: Client::over(tokio::io::join(reader, tokio::io::sink())),
            writer,
        }
    }

    /// Sends PUBLISHes and acknowledges all messages. Returns how many PUBLISHes were accepted, how
    /// many were refused, and how many messages came.
    async fn exchange(&mut self, packets: Vec<Packet>) -> (usize, usize, usize) {
        let count = packets.len();
        self.exchange_some(packets, count, true).await
    }

    /// Waits only for the first answers, and does not acknowledge unless `acknowledges`.
    async fn exchange_some(
        &mut self,
        packets: Vec<Packet>,
        count: usize,
        acknowledges: bool,
    ) -> (usize, usize, usize) {
        packets
            .into_iter()
            .for_each(|it| self.writer.send(it).unwrap());
        let (mut accepted, mut refused, mut messages) = (0, 0, 0);
        while accepted + refused < count || acknowledges && messages < accepted {
            match self.reader.next().await {
                Some(Packet::Publish(message)) => {
                    messages += 1;
                    if acknowledges {
                        self.writer.send(puback(message.pkid)).unwrap();
                    }
                }
                Some(Packet::PubAck(ack)) => match ack.reason {
                    wire::PubAckReason::Success => accepted += 1,
                    wire::PubAckReason::QuotaExceeded => refused += 1,
                    reason => panic!("{reason:?}"),
                },
                other => panic!("{other:?} after {accepted}, {refused}, {messages}"),
            }
        }
        self.writer.send(Packet::PingReq(wire::PingReq)).unwrap();
        while let Some(packet) = self.reader.next().await {
            if packet == Packet::PingResp(wire::PingResp) {
                return (accepted, refused, messages);
            }
        }
        panic!("the broker has closed");
    }
}

const PAYLOAD_BYTES: usize = 400_000;

/// Messages of the client to itself.
fn messages(ids: std::ops::RangeInclusive<u16>) -> Vec<Packet> {
    ids.map(|id| publish("answers", Q::AtLeastOnce, id, vec![0; PAYLOAD_BYTES]))
        .collect()
}

#[tokio::test]
async fn acknowledgements_behind_large_publishes_are_reached() {
    let broker = broker(limits());
    let mut client = Fifo::new(&broker).await;
    // A part fits into the queue, and the rest waits.
    assert_eq!(client.exchange(messages(1..=28)).await, (28, 0, 28));
    // More than the queue and the packets that wait may hold.
    let (accepted, refused, received) = client.exchange(messages(1..=100)).await;
    assert!(refused > 0 && accepted >= 28, "{accepted}, {refused}");
    assert_eq!((accepted + refused, received), (100, accepted));
    // What was refused can be sent again.
    assert_eq!(client.exchange(messages(1..=10)).await, (10, 0, 10));
    assert_eq!(broker.stats().dropped, 0);
}

#[tokio::test]
async fn acknowledgements_behind_large_requests_are_reached() {
    let broker = Large::broker(limits(), ANSWER_BYTES);
    let mut client = Fifo::new(&broker).await;
    let large = |id| match request("req/large", Q::AtLeastOnce, id) {
        Packet::Publish(mut request) => {
            request.payload = vec![0; PAYLOAD_BYTES].into();
            Packet::Publish(request)
        }
        other => other,
    };
    let (accepted, refused, received) = client.exchange((1..=60).map(large).collect()).await;
    assert!(refused > 0 && accepted >= 20, "{accepted}, {refused}");
    assert_eq!((accepted + refused, received), (60, accepted));
}

#[tokio::test]
async fn publishes_of_a_client_that_never_acknowledges_are_refused() {
    let broker = broker(limits());
    let mut client = Fifo::new(&broker).await;
    // The last ones wait, since the broker keeps that many.
    let (accepted, refused, received) = client.exchange_some(messages(1..=100), 70, false).await;
    assert_eq!((accepted, refused), (received, 70 - received));
    let queued = accepted * PAYLOAD_BYTES;
    assert!(
        (QUEUE_BYTES / 2..=QUEUE_BYTES / 4 * 3).contains(&queued),
        "{queued}"
    );
    assert_eq!(broker.stats().disconnected, 0);
}

#[tokio::test(start_paused = true)]
async fn pieces_of_a_large_packet_are_signs_of_life() {
    let broker = broker(Limits::default());
    let packet = bytes(&[publish("t", Q::AtLeastOnce, 1, vec![0; 20_000])]);
    // The keep alive of two seconds ends three seconds after the last sign of life.
    for (piece_bytes, stays) in [(2048, true), (100, false)] {
        let mut client = Client::duplex(&broker, 1 << 16);
        client.send(&[connect("a", true, 0, 2)]).await;
        client.connack().await;
        for piece in packet.chunks(piece_bytes).take(10) {
            tokio::time::sleep(Duration::from_secs(1)).await;
            // Fails once the broker has closed.
            _ = tokio::io::AsyncWriteExt::write_all(&mut client.stream, piece).await;
        }
        match stays {
            true => assert!(matches!(client.next().await, Some(Packet::PubAck(_)))),
            false => assert_eq!(client.disconnected().await, Some(Reason::KeepAliveTimeout)),
        }
    }
}

/// Sends fifty sequential requests. Acknowledges each answer in a separate write, as paho does.
async fn sequential(address: SocketAddr, client: &str, nodelay: bool) -> Duration {
    let mut client = Client::tcp(address).await.hello(client, 0).await;
    client.stream.set_nodelay(nodelay).unwrap();
    client.listen_to("answers", Q::AtLeastOnce).await;
    let begun = Instant::now();
    for id in 1..=50 {
        client.send(&[request("req/x", Q::AtLeastOnce, id)]).await;
        let mut missing = 2;
        while missing > 0 {
            match client.next().await {
                Some(Packet::Publish(answer)) => {
                    client.send(&[puback(answer.pkid)]).await;
                    missing -= 1;
                }
                Some(Packet::PubAck(_)) => missing -= 1,
                other => panic!("{other:?}"),
            }
        }
    }
    begun.elapsed()
}

#[cfg(target_os = "linux")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_of_a_client_with_nagle_are_not_delayed() {
    let (broker, _) = Echo::broker(Limits::default());
    let address = listen(&broker).await;
    let [with, without] = [("a", false), ("b", true)]
        .map(|(client, nodelay)| tokio::spawn(sequential(address, client, nodelay)));
    let (with, without) = (with.await.unwrap(), without.await.unwrap());
    // Each request would otherwise wait for an acknowledgement that is delayed by 40 ms.
    assert!(
        with < without + Duration::from_secs(1),
        "{with:?}, {without:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn overlapping_filters_each_bring_all_retained_messages() {
    const RETAINED: usize = 8;
    const FILTERS: usize = 10;
    let broker = broker(Limits {
        queue_bytes_max: 2 << 20,
        retained_bytes_max: 1 << 20,
        ..Limits::default()
    });
    for n in 0..RETAINED {
        let mut message = Message::new(format!("a/b/{n}"), vec![0; 100_000], QoS::AtLeastOnce);
        message.retain = true;
        broker.batch(|batch| batch.publish(message.clone()));
    }
    let mut client = Client::duplex(&broker, 1 << 16).hello("a", 0).await;
    let overlapping = [
        "#", "+/#", "a/#", "+/+/#", "a/+/#", "+/b/#", "a/b/#", "a/b/+", "a/+/+", "+/+/+",
    ];
    let all = subscribe_to(&overlapping, Q::AtLeastOnce);
    client.send(&[all]).await;
    // The client does not read yet, and all messages together exceed the limit of its queue.
    tokio::time::sleep(Duration::from_secs(5)).await;
    let stats = broker.stats();
    assert!(stats.queued_bytes > 0 && stats.dropped == 0, "{stats:?}");
    let mut received = 0;
    while received < RETAINED * FILTERS {
        match client.next().await {
            Some(Packet::Publish(message)) => {
                received += 1;
                client.send(&[puback(message.pkid)]).await;
            }
            Some(Packet::SubAck(_)) => {}
            other => panic!("{other:?} after {received} messages"),
        }
    }
    assert_eq!(broker.stats().dropped, 0);
}
