//! Clients of a cluster whose leader or whose own host is lost.

use std::{
    thread,
    time::{Duration, Instant},
};

use statehouse_tests::{Client, Cluster, Heard, client::PATIENCE};

use crate::{
    SHORT_LEASE,
    resumed::{begin, connect, resume},
};

/// The default lease is two seconds, so there is no leader for that long.
#[test]
fn client_without_a_leader_is_held_and_then_served() {
    let mut cluster = Cluster::start(2);
    cluster.store(0, "writer").set("key", "value");
    let leader = cluster.present_leader();
    let follower = cluster.follower();
    cluster[leader.host].kill();
    let killed = Instant::now();
    // One connection: a closed or refused one fails the test.
    let mut store = cluster.store(follower, "held");
    assert_eq!(store.get("key"), Some(b"value".to_vec()));
    eprintln!(
        "answered {} ms after the kill",
        killed.elapsed().as_millis()
    );
    assert_eq!(cluster.present_leader().host, follower);
}

#[test]
fn client_without_etcd_is_closed_in_time_and_served_later() {
    let mut cluster = Cluster::start(2);
    let mut open = begin(&cluster[cluster.follower()], "open");
    open.set("key", "value");
    let leader = cluster.present_leader();
    cluster.etcd.kill_all();
    cluster[leader.host].kill();
    let follower = cluster.follower();
    let mut held = Client::open(cluster[follower].address());
    held.send(&connect("held").bytes());
    let began = Instant::now();
    assert!(
        matches!(held.poll(PATIENCE), Heard::Closed),
        "it was answered"
    );
    let took = began.elapsed();
    assert!(took < Duration::from_secs(15), "closed after {took:?}");
    assert!(took > Duration::from_secs(5), "closed after {took:?}");
    cluster.etcd.restart_all();
    let mut open = resume(&cluster[follower], "open");
    assert_eq!(open.get("key"), Some(b"value".to_vec()));
}

#[test]
fn client_of_a_lost_host_resumes_through_another() {
    let mut cluster = Cluster::with(3, 1, &[SHORT_LEASE]);
    let leader = cluster.present_leader();
    let follower = cluster.follower();
    let mut store = begin(&cluster[follower], "client");
    let version = store.set("key", "value");
    cluster[follower].kill();
    store.client.expect_closed();
    let other = cluster.other_than(&[leader.host, follower]);
    let mut store = resume(&cluster[other], "client");
    let got = store.ask(&["GET", "key"]);
    assert_eq!(got.version(), Some(version));
    assert_eq!(cluster.present_leader(), leader, "a follower was lost");
}

/// Without etcd the leader decides nothing. It keeps its leadership, and closes its clients.
#[test]
fn leader_without_etcd_answers_nothing_and_leads_on() {
    let cluster = Cluster::with(2, 1, &[SHORT_LEASE]);
    let leader = cluster.present_leader();
    let mut stores = [0, 1].map(|host| begin(&cluster[host], &format!("client{host}")));
    let version = stores[0].set("key", "before");
    cluster.etcd.pause(0);
    // Longer than the lease, so reads need etcd too.
    thread::sleep(Duration::from_secs(1));
    let requests: [&[&str]; 2] = [&["GET", "key"], &["SET", "key", "after"]];
    let mut sent = Vec::new();
    for (store, words) in stores.iter_mut().zip(requests) {
        let request = store.command(words);
        let packet_id = store.client.start(request.publish());
        sent.push((request, packet_id));
    }
    for store in &mut stores {
        store.client.expect_closed();
        assert_eq!(store.client.drain().len(), 0, "an answer without etcd");
    }
    cluster.etcd.resume(0);
    let mut store = resume(&cluster[cluster.follower()], "client1");
    let (request, packet_id) = &sent[1];
    let answer = store.redeliver(request, *packet_id, true);
    assert_eq!(answer.text(), "+OK\\r\\n");
    assert!(answer.version() > Some(version));
    assert_eq!(store.ask(&["GET", "key"]).version(), answer.version());
    assert_eq!(
        cluster.present_leader(),
        leader,
        "an outage of etcd changed the leader"
    );
}
