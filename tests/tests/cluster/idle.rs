//! An idle cluster: flash memory of gateways wears with each write of etcd.

use std::{thread, time::Duration};

use statehouse_tests::Cluster;

/// Writes of etcd within this time by a cluster with idle clients on each host.
fn writes_within(time: Duration) -> u64 {
    let cluster = Cluster::start(3);
    let mut stores: Vec<_> = (0..3)
        .map(|host| cluster.store(host, &format!("client{host}")))
        .collect();
    for store in &mut stores {
        store.set("key", "value");
    }
    // What follows from the last requests ends within a lease.
    thread::sleep(Duration::from_secs(3));
    let before = cluster.etcd.revision();
    thread::sleep(time);
    let writes = cluster.etcd.revision() - before;
    stores.iter_mut().for_each(|store| store.client.ping());
    writes
}

#[test]
fn idle_cluster_writes_nothing() {
    assert_eq!(writes_within(Duration::from_secs(8)), 0);
}

#[test]
#[ignore = "takes two minutes"]
fn idle_cluster_writes_little_in_two_minutes() {
    let writes = writes_within(Duration::from_secs(120));
    eprintln!("{writes} writes in two minutes");
    // A challenge of the leader, two writes by a follower and the leader, every 30 seconds.
    assert!(writes <= 16, "{writes} writes");
}
