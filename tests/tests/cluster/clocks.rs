//! Wall clocks that are set while hosts serve, as an operator or NTP does.

use std::{
    thread,
    time::{Duration, Instant},
};

use statehouse_tests::{
    Admin, Client, Cluster, Connect, Heard, Store, WallClock, assert_contains,
    command::{command, finish},
    histories::Play,
};

use crate::{CLIENTS, SHORT_LEASE};

const HOUR_S: i64 = 3600;
const HOUR_MS: u64 = 3_600_000;

const PX: Duration = Duration::from_secs(3);

/// Steps below 100 ms move no deadline.
const EARLY: Duration = Duration::from_millis(100);

/// Clocks of hosts may differ by this time.
const SKEW: Duration = Duration::from_secs(1);

/// The leader sends its clocks over a link three times a second.
const BEATS: Duration = Duration::from_secs(1);

/// A busy machine answers late, and an hour is longer.
const LATE: Duration = Duration::from_secs(5);

/// Starts hosts with a clock each. The first one leads. Returns also the clocks.
fn start(hosts: usize, settings: &[(&str, &str)]) -> (Cluster, Vec<WallClock>) {
    let mut cluster = Cluster::without_hosts(1, settings);
    let clocks: Vec<_> = (0..hosts).map(|_| WallClock::right()).collect();
    for (host, clock) in clocks.iter().enumerate() {
        let environment = clock.environment();
        cluster.add_in(
            &environment
                .each_ref()
                .map(|(name, value)| (*name, &**value)),
        );
        cluster[host].wait_until_ready();
    }
    assert_eq!(cluster.present_leader().host, 0);
    (cluster, clocks)
}

/// Acquires the lock. Returns the time before that.
fn lock(store: &mut Store, owner: &str) -> Instant {
    let px = PX.as_millis().to_string();
    let began = Instant::now();
    let locked = store.ask(&["SET", "lock", owner, "NX", "PX", &px]);
    assert_eq!(locked.text(), "+OK\\r\\n", "{owner}");
    began
}

/// Does something while a lock is held. The lock must last as long as its PX says.
fn lock_over(store: &mut Store, what: &str, change: impl FnOnce()) {
    let began = lock(store, what);
    change();
    expect_expiry(store, what, began, EARLY);
}

/// Waits until a lock expires. It may expire too early by this time.
fn expect_expiry(store: &mut Store, what: &str, began: Instant, early: Duration) {
    while store.get("lock").is_some() {
        assert!(
            began.elapsed() < PX + LATE,
            "{what}: the lock does not expire"
        );
        thread::sleep(Duration::from_millis(20));
    }
    let lasted = began.elapsed();
    eprintln!("{what}: a lock of {PX:?} lasted {lasted:?}");
    assert!(lasted > PX - early, "{what}: the lock lasted {lasted:?}");
}

#[test]
fn clock_of_the_leader_that_is_set_moves_no_deadline() {
    let (mut cluster, clocks) = start(3, &[SHORT_LEASE]);
    let mut play = Play::over(&cluster, "play", &CLIENTS);
    let leader = cluster.present_leader();
    let mut store = cluster.store(leader.host, "store");
    let mut last = store.set("key", "first");
    let first = last.clone();
    for (offset_s, ready) in [(-HOUR_S, 503), (0, 200), (HOUR_S, 200)] {
        play.go_on();
        lock_over(&mut store, &format!("{offset_s} s"), || {
            clocks[leader.host].set(offset_s);
        });
        let version = store.set("key", "value");
        assert!(version > last, "{version} after {last}");
        last = version;
        let (status, body) = Admin::of(&cluster[leader.host]).ask("GET", "/readyz", b"");
        assert_eq!(status, ready, "at {offset_s} s: {body}");
        play.go_on();
    }
    assert_eq!(cluster.present_leader(), leader);
    assert!(last.wall_ms >= first.wall_ms + HOUR_MS, "no clock was set");

    // The other machines follow the same time. So they can lead, and no time has passed.
    clocks.iter().for_each(|clock| clock.set(HOUR_S));
    let mut through = cluster.store(cluster.follower(), "before");
    let held = through.ask(&["SET", "held", "value", "PX", "60000"]);
    assert_eq!(held.text(), "+OK\\r\\n");
    let (_, next) = cluster.fail_over();
    play.died();
    let mut store = cluster.store(next.host, "next");
    assert_eq!(store.get("held"), Some(b"value".to_vec()));
    let version = store.set("key", "next");
    assert!(version > last, "{version} after {last}");
    play.go_on();
    play.end();
}

#[test]
fn lock_expires_in_time_after_a_leader_with_a_wrong_clock() {
    let (mut cluster, clocks) = start(2, &[SHORT_LEASE]);
    clocks[0].set(-HOUR_S);
    let mut store = cluster.store(1, "store");
    let last = store.set("key", "value");
    let began = lock(&mut store, "owner");
    let (_, next) = cluster.fail_over();
    let mut store = cluster.store(next.host, "next");
    expect_expiry(&mut store, "next leader", began, SKEW);
    let version = store.set("key", "next");
    assert!(version > last, "{version} after {last}");
}

#[test]
fn clock_of_a_follower_that_is_set_changes_nothing() {
    let (mut cluster, clocks) = start(3, &[SHORT_LEASE]);
    let mut play = Play::over(&cluster, "play", &CLIENTS);
    let leader = cluster.present_leader();
    let mut store = cluster.store(2, "store");
    for offset_s in [HOUR_S, -HOUR_S] {
        play.go_on();
        lock_over(&mut store, &format!("follower at {offset_s} s"), || {
            clocks[1].set(offset_s);
        });
        play.go_on();
    }
    assert_eq!(cluster.present_leader(), leader);
    let (_, next) = cluster.fail_over();
    play.died();
    assert_eq!(next.host, 2, "a host with a wrong clock leads");
    play.go_on();
    play.end();
}

/// Lets the leader die while the clock of the only other host is off. Returns what that host says.
fn refusal(cluster: &mut Cluster, clock: &WallClock, offset_s: i64) -> String {
    clock.set(offset_s);
    let mut store = cluster.store(0, "writer");
    // The follower compares its clock with the times of records.
    (0..5).for_each(|n| drop(store.set("key", n.to_string())));
    refusal_of_takeover(cluster)
}

/// Lets the leader die. Returns why the only other host does not lead.
fn refusal_of_takeover(cluster: &mut Cluster) -> String {
    cluster[0].kill();
    let said = cluster[1].wait_for_log("this host may not lead: its clock is ");
    assert_contains!(said, "--accept-clock", "synchronize the clocks");
    // It holds clients and answers nothing.
    let mut held = Client::open(cluster[1].address());
    held.send(&Connect::new("held").bytes());
    let heard = held.poll(Duration::from_secs(3));
    assert!(matches!(heard, Heard::Silence), "{heard:?}");
    let second_leads = cluster.leader().is_some_and(|it| it.host == 1);
    assert!(!second_leads, "a host with a wrong clock leads");
    said
}

/// The second host leads once its clock is right, with what the first one wrote.
fn expect_takeover(cluster: &Cluster, clock: &WallClock) {
    let epoch = cluster.present_leader().epoch;
    clock.set(0);
    assert_eq!(cluster.wait_for_leader_after(epoch).host, 1);
    assert_eq!(cluster.store(1, "next").get("key"), Some(b"4".to_vec()));
}

#[test]
fn host_5_s_behind_does_not_lead_until_its_clock_is_right() {
    let (mut cluster, clocks) = start(2, &[SHORT_LEASE]);
    let said = refusal(&mut cluster, &clocks[1], -5);
    assert!(said.contains(" ms behind the log of the cluster"), "{said}");
    expect_takeover(&cluster, &clocks[1]);
}

/// The last record is older than the clock of the other host, and clients have read later times.
#[test]
fn host_20_s_behind_does_not_lead_after_reads_only() {
    let (mut cluster, clocks) = start(2, &[SHORT_LEASE]);
    clocks[1].set(-20);
    let mut store = cluster.store(0, "reader");
    store.set("key", "4");
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(7) {
        assert_eq!(store.get("key"), Some(b"4".to_vec()));
        thread::sleep(Duration::from_millis(20));
    }
    let said = refusal_of_takeover(&mut cluster);
    assert!(said.contains(" ms behind the log"), "{said}");
    expect_takeover(&cluster, &clocks[1]);
}

#[test]
fn host_5_s_ahead_does_not_lead_until_its_clock_is_right() {
    let (mut cluster, clocks) = start(2, &[SHORT_LEASE]);
    let said = refusal(&mut cluster, &clocks[1], 5);
    assert_contains!(said, " ms ahead of that of the last leader, gw1");
    expect_takeover(&cluster, &clocks[1]);
}

#[test]
fn host_with_a_wrong_clock_leads_if_it_is_accepted() {
    for offset_s in [-5, 5] {
        let (mut cluster, clocks) = start(2, &[SHORT_LEASE, ("accept_clock", "true")]);
        clocks[1].set(offset_s);
        let mut store = cluster.store(0, "writer");
        let versions: Vec<_> = (0..5).map(|n| store.set("key", n.to_string())).collect();
        let (_, next) = cluster.fail_over();
        assert_eq!(next.host, 1);
        let mut store = cluster.store(1, "reader");
        assert_eq!(store.get("key"), Some(b"4".to_vec()), "at {offset_s} s");
        let version = store.set("key", "next");
        assert!(Some(&version) > versions.last(), "at {offset_s} s");
    }
}

/// The log continues at the time that the leader has, so all other hosts are behind it.
#[test]
fn leader_that_is_ahead_is_replaced_if_clocks_are_accepted() {
    let (mut cluster, clocks) = start(2, &[SHORT_LEASE]);
    let epoch = cluster.present_leader().epoch;
    clocks[0].set(HOUR_S);
    let last = cluster.store(0, "writer").set("key", "ahead");
    // The follower compares its clock with that of the leader.
    thread::sleep(BEATS);
    cluster[0].kill();
    let said = cluster[1].wait_for_log("this host may not lead: its clock is ");
    assert!(said.contains(" ms behind the log of the cluster"), "{said}");
    cluster[1].stop();
    cluster[1].start_again(&[("accept_clock", "true")]);
    assert_eq!(cluster.wait_for_leader_after(epoch).host, 1);
    let mut store = cluster.store(1, "reader");
    assert_eq!(store.get("key"), Some(b"ahead".to_vec()));
    let version = store.set("key", "next");
    assert!(version > last, "{version} after {last}");
}

/// The log is an hour ahead, and the clocks of both hosts agree.
#[test]
fn leader_that_was_ahead_for_a_moment_is_replaced() {
    let (mut cluster, clocks) = start(2, &[SHORT_LEASE]);
    let mut store = cluster.store(0, "writer");
    clocks[0].set(HOUR_S);
    let last = store.set("key", "ahead");
    let began = lock(&mut store, "owner");
    clocks[0].set(0);
    thread::sleep(BEATS);
    let (_, next) = cluster.fail_over();
    assert_eq!(next.host, 1);
    let mut store = cluster.store(1, "next");
    assert_eq!(store.get("key"), Some(b"ahead".to_vec()));
    let version = store.set("key", "next");
    assert!(version > last, "{version} after {last}");
    expect_expiry(&mut store, "next leader", began, SKEW);
}

/// In an earlier version, a command with one address failed at once, with the advice to name all
/// hosts.
#[test]
fn command_says_that_no_host_leads() {
    let token = ("admin_token", "one token for all hosts");
    let (mut cluster, clocks) = start(2, &[SHORT_LEASE, token]);
    clocks[1].set(-HOUR_S);
    cluster[1].kill();
    cluster[0].stop();
    cluster[1].start_again(&[]);
    cluster[1].wait_for_log("this host may not lead: its clock is ");
    let url = Admin::of(&cluster[1]).url();
    let mut list = command(&["policy", "list", "--admin", &url]);
    list.env("STATEHOUSE_ADMIN_TOKEN", token.1);
    let ran = finish(list, b"")
        .fails(3, "the cluster has no leader")
        .says("statehouse cluster status");
    assert!(!ran.stderr.contains("the address of each host"), "{ran:#?}");
}

/// No record shows the host how far its clock is ahead, but the link does. If it led, locks would
/// end an hour early.
#[test]
fn host_that_was_ahead_when_it_joined_does_not_lead() {
    let (mut cluster, clocks) = start(2, &[SHORT_LEASE]);
    cluster[1].kill();
    clocks[1].set(HOUR_S);
    let mut store = cluster.store(0, "writer");
    let locked = store.ask(&["SET", "lock", "owner", "NX", "PX", "60000"]);
    assert_eq!(locked.text(), "+OK\\r\\n");
    cluster[1].restart();
    thread::sleep(BEATS);
    cluster[0].kill();
    let said = cluster[1].wait_for_log("this host may not lead: its clock is ");
    assert_contains!(said, " ms ahead of that of the last leader");
}
