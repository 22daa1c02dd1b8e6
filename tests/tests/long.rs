//! What takes minutes. `bash tests/run --all` runs it.
#![allow(missing_docs, clippy::unwrap_used)]

use std::collections::VecDeque;

use statehouse_tests::{Request, Server, Store};

const REQUESTS: usize = 1_000_000;
const IN_FLIGHT: usize = 200;

/// Sends requests with some in flight, and checks that every one is answered well.
fn run(store: &mut Store, requests: usize, next: impl Fn(&mut Store, usize) -> Request) {
    let mut flying: VecDeque<(Request, u16)> = VecDeque::new();
    for n in 0..requests + IN_FLIGHT {
        if n >= IN_FLIGHT {
            let (request, id) = flying.pop_front().unwrap();
            let answer = store.finish(&request, id);
            assert!(!answer.payload().starts_with(b"-"), "{}", answer.text());
        }
        if n < requests {
            let request = next(store, n);
            let id = store.client.start(request.publish());
            flying.push_back((request, id));
        }
    }
}

/// A million requests over a thousand keys: set with an expiry, got, deleted, watched and not. After a tenth of
/// them memory has what it needs: as many remembered requests as it may have, above all.
#[test]
#[ignore = "a million requests take minutes"]
fn memory_is_flat_over_a_million_requests() {
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
    run(&mut store, REQUESTS / 10, request);
    let before_kib = server.memory_kib();
    run(&mut store, REQUESTS * 9 / 10, request);
    let grown_kib = server.memory_kib().saturating_sub(before_kib);
    assert!(
        grown_kib < 8 * 1024,
        "{grown_kib} KiB more than after a tenth"
    );
    assert_eq!(store.ask(&["SCAN", "*"]).payload(), b"*1\r\n*0\r\n");
}

/// Ten thousand sessions come, watch, and go: nothing of them stays.
#[test]
#[ignore = "ten thousand connections take a minute"]
fn nothing_stays_of_ten_thousand_clients() {
    let server = Server::start();
    let come_and_go = |from: u32, to: u32| {
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
    come_and_go(0, 1000);
    let before_kib = server.memory_kib();
    come_and_go(1000, 10_000);
    let grown_kib = server.memory_kib().saturating_sub(before_kib);
    assert!(
        grown_kib < 8 * 1024,
        "{grown_kib} KiB more than after a tenth"
    );
    assert_eq!(server.store("last").get("key"), None);
}
