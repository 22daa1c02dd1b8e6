//! Locks over the loss of a leader: they expire when their holders expect, and fencing tokens rise.

use std::{
    thread,
    time::{Duration, Instant},
};

use statehouse_tests::{Cluster, Store};

use crate::SHORT_LEASE;

const PX: Duration = Duration::from_secs(4);

/// The difference of clocks that the cluster allows.
const SKEW: Duration = Duration::from_secs(1);

fn lock(store: &mut Store, owner: &str) -> statehouse_tests::Answer {
    let px = PX.as_millis().to_string();
    store.ask(&["SET", "lock", owner, "NX", "PX", &px])
}

#[test]
fn lock_over_a_failover_expires_in_time_and_fences() {
    let mut cluster = Cluster::with(2, 1, &[SHORT_LEASE]);
    let mut one = cluster.store(cluster.follower(), "one");
    let began = Instant::now();
    let held = lock(&mut one, "one");
    assert_eq!(held.text(), "+OK\\r\\n");
    let first = held.version().unwrap();
    let fenced = one.command(&["SET", "data", "1"]).with("__ft", &first);
    assert_eq!(one.call(&fenced).text(), "+OK\\r\\n");

    let (_, leader) = cluster.fail_over();
    let mut two = cluster.store(leader.host, "two");
    assert!(began.elapsed() < PX - SKEW, "too slow for this test");
    // The version in a refusal is that of the lock.
    let refused = lock(&mut two, "two");
    assert_eq!(refused.text(), ":-1\\r\\n");
    assert_eq!(refused.version(), Some(first.clone()));
    let second = loop {
        let answer = lock(&mut two, "two");
        if answer.text() == "+OK\\r\\n" {
            break answer.version().unwrap();
        }
        assert!(began.elapsed() < PX + 10 * SKEW, "the lock does not expire");
        thread::sleep(Duration::from_millis(20));
    };
    let expired = began.elapsed();
    assert!(expired > PX - SKEW, "after {expired:?}");
    eprintln!("a lock of {PX:?} was free after {expired:?}");
    assert!(second > first, "{second} after {first}");

    let fenced = two.command(&["SET", "data", "2"]).with("__ft", &second);
    assert_eq!(two.call(&fenced).text(), "+OK\\r\\n");
    let late = two.command(&["SET", "data", "late"]).with("__ft", &first);
    let late = two.call(&late).text();
    assert!(late.starts_with("-ERR"), "{late}");
    assert_eq!(two.get("data"), Some(b"2".to_vec()));
}

/// Also between keys, and over leaders that follow each other quickly.
#[test]
fn versions_rise_over_failovers() {
    let mut cluster = Cluster::with(2, 1, &[SHORT_LEASE]);
    let mut last = cluster.store(0, "first").set("key", "0");
    for round in 0..3 {
        let (before, leader) = cluster.fail_over();
        let mut store = cluster.store(leader.host, "next");
        for key in ["key", "other"] {
            let version = store.set(key, round.to_string());
            assert!(version > last, "{version} after {last}");
            last = version;
        }
        cluster[before.host].restart();
    }
}
