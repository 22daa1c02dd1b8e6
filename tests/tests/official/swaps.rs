//! Swaps of the active policy under load. No request may be lost, executed twice or reordered, and
//! every answer must come from a single policy.
//!
//! The test also prints how long each swap delayed requests, but asserts nothing about it. To
//! measure a release build:
//! `STATEHOUSE_BIN=target/release/statehouse cargo nextest run -p statehouse-tests --test official
//! swaps --no-capture`.

use std::{
    fs,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;
use statehouse_tests::{Admin, Server, client::PATIENCE, policies};

use crate::{
    peer::{Peer, TIMEOUT},
    place::Place,
};

const SWAPS: usize = 200;
const CLIENTS: usize = 6;
/// The number of requests that a client has in flight.
const WINDOW: usize = 4;

/// The answers that one client got.
#[derive(Clone, Copy, Default)]
struct Answers {
    /// From the policy `one`.
    one: u64,
    /// From the policy `two`.
    two: u64,
    /// How often the policy changed between two answers.
    changes: u64,
}

/// Sends TALLY without a pause. Each answer must be the next number, in the format of one policy.
fn tally(server: &Server, id: usize, over: &AtomicBool, done: &AtomicU64) -> Answers {
    let mut store = server.store(&format!("tally{id}"));
    let key = format!("tally/{id}");
    let mut answers = Answers::default();
    let mut count = 0;
    let mut last = None;
    while !over.load(Ordering::Relaxed) {
        let requests: Vec<_> = (0..WINDOW)
            .map(|_| {
                let request = store.command(&["TALLY", &key]);
                let packet_id = store.client.start(request.publish());
                (request, packet_id)
            })
            .collect();
        for (request, packet_id) in requests {
            count += 1;
            let answer = store.finish(&request, packet_id);
            let one = format!("*3\r\n+one\r\n:{count}\r\n+one\r\n").into_bytes();
            let two = format!("*3\r\n+two\r\n:{count}\r\n+two\r\n").into_bytes();
            let by_two = answer.payload() == two;
            assert!(
                by_two || answer.payload() == one,
                "client {id}, request {count}: {}; the last warning of the store: {:?}",
                answer.text(),
                server.stderr().iter().rfind(|line| line.contains(" WARN "))
            );
            if by_two {
                answers.two += 1;
            } else {
                answers.one += 1;
            }
            answers.changes += u64::from(last.replace(by_two).is_some_and(|last| last != by_two));
            done.fetch_add(1, Ordering::Relaxed);
        }
    }
    assert_eq!(store.get(&key), Some(count.to_string().into_bytes()));
    answers
}

/// Writes and reads a key through the official client until `over` is set. Returns the number of
/// writes.
async fn official(peer: &Peer, over: &AtomicBool) -> u64 {
    let mut written = 0;
    while !over.load(Ordering::Relaxed) {
        written += 1;
        let value = written.to_string();
        let version = peer.set("official", &value).await;
        let got = peer.store.get(b"official".to_vec(), TIMEOUT).await.unwrap();
        assert_eq!(got.response.as_deref(), Some(value.as_bytes()));
        assert_eq!(got.version, Some(version));
    }
    written
}

/// Waits for answers to requests that were sent after this call: those in flight may have been
/// handled before.
fn wait_for_answers(done: &AtomicU64) {
    let enough = done.load(Ordering::Relaxed) + (CLIENTS * WINDOW) as u64 + 20;
    let asked = Instant::now();
    while done.load(Ordering::Relaxed) < enough {
        assert!(
            asked.elapsed() < PATIENCE,
            "requests are no longer answered"
        );
        thread::sleep(Duration::from_millis(1));
    }
}

/// Swaps the policies `one` and `two` under load. Returns how long each rollback took.
fn swap(admin: &Admin, done: &AtomicU64) -> Vec<Duration> {
    let mut rollbacks = Vec::new();
    // The delay of a swap is measured from the request before it.
    wait_for_answers(done);
    for swap in 0..SWAPS {
        let asked = Instant::now();
        // Every fourth swap is a rollback to the previous policy.
        if swap % 4 == 1 {
            admin.done("POST", "/v1/rollback", b"");
            rollbacks.push(asked.elapsed());
        } else {
            let to = if swap % 2 == 0 { "two" } else { "one" };
            admin.done("POST", &format!("/v1/policies/marked-{to}/promote"), b"");
        }
        wait_for_answers(done);
    }
    rollbacks
}

/// Checks that the listed swaps form a chain. Returns how long each delayed requests, in us.
fn gaps(listing: &Value) -> Vec<u64> {
    let swaps = listing["swaps"].as_array().unwrap();
    for (earlier, later) in swaps.iter().zip(&swaps[1..]) {
        assert_eq!(earlier["to"], later["from"]);
    }
    let gap = |swap: &Value| swap["gap_us"].as_u64();
    // The first promotion was made before any request, so it has no gap.
    let gaps = swaps.iter().skip(1).map(gap);
    let gaps: Option<Vec<u64>> = gaps.collect();
    gaps.expect("a request followed each swap")
}

pub(crate) async fn policy_swaps_under_load_keep_every_request(place: Place) {
    let server = Arc::new(place.start(&[]));
    let admin = Admin::of(&server);
    for mark in ["one", "two"] {
        let module = fs::read(policies::marked(mark)).unwrap();
        let loaded = admin.done("POST", "/v1/policies", &module);
        assert_eq!(loaded["name"], format!("marked-{mark}"));
    }
    admin.done("POST", "/v1/policies/marked-one/promote", b"");

    let over = Arc::new(AtomicBool::new(false));
    let done = Arc::new(AtomicU64::new(0));
    let clients: Vec<_> = (0..CLIENTS)
        .map(|id| {
            let (server, over, done) = (server.clone(), over.clone(), done.clone());
            thread::spawn(move || tally(&server, id, &over, &done))
        })
        .collect();
    let peer = Arc::new(Peer::connect(&server, "official"));
    let official_task = tokio::spawn({
        let (peer, over) = (peer.clone(), over.clone());
        async move { official(&peer, &over).await }
    });
    let begun = Instant::now();
    let swapping = tokio::task::spawn_blocking(move || {
        let rollbacks = swap(&admin, &done);
        (admin.done("GET", "/v1/policies", b""), rollbacks)
    });
    let swapped = swapping.await;
    // Set even if swapping failed, so that the clients end.
    over.store(true, Ordering::Relaxed);
    // All threads end before one fails the test. Otherwise those that still run keep the server.
    let ended: Vec<_> = clients.into_iter().map(|it| it.join()).collect();
    let answers: Vec<Answers> = ended.into_iter().map(Result::unwrap).collect();
    let written = official_task.await.unwrap();
    let (listing, mut rollbacks) = swapped.unwrap();
    let seconds = begun.elapsed().as_secs_f64();

    let sum = |of: fn(&Answers) -> u64| answers.iter().map(of).sum::<u64>();
    let (one, two) = (sum(|it| it.one), sum(|it| it.two));
    assert!(one > 0 && two > 0 && written > 0);
    let changes = answers.iter().map(|it| it.changes).max().unwrap();
    assert!(changes as usize <= SWAPS, "a client saw {changes} changes");
    let mut gaps = gaps(&listing);
    assert_eq!(gaps.len(), SWAPS);
    println!("gaps of {SWAPS} swaps, in us: {gaps:?}");
    gaps.sort_unstable();
    rollbacks.sort_unstable();
    println!(
        "{:.0} requests/s of {CLIENTS} raw clients with {WINDOW} in flight, {written} rounds of the official one; gap: median {} us, worst {} us; a rollback over HTTP: median {:?}, worst {:?}",
        (one + two) as f64 / seconds,
        gaps[SWAPS / 2],
        gaps[SWAPS - 1],
        rollbacks[rollbacks.len() / 2],
        rollbacks[rollbacks.len() - 1],
    );
    let peer = Arc::into_inner(peer).expect("the task has ended");
    peer.leave().await;
}
