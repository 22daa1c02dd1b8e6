//! Tests of a slow way to the engine.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::time::{sleep, timeout};

use super::cluster::{Host, world};
use crate::limits;

/// The least rate of `docs/cluster.md`: 8 Mbit/s.
const BYTES_PER_S: f64 = 1e6;

/// A transaction that takes longer than an attempt would be sent again without end.
#[tokio::test(start_paused = true)]
async fn long_records_are_released_over_a_slow_link() {
    let world = world(1).await;
    let (host, log) = Host::lead(&world, "a", |it| it.sizes.snapshot_after_bytes = 1 << 20).await;
    host.seen.lock().unwrap().state_bytes = 4 << 20;
    world.slow(Duration::ZERO, BYTES_PER_S);
    let largest = Arc::<AtomicUsize>::default();
    let seen = Arc::clone(&largest);
    world.observe(move |it| {
        let bytes: usize = it.puts.iter().map(|put| put.1.len()).sum();
        seen.fetch_max(bytes, Ordering::Relaxed);
    });
    let record = vec![7; 1 << 20];
    for _ in 0..4 {
        let append = Host::append(&log, &record);
        let released = timeout(Duration::from_secs(10), append).await;
        released.expect("a long record is not released");
    }
    let shared = limits::PART_BYTES + limits::PIECE_BYTES_MAX;
    let largest = largest.load(Ordering::Relaxed);
    assert!(
        largest > shared,
        "no part shares a transaction with a piece"
    );
    assert!(largest < shared + 1024, "{largest}");
}

#[tokio::test(start_paused = true)]
async fn requests_are_decided_although_commits_outlast_the_lease() {
    let world = world(1).await;
    let lease = Duration::from_millis(200);
    let (_host, log) = Host::lead(&world, "a", |it| it.timing.lease = lease).await;
    world.slow(Duration::from_millis(250), f64::INFINITY);
    for _ in 0..3 {
        sleep(Duration::from_secs(1)).await;
        let decided = timeout(Duration::from_secs(1), log.may_decide()).await;
        decided.expect("a request is not decided").unwrap();
        assert!(!log.has_lease());
    }
}
