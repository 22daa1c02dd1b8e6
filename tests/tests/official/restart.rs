//! The official client over `kill -9` of the server. It reconnects and redelivers its requests in
//! flight. Every acknowledged write must survive, and each request must take effect exactly once.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use azure_iot_operations_protocol::common::hybrid_logical_clock::HybridLogicalClock;
use azure_iot_operations_services::state_store::{SetCondition, SetOptions};
use statehouse_tests::Dice;
pub(crate) use statehouse_tests::Store;
use tokio::{sync::Notify, task::block_in_place};

use crate::{
    peer::{Peer, TIMEOUT, newer, within},
    place::Place,
};

const PEERS: usize = 3;
/// Guards the counter.
const MUTEX: &str = "mutex";
/// Incremented by every peer, while it holds the mutex.
const COUNTER: &str = "counter";

/// The state shared by the peers and the task that kills the server.
#[derive(Default)]
struct Shared {
    stop: AtomicBool,
    /// The last value of each peer's own key that was acknowledged.
    acknowledged: [AtomicU64; PEERS],
    /// The number of increments of the counter.
    increments: AtomicU64,
    /// Notified when a write of a peer was acknowledged.
    written: Notify,
}

impl Shared {
    /// The last acknowledged value of each peer.
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

    /// Runs requests such that one that is executed twice, or not at all, changes a later answer.
    async fn turn(&mut self, n: u64, shared: &Shared, number: usize) {
        let own = self.own.clone();
        self.set(&own, &n.to_string()).await;
        shared.acknowledged[number].store(n, Ordering::SeqCst);
        shared.written.notify_waiters();
        let read = self.get(&own).await;
        assert_eq!(read, Some((n.to_string(), self.last.clone().unwrap())));
        // Only this peer uses the key, so its SET NX succeeds, and VDEL removes one value.
        let once = format!("{own}/once");
        assert!(
            self.set_new(&once, &own).await,
            "the SET NX was executed twice"
        );
        assert_eq!(
            self.remove(&once, &own).await,
            1,
            "the VDEL was executed twice"
        );
        if self.set_new(MUTEX, &own).await {
            // If a SET were executed again after the mutex was released, it would undo increments
            // of other peers.
            let before = self.get(COUNTER).await;
            let before: u64 = before.map_or(0, |(value, _)| value.parse().unwrap());
            self.set(COUNTER, &(before + 1).to_string()).await;
            shared.increments.fetch_add(1, Ordering::SeqCst);
            assert_eq!(self.remove(MUTEX, &own).await, 1, "the mutex was not held");
        }
    }
}

/// Runs peers at this address over so many kills. `kill_and_restart` asks for the values that are
/// acknowledged while nothing runs, and returns them with a client of the restarted store.
pub(crate) async fn run_over_kills(
    address: SocketAddr,
    rounds: u64,
    mut kill_and_restart: impl FnMut(&mut dyn FnMut() -> Vec<u64>) -> (Vec<u64>, Store),
) {
    let mut dice = Dice::thrown();
    let shared = Arc::new(Shared::default());
    let workers: Vec<_> = (0..PEERS)
        .map(|number| {
            let shared = shared.clone();
            let own = format!("peer{number}");
            let peer = Peer::connect_to(address, &own);
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
        // Waits until every peer has reconnected and made progress.
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
        // Kills at a random moment, or right after an answer. The answered write must survive.
        match round % 2 {
            0 => tokio::time::sleep(dice.below_ms(30)).await,
            _ => within(shared.written.notified()).await,
        }
        let (acknowledged, mut reader) =
            block_in_place(|| kill_and_restart(&mut || shared.progress()));
        // Each key has the last acknowledged value, or a later one.
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
    let increments = shared.increments.load(Ordering::SeqCst);
    assert!(increments > 0, "no peer ever held the mutex");
    let counter = ended[0].get(COUNTER).await;
    assert_eq!(counter.unwrap().0, increments.to_string());
    for (worker, n) in ended.into_iter().zip(shared.progress()) {
        assert_eq!(worker.get(&worker.own).await.unwrap().0, n.to_string());
        // This fails if the session has given up.
        worker.peer.leave().await;
    }
}

async fn run_at(place: Place, rounds: u64) {
    let mut server = place.start(&[]);
    let address = server.address();
    let kill_and_restart = |acknowledged: &mut dyn FnMut() -> Vec<u64>| {
        server.kill();
        let acknowledged = acknowledged();
        server.restart();
        (acknowledged, server.store("reader"))
    };
    run_over_kills(address, rounds, kill_and_restart).await;
}

pub(crate) async fn requests_over_10_kills_take_effect_once(place: Place) {
    run_at(place, 10).await;
}

pub(crate) async fn requests_over_100_kills_take_effect_once(place: Place) {
    run_at(place, 100).await;
}
