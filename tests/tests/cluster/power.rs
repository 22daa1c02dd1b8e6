//! All machines lose their power at once, under load through all hosts. What etcd and the hosts had
//! not flushed is lost. The answers must be linearizable (see `histories`).

use statehouse_tests::{
    Cluster, cluster,
    etcd::Etcd,
    histories::Play,
    small::{FileSystem, Small},
};

use crate::{CLIENTS, SHORT_LEASE};

#[test]
#[ignore = "takes a minute"]
fn answers_over_power_losses_are_linearizable() {
    let Some(small) = Small::mount(FileSystem::Ext4, 2048) else {
        return;
    };
    let etcd = Etcd::start_in(small.path(), 3);
    let mut cluster = Cluster::without_hosts_on(etcd, &[SHORT_LEASE]);
    for host in 0..3 {
        let data = small.path().join(cluster::name(host));
        cluster.add_with(&[("data", data.to_str().unwrap())]);
    }
    cluster.wait_for_leader_after(0);
    let mut play = Play::over(&cluster, "play", &CLIENTS);
    for _ in 0..15 {
        play.go_on();
        let leader = cluster.present_leader();
        small.lose_power();
        (0..3).for_each(|host| cluster[host].end());
        cluster.etcd.end_all();
        small.restore_power();
        cluster.etcd.restart_all();
        (0..3).for_each(|host| cluster[host].start_again(&[]));
        cluster.wait_for_leader_after(leader.epoch);
        play.died();
    }
    play.end();
    // The copies of the log were torn too, and continue.
    for host in 0..3 {
        cluster[host].wait_until_ready();
        let log = cluster[host].stderr().join("\n");
        assert!(!log.contains(" ERROR "), "{log}");
    }
}
