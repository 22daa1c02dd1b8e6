//! Tests of the whole server that take minutes. `bash tests/run --all` runs them.
#![allow(missing_docs, clippy::unwrap_used)]

use std::collections::VecDeque;

use statehouse_tests::{Request, Server, Store};

const REQUESTS: usize = 1_000_000;
const IN_FLIGHT: usize = 200;

/// Sends requests, with up to `IN_FLIGHT` unanswered, and checks that no answer is an error.
fn run(store: &mut Store, requests: usize, next: impl Fn(&mut Store, usize) -> Request) {
    let mut in_flight: VecDeque<(Request, u16)> = VecDeque::new();
    for n in 0..requests + IN_FLIGHT {
        if n >= IN_FLIGHT {
            let (request, id) = in_flight.pop_front().unwrap();
            let answer = store.finish(&request, id);
            assert!(!answer.payload().starts_with(b"-"), "{}", answer.text());
        }
        if n < requests {
            let request = next(store, n);
            let id = store.client.start(request.publish());
            in_flight.push_back((request, id));
        }
    }
}

/// A million requests on a thousand keys: SET with an expiry, GET, DEL, KEYNOTIFY and STOP. After a
/// fifth of them the dedup table and the list of recent changes are full.
#[test]
#[ignore = "a million requests take minutes"]
fn memory_over_a_million_requests_stays_flat() {
    let server = Server::with_config("max_duplicates = 10000\n");
    let mut store = server.store("client");
    let request = |store: &mut Store, n: usize| {
        let key = format!("key{}", (n / 5) % 1000);
        match n % 5 {
            0 => store.command(&["SET", &key, &"v".repeat(n % 512), "PX", "60000"]),
            1 => store.command(&["KEYNOTIFY", &key]),
            2 => store.command(&["GET", &key]),
            3 => store.command(&["KEYNOTIFY", &key, "STOP"]),
            _ => store.command(&["DEL", &key]),
        }
    };
    run(&mut store, REQUESTS / 5, request);
    let before_kib = server.memory_kib();
    run(&mut store, REQUESTS * 4 / 5, request);
    let grown_kib = server.memory_kib().saturating_sub(before_kib);
    assert!(
        grown_kib < 8 * 1024,
        "{grown_kib} KiB more than after a fifth"
    );
    assert_eq!(store.ask(&["SCAN", "*"]).payload(), b"*1\r\n*0\r\n");
}

/// Ten thousand clients connect, watch a key, and disconnect. The server keeps nothing of them.
#[test]
#[ignore = "ten thousand connections take a minute"]
fn memory_after_ten_thousand_clients_stays_flat() {
    let server = Server::start();
    let connect_and_leave = |from: u32, to: u32| {
        for n in from..to {
            let mut store = server.store(&format!("client{n}"));
            store.watch("key");
            if n % 2 == 0 {
                store.client.disconnect();
            } else {
                store.client.abort();
            }
        }
    };
    connect_and_leave(0, 1000);
    let before_kib = server.memory_kib();
    connect_and_leave(1000, 10_000);
    let grown_kib = server.memory_kib().saturating_sub(before_kib);
    assert!(
        grown_kib < 8 * 1024,
        "{grown_kib} KiB more than after a tenth"
    );
    assert_eq!(server.store("last").get("key"), None);
}
