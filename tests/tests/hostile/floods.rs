//! More than anybody can eat: who does not read is disconnected, the others notice nothing, and memory is bounded.

use std::time::{Duration, Instant};

use statehouse_tests::{Publish, client::PATIENCE, packet::kind};

use crate::witness::Witness;

const CONFIG: &str = "max_queue_bytes = 1048576";
const MESSAGE: usize = 64 * 1024;
/// The queue, the sockets' buffers, an allocator's slack; far below what is sent.
const GROWTH_KIB_MAX: u64 = 48 * 1024;

/// Its connection has to end; with a DISCONNECT it is 0x97.
fn expect_thrown_out(client: &mut statehouse_tests::Client) {
    if let Some(disconnect) = client.expect_closed() {
        assert_eq!(disconnect.reason, 0x97, "{disconnect:?}");
    }
}

#[test]
fn a_subscriber_that_never_reads() {
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
            // Its acknowledgement has arrived: it is never more than one message behind.
            reader.ping();
        }
        witness.assert_grown_less_than(before_kib, GROWTH_KIB_MAX);
        expect_thrown_out(&mut slow);
        reader.disconnect();
        publisher.disconnect();
        witness.unharmed();
    }
}

#[test]
fn a_watcher_that_never_reads() {
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
        let heard = writer.notification();
        assert_eq!(statehouse_tests::store::version(&heard), Some(version));
    }
    witness.assert_grown_less_than(before_kib, GROWTH_KIB_MAX);
    expect_thrown_out(&mut slow.client);
    writer.client.disconnect();
    witness.unharmed();
}

/// It asks for large values and reads none of them: its answers would be more than a gigabyte. The server stops reading; that a
/// write which stalls ends the connection is tried in `mqtt/pacing`.
#[test]
fn a_requester_that_never_reads() {
    let mut witness = Witness::with_config(CONFIG);
    witness.store.set("large", vec![b'x'; MESSAGE]);
    let before_kib = witness.server.memory_kib();
    let mut slow = witness.server.store("attacker");
    // Large enough for the requests not to fit into the sockets' buffers.
    let pad = "x".repeat(4000);
    let request = slow.command(&["GET", "large"]).with("pad", pad).publish();
    slow.client.set_write_timeout(Duration::from_secs(1));
    let mut held_back = false;
    for n in 0..20_000_u32 {
        let mut publish = request.clone();
        publish.packet_id = u16::try_from(n % 60_000 + 1).unwrap();
        if slow.client.try_send(&publish.bytes()).is_err() {
            held_back = true;
            break;
        }
        if n % 500 == 0 {
            assert_eq!(witness.store.get("data"), Some(b"still there".to_vec()));
        }
    }
    witness.assert_grown_less_than(before_kib, GROWTH_KIB_MAX);
    witness.still_served();
    assert!(held_back, "the server read requests without end");
    // Nothing of it is read any more, not even the end of its stream: its connection ends after 20 seconds.
    drop(slow);
    witness.still_served();
}

/// An honest client that asks for more in one write than may wait for it gets all of it.
#[test]
fn pipelined_gets_of_large_values_are_all_answered() {
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

/// More connections than there is room for are refused; those that are there go on.
#[test]
fn connections_over_the_maximum() {
    let mut witness = Witness::with_config("max_connections = 8");
    let mut held: Vec<_> = Vec::new();
    for _ in 0..7 {
        let n = held.len();
        held.push(witness.server.connect(&format!("held{n}")));
    }
    // Full: closed at once, or refused by its CONNACK.
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
