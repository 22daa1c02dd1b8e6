//! Clients that do not read, and too many connections. The server must disconnect or refuse them,
//! must not delay other clients, and must limit its memory.

use std::{
    net::TcpStream,
    process::Command,
    time::{Duration, Instant},
};

use statehouse_tests::{Publish, Server, binary, client::PATIENCE, packet::kind};

use crate::witness::Witness;

const CONFIG: &str = "max_queue_bytes = 1048576";
const MESSAGE: usize = 64 * 1024;
/// Room for the queue, socket buffers and allocator overhead; far below the amount that is sent.
const GROWTH_KIB_MAX: u64 = 48 * 1024;

/// Waits for the end of the connection. A DISCONNECT, if any, must have reason 0x97.
fn expect_evicted(client: &mut statehouse_tests::Client) {
    if let Some(disconnect) = client.expect_closed() {
        assert_eq!(disconnect.reason, 0x97, "{disconnect:?}");
    }
}

#[test]
fn subscriber_that_never_reads_is_disconnected() {
    for qos in [0, 1] {
        let mut witness = Witness::with_config(CONFIG);
        let mut slow = witness.attacker();
        slow.subscribe("flood", qos);
        let mut reader = witness.server.connect("reader");
        reader.subscribe("flood", qos);
        let mut publisher = witness.server.connect("publisher");
        let before_kib = witness.server.memory_kib();
        // 64 MiB.
        for n in 0..1024_u32 {
            let mut payload = vec![b'x'; MESSAGE];
            payload[..4].copy_from_slice(&n.to_be_bytes());
            publisher.publish(Publish::new("flood", payload).qos(qos));
            let got = reader.take_publish("flood");
            assert_eq!(got.payload[..4], n.to_be_bytes(), "order");
            // The ping confirms that its acknowledgement arrived, so the reader is at most one
            // message behind.
            reader.ping();
        }
        witness.assert_grown_less_than(before_kib, GROWTH_KIB_MAX);
        expect_evicted(&mut slow);
        reader.disconnect();
        publisher.disconnect();
        witness.unharmed();
    }
}

#[test]
fn watcher_that_never_reads_is_disconnected() {
    let mut witness = Witness::with_config(CONFIG);
    let mut slow = witness.server.store("attacker");
    slow.watch("flood");
    let mut writer = witness.server.store("writer");
    writer.watch("flood");
    let before_kib = witness.server.memory_kib();
    for n in 0..512_u32 {
        let mut value = vec![b'x'; MESSAGE];
        value[..4].copy_from_slice(&n.to_be_bytes());
        let version = writer.set("flood", value);
        let change = writer.notification();
        assert_eq!(statehouse_tests::store::version(&change), Some(version));
    }
    witness.assert_grown_less_than(before_kib, GROWTH_KIB_MAX);
    expect_evicted(&mut slow.client);
    writer.client.disconnect();
    witness.unharmed();
}

/// The client requests large values and reads no answer; together the answers would exceed a
/// gigabyte. The server refuses its requests or stops reading them. `mqtt/pacing` tests that a
/// stalled write ends the connection.
#[test]
fn requester_that_never_reads_takes_little_memory() {
    let mut witness = Witness::with_config(CONFIG);
    witness.store.set("large", vec![b'x'; MESSAGE]);
    let before_kib = witness.server.memory_kib();
    let mut slow = witness.server.store("attacker");
    // Large enough that the requests do not fit into the socket buffers.
    let pad = "x".repeat(4000);
    let request = slow.command(&["GET", "large"]).with("pad", pad).publish();
    slow.client.set_write_timeout(Duration::from_secs(1));
    for n in 0..20_000_u32 {
        let mut publish = request.clone();
        publish.packet_id = u16::try_from(n % 60_000 + 1).unwrap();
        if slow.client.try_send(&publish.bytes()).is_err() {
            break;
        }
        if n % 500 == 0 {
            assert_eq!(witness.store.get("data"), Some(b"still there".to_vec()));
        }
    }
    witness.assert_grown_less_than(before_kib, GROWTH_KIB_MAX);
    witness.still_served();
    drop(slow);
    witness.still_served();
}

/// An honest client requests more in one write than its queue may hold. It gets every answer.
#[test]
fn pipelined_reads_of_large_values_are_all_answered() {
    let mut witness = Witness::new();
    let value = vec![b'x'; 1_000_000];
    let mut honest = witness.server.store("honest");
    honest.set("large", &value);
    let mut packets = Vec::new();
    for packet_id in 1..=40 {
        let mut publish = honest.command(&["GET", "large"]).publish();
        publish.packet_id = packet_id;
        packets.extend(publish.bytes());
    }
    honest.client.send(&packets);
    for packet_id in 1..=40 {
        let answer = honest.client.take_publish("clients/honest/");
        assert!(answer.payload.len() > value.len());
        assert_eq!(honest.client.take_ack(kind::PUBACK, packet_id).reason, 0);
    }
    drop(honest);
    witness.unharmed();
}

/// Connections over the limit are refused, and existing ones continue.
#[test]
fn connections_over_the_limit_are_refused() {
    let mut witness = Witness::with_config("max_connections = 8");
    let mut held: Vec<_> = Vec::new();
    for _ in 0..7 {
        let n = held.len();
        held.push(witness.server.connect(&format!("held{n}")));
    }
    // Each extra connection is closed at once, or refused by its CONNACK.
    let end = Instant::now() + PATIENCE;
    for n in 0..5 {
        assert!(Instant::now() < end);
        let mut extra = witness.server.open();
        // The server may have closed already.
        let _ = extra.try_send(&statehouse_tests::Connect::new(&format!("extra{n}")).bytes());
        extra.expect_closed();
        for answer in extra.drain() {
            assert!(answer.ack().reason >= 0x80, "{answer:?}");
        }
    }
    assert_eq!(witness.store.get("data"), Some(b"still there".to_vec()));
    held.into_iter()
        .for_each(statehouse_tests::Client::disconnect);
    witness.unharmed();
}

/// Sockets must not take the files that the log needs: it would fail, and stop the store.
#[test]
fn idle_sockets_leave_files_for_the_log() {
    const FILES: usize = 400;
    let directory = tempfile::tempdir().unwrap();
    let mut command = Command::new("prlimit");
    command
        .arg(format!("--nofile={FILES}:{FILES}"))
        .arg(binary::statehouse())
        .args(["serve", "--listen", "127.0.0.1:0", "--data"])
        .arg(directory.path().join("statehouse-data"));
    let mut server = Server::spawn(command, directory);
    server.wait_for_log("max_connections is what the number of open files allows");
    let mut store = server.store("client");
    let idle: Vec<_> = (0..FILES + 50)
        .map(|_| TcpStream::connect(server.address()).unwrap())
        .collect();
    // The log changes its segment twice.
    let value = vec![b'x'; 100_000];
    for n in 0..100 {
        store.set(format!("key {}", n % 10), &value);
    }
    assert!(server.runs());
    let most = server.metric("limit{setting=\"max_connections\"}") as usize;
    assert!(most < FILES && server.descriptors() < FILES);
    drop(idle);
    store.get("key 1").unwrap();
}
