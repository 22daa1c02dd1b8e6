//! Attacks the read buffers: one byte of a next packet must not keep the buffer of a large packet.

use std::time::Duration;

use statehouse_tests::{Client, Publish, Server, attack};

const CONNECTIONS: usize = 252;
/// Nearly the largest packet that the server accepts.
const LARGE_BYTES: usize = 1900 << 10;
/// Room for the smallest buffer and the session of each connection, but not for large buffers.
const GROWTH_KIB_MAX: u64 = 128 << 10;

/// Each connection sends a large packet, then the first byte of another packet.
#[test]
#[ignore = "an attack takes half a minute"]
fn large_read_buffers_are_freed_after_a_packet() {
    let Some(mut server) = Server::limited(512) else {
        return;
    };
    let large = Publish::new("no/subscriber", vec![b'x'; LARGE_BYTES]).qos(1);
    let name = "252 read buffers pinned by one byte";
    let outcome = attack::run(name, &mut server, |server| {
        let pin = |n: usize| -> Client {
            let mut client = server.connect(&format!("attacker{n}"));
            client.publish(large.clone());
            client.send(&[0x30]);
            client
        };
        (0..CONNECTIONS).map(pin).collect::<Vec<_>>()
    });
    outcome.assert_victim_served(Duration::from_secs(1));
    let grown_kib = outcome
        .rss_during_kib
        .saturating_sub(outcome.rss_before_kib);
    assert!(grown_kib < GROWTH_KIB_MAX, "{grown_kib} KiB more");
}
