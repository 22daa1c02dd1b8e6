//! Policies are swapped under load: nothing is lost, doubled or reordered, and every answer is wholly from one
//! policy. It prints how long requests stood still for each swap; what it asserts is order.
//!
//! For figures of a release: `STATEHOUSE_BIN=target/release/statehouse cargo nextest run -p statehouse-tests --test official
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

use statehouse_tests::{Admin, Server, client::PATIENCE, policies};

use crate::{
    peer::{Peer, TIMEOUT},
    place::Place,
};

const SWAPS: usize = 200;
const CLIENTS: usize = 6;
/// Requests of one client on their way at once.
const WINDOW: usize = 4;

/// What one client heard: how often each policy answered.
#[derive(Clone, Copy, Default)]
struct Heard {
    one: u64,
    two: u64,
    changes: u64,
}

/// Counts strokes without a pause. Each answer has to be the next number, in one policy's words.
fn tally(server: &Server, id: usize, over: &AtomicBool, done: &AtomicU64) -> Heard {
    let mut store = server.store(&format!("tally{id}"));
    let key = format!("tally/{id}");
    let mut heard = Heard::default();
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
                "client {id}, stroke {count}: {}",
                answer.text()
            );
            if by_two {
                heard.two += 1;
            } else {
                heard.one += 1;
            }
            heard.changes += u64::from(last.replace(by_two).is_some_and(|last| last != by_two));
            done.fetch_add(1, Ordering::Relaxed);
        }
    }
    assert_eq!(store.get(&key), Some(count.to_string().into_bytes()));
    heard
}

/// The official client writes and reads its own key meanwhile.
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

pub(crate) async fn two_hundred_swaps_under_load_lose_and_double_nothing(place: Place) {
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
    let beside = tokio::spawn({
        let (peer, over) = (peer.clone(), over.clone());
        async move { official(&peer, &over).await }
    });

    let begun = Instant::now();
    let swapping = tokio::task::spawn_blocking({
        let (done, over) = (done.clone(), over.clone());
        move || {
            let mut rollbacks = Vec::new();
            // Every fourth goes on with a rollback, which leads back to the one before.
            for swap in 0..SWAPS {
                let asked = Instant::now();
                if swap % 4 == 1 {
                    admin.done("POST", "/v1/rollback", b"");
                    rollbacks.push(asked.elapsed());
                } else {
                    let to = if swap % 2 == 0 { "two" } else { "one" };
                    admin.done("POST", &format!("/v1/policies/marked-{to}/promote"), b"");
                }
                // Somebody is answered between any two.
                let before = done.load(Ordering::Relaxed);
                let asked = Instant::now();
                while done.load(Ordering::Relaxed) < before + 20 {
                    assert!(asked.elapsed() < PATIENCE, "nobody is answered any more");
                    thread::sleep(Duration::from_millis(1));
                }
            }
            over.store(true, Ordering::Relaxed);
            (admin.done("GET", "/v1/policies", b""), rollbacks)
        }
    });
    let swapped = swapping.await;
    // Also where it failed, so that the others end.
    over.store(true, Ordering::Relaxed);
    let heard: Vec<Heard> = clients.into_iter().map(|it| it.join().unwrap()).collect();
    let written = beside.await.unwrap();
    let (listing, mut rollbacks) = swapped.unwrap();
    let seconds = begun.elapsed().as_secs_f64();

    let sum = |of: fn(&Heard) -> u64| heard.iter().map(of).sum::<u64>();
    let (one, two) = (sum(|it| it.one), sum(|it| it.two));
    assert!(one > 0 && two > 0 && written > 0);
    for (id, heard) in heard.iter().enumerate() {
        assert!(
            heard.changes as usize <= SWAPS,
            "client {id} went back and forth between the policies {} times",
            heard.changes
        );
    }
    let swaps = listing["swaps"].as_array().unwrap();
    // The first promotion came before any request.
    let mut gaps: Vec<u64> = swaps
        .iter()
        .skip(1)
        .map(|swap| swap["gap_us"].as_u64().expect("somebody asked after it"))
        .collect();
    assert_eq!(gaps.len(), SWAPS);
    for (earlier, later) in swaps.iter().zip(&swaps[1..]) {
        assert_eq!(earlier["to"], later["from"]);
    }
    println!("gaps of {SWAPS} swaps, in us: {gaps:?}");
    gaps.sort_unstable();
    rollbacks.sort_unstable();
    println!(
        "{:.0} requests/s of {CLIENTS} lean clients with {WINDOW} on their way, {written} rounds of the official one; gap: median {} us, worst {} us; a rollback over HTTP: median {:?}, worst {:?}",
        (one + two) as f64 / seconds,
        gaps[SWAPS / 2],
        gaps[SWAPS - 1],
        rollbacks[rollbacks.len() / 2],
        rollbacks[rollbacks.len() - 1],
    );
    let peer = Arc::into_inner(peer).expect("the task is over");
    peer.leave().await;
}
