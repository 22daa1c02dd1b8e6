//! Tests of how the records of many clients share transactions.

use std::sync::Arc;

use tokio::task::{JoinSet, yield_now};

use super::cluster::{Host, head, world};
use crate::LeaderLog;

const RECORDS: u32 = 40;

/// Runs clients that append one record after another.
async fn run(log: &Arc<LeaderLog>, clients: usize) {
    let mut running = JoinSet::new();
    for number in 0..clients {
        let log = Arc::clone(log);
        running.spawn(async move {
            // Half of the clients begin while the first transaction is under way.
            for _ in 0..10 * (number % 2) {
                yield_now().await;
            }
            for _ in 0..RECORDS {
                Host::append(&log, b"record").await;
            }
        });
    }
    running.join_all().await;
}

#[tokio::test(start_paused = true)]
async fn clients_that_wait_for_answers_share_transactions() {
    let world = world(1).await;
    let (_host, log) = Host::lead(&world, "a", |_| {}).await;
    let before = head(&world).await.seq;
    run(&log, 50).await;
    let frames = head(&world).await.seq - before;
    // Two parts that alternate would need twice as many.
    assert!(frames < 50, "{frames} frames for {RECORDS} rounds");
}
