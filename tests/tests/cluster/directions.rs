//! Networks that lose the packets of one direction: between a host and etcd, or between a leader
//! and the other hosts. Bytes that were held arrive late, as repeated packets do.

use std::{
    thread,
    time::{Duration, Instant},
};

use statehouse_tests::{
    Admin, Cluster, Connect, Dice,
    cluster::{self, Leader, NAME},
    histories::Play,
    server,
    switch::{Switch, Toward},
    wait::until,
};

use crate::{CLIENTS, CONFIRMED, LEASE, SHORT_LEASE, expect_closed_unanswered};

/// Far above what a takeover takes, and below the 30 s of an unchanged log after which followers
/// suspect every leader.
const TAKEOVER: Duration = Duration::from_secs(15);

/// Longer than the silence after which a link is suspected and a challenged leader is replaced.
const CUT: Duration = Duration::from_secs(4);

/// A direction that one host loses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lost {
    ToEtcd,
    FromEtcd,
    /// From the other hosts to the cluster port of this one.
    FromHosts,
    /// From the cluster port of this host to the other ones.
    ToHosts,
}

impl Lost {
    const ALL: [Lost; 4] = [Lost::ToEtcd, Lost::FromEtcd, Lost::FromHosts, Lost::ToHosts];
}

/// The switches of a host.
struct Cables {
    /// To each node of etcd.
    etcd: Vec<Switch>,
    /// In front of its cluster port.
    port: Switch,
}

/// A cluster whose hosts reach etcd and each other through switches.
struct Network {
    cluster: Cluster,
    hosts: Vec<Cables>,
}

impl Network {
    fn start(hosts: usize, nodes: usize) -> Network {
        Network::with(hosts, nodes, LEASE)
    }

    fn with(hosts: usize, nodes: usize, reads: (&str, &str)) -> Network {
        let mut cluster = Cluster::without_hosts(nodes, &[SHORT_LEASE, reads]);
        let cables = (0..hosts).map(|_| {
            let nodes = cluster.etcd.urls().iter();
            let nodes = nodes.map(|url| url.strip_prefix("http://").unwrap().parse().unwrap());
            let etcd: Vec<_> = nodes.map(|node| Switch::start(vec![node])).collect();
            let urls = etcd.iter().map(|it| format!("http://{}", it.address()));
            let urls: Vec<_> = urls.collect();
            let listen = server::own_address();
            let port = Switch::start(vec![listen]);
            cluster.add_with(&[
                ("cluster", &urls.join(",")),
                ("cluster_listen", &listen.to_string()),
                ("cluster_address", &port.address().to_string()),
            ]);
            Cables { etcd, port }
        });
        let hosts = cables.collect();
        cluster.wait_until_ready();
        cluster.wait_for_leader_after(0);
        Network { cluster, hosts }
    }

    /// Loses a direction of a host, or restores it.
    fn set(&self, host: usize, lost: Lost, holds: bool) {
        let Cables { etcd, port } = &self.hosts[host];
        let at_etcd = |toward| etcd.iter().for_each(|it| it.hold(toward, holds));
        match lost {
            Lost::ToEtcd => at_etcd(Toward::Hosts),
            Lost::FromEtcd => at_etcd(Toward::Clients),
            Lost::FromHosts => port.hold(Toward::Hosts, holds),
            Lost::ToHosts => port.hold(Toward::Clients, holds),
        }
    }

    fn restore_all(&self) {
        for host in 0..self.hosts.len() {
            for lost in Lost::ALL {
                self.set(host, lost, false);
            }
        }
    }

    /// Waits until a host has applied what the leader has committed.
    fn wait_until_current(&self, host: usize) {
        let leader = self.cluster.present_leader().host;
        let committed = self.cluster[leader].metric("cluster_position");
        until("the host has applied the log of the leader", || {
            self.cluster[host].metric("cluster_position") >= committed
        });
    }
}

/// The leader loses a direction of etcd. It can decide nothing, so another host takes over. The
/// leader must never answer from its old state, also when late bytes arrive.
fn leader_loses(lost: Lost) {
    let network = Network::start(3, 1);
    let cluster = &network.cluster;
    let mut play = Play::over(cluster, "play", &CLIENTS);
    play.go_on();
    let old = cluster.present_leader();
    let mut before = cluster.store(old.host, "before");
    before.set("key", "old");
    play.longest_gap();

    network.set(old.host, lost, true);
    let began = Instant::now();
    let new = cluster.wait_for_leader_after(old.epoch);
    play.died();
    let follows = format!("following {} of {NAME}", cluster::name(new.host));
    let other = cluster.other_than(&[old.host, new.host]);
    // Until then it passes clients on to the old leader, and then ends their connections.
    cluster[other].wait_for_line(&follows);
    let mut other = cluster.store(other, "other");
    assert_eq!(
        other.get("key"),
        Some(b"old".to_vec()),
        "a write of the old leader was lost"
    );
    other.set("key", "new");
    let took = began.elapsed();
    let stale = before.command(&["GET", "key"]);
    // An error means that the old leader has already closed the connection.
    let _ = before.client.try_send(&stale.publish().bytes());
    play.go_on();

    network.set(old.host, lost, false);
    expect_closed_unanswered(&mut before.client);
    cluster[old.host].wait_for_line(&follows);
    let value = cluster.store(old.host, "after").get("key");
    assert_eq!(value, Some(b"new".to_vec()));
    play.go_on();
    eprintln!(
        "{lost:?}: first write through another host after {} ms, no answer for {} ms",
        took.as_millis(),
        play.longest_gap().as_millis()
    );
    play.end();
    assert!(took < TAKEOVER, "after {took:?}");
}

#[test]
fn leader_that_cannot_send_to_etcd_is_replaced() {
    leader_loses(Lost::ToEtcd);
}

/// What the leader sends is committed, and it does not learn of it.
#[test]
fn leader_that_cannot_receive_from_etcd_is_replaced() {
    leader_loses(Lost::FromEtcd);
}

/// Runs clients while a host has lost a direction, which must change no leader.
fn change_no_leader(network: &Network, host: usize, lost: Lost, meanwhile: impl FnOnce()) {
    let cluster = &network.cluster;
    let leader = cluster.present_leader();
    let mut play = Play::over(cluster, &format!("{lost:?}"), &CLIENTS);
    play.go_on();
    play.longest_gap();
    network.set(host, lost, true);
    let began = Instant::now();
    meanwhile();
    thread::sleep(CUT.saturating_sub(began.elapsed()));
    play.go_on();
    network.set(host, lost, false);
    play.go_on();
    network.wait_until_current(cluster.follower());
    eprintln!(
        "{lost:?}: no answer for {} ms",
        play.longest_gap().as_millis()
    );
    play.end();
    assert_eq!(cluster.present_leader(), leader, "without {lost:?}");
}

#[test]
fn follower_without_one_direction_of_etcd_changes_no_leader() {
    let network = Network::start(2, 1);
    for lost in [Lost::ToEtcd, Lost::FromEtcd] {
        let follower = network.cluster.follower();
        change_no_leader(&network, follower, lost, || {});
    }
}

/// The leader reaches etcd, and answers the challenges of the other hosts there. Their clients wait
/// until the direction returns.
#[test]
fn leader_without_one_direction_of_other_hosts_stays() {
    let network = Network::start(2, 1);
    let cluster = &network.cluster;
    for lost in [Lost::FromHosts, Lost::ToHosts] {
        let Leader { host, .. } = cluster.present_leader();
        let follower = cluster.follower();
        let mut open = cluster.store(follower, "open");
        let mut sent = None;
        change_no_leader(&network, host, lost, || {
            let request = open.command(&["SET", "key", &format!("{lost:?}")]);
            let packet_id = open.client.start(request.publish());
            sent = Some((request, packet_id));
            let served = Instant::now();
            cluster.store(host, "direct").set("other", "value");
            assert!(served.elapsed() < CUT, "clients of the leader wait");
        });
        let (request, packet_id) = sent.unwrap();
        let answer = open.finish(&request, packet_id);
        assert_eq!(answer.text(), "+OK\\r\\n", "after {lost:?}");
        let value = cluster.store(host, "reader").get("key");
        assert_eq!(value, Some(format!("{lost:?}").into_bytes()));
    }
}

/// The network acknowledges the bytes that it holds, so no connection fails. In an earlier version
/// the clients of the follower stayed connected to nothing, and it was ready without its own bytes.
#[test]
fn follower_without_one_direction_disconnects_its_clients() {
    let network = Network::start(2, 1);
    let cluster = &network.cluster;
    let leader = cluster.present_leader();
    let follower = cluster.follower();
    let admin = Admin::of(&cluster[follower]);
    let is_ready = || admin.ask("GET", "/readyz", b"").0 == 200;
    for lost in [Lost::FromHosts, Lost::ToHosts] {
        let mut idle = cluster.connect(follower, &Connect::new("idle"));
        network.set(leader.host, lost, true);
        idle.expect_closed_after(&format!("the loss of {lost:?}"));
        until("the follower is not ready", || !is_ready());
        network.set(leader.host, lost, false);
        until("the follower is ready again", is_ready);
        cluster.store(follower, "after").set("key", "value");
    }
    assert_eq!(cluster.present_leader(), leader);
}

/// Loses random directions of one or two hosts, of which one is the leader in most rounds, for a
/// random time, which may be shorter than a takeover.
fn lose_often(reads: (&str, &str), rounds: usize) {
    let network = Network::with(3, 3, reads);
    let cluster = &network.cluster;
    for (number, first) in (0..rounds).step_by(20).enumerate() {
        let mut play = Play::over(cluster, &format!("play{number}"), &CLIENTS);
        for round in first..rounds.min(first + 20) {
            play.go_on();
            play.longest_gap();
            let before = cluster.present_leader();
            let lost = some_directions(play.dice(), before.host);
            lost.iter()
                .for_each(|(host, lost)| network.set(*host, *lost, true));
            let length = Duration::from_millis(50) + play.dice().below_ms(6_000);
            thread::sleep(length);
            network.restore_all();
            play.go_on();
            if cluster.present_leader() != before {
                play.died();
            }
            eprintln!(
                "round {round}, {lost:?} for {} ms: no answer for {} ms",
                length.as_millis(),
                play.longest_gap().as_millis()
            );
        }
        play.end();
    }
    (0..3).for_each(|host| network.wait_until_current(host));
}

/// One to four directions, some of which may be the same.
fn some_directions(dice: &mut Dice, leader: usize) -> Vec<(usize, Lost)> {
    let count = 1 + dice.below(4);
    let directions = (0..count).map(|_| {
        let host = match dice.below(4) {
            0 => usize::try_from(dice.below(3)).unwrap(),
            _ => leader,
        };
        (host, *dice.of_these(&Lost::ALL))
    });
    directions.collect()
}

#[test]
#[ignore = "takes minutes"]
fn lost_directions_with_lease_reads_are_linearizable() {
    lose_often(LEASE, 60);
}

#[test]
#[ignore = "takes minutes"]
fn lost_directions_with_confirmed_reads_are_linearizable() {
    lose_often(CONFIRMED, 60);
}
