//! Clients that never get to the point.

use std::{
    thread,
    time::{Duration, Instant},
};

use statehouse_tests::{Connect, Heard};

use crate::witness::Witness;

/// Beyond the server's time for a CONNECT, which is ten seconds.
const ENOUGH: Duration = Duration::from_secs(40);

/// Nothing at all, half a CONNECT, and a CONNECT that comes byte by byte and never ends: all three are closed.
#[test]
fn a_connect_that_never_ends() {
    let mut witness = Witness::new();
    let mut silent = witness.server.open();
    let mut half = witness.server.open();
    let whole = Connect::new("attacker").bytes();
    half.send(&whole[..whole.len() / 2]);

    let mut dribbling = witness.server.open();
    // A CONNECT of 16 KiB, so that it has time.
    dribbling.send(&[
        0x10, 0x80, 0x80, 0x01, 0, 4, b'M', b'Q', b'T', b'T', 5, 2, 0, 0,
    ]);
    let end = Instant::now() + ENOUGH;
    loop {
        match dribbling.poll(Duration::from_millis(100)) {
            Heard::Closed => break,
            Heard::Silence => {}
            Heard::Packet(packet) => panic!("an answer to half a CONNECT: {packet:?}"),
        }
        assert!(Instant::now() < end, "it was never closed");
        if dribbling.try_send(&[0]).is_err() {
            break;
        }
    }
    for client in [&mut silent, &mut half] {
        client.expect_closed();
        assert!(client.drain().is_empty());
    }
    witness.unharmed();
}

/// A CONNECT that claims 256 MiB is not waited for.
#[test]
fn a_huge_connect_is_refused_at_its_length() {
    let mut witness = Witness::new();
    let before_kib = witness.server.memory_kib();
    let mut attackers: Vec<_> = (0..20)
        .map(|_| {
            let mut attacker = witness.server.open();
            attacker.send(&[
                0x10, 0xFF, 0xFF, 0xFF, 0x7F, 0, 4, b'M', b'Q', b'T', b'T', 5,
            ]);
            attacker
        })
        .collect();
    for attacker in &mut attackers {
        attacker.expect_closed();
    }
    assert!(witness.server.memory_kib() < before_kib + 20 * 1024);
    drop(attackers);
    witness.unharmed();
}

/// Packets that claim to be as large as allowed and never come cost what came, not what was claimed.
#[test]
fn claimed_lengths_cost_nothing() {
    let mut witness = Witness::new();
    let before_kib = witness.server.memory_kib();
    let attackers: Vec<_> = (0..100)
        .map(|n| {
            let mut attacker = witness.server.connect(&format!("attacker{n}"));
            // A PUBLISH of 1.5 MiB, of which 100 bytes come.
            attacker.send(&[0x30, 0x80, 0x80, 0x60, 0, 1, b'a', 0]);
            attacker.send(&[b'x'; 100]);
            attacker
        })
        .collect();
    witness.still_served();
    let grown_kib = witness.server.memory_kib().saturating_sub(before_kib);
    assert!(grown_kib < 50 * 1024, "{grown_kib} KiB for 100 claims");
    drop(attackers);
    witness.unharmed();
}

/// A connection whose client went away without a word is found by its keep alive.
#[test]
fn a_silent_client_is_disconnected_at_its_keep_alive() {
    let mut witness = Witness::new();
    let mut connect = Connect::new("attacker");
    connect.keep_alive_s = 1;
    let began = Instant::now();
    let mut attacker = statehouse_tests::Client::connect(witness.server.address(), &connect);
    attacker.expect_disconnect(0x8D);
    assert!(began.elapsed() >= Duration::from_millis(1400), "too early");
    // One that pings stays.
    let mut lively = statehouse_tests::Client::connect(witness.server.address(), &connect);
    for _ in 0..8 {
        thread::sleep(Duration::from_millis(500));
        lively.ping();
    }
    lively.disconnect();
    witness.unharmed();
}
