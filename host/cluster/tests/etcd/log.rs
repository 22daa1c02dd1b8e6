//! The log with hosts over etcd.

use std::time::{Duration, Instant};

use statehouse_cluster::{Engine, Id, LogPosition, Reads, create};

use crate::nodes::{Nodes, connect};
use crate::store::Host;

/// Starts nodes of etcd with a new cluster.
async fn created(count: usize) -> Nodes {
    let nodes = Nodes::start(count);
    let etcd = connect(&nodes, None).await;
    let id = Id::random().unwrap();
    assert_eq!(create(&etcd, "test", id, 0).await, Ok(true));
    assert_eq!(create(&etcd, "test", Id([1; 16]), 0).await, Ok(false));
    nodes
}

fn record(number: usize) -> Vec<u8> {
    format!("record {number} {}", "x".repeat(number % 300)).into_bytes()
}

/// Checks that a follower has the same records as its leader.
async fn check_follower(follower: &Host, leader: &Host, position: LogPosition) {
    let records = follower.records(position).await;
    assert_eq!(records, leader.shared.lock().unwrap().records);
}

#[tokio::test(flavor = "multi_thread")]
async fn follower_receives_what_the_leader_appends() {
    let nodes = created(1).await;
    let leader = Host::start("a", connect(&nodes, None).await, |_| {});
    let log = leader.leads().await;
    let follower = Host::start("b", connect(&nodes, None).await, |_| {});
    let began = Instant::now();
    let mut position = LogPosition::NONE;
    for number in 0..20_000 {
        position = leader.append(&log, &record(number));
        if number % 100 == 0 {
            log.wait_released(position).await.unwrap();
        }
    }
    // A record that needs several frames.
    leader.append(&log, &vec![7; 3 << 20]);
    position = position.max(leader.append(&log, b"last"));
    log.wait_released(position).await.unwrap();
    println!("20 000 records in {:?}", began.elapsed());
    check_follower(&follower, &leader, position).await;
    assert!(log.has_lease() && log.has_room() && !log.is_behind());
}

#[tokio::test(flavor = "multi_thread")]
async fn handover_moves_the_leadership_at_once() {
    let nodes = created(1).await;
    let first = Host::start("a", connect(&nodes, None).await, |_| {});
    let log = first.leads().await;
    let reads = |it: &mut statehouse_cluster::Options| it.reads = Reads::Confirmed;
    let second = Host::start("b", connect(&nodes, None).await, reads);
    let position = first.append(&log, b"before");
    second.records(position).await;
    let began = Instant::now();
    log.hand_over(None);
    let new = second.leads().await;
    let gap = began.elapsed();
    println!("handover in {gap:?}");
    assert!(gap < Duration::from_secs(1), "{gap:?}");
    assert!(!log.has_lease() && log.may_decide().await.is_err());
    assert!(!new.has_lease(), "confirmed reads have no lease");
    new.may_decide().await.unwrap();
    let position = second.append(&new, b"after");
    new.wait_released(position).await.unwrap();
    check_follower(&first, &second, position).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_leader_is_replaced_after_its_lease() {
    let nodes = created(1).await;
    let first = Host::start("a", connect(&nodes, None).await, |_| {});
    let log = first.leads().await;
    let quiet = |it: &mut statehouse_cluster::Options| it.timing.quiet = Duration::from_secs(1);
    let second = Host::start("b", connect(&nodes, None).await, quiet);
    let position = first.append(&log, b"before");
    log.wait_released(position).await.unwrap();
    second.records(position).await;
    let began = Instant::now();
    drop(first);
    let new = second.leads().await;
    let gap = began.elapsed();
    println!("takeover in {gap:?}");
    assert!(gap > Duration::from_millis(1900), "{gap:?}");
    assert!(new.epoch() > log.epoch());
    assert_eq!(second.shared.lock().unwrap().records[1], b"before");
}

#[tokio::test(flavor = "multi_thread")]
async fn restarted_leader_waits_for_no_lease() {
    let nodes = created(1).await;
    let process = Id::random().unwrap();
    let first = Host::start("a", connect(&nodes, None).await, |it| it.process = process);
    let log = first.leads().await;
    let position = first.append(&log, b"before");
    log.wait_released(position).await.unwrap();
    let etcd = connect(&nodes, None).await;
    let began = Instant::now();
    drop(first);
    let again = Host::start("a", etcd, |it| it.predecessor = Some(process));
    again.leads().await;
    let gap = began.elapsed();
    println!("restart in {gap:?}");
    assert!(gap < Duration::from_secs(1), "{gap:?}");
    assert_eq!(again.shared.lock().unwrap().records[1], b"before");
}

#[tokio::test(flavor = "multi_thread")]
async fn appends_continue_when_the_leading_etcd_node_is_killed() {
    let mut nodes = created(3).await;
    let leader = Host::start("a", connect(&nodes, None).await, |_| {});
    let log = leader.leads().await;
    let follower = Host::start("b", connect(&nodes, None).await, |_| {});
    let mut position = LogPosition::NONE;
    for number in 0..1_500 {
        if number == 500 {
            let leading = nodes.leader();
            nodes.kill(leading);
        }
        position = leader.append(&log, &record(number));
        // An election of etcd on a busy machine takes up to half a minute.
        log.wait_released(position).await.unwrap();
    }
    check_follower(&follower, &leader, position).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn compaction_by_another_client_loses_nothing() {
    let nodes = created(1).await;
    let small = |it: &mut statehouse_cluster::Options| {
        it.sizes.snapshot_after_bytes = 50_000;
        it.timing.piece = Duration::from_millis(1);
    };
    let leader = Host::start("a", connect(&nodes, None).await, small);
    let log = leader.leads().await;
    let follower = Host::start("b", connect(&nodes, None).await, small);
    let other = connect(&nodes, None).await;
    let mut position = LogPosition::NONE;
    for number in 0..3_000 {
        position = leader.append(&log, &record(number));
        if number % 10 == 0 {
            log.wait_released(position).await.unwrap();
        }
        if number % 200 == 0 {
            let newest = other.get(b"x").await.unwrap().revision;
            other.compact(newest).await.unwrap();
        }
    }
    log.wait_released(position).await.unwrap();
    check_follower(&follower, &leader, position).await;
    let newcomer = Host::start("c", connect(&nodes, None).await, small);
    check_follower(&newcomer, &leader, position).await;
    let blocks = newcomer.shared.lock().unwrap().blocks;
    assert!(blocks > 0, "the newcomer read no snapshot");
    println!("the newcomer read {blocks} blocks of a snapshot");
}
