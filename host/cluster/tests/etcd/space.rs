//! An etcd whose quota is used up.

use std::time::{Duration, Instant};

use bytes::Bytes;
use statehouse_cluster::etcd::Etcd;
use statehouse_cluster::{
    Condition, Engine, EngineError, Id, KeyRange, Options, Outcome, Transaction, create,
};

use crate::nodes::{Nodes, connect};
use crate::store::Host;

const QUOTA: u64 = 16 << 20;

async fn start(count: usize) -> (Nodes, Etcd) {
    let quota = format!("--quota-backend-bytes={QUOTA}");
    let nodes = Nodes::start_with(count, "http", &[quota]);
    let etcd = connect(&nodes, None).await;
    // Some nodes may not answer yet.
    while create(&etcd, "test", Id([1; 16]), 0).await != Ok(true) {
        etcd.next_endpoint();
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    (nodes, etcd)
}

fn small(options: &mut Options) {
    options.sizes.quota_bytes = QUOTA;
    options.sizes.snapshot_after_bytes = 1 << 20;
    options.timing.status = Duration::from_millis(200);
    options.timing.piece = Duration::from_millis(1);
}

fn transaction(puts: Vec<(Vec<u8>, Bytes)>, deletes: Vec<KeyRange>) -> Transaction {
    Transaction {
        key: b"x".to_vec(),
        condition: Condition::Always,
        puts,
        deletes,
    }
}

fn junk(number: u32) -> Vec<u8> {
    format!("junk/{number:04}").into_bytes()
}

/// Writes keys until etcd refuses them.
async fn fill(etcd: &Etcd) {
    for number in 0..1000 {
        let put = (junk(number), Bytes::from(vec![1; 500_000]));
        match etcd.transact(&transaction(vec![put], Vec::new())).await {
            Ok(_) => {}
            Err(EngineError::NoSpace) => return,
            Err(error) => panic!("another error: {error}"),
        }
    }
    panic!("etcd accepted 500 MB");
}

fn all_junk() -> KeyRange {
    KeyRange::new(junk(0), junk(9999))
}

/// What the module `space` says of etcd.
#[tokio::test(flavor = "multi_thread")]
async fn full_etcd_accepts_only_what_frees_space() {
    let (_nodes, etcd) = start(1).await;
    fill(&etcd).await;
    assert!(etcd.status().await.unwrap().is_full());
    let small = (b"small".to_vec(), Bytes::from_static(b"v"));
    let put = transaction(vec![small], Vec::new());
    assert_eq!(etcd.transact(&put).await, Err(EngineError::NoSpace));
    let with_deletion = transaction(put.puts.clone(), vec![all_junk()]);
    let refused = etcd.transact(&with_deletion).await;
    assert_eq!(refused, Err(EngineError::NoSpace));
    let deletion = transaction(Vec::new(), vec![all_junk()]);
    let outcome = etcd.transact(&deletion).await.unwrap();
    let Outcome::Applied(revision) = outcome else {
        panic!("the deletion was not applied");
    };
    let before = etcd.status().await.unwrap();
    etcd.compact(revision).await.unwrap();
    tokio::time::sleep(Duration::from_secs(1)).await;
    let compacted = etcd.status().await.unwrap();
    // The pages of deleted keys do not count as free, because etcd writes nothing. The alarm is
    // about the file, which has some free pages besides.
    assert!(compacted.bytes > QUOTA * 3 / 4, "{compacted:?}");
    assert!(compacted.file_bytes >= before.file_bytes, "{compacted:?}");
    // Without a defragmentation the next large write arms the alarm again.
    etcd.disarm().await.unwrap();
    assert!(!etcd.status().await.unwrap().is_full());
    let large = (junk(1), Bytes::from(vec![1; 1 << 20]));
    let large = transaction(vec![large], Vec::new());
    assert_eq!(etcd.transact(&large).await, Err(EngineError::NoSpace));
    etcd.shrink(revision).await.unwrap();
    etcd.disarm().await.unwrap();
    let defragmented = etcd.status().await.unwrap();
    assert!(defragmented.file_bytes < QUOTA / 4, "{defragmented:?}");
    etcd.transact(&large).await.unwrap();
    etcd.transact(&put).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn leader_makes_room_when_other_keys_are_deleted() {
    let (nodes, etcd) = start(3).await;
    let leader = Host::start("a", connect(&nodes, None).await, small);
    let log = leader.leads().await;
    let follower = Host::start("b", connect(&nodes, None).await, small);
    let position = leader.append(&log, &[1; 100_000]);
    log.wait_released(position).await.unwrap();
    fill(&etcd).await;
    let position = leader.append(&log, b"waits");
    leader
        .wait("the leader has no room", |_| {
            (!log.has_room()).then_some(())
        })
        .await;
    assert!(log.released() < position);
    let began = Instant::now();
    let deletion = transaction(Vec::new(), vec![all_junk()]);
    etcd.transact(&deletion).await.unwrap();
    log.wait_released(position).await.unwrap();
    println!("room {:?} after the deletion", began.elapsed());
    follower.records(position).await;
    leader
        .wait("the leader has room", |_| log.has_room().then_some(()))
        .await;
    // A member that was late with the writes may raise the alarm once more.
    let calm = async {
        while etcd.status().await.unwrap().is_full() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let calm = tokio::time::timeout(Duration::from_secs(10), calm).await;
    calm.expect("the leader ends the alarm");
}

#[tokio::test(flavor = "multi_thread")]
async fn leader_alone_never_uses_the_quota_up() {
    let (nodes, etcd) = start(1).await;
    let leader = Host::start("a", connect(&nodes, None).await, small);
    let log = leader.leads().await;
    leader.shared.lock().unwrap().is_constant = true;
    let (mut waits, mut highest) = (0, 0);
    let deadline = Instant::now() + Duration::from_secs(90);
    // 100 MB, six times the quota.
    for number in 0..1_000 {
        while !log.has_room() {
            waits += 1;
            assert!(Instant::now() < deadline, "no room after {number} records");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        let position = leader.append(&log, &[1; 100_000]);
        log.wait_released(position).await.unwrap();
        if number % 20 == 0 {
            let status = etcd.status().await.unwrap();
            assert!(
                !status.is_full(),
                "the alarm is armed after {number} records"
            );
            highest = highest.max(status.file_bytes);
        }
    }
    println!("{waits} waits, file up to {highest} bytes");
}
