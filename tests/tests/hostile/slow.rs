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

/// By the thousand: silence, halves, and names that never end. Whoever is honest gets in meanwhile, memory has its bound, and
/// the time for a CONNECT ends all of them.
#[test]
fn a_thousand_connects_that_never_end_keep_nobody_out() {
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
