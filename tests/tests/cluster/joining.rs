//! Hosts that join while the store serves: with an empty directory, or far behind.

use std::{
    thread,
    time::{Duration, Instant},
};

use statehouse_tests::{Cluster, Store, client::PATIENCE, histories::Play, resp};

use crate::{CLIENTS, SHORT_LEASE};

#[test]
fn host_with_an_empty_directory_joins_under_load() {
    let mut cluster = Cluster::with(2, 1, &[SHORT_LEASE]);
    let mut play = Play::over(&cluster, "play", &CLIENTS);
    play.go_on();
    cluster.store(0, "writer").set("key", "value");
    let new = cluster.add();
    cluster[new].wait_until_ready();
    play.go_on();
    // Without the others, only the new host can lead.
    let leader = cluster.present_leader();
    cluster[0].kill();
    cluster[1].kill();
    let next = cluster.wait_for_leader_after(leader.epoch);
    play.died();
    assert_eq!(next.host, new);
    let value = cluster.store(new, "reader").get("key");
    assert_eq!(value, Some(b"value".to_vec()));
    cluster[0].restart();
    cluster[1].restart();
    play.go_on();
    play.end();
}

/// Writes this many values of this size, and returns the last value.
fn write(store: &mut Store, count: usize, bytes: usize) -> Vec<u8> {
    let mut value = Vec::new();
    for n in 0..count {
        value = format!("{n}{}", "v".repeat(bytes)).into_bytes();
        store.set(format!("key{}", n % 50), &value);
    }
    value
}

/// A follower misses these writes and what happens after them. Then it must lead with all of them.
fn follow_from_far_behind(count: usize, bytes: usize, meanwhile: impl FnOnce(&Cluster)) {
    let mut cluster = Cluster::with(2, 1, &[SHORT_LEASE]);
    let leader = cluster.present_leader();
    let behind = cluster.follower();
    let mut store = cluster.store(leader.host, "writer");
    write(&mut store, 10, 10);
    cluster[behind].kill();
    let last = write(&mut store, count, bytes);
    meanwhile(&cluster);
    cluster[behind].restart();
    cluster[leader.host].kill();
    let next = cluster.wait_for_leader_after(leader.epoch);
    assert_eq!(next.host, behind);
    let mut reader = cluster.store(behind, "reader");
    let key = format!("key{}", (count - 1) % 50);
    assert!(reader.get(key).unwrap() == last, "the last write is lost");
    let (listed, _) = resp::scan(reader.ask(&["SCAN", "key*"]).payload());
    assert_eq!(listed.len(), 50);
    cluster[leader.host].restart();
}

#[test]
fn follower_far_behind_catches_up_and_leads() {
    follow_from_far_behind(1000, 1000, |_| {});
}

/// The leader writes a snapshot and removes the frames before it, so the follower must start from
/// the snapshot.
#[test]
#[ignore = "writes 200 MB"]
fn follower_behind_a_snapshot_catches_up_and_leads() {
    follow_from_far_behind(400, 500_000, |cluster| {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let status = cluster.ask(&["status"]).code(0).text();
            if !status.contains("snapshot  none yet") {
                return;
            }
            assert!(Instant::now() < deadline, "{status}");
            thread::sleep(Duration::from_millis(200));
        }
    });
}

/// Writes that are not batched, as those of few clients, each have a frame of their own. All hosts
/// must read all frames since the last snapshot before one can lead.
#[test]
#[ignore = "writes 20000 values one after the other"]
fn restarted_hosts_lead_after_many_small_writes() {
    let mut cluster = Cluster::with(2, 1, &[SHORT_LEASE]);
    let last = write(&mut cluster.store(0, "writer"), 20_000, 10);
    eprintln!("{}", cluster.ask(&["status"]).code(0).text());
    let leader = cluster.present_leader();
    for host in 0..2 {
        cluster[host].kill();
    }
    let began = Instant::now();
    for host in 0..2 {
        cluster[host].start_again(&[]);
    }
    cluster.wait_for_leader_after(leader.epoch);
    eprintln!("a host leads after {} ms", began.elapsed().as_millis());
    let mut reader = cluster.store(0, "reader");
    assert!(
        reader.get("key49").unwrap() == last,
        "the last write is lost"
    );
}
