//! Tests of an engine whose quota is used up.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;

use super::cluster::{Host, access, world};
use super::operators::modules;
use crate::access::{delete, put};
use crate::keys::Keys;
use crate::{EngineError, Options, limits, overview};

const QUOTA: u64 = 1 << 20;

fn small(options: &mut Options) {
    options.sizes.quota_bytes = QUOTA;
    options.sizes.snapshot_after_bytes = 100_000;
    options.timing.status = Duration::from_secs(1);
}

/// Writes six times the quota, with a state of this size.
async fn write_much(snapshot_after_bytes: u64, state_bytes: usize) {
    let world = world(1).await;
    world.limit(QUOTA);
    // The engine reports its quota, so a wrong setting does not matter.
    let host = Host::start(&world, "a", |it| {
        small(it);
        it.sizes.quota_bytes = 1 << 40;
        it.sizes.snapshot_after_bytes = snapshot_after_bytes;
    });
    let log = host.leads().await;
    host.seen.lock().unwrap().state_bytes = state_bytes;
    for number in 0..6_000 {
        for waits in 0.. {
            if log.has_room() {
                break;
            }
            assert!(waits < 1_000, "no room for 10 s after {number} records");
            sleep(Duration::from_millis(10)).await;
        }
        Host::append(&log, &[1; 1000]).await;
        assert!(!world.is_full(), "the alarm is armed");
    }
}

#[tokio::test(start_paused = true)]
async fn leader_alone_never_uses_the_quota_up() {
    write_much(QUOTA / 10, 0).await;
}

#[tokio::test(start_paused = true)]
async fn snapshot_makes_room_although_the_log_is_short() {
    write_much(64 << 20, 0).await;
}

/// The pieces of a running snapshot must not count twice.
#[tokio::test(start_paused = true)]
async fn snapshot_of_a_large_state_makes_room() {
    write_much(64 << 20, 300_000).await;
}

/// The state grows until it is refused, so the quota does not hold a snapshot of it and the log.
#[tokio::test(start_paused = true)]
async fn state_that_fills_the_quota_can_be_removed() {
    let world = world(1).await;
    world.limit(QUOTA);
    let (host, log) = Host::lead(&world, "a", small).await;
    let mut waits = 0;
    // Without room for 10 s, no snapshot can make any.
    while waits < 100 {
        if !log.has_room() {
            waits += 1;
            sleep(Duration::from_millis(100)).await;
            continue;
        }
        waits = 0;
        host.seen.lock().unwrap().state_bytes += 1_004;
        Host::append(&log, &[1; 1000]).await;
        assert!(!world.is_full(), "the alarm is armed");
    }
    for _ in 0..60 {
        sleep(Duration::from_secs(1)).await;
        log.may_decide().await.unwrap();
        assert!(!world.is_full(), "the alarm is armed");
        assert!(!log.has_room(), "room: {} bytes in use", world.bytes());
    }
    let state_bytes = host.seen.lock().unwrap().state_bytes;
    assert!(state_bytes > QUOTA as usize / 3, "{state_bytes} bytes fit");
    for _ in 0..state_bytes / 1_004 {
        host.seen.lock().unwrap().state_bytes -= 1_004;
        Host::append(&log, &[1; 100]).await;
        assert!(!world.is_full(), "the alarm is armed");
    }
    sleep(Duration::from_secs(5)).await;
    assert!(log.has_room(), "{} bytes are in use", world.bytes());
}

#[tokio::test(start_paused = true)]
async fn leader_removes_the_unfinished_snapshot_of_the_leader_before() {
    let large = |options: &mut Options| options.sizes.snapshot_after_bytes = 100_000;
    let world = world(1).await;
    let engine = world.engine(0);
    let pieces = Keys::new("c").all_snapshots();
    let stored = async || {
        let page = engine.range(&pieces, None, 1_000).await.unwrap();
        page.values.into_iter().map(|it| it.0).collect::<Vec<_>>()
    };
    let (first, log) = Host::lead(&world, "a", large).await;
    first.seen.lock().unwrap().state_bytes = 10_000_000;
    for _ in 0..50 {
        Host::append(&log, &[1; 10_000]).await;
    }
    let unfinished = stored().await;
    assert!(!unfinished.is_empty(), "no snapshot began");
    drop((first, log));
    let (_second, log) = Host::lead(&world, "b", large).await;
    Host::append(&log, b"first").await;
    // The second leader has begun a snapshot of its own.
    let left = stored().await;
    assert!(!left.iter().any(|it| unfinished.contains(it)), "{left:?}");
}

#[tokio::test(start_paused = true)]
async fn leader_makes_room_after_another_client_used_the_quota_up() {
    let world = world(1).await;
    world.limit(QUOTA);
    let engine = world.engine(0);
    let (_host, log) = Host::lead(&world, "a", small).await;
    for _ in 0..200 {
        Host::append(&log, &[1; 1000]).await;
    }
    let junk = put(b"junk".to_vec(), vec![0; 50_000].into());
    // Each version counts until the engine is compacted.
    while engine.transact(&junk).await != Err(EngineError::NoSpace) {}
    let position = log.append(&[b"waits"]).unwrap();
    log.wait_released(position).await.unwrap();
    assert!(!world.is_full());
    sleep(Duration::from_secs(2)).await;
    assert!(log.has_room(), "the leader has no room after the alarm");
    let newcomer = Host::start(&world, "b", small);
    newcomer
        .wait(|it| (!it.records.is_empty()).then_some(()))
        .await;
}

#[tokio::test(start_paused = true)]
async fn removed_module_makes_room_without_traffic() {
    let world = world(1).await;
    world.limit(QUOTA);
    let (_host, log) = Host::lead(&world, "a", small).await;
    let modules = modules(&world);
    let digest = modules.put(&vec![1; 700_000]).await.unwrap();
    let others = put(b"other".to_vec(), vec![0; 250_000].into());
    world.engine(0).transact(&others).await.unwrap();
    sleep(Duration::from_secs(2)).await;
    assert!(!log.has_room(), "the module does not count");
    log.remove_modules(&[digest]).await.unwrap();
    sleep(2 * limits::JOIN).await;
    sleep(Duration::from_secs(10)).await;
    assert!(log.has_room(), "{} bytes are in use", world.bytes());
}

#[tokio::test(start_paused = true)]
async fn full_engine_is_left_alone_without_permission_to_compact() {
    let world = world(1).await;
    world.limit(QUOTA);
    let engine = world.engine(0);
    let host = Host::start(&world, "a", |it| {
        small(it);
        it.compacts = false;
    });
    let log = host.leads().await;
    let junk = put(b"junk".to_vec(), vec![0; 2 << 20].into());
    // The engine reports the error although it applied the transaction.
    assert_eq!(engine.transact(&junk).await, Err(EngineError::NoSpace));
    let position = log.append(&[b"waits"]).unwrap();
    let log = Arc::clone(&log);
    let waiting = tokio::spawn(async move { log.wait_released(position).await });
    sleep(Duration::from_secs(60)).await;
    assert!(!waiting.is_finished() && world.is_full());
    let log = host.leads_without_wait();
    assert!(!log.has_room(), "a full engine has room");
    // The operator makes room.
    let deletion = delete(b"junk".to_vec());
    engine.transact(&deletion).await.unwrap();
    world.compact();
    let newest = engine.get(b"x").await.unwrap().revision;
    engine.shrink(newest).await.unwrap();
    engine.disarm().await.unwrap();
    waiting.await.unwrap().unwrap();
    sleep(Duration::from_secs(2)).await;
    assert!(log.has_room());
    overview(&access(&world), 0).await.unwrap();
}
