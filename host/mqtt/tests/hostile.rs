//! Hostile clients over real sockets and streams. Each test covers a class of faults that brokers
//! had.

mod common;

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use common::*;
use statehouse_mqtt::{
    Broker, Door, Limits, Message, QoS, ReasonCode, RefusalCount, Refused, Stats,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, BufStream, DuplexStream},
    net::TcpListener,
    time::timeout,
};
use wire::{DisconnectReasonCode as Reason, Packet};

#[tokio::test]
async fn acknowledgement_of_an_unknown_packet_id_is_ignored() {
    let broker = broker(Limits::default());
    let address = listen(&broker).await;
    for first in [0x40, 0x50, 0x62, 0x70] {
        let mut client = Client::tcp(address).await.hello("a", 0).await;
        client.stream.write_all(&[first, 2, 0, 1]).await.unwrap();
        client.send(&[Packet::PingReq(wire::PingReq)]).await;
        while client.next().await.expect("no end") != Packet::PingResp(wire::PingResp) {}
    }
}

#[tokio::test(start_paused = true)]
async fn connect_that_never_completes_times_out() {
    let broker = broker(Limits::default());
    let started = tokio::time::Instant::now();
    let mut silent = Client::duplex(&broker, 1024);
    assert_eq!(silent.rest().await, []);
    let mut slow = Client::duplex(&broker, 1024);
    let connect = bytes(&[connect("a", true, 0, 60)]);
    let mut open = 0;
    for byte in &connect {
        tokio::time::sleep(Duration::from_secs(1)).await;
        open += usize::from(slow.stream.write_all(&[*byte]).await.is_ok());
    }
    assert!(
        open < connect.len(),
        "the connection ends although a byte arrives every second"
    );
    assert_eq!(slow.rest().await, []);
    // The clock is paused, so waiting is exact: twice the ten seconds of the limit, and the bytes
    // that the broker no longer read.
    assert!(started.elapsed() >= Duration::from_secs(20));
    assert_eq!(broker.stats().connections, 0);
}

#[tokio::test]
async fn large_connect_is_refused() {
    let broker = broker(Limits {
        connect_bytes_max: 1000,
        ..Limits::default()
    });
    let packet = bytes(&[connect(&"x".repeat(1000), true, 0, 60)]);
    // The first read may end anywhere.
    for cut in [1, 3, 5, 9, packet.len()] {
        let mut client = Client::duplex(&broker, 4096);
        client.stream.write_all(&packet[..cut]).await.unwrap();
        tokio::task::yield_now().await;
        client.stream.write_all(&packet[cut..]).await.unwrap();
        let connack = client.connack().await;
        assert_eq!(connack.code, wire::ConnectReturnCode::PacketTooLarge);
        let text = connack.properties.and_then(|it| it.reason_string);
        assert!(text.is_some_and(|it| it.contains("64 KiB")));
        assert_eq!(client.rest().await, []);
    }
    let mut foreign = Client::duplex(&broker, 4096);
    let name = packet.windows(4).position(|it| it == b"MQTT").unwrap();
    let mut packet = packet;
    packet[name..name + 4].copy_from_slice(b"HTTP");
    foreign.stream.write_all(&packet).await.unwrap();
    assert_eq!(foreign.rest().await, []);
}

#[tokio::test]
async fn no_packet_exceeds_the_maximum_of_the_client() {
    let broker = broker(Limits::default());
    for bytes_max in 1..60 {
        let mut connect = greeting("a", true, 0, 60);
        connect.properties.as_mut().unwrap().max_packet_size = Some(bytes_max);
        let mut client = Client::duplex(&broker, 4096);
        let disconnect = wire::Disconnect::new(Reason::NormalDisconnection);
        let packets = [
            Packet::Connect(connect, None, None),
            // Its SUBACK has 45 bytes.
            subscribe_to(&["t"; 40], Q::AtMostOnce),
            Packet::PingReq(wire::PingReq),
            Packet::Disconnect(disconnect),
        ];
        // The broker may have closed by then.
        _ = client.stream.write_all(&bytes(&packets)).await;
        let mut received = Vec::new();
        client.stream.read_to_end(&mut received).await.unwrap();
        let mut packets = Vec::new();
        while !received.is_empty() {
            let rest = received.split_off(2 + usize::from(received[1]));
            assert!(received.len() <= bytes_max as usize, "{received:02x?}");
            packets.push(received[0]);
            received = rest;
        }
        match bytes_max {
            ..5 => assert_eq!(packets, [0; 0], "{bytes_max}"),
            // Refused: the CONNACK does not fit, and none of its properties may be omitted.
            5..10 => assert_eq!(packets, [0x20], "{bytes_max}"),
            // The client must get the SUBACK, so the SUBSCRIBE is refused.
            10..45 => assert!(
                matches!(packets[..], [0x20] | [0x20, 0xE0]),
                "{packets:02x?}"
            ),
            45.. => assert_eq!(packets, [0x20, 0x90, 0xD0], "{bytes_max}"),
        }
    }
    assert_eq!(broker.stats().sessions, 0);
}

#[tokio::test]
async fn disconnect_arrives_despite_unread_bytes() {
    // Closing a socket with unread bytes resets it, and the reset discards the last packet.
    let broker = broker(Limits::default());
    let address = listen(&broker).await;
    for _ in 0..20 {
        let client = Client::tcp(address).await.hello("a", 0).await;
        let (reader, mut writer) = client.stream.into_split();
        let flood = tokio::spawn(async move {
            _ = writer.write_all(&[0xff; 1 << 20]).await;
            writer
        });
        let mut reader = Client::over(tokio::io::join(reader, tokio::io::sink()));
        assert_eq!(reader.disconnected().await, Some(Reason::MalformedPacket));
        drop(flood.await);
    }
}

#[tokio::test]
async fn slow_reader_is_disconnected_and_delays_no_other() {
    let limits = Limits {
        queue_bytes_max: 1 << 20,
        close_timeout: Duration::from_millis(100),
        ..Limits::default()
    };
    let broker = broker(limits);
    let mut slow = Client::duplex(&broker, 1000).hello("slow", 1000).await;
    slow.listen_to("t", Q::AtLeastOnce).await;
    let mut quick = Client::duplex(&broker, 100_000).hello("quick", 0).await;
    quick.listen_to("t", Q::AtLeastOnce).await;
    let mut publisher = Client::duplex(&broker, 100_000).hello("publisher", 0).await;
    for id in 1..=5000 {
        publisher
            .send(&[publish("t", Q::AtLeastOnce, id, vec![0; 1000])])
            .await;
        assert!(matches!(publisher.next().await, Some(Packet::PubAck(_))));
        let message = quick.message().await;
        quick.send(&[puback(message.pkid)]).await;
    }
    let stats = broker.stats();
    assert!(stats.dropped > 3000 && stats.disconnected == 1, "{stats:?}");
    assert!(stats.queued_bytes < (1 << 20) + 10_000, "{stats:?}");
    until(|| broker.stats().connections <= 2).await;
}

#[tokio::test(start_paused = true)]
async fn stalled_write_ends_the_connection() {
    for client in [Client::duplex, Client::buffered] {
        let broker = broker(Limits::default());
        let mut client = client(&broker, 100).hello("a", 0).await;
        client.listen_to("t", Q::AtMostOnce).await;
        // More than the stream holds, but far below any limit of a queue.
        broker.batch(|batch| batch.publish(Message::new("t", vec![0; 1000], QoS::AtMostOnce)));
        for _ in 0..19 {
            tokio::time::sleep(Duration::from_secs(1)).await;
            assert_eq!(broker.stats().connections, 1);
        }
        tokio::time::sleep(Duration::from_secs(2)).await;
        let stats = broker.stats();
        assert_eq!((stats.connections, stats.disconnected), (0, 1));
        assert_ends_reported(&broker, &stats);
    }
}

/// Asserts that each connection that the broker ended was refused for its quota, and once.
fn assert_ends_reported(broker: &Broker, stats: &Stats) {
    let expected = RefusalCount {
        what: Refused::Connection,
        reason: ReasonCode::QUOTA_EXCEEDED,
        count: stats.disconnected,
    };
    assert_eq!(broker.refusals(), [expected], "{stats:?}");
}

#[tokio::test(start_paused = true)]
async fn unread_output_is_bounded_over_all_connections() {
    bound_unread_output(Client::duplex).await;
    bound_unread_output(Client::buffered).await;
}

async fn bound_unread_output(connect: fn(&Broker, usize) -> Client<DuplexStream>) {
    let bytes_max = 100_000;
    let broker = broker(Limits {
        output_bytes_total_max: bytes_max,
        ..Limits::default()
    });
    let mut silent = Vec::new();
    for n in 0..8 {
        let client = connect(&broker, 1000);
        let mut client = client.hello(&format!("silent{n}"), 0).await;
        client.listen_to("t", Q::AtLeastOnce).await;
        silent.push(client);
    }
    let mut reader = connect(&broker, 1000).hello("reader", 0).await;
    reader.listen_to("t", Q::AtLeastOnce).await;
    // Eight outputs may each hold two and a half times the total.
    for _ in 0..16 {
        broker.batch(|batch| batch.publish(Message::new("t", vec![0; 16_000], QoS::AtLeastOnce)));
    }
    for _ in 0..16 {
        let message = reader.next().await;
        assert!(matches!(message, Some(Packet::Publish(_))), "{message:?}");
    }
    // Clients that hold the output are closed long before a write stalls. The other outputs are too
    // small to count.
    let stats = broker.stats();
    assert!((1..=5).contains(&stats.connections), "{stats:?}");
    let gone = 9 - stats.connections as u64;
    assert!((gone..=8).contains(&stats.disconnected), "{stats:?}");
    assert_ends_reported(&broker, &stats);
    drop(silent);
}

#[tokio::test(start_paused = true)]
async fn silence_ends_the_connection_unless_pings_arrive() {
    let broker = broker(Limits::default());
    let mut client = Client::duplex(&broker, 1000);
    client.send(&[connect("a", true, 0, 10)]).await;
    client.next().await;
    for _ in 0..3 {
        tokio::time::sleep(Duration::from_secs(14)).await;
        client.ping().await;
    }
    // Bytes of an incomplete packet do not reset the timer.
    tokio::time::sleep(Duration::from_secs(14)).await;
    client.stream.write_all(&[0x30]).await.unwrap();
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(client.disconnected().await, Some(Reason::KeepAliveTimeout));
}

#[tokio::test]
async fn sockets_are_bounded_and_silent_ones_keep_no_client_out() {
    let broker = broker_of_two();
    let address = listen(&broker).await;
    let mut silent = Client::tcp(address).await;
    let mut slow = Client::tcp(address).await;
    slow.stream.write_all(&[0x10]).await.unwrap();
    let mut clients = Vec::new();
    // They had time for their CONNECTs.
    tokio::time::sleep(Duration::from_secs(1)).await;
    for (name, evicted) in [("a", &mut silent), ("b", &mut slow)] {
        clients.push(Client::tcp(address).await.hello(name, 0).await);
        assert_eq!(evicted.rest().await, []);
    }
    assert_eq!(broker.stats().turned_away, 2);
    for client in &mut clients {
        client.ping().await;
    }
    assert_eq!(Client::tcp(address).await.rest().await, []);
    assert_eq!(broker.stats().turned_away, 3);
    drop(clients.pop());
    until(|| broker.stats().connections <= 1).await;
    // The socket's permit is freed a moment after the session is detached.
    tokio::time::sleep(Duration::from_millis(100)).await;
    Client::tcp(address).await.hello("c", 0).await;
}

#[tokio::test]
async fn connection_that_was_given_up_takes_no_session_over() {
    let broker = broker(Limits::default());
    // The client gives up while nothing accepts, and connects again.
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut given_up = Client::tcp(listener.local_addr().unwrap()).await;
    given_up.send(&[connect("a", false, 60, 60)]).await;
    given_up.stream.shutdown().await.unwrap();
    let address = listen(&broker).await;
    let mut client = Client::tcp(address).await.hello("a", 60).await;
    tokio::spawn({
        let broker = broker.clone();
        async move { broker.listen(listener).await }
    });
    assert_eq!(given_up.rest().await, []);
    client.ping().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn concurrent_takeovers_of_one_client_id_stay_ordered() {
    // NanoMQ used freed subscriptions here (CVE-2026-22040, CVE-2025-59946).
    let (broker, echo) = Echo::broker(Limits::default());
    let address = listen(&broker).await;
    let connected = Arc::new(AtomicUsize::new(0));
    let mut fighters = Vec::new();
    for _ in 0..64 {
        let connected = connected.clone();
        fighters.push(tokio::spawn(async move {
            for round in 0..8 {
                let mut client = Client::tcp(address).await;
                let clean = round % 3 == 0;
                client
                    .send(&[
                        connect("same", clean, 1000, 60),
                        subscribe("#", Q::AtLeastOnce),
                        publish("t", Q::AtLeastOnce, 2, "x"),
                        request("req/x", Q::AtLeastOnce, 3),
                        request("req/x", Q::ExactlyOnce, 4),
                    ])
                    .await;
                // Until it is taken over, or all requests were answered.
                while let Some(packet) = client.next().await {
                    match packet {
                        Packet::ConnAck(_) => _ = connected.fetch_add(1, Ordering::Relaxed),
                        Packet::PubRec(_) => break,
                        _ => {}
                    }
                }
            }
        }));
    }
    for fighter in fighters {
        fighter.await.unwrap();
    }
    until(|| broker.stats().connections == 0 && echo.count("disconnected") >= 512).await;
    let stats = broker.stats();
    assert_eq!(
        (stats.sessions, echo.count("disconnected")),
        (1, 512),
        "{stats:?}"
    );
    assert!(connected.load(Ordering::Relaxed) <= 512);
    // In the order of the connections: each ended before the first request of the next one.
    let log = echo.log.lock().unwrap();
    let numbers: Vec<u64> = log.iter().map(|(_, origin)| origin.connection.0).collect();
    assert!(
        numbers.is_sorted(),
        "requests and ends are in the order of the connections"
    );
    let ends: Vec<u64> = log
        .iter()
        .filter(|(what, _)| *what == "disconnected")
        .map(|(_, origin)| origin.connection.0)
        .collect();
    assert_eq!(ends, (1..=512).collect::<Vec<_>>());
}

#[tokio::test]
async fn incomplete_packets_stay_within_their_total_memory() {
    let broker = broker(Limits {
        packet_bytes_total_max: 100_000,
        connect_bytes_total_max: 100_000,
        ..Limits::default()
    });
    let address = listen(&broker).await;
    // The header and most of the body of a PUBLISH and a CONNECT with 60 000 bytes.
    let begun = |head: u8| [&[head, 0xE0, 0xD4, 0x03][..], &[0; 40_000]].concat();
    let mut holders = Vec::new();
    let mut over = 0;
    for number in 0..4 {
        let name = format!("holder-{number}");
        let mut client = Client::tcp(address).await.hello(&name, 0).await;
        client.stream.write_all(&begun(0x30)).await.unwrap();
        let ended = timeout(Duration::from_millis(500), client.disconnected()).await;
        if let Ok(reason) = ended {
            assert_eq!(reason, Some(Reason::QuotaExceeded));
            over += 1;
        } else {
            holders.push(client);
        }
    }
    assert!(over > 0 && !holders.is_empty(), "{over} exceeded the limit");
    // Small packets are still handled, also of new clients.
    let mut other = Client::tcp(address).await.hello("other", 0).await;
    other.ping().await;

    let mut peers = Vec::new();
    let mut over = 0;
    for _ in 0..3 {
        let mut peer = Client::tcp(address).await;
        peer.stream.write_all(&begun(0x10)).await.unwrap();
        let ended = timeout(Duration::from_millis(500), peer.rest()).await;
        over += usize::from(ended.is_ok());
        peers.push(peer);
    }
    assert!((1..3).contains(&over), "{over} exceeded the limit");
    Client::tcp(address).await.hello("new", 0).await;
}

#[tokio::test(start_paused = true)]
async fn large_packet_without_progress_makes_room_for_another() {
    let broker = broker(Limits {
        packet_bytes_total_max: 300_000,
        ..Limits::default()
    });
    // The header and half of the body of a PUBLISH with 60 000 bytes.
    let begun = [&[0x30, 0xE0, 0xD4, 0x03][..], &[0; 30_000]].concat();
    let mut holders = Vec::new();
    let mut refused = loop {
        let name = format!("holder-{}", holders.len());
        let mut client = Client::duplex(&broker, 1 << 16).hello(&name, 0).await;
        client.stream.write_all(&begun).await.unwrap();
        tokio::time::sleep(Duration::from_millis(100)).await;
        if broker.stats().connections <= holders.len() {
            break client;
        }
        holders.push(client);
    };
    let over = Some(Reason::QuotaExceeded);
    assert_eq!(refused.disconnected().await, over, "all are recent");
    assert!(holders.len() >= 3, "{}", holders.len());
    // The first has a slow line. Its buffer has room to grow.
    drop(holders.pop());
    tokio::time::sleep(Duration::from_secs(29)).await;
    holders[0].stream.write_all(&[0; 1100]).await.unwrap();
    tokio::time::sleep(Duration::from_secs(2)).await;
    let mut client = Client::duplex(&broker, 1 << 16).hello("large", 0).await;
    client
        .send(&[publish("t", Q::AtLeastOnce, 1, vec![0; 60_000])])
        .await;
    assert!(matches!(client.next().await, Some(Packet::PubAck(_))));
    assert_eq!(holders[1].disconnected().await, over);
    let stats = broker.stats();
    assert_eq!((stats.connections, stats.disconnected), (holders.len(), 2));
}

/// What a stream sends at its orderly end, as TLS and WebSocket do. It is lost if the broker only
/// drops the stream.
const LAST_BYTE: u8 = b'.';

/// A connection from 10.0.0.`last_byte`.
async fn open(broker: &Broker, last_byte: u8) -> DuplexStream {
    let (ours, theirs) = tokio::io::duplex(1024);
    let mut stream = BufStream::new(theirs);
    stream.write_all(&[LAST_BYTE]).await.expect("write");
    let peer = SocketAddr::from(([10, 0, 0, last_byte], 1));
    let broker = broker.clone();
    tokio::spawn(async move { broker.serve_connection(stream, Door::open(peer)).await });
    ours
}

async fn assert_ends(mut stream: DuplexStream) {
    let mut received = Vec::new();
    let end = stream.read_to_end(&mut received).await;
    assert!(end.is_ok(), "{end:?}");
    assert_eq!(received, [LAST_BYTE]);
}

fn broker_of_two() -> Broker {
    broker(Limits {
        connections_max: 2,
        ..Limits::default()
    })
}

#[tokio::test(start_paused = true)]
async fn stream_without_connack_ends_in_order() {
    let broker = broker_of_two();
    let mut foreign = open(&broker, 1).await;
    foreign.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
    assert_ends(foreign).await;
    assert_eq!(broker.stats().turned_away, 0);

    let evicted = open(&broker, 1).await;
    tokio::time::sleep(Duration::from_millis(1)).await;
    let silent = open(&broker, 1).await;
    tokio::time::sleep(Duration::from_millis(1)).await;
    let _takes_its_place = open(&broker, 2).await;
    assert_ends(evicted).await;
    assert_eq!(broker.stats().turned_away, 1);
    assert_ends(open(&broker, 3).await).await;
    assert_eq!(broker.stats().turned_away, 2);
    assert_ends(silent).await;
}

/// It has been reported when it was refused.
#[tokio::test(start_paused = true)]
async fn refused_stream_that_is_evicted_is_not_reported_again() {
    let broker = broker_of_two();
    let mut refused = open(&broker, 1).await;
    refused.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
    tokio::time::sleep(Duration::from_millis(1)).await;
    let _silent = open(&broker, 1).await;
    tokio::time::sleep(Duration::from_millis(1)).await;
    let _takes_its_place = open(&broker, 2).await;
    tokio::time::sleep(Duration::from_millis(1)).await;
    assert_eq!(broker.stats().turned_away, 0);
    // The broker does not read any more: it closed the connection before the end of its lingering.
    refused.write_all(b" ").await.unwrap_err();
    assert_ends(refused).await;
}
