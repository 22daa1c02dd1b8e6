//! Hosts and nodes of etcd are killed, and followers paused, in random order, under load through
//! all hosts. The answers must be linearizable, and no session may be lost (see `histories`).

use std::time::Duration;

use statehouse_tests::{Cluster, Dice, histories::Play};

use crate::{CLIENTS, SHORT_LEASE};

#[derive(Clone, Copy, Debug)]
enum Fault {
    Leader,
    Follower,
    PausedFollower,
    AllHosts,
    EtcdLeader,
    AllOfEtcd,
}

impl Fault {
    const ALL: [Fault; 6] = [
        Fault::Leader,
        Fault::Follower,
        Fault::PausedFollower,
        Fault::AllHosts,
        Fault::EtcdLeader,
        Fault::AllOfEtcd,
    ];

    /// Each fault before any one is repeated, in random order.
    fn sequence(dice: &mut Dice, rounds: usize) -> Vec<Fault> {
        let mut faults = Vec::new();
        while faults.len() < rounds {
            let mut left = Fault::ALL.to_vec();
            while !left.is_empty() {
                let at = usize::try_from(dice.below(left.len() as u64)).unwrap();
                faults.push(left.swap_remove(at));
            }
        }
        faults.truncate(rounds);
        faults
    }
}

/// Injects a fault, and restarts what it killed.
fn inject(fault: Fault, cluster: &mut Cluster, play: &mut Play) {
    let leader = cluster.present_leader();
    match fault {
        Fault::Leader => {
            cluster[leader.host].kill();
            cluster.wait_for_leader_after(leader.epoch);
            play.died();
            cluster[leader.host].start_again(&[]);
        }
        Fault::Follower => {
            let host = cluster.follower();
            cluster[host].kill();
            play.go_on();
            cluster[host].start_again(&[]);
        }
        Fault::PausedFollower => {
            let host = cluster.follower();
            cluster[host].signal("STOP");
            play.go_on();
            cluster[host].signal("CONT");
        }
        Fault::AllHosts => {
            let hosts = cluster.count();
            (0..hosts).for_each(|host| cluster[host].kill());
            (0..hosts).for_each(|host| cluster[host].start_again(&[]));
            cluster.wait_for_leader_after(leader.epoch);
            play.died();
        }
        Fault::EtcdLeader => {
            let node = cluster.etcd.leader();
            cluster.etcd.kill(node);
            play.go_on();
            cluster.etcd.restart_all();
        }
        Fault::AllOfEtcd => {
            cluster.etcd.kill_all();
            std::thread::sleep(play.dice().below_ms(300));
            cluster.etcd.restart_all();
        }
    }
}

/// Runs so many rounds on one cluster. Each play has 20 of them, because the search for an order
/// takes longer than linear time.
fn check_linearizability(rounds: usize) {
    let mut cluster = Cluster::with(3, 3, &[SHORT_LEASE]);
    for (number, first) in (0..rounds).step_by(20).enumerate() {
        let mut play = Play::over(&cluster, &format!("play{number}"), &CLIENTS);
        let faults = Fault::sequence(play.dice(), 20.min(rounds - first));
        for (round, fault) in faults.into_iter().enumerate() {
            play.go_on();
            // In half of the rounds, hosts of the last fault may still be joining.
            if play.dice().below(2) == 0 {
                cluster.wait_until_ready();
            }
            play.longest_gap();
            inject(fault, &mut cluster, &mut play);
            play.go_on();
            report(first + round, fault, play.longest_gap());
        }
        play.end();
    }
    cluster.wait_until_ready();
    (0..cluster.count()).for_each(|host| assert!(cluster[host].runs()));
}

fn report(round: usize, fault: Fault, gap: Duration) {
    eprintln!(
        "round {round}, {fault:?}: no answer for {} ms",
        gap.as_millis()
    );
}

#[test]
fn answers_over_20_faults_are_linearizable() {
    check_linearizability(20);
}

#[test]
#[ignore = "takes minutes"]
fn answers_over_300_faults_are_linearizable() {
    check_linearizability(300);
}
