//! A leader that hands over: by SIGTERM, and by `statehouse cluster handover`. Clients wait for a
//! moment, and no request fails.

use std::{thread, time::Duration};

use statehouse_tests::{Admin, Cluster, cluster, histories::Play, run, wait::until};

use crate::CLIENTS;

/// Far above what a handover takes, and below what a takeover after a loss takes: that waits for
/// the default lease of 2 s, after 1 s of silence.
const BOUND: Duration = Duration::from_secs(10);

fn check(what: &str, rounds: usize, hand_over: impl Fn(&mut Cluster, usize)) {
    let mut cluster = Cluster::with(3, 1, &[]);
    let mut play = Play::over(&cluster, "play", &CLIENTS);
    for _ in 0..rounds {
        play.go_on();
        play.longest_gap();
        let old = cluster.present_leader();
        hand_over(&mut cluster, old.host);
        let new = cluster.wait_for_leader_after(old.epoch);
        assert_ne!(
            new.host, old.host,
            "it leads again, although other hosts follow"
        );
        play.died();
        play.go_on();
        let gap = play.longest_gap();
        eprintln!("{what}: no answer for {} ms", gap.as_millis());
        assert!(gap < BOUND, "{gap:?}");
    }
    play.end();
}

#[test]
fn leader_that_is_terminated_hands_over() {
    check("SIGTERM", 3, |cluster, host| {
        let before = cluster.present_leader();
        cluster[host].stop();
        // A host that restarts may lead again, if it is faster than the followers.
        cluster.wait_for_leader_after(before.epoch);
        cluster[host].restart();
    });
}

#[test]
fn handover_command_lets_another_host_lead() {
    check("cluster handover", 2, hand_over);
}

/// An operator restarts one machine after the other. So a host hands over shortly after another
/// one handed over to it.
#[test]
fn each_of_several_handovers_changes_the_leader() {
    check("several times", 5, hand_over);
}

fn hand_over(cluster: &mut Cluster, host: usize) {
    let data = cluster[host].data();
    let done = run(&["cluster", "handover", "--data", &data], b"").code(0);
    assert_eq!(done.text(), "the host hands over\n");
    let name = cluster::name(host);
    let line = format!("{name} does not lead {} any more: ", cluster::NAME);
    let said = cluster[host].wait_for_line(&line);
    assert!(said.ends_with(": it handed over"), "{said}");
}

/// A stream that stays open would be silent for ever, and would keep the old store in memory.
#[test]
fn stream_of_changes_ends_with_the_leadership() {
    let mut cluster = Cluster::start(2);
    let leader = cluster.present_leader().host;
    let changes = Admin::of(&cluster[leader]).stream("/v1/changes");
    hand_over(&mut cluster, leader);
    changes.expect_end();
}

#[test]
fn handover_without_a_follower_is_refused() {
    let cluster = Cluster::start(1);
    let leader = cluster.present_leader();
    let data = cluster[leader.host].data();
    run(&["cluster", "handover", "--data", &data], b"").fails(1, "no other host has a link to gw1");
    cluster.store(leader.host, "writer").set("key", "value");
    assert_eq!(cluster.present_leader(), leader);
}

/// In an earlier version the host handed over to no host, and the store had no leader for seconds.
#[test]
fn handover_without_a_host_that_can_lead_is_refused() {
    let cluster = Cluster::start(2);
    let leader = cluster.present_leader();
    let data = cluster[leader.host].data();
    let other = cluster::name(cluster.follower());
    let hand_over = || run(&["cluster", "handover", "--data", &data], b"");
    let remove = || cluster.ask(&["remove", &other]).code == Some(0);
    // Until the record of its new role is written.
    thread::sleep(Duration::from_secs(1));
    until("the host has a record", remove);
    // The host looks at its record every 10 s, so the second removal lasts for that long.
    until("the host has written its record again", remove);
    hand_over().fails(1, &format!("has no host {other}"));
    assert_eq!(cluster.present_leader(), leader);
    until("the other host can lead", || hand_over().code == Some(0));
}

/// In an earlier version the host stopped serving at once, and handed over when etcd returned.
#[test]
fn handover_without_a_majority_of_etcd_is_refused() {
    let cluster = Cluster::with(2, 3, &[]);
    let leader = cluster.present_leader();
    let data = cluster[leader.host].data();
    for server in 0..2 {
        cluster.etcd.pause(server);
    }
    let refused = run(&["cluster", "handover", "--data", &data], b"");
    for server in 0..2 {
        cluster.etcd.resume(server);
    }
    refused.fails(3, "this host does not reach the log of its cluster");
    cluster.etcd.wait_until_ready();
    cluster.store(leader.host, "writer").set("key", "value");
    assert_eq!(cluster.present_leader(), leader);
}

#[test]
fn handover_at_a_follower_names_the_leader() {
    let cluster = Cluster::start(2);
    let leader = cluster.present_leader();
    let data = cluster[cluster.follower()].data();
    let leader_name = cluster::name(leader.host);
    run(&["cluster", "handover", "--data", &data], b"")
        .fails(4, &format!("use the admin API of {leader_name}"));
    assert_eq!(cluster.present_leader(), leader);
}

#[test]
fn handover_lets_the_named_host_lead() {
    let mut cluster = Cluster::with(3, 1, &[]);
    for _ in 0..3 {
        let old = cluster.present_leader();
        let target = (old.host + 2) % 3;
        let (data, name) = (cluster[old.host].data(), cluster::name(target));
        let hand_over = || run(&["cluster", "handover", "--data", &data, &name], b"");
        // The link of a follower to a new leader takes a moment.
        until("the host follows", || hand_over().code == Some(0));
        assert_eq!(cluster.wait_for_leader_after(old.epoch).host, target);
        cluster.store(old.host, "writer").set("key", "value");
    }

    let leader = cluster.present_leader();
    let data = cluster[leader.host].data();
    let hand_over = |to: &str| run(&["cluster", "handover", "--data", &data, to], b"");
    let own = cluster::name(leader.host);
    let done = hand_over(&own).code(0);
    assert_eq!(done.text(), format!("{own} leads already\n"));
    hand_over("gw9").fails(1, "has no host gw9");
    // The record of a host that was killed still says that it follows.
    let killed = cluster.follower();
    let name = cluster::name(killed);
    let follows = [&name, "follows", &leader.epoch.to_string()].join(" ");
    until("the record of the host", || {
        let status = cluster.ask(&["status"]).code(0).text();
        let mut rows = status.lines().map(|it| it.split_whitespace().take(3));
        rows.any(|row| row.collect::<Vec<_>>().join(" ") == follows)
    });
    cluster[killed].kill();
    thread::sleep(Duration::from_secs(1));
    until("the leader notices", || {
        let refused = hand_over(&name).code(1);
        refused.stderr.contains("has no link")
    });
    assert_eq!(cluster.present_leader(), leader);
}
