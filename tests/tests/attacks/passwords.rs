//! Attacks the password check. Each guess takes memory and time on a CPU core, and must not delay
//! connected clients.

use std::{
    thread,
    time::{Duration, Instant},
};

use statehouse_tests::{Client, Connect, Server, attack, command::add_user};

const ATTACK: Duration = Duration::from_secs(10);
const GUESSERS: usize = 16;
const GROWTH_KIB_MAX: u64 = 128 << 10;

/// The victim is connected before the flood, from the same address.
#[test]
#[ignore = "an attack takes half a minute"]
fn password_flood_does_not_delay_connected_clients() {
    let directory = tempfile::tempdir().unwrap();
    let users = directory.path().join("users");
    let users = users.to_str().unwrap();
    add_user(users, "anna", "secret").code(0);
    let mut server = Server::restartable(&[("users", users)]);
    let victim = Connect::new("victim").login("anna", "secret");
    let name = "password flood of 16 connections";
    let outcome = attack::run_as(name, &mut server, &victim, |server| {
        thread::scope(|scope| {
            for n in 0..GUESSERS {
                let guess = Connect::new(&format!("guess{n}")).login("anna", "wrong");
                let guess = guess.bytes();
                scope.spawn(move || guess_until(server, &guess, Instant::now() + ATTACK));
            }
        });
    });
    outcome.assert_victim_served(Duration::from_secs(2));
    let grown_kib = outcome.peak_kib - outcome.rss_before_kib;
    assert!(grown_kib < GROWTH_KIB_MAX, "{grown_kib} KiB more");
}

fn guess_until(server: &Server, guess: &[u8], end: Instant) {
    while Instant::now() < end {
        let mut client = Client::open(server.address());
        // The server may close the connection before it reads the guess.
        if client.try_send(guess).is_ok() {
            client.poll(ATTACK);
        }
    }
}
