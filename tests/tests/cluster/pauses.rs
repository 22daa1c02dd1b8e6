//! A leader that is stopped for seconds (SIGSTOP), as a suspended machine is. Another host takes
//! over during the pause. After it, the old leader must never answer from its old state.

use std::{
    thread,
    time::{Duration, Instant},
};

use statehouse_tests::{Cluster, cluster, histories::Play, wait::until};

use crate::{CLIENTS, CONFIRMED, LEASE, SHORT_LEASE, expect_closed_unanswered};

/// Pauses the leader for this long while clients read and write through the other hosts.
fn pause_the_leader(reads: (&str, &str), length: Duration) {
    let cluster = Cluster::with(3, 1, &[SHORT_LEASE, reads]);
    let mut play = Play::over(&cluster, "play", &CLIENTS);
    play.go_on();
    let old = cluster.present_leader();
    let mut before = cluster.store(old.host, "before");
    before.set("key", "old");

    cluster[old.host].signal("STOP");
    let paused = Instant::now();
    // The old leader finds this request after the pause, when its state is old.
    let stale = before.command(&["GET", "key"]);
    before.client.start(stale.publish());
    let new = cluster.wait_for_leader_after(old.epoch);
    play.died();
    let other = cluster.other_than(&[old.host, new.host]);
    let mut reader = cluster.store(other, "reader");
    assert_eq!(reader.get("key"), Some(b"old".to_vec()), "a write was lost");
    cluster.store(new.host, "writer").set("key", "new");
    let served = paused.elapsed();
    while paused.elapsed() < length {
        assert_eq!(reader.get("key"), Some(b"new".to_vec()));
        thread::sleep(Duration::from_millis(20));
    }
    play.go_on();

    cluster[old.host].signal("CONT");
    let name = cluster::name(old.host);
    let deposed = format!("{name} does not lead {} any more", cluster::NAME);
    let said = cluster[old.host].wait_for_line(&deposed);
    assert!(said.ends_with(": another host took over"), "{said}");
    let follows = format!("following {} of {}", cluster::name(new.host), cluster::NAME);
    cluster[old.host].wait_for_line(&follows);
    expect_closed_unanswered(&mut before.client);
    let mut after = cluster.store(old.host, "after");
    assert_eq!(after.get("key"), Some(b"new".to_vec()));
    eprintln!(
        "{}: first write through another host after {} ms",
        reads.1,
        served.as_millis()
    );
    play.end();
}

#[test]
fn leader_paused_for_5_s_with_lease_reads_answers_nothing_old() {
    pause_the_leader(LEASE, Duration::from_secs(5));
}

#[test]
fn leader_paused_5_s_with_confirmed_reads_answers_nothing_old() {
    pause_the_leader(CONFIRMED, Duration::from_secs(5));
}

/// Pauses of any length, also shorter than a takeover needs.
fn pause_often(reads: (&str, &str), rounds: u64) {
    let mut cluster = Cluster::with(3, 1, &[SHORT_LEASE, reads]);
    for round in 0..rounds {
        let mut play = Play::over(&cluster, &format!("play{round}"), &CLIENTS);
        for _ in 0..2 {
            play.go_on();
            let old = cluster.present_leader();
            cluster[old.host].signal("STOP");
            let pause = Duration::from_millis(100) + play.dice().below_ms(20_000);
            thread::sleep(pause);
            cluster[old.host].signal("CONT");
            play.go_on();
            if cluster.present_leader() != old {
                play.died();
            }
            eprintln!(
                "{}: paused for {} ms, no answer for {} ms",
                reads.1,
                pause.as_millis(),
                play.longest_gap().as_millis()
            );
        }
        play.end();
    }
    (0..3).for_each(|host| assert!(cluster[host].runs()));
}

#[test]
#[ignore = "takes minutes"]
fn answers_over_many_pauses_with_lease_reads_are_linearizable() {
    pause_often(LEASE, 10);
}

#[test]
#[ignore = "takes minutes"]
fn many_pauses_with_confirmed_reads_are_linearizable() {
    pause_often(CONFIRMED, 10);
}

/// An election in etcd delays answers, and changes no leader.
#[test]
fn paused_leader_of_etcd_costs_no_leadership() {
    let mut cluster = Cluster::with(2, 3, &[]);
    let leader = cluster.present_leader();
    let mut play = Play::over(&cluster, "play", &CLIENTS);
    play.go_on();
    play.longest_gap();
    let node = cluster.etcd.leader();
    cluster.etcd.pause(node);
    play.go_on();
    thread::sleep(Duration::from_secs(2));
    cluster.etcd.resume(node);
    play.go_on();
    eprintln!("no answer for {} ms", play.longest_gap().as_millis());
    play.end();
    assert_eq!(cluster.present_leader(), leader);
    // The links between the hosts are alive, so no host was suspected for long.
    until("the etcd cluster leads again", || cluster.etcd.leader() < 3);
}
