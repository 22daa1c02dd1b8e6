//! The official client under `kill -9` of the server: it comes back by itself, sends again what was on its way, and
//! goes on. Whatever it was told is so, and each of its requests had one effect.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use azure_iot_operations_protocol::common::hybrid_logical_clock::HybridLogicalClock;
use azure_iot_operations_services::state_store::{SetCondition, SetOptions};
use statehouse_tests::Dice;
use tokio::{sync::Notify, task::block_in_place};

use crate::{
    peer::{Peer, TIMEOUT, newer, within},
    place::Place,
};

const PEERS: usize = 3;
/// Guards the counter.
const MUTEX: &str = "mutex";
/// Counted up by all, each holding the mutex.
const COUNTER: &str = "counter";

/// What the peers and the one who kills know of each other.
#[derive(Default)]
struct Shared {
    stop: AtomicBool,
    /// The last value of each peer's own key that was acknowledged.
    acknowledged: [AtomicU64; PEERS],
    /// How often the counter was counted up.
    counted: AtomicU64,
    /// A peer has just been told that its write was done.
    told: Notify,
}

impl Shared {
    /// All requests that came to an end.
    fn progress(&self) -> Vec<u64> {
        let own = self.acknowledged.iter();
        own.map(|n| n.load(Ordering::SeqCst)).collect()
    }
}

struct Worker {
    peer: Peer,
    own: String,
    last: Option<HybridLogicalClock>,
}

impl Worker {
    async fn set(&mut self, key: &str, value: &str) {
        let version = self.peer.set(key, value).await;
        if let Some(last) = &self.last {
            assert!(newer(&version, last), "{version} after {last}");
        }
        self.last = Some(version);
    }

    async fn set_new(&mut self, key: &str, value: &str) -> bool {
        let options = SetOptions {
            set_condition: SetCondition::OnlyIfDoesNotExist,
            ..SetOptions::default()
        };
        let (key, value) = (key.into(), value.into());
        let store = &self.peer.store;
        let response = store.set(key, value, TIMEOUT, None, options).await;
        response.unwrap().response
    }

    async fn get(&self, key: &str) -> Option<(String, HybridLogicalClock)> {
        let got = self.peer.store.get(key.into(), TIMEOUT).await.unwrap();
        let value = String::from_utf8(got.response?).unwrap();
        Some((value, got.version.unwrap()))
    }

    async fn remove(&self, key: &str, value: &str) -> i64 {
        let store = &self.peer.store;
        let response = store.vdel(key.into(), value.into(), None, TIMEOUT).await;
        response.unwrap().response
    }

    /// One turn: what ran twice, or not at all, shows in what follows.
    async fn turn(&mut self, n: u64, shared: &Shared, number: usize) {
        let own = self.own.clone();
        self.set(&own, &n.to_string()).await;
        shared.acknowledged[number].store(n, Ordering::SeqCst);
        shared.told.notify_waiters();
        let read = self.get(&own).await;
        assert_eq!(read, Some((n.to_string(), self.last.clone().unwrap())));
        // Nobody else uses this key: the first SET wins, and there is one value to remove.
        let once = format!("{own}/once");
        assert!(self.set_new(&once, &own).await, "an NX met itself");
        assert_eq!(self.remove(&once, &own).await, 1, "a VDEL met itself");
        if self.set_new(MUTEX, &own).await {
            // A SET that came again after the mutex was free would take back what others counted.
            let before = self.get(COUNTER).await;
            let before: u64 = before.map_or(0, |(value, _)| value.parse().unwrap());
            self.set(COUNTER, &(before + 1).to_string()).await;
            shared.counted.fetch_add(1, Ordering::SeqCst);
            assert_eq!(self.remove(MUTEX, &own).await, 1, "the mutex was not held");
        }
    }
}

async fn killed_under(place: Place, rounds: u64) {
    let mut dice = Dice::thrown();
    let mut server = place.start(&[]);
    let shared = Arc::new(Shared::default());
    let workers: Vec<_> = (0..PEERS)
        .map(|number| {
            let shared = shared.clone();
            let own = format!("peer{number}");
            let peer = Peer::connect(&server, &own);
            let mut worker = Worker {
                peer,
                own,
                last: None,
            };
            tokio::spawn(async move {
                for n in 1.. {
                    if shared.stop.load(Ordering::SeqCst) {
                        break;
                    }
                    worker.turn(n, &shared, number).await;
                }
                worker
            })
        })
        .collect();
    for round in 0..rounds {
        // Every peer is back and has done something.
        let before = shared.progress();
        while shared
            .progress()
            .iter()
            .zip(&before)
            .any(|(now, then)| *now < then + 2)
        {
            assert!(
                workers.iter().all(|worker| !worker.is_finished()),
                "a peer gave up in round {round}"
            );
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        // At any moment, or right after an answer: what that says has to be there.
        match round % 2 {
            0 => tokio::time::sleep(dice.below_ms(30)).await,
            _ => within(shared.told.notified()).await,
        }
        block_in_place(|| server.kill());
        let acknowledged = shared.progress();
        block_in_place(|| server.restart());
        // What a peer was told is there, or what it wrote after that.
        let mut reader = server.store("reader");
        for (number, acknowledged) in acknowledged.iter().enumerate() {
            let value = block_in_place(|| reader.get(format!("peer{number}")));
            let value: u64 = String::from_utf8(value.unwrap()).unwrap().parse().unwrap();
            assert!(value >= *acknowledged, "{value} after {acknowledged}");
        }
    }
    shared.stop.store(true, Ordering::SeqCst);
    let mut ended = Vec::new();
    for worker in workers {
        ended.push(worker.await.unwrap());
    }
    let counted = shared.counted.load(Ordering::SeqCst);
    assert!(counted > 0, "nobody ever had the mutex");
    let counter = ended[0].get(COUNTER).await;
    assert_eq!(counter.unwrap().0, counted.to_string());
    for (worker, n) in ended.into_iter().zip(shared.progress()) {
        assert_eq!(worker.get(&worker.own).await.unwrap().0, n.to_string());
        // A session that had given up would say so here.
        worker.peer.leave().await;
    }
}

pub(crate) async fn nothing_is_lost_or_doubled_in_10_kills(place: Place) {
    killed_under(place, 10).await;
}

pub(crate) async fn nothing_is_lost_or_doubled_in_100_kills(place: Place) {
    killed_under(place, 100).await;
}
