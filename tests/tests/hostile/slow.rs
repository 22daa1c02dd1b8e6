//! Clients that do not complete their CONNECT, or fall silent after it. The server must disconnect
//! them in time and still serve other clients.

use std::{
    thread,
    time::{Duration, Instant},
};

use statehouse_tests::{Client, Connect, Heard};

use crate::witness::Witness;

/// Longer than the server's timeout for CONNECT, which is ten seconds.
const ENOUGH: Duration = Duration::from_secs(40);

/// The server closes a silent connection, one with half a CONNECT, and one that sends an endless
/// CONNECT byte by byte.
#[test]
fn connect_that_never_ends_is_closed() {
    let mut witness = Witness::new();
    let mut silent = witness.server.open();
    let mut half = witness.server.open();
    let whole = Connect::new("attacker").bytes();
    half.send(&whole[..whole.len() / 2]);

    let mut trickling = witness.server.open();
    // A CONNECT of 16 KiB, so that it does not end before the timeout.
    trickling.send(&[
        0x10, 0x80, 0x80, 0x01, 0, 4, b'M', b'Q', b'T', b'T', 5, 2, 0, 0,
    ]);
    let end = Instant::now() + ENOUGH;
    loop {
        match trickling.poll(Duration::from_millis(100)) {
            Heard::Closed => break,
            Heard::Silence => {}
            Heard::Packet(packet) => panic!("an answer to half a CONNECT: {packet:?}"),
        }
        assert!(Instant::now() < end, "the connection was never closed");
        if trickling.try_send(&[0]).is_err() {
            break;
        }
    }
    for client in [&mut silent, &mut half] {
        client.expect_closed();
        assert!(client.drain().is_empty());
    }
    witness.unharmed();
}

/// A thousand connections send parts of a CONNECT. Honest clients still connect, memory stays
/// limited, and the timeout for CONNECT ends all of the thousand.
#[test]
fn thousand_endless_connects_block_no_other_client() {
    let mut witness = Witness::new();
    let before_kib = witness.server.memory_kib();
    let whole = Connect::new(&"x".repeat(1000)).bytes();
    let mut attackers: Vec<_> = (0..1000)
        .map(|n| {
            let mut attacker = witness.server.open();
            attacker.send(&whole[..n % whole.len()]);
            attacker
        })
        .collect();
    witness.still_served();
    witness.assert_grown_less_than(before_kib, 48 * 1024);
    for attacker in &mut attackers {
        attacker.expect_closed();
        assert!(attacker.drain().is_empty());
    }
    witness.unharmed();
}

/// The keep alive detects a client that left without closing its connection.
#[test]
fn silent_client_is_disconnected_at_its_keep_alive() {
    let mut witness = Witness::new();
    let mut connect = Connect::new("attacker");
    connect.keep_alive_s = 1;
    let began = Instant::now();
    let mut attacker = Client::connect(witness.server.address(), &connect);
    attacker.expect_disconnect(0x8D);
    assert!(began.elapsed() >= Duration::from_millis(1400), "too early");
    // A client that pings stays connected.
    let mut active = Client::connect(witness.server.address(), &connect);
    for _ in 0..8 {
        thread::sleep(Duration::from_millis(500));
        active.ping();
    }
    active.disconnect();
    witness.unharmed();
}
