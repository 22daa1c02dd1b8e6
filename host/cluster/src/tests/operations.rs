//! Tests of what a leader does for operators: a handover to a named host, the upgrade of the format
//! of the log, and figures.

use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::cluster::{Host, access, head, simulate, world};
use super::operators::count_writes;
use crate::access::put;
use crate::codec::Malformed;
use crate::keys::Keys;
use crate::simulated::World;
use crate::{
    After, Id, LOG_FORMAT, LeaderLog, MemberInfo, Stop, Upgraded, check_reach, check_successor,
    limits, members, remove_member, upgrade,
};

const SEEDS: u64 = 40;

/// The names of the hosts. The first one leads.
const NAMES: [&str; 4] = ["a", "b", "c", "d"];

/// Starts hosts, of which the first one leads and the others follow.
async fn start(seed: u64) -> (World, Vec<Host>) {
    let world = world(seed).await;
    let mut hosts = Vec::new();
    for (index, name) in (0..).zip(NAMES) {
        let host = Host::start(&world, name, |it| {
            it.process.0[..8].copy_from_slice(&(seed * 10 + index).to_le_bytes());
        });
        if hosts.is_empty() {
            host.leads().await;
        } else {
            host.follows(NAMES[0]).await;
        }
        hosts.push(host);
    }
    (world, hosts)
}

/// The index of the host that leads after the first epoch, and how long that took.
async fn next_leader(hosts: &[Host]) -> (usize, Duration) {
    let began = Instant::now();
    for _ in 0..10_000 {
        for (index, host) in hosts.iter().enumerate() {
            let log = host.seen.lock().unwrap().log.clone();
            if log.is_some_and(|it| it.epoch() > 1) {
                return (index, began.elapsed());
            }
        }
        sleep(Duration::from_millis(1)).await;
    }
    panic!("no host leads after epoch 1");
}

async fn checked(world: &World, host: &str) -> Result<(), String> {
    let checked = check_successor(&access(world), 1, host).await;
    checked.map_err(|error| error.to_string())
}

#[test]
fn named_successor_leads_for_every_seed() {
    for seed in 0..SEEDS {
        simulate(async move {
            let (world, hosts) = start(seed).await;
            let target = 1 + seed as usize % (NAMES.len() - 1);
            sleep(Duration::from_secs(1)).await;
            checked(&world, NAMES[target]).await.unwrap();
            let log = hosts[0].leads().await;
            log.hand_over(Some(NAMES[target]));
            let (leader, took) = next_leader(&hosts).await;
            assert_eq!(leader, target, "seed {seed}");
            assert!(took < Duration::from_millis(100), "seed {seed}: {took:?}");
            hosts[target].leads().await;
            let figures = hosts[target].member.figures();
            assert_eq!(figures.takeovers(After::Handover), 1);
        });
    }
}

#[tokio::test(start_paused = true)]
async fn log_is_reached_only_if_the_engine_answers() {
    let (world, _hosts) = start(1).await;
    check_reach(&access(&world)).await.unwrap();
    world.cut(0, true, true);
    let error = check_reach(&access(&world)).await.unwrap_err();
    assert!(error.to_string().starts_with("reading the head"), "{error}");
}

#[test]
fn successor_that_is_dead_only_delays_the_handover() {
    for seed in 0..SEEDS {
        simulate(async move {
            let (_world, mut hosts) = start(seed).await;
            drop(hosts.pop());
            let log = hosts[0].leads().await;
            log.hand_over(Some(NAMES[3]));
            let (leader, took) = next_leader(&hosts).await;
            assert!((1..=2).contains(&leader), "seed {seed}: {leader} leads");
            let bounds = Duration::from_secs(3)..Duration::from_secs(4);
            assert!(bounds.contains(&took), "seed {seed}: {took:?}");
        });
    }
}

#[tokio::test(start_paused = true)]
async fn successor_with_too_long_a_name_is_not_named() {
    let (_world, hosts) = start(1).await;
    let log = hosts[0].leads().await;
    log.hand_over(Some(&"x".repeat(64)));
    let (leader, took) = next_leader(&hosts).await;
    assert_ne!(leader, 0);
    assert!(took < Duration::from_secs(1), "{took:?}");
}

#[tokio::test(start_paused = true)]
async fn successor_that_cannot_lead_is_refused_in_words() {
    let (world, hosts) = start(1).await;
    hosts[1].seen.lock().unwrap().description.missing_modules = vec![[7; 32]];
    hosts[1].member.describe_again();
    sleep(Duration::from_secs(1)).await;
    for (host, why) in [
        ("b", "lacks 1 policies"),
        ("x", "has no host x"),
        ("a", "leads in epoch 1"),
    ] {
        let error = checked(&world, host).await.unwrap_err();
        assert!(error.contains(why), "{error}");
    }
    checked(&world, "c").await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn only_hosts_that_do_not_run_can_be_removed_for_long() {
    let (world, _hosts) = start(1).await;
    let remove = async |host: &str| remove_member(&access(&world), host).await;
    sleep(Duration::from_secs(1)).await;
    let refused = remove("a").await.unwrap_err().to_string();
    assert!(refused.contains("a leads the cluster c"), "{refused}");
    assert!(remove("b").await.unwrap());
    assert!(!remove("b").await.unwrap(), "it was listed twice");
    sleep(2 * limits::PRESENCE_PACE).await;
    let listed = members(&access(&world)).await.unwrap();
    let names: Vec<_> = listed.iter().map(|it| it.host.as_str()).collect();
    assert_eq!(names, NAMES);
}

#[tokio::test(start_paused = true)]
async fn hosts_of_one_name_do_not_write_records_without_end() {
    let world = world(1).await;
    let counts = count_writes(&world);
    let (_leader, _log) = Host::lead(&world, "a", |_| {}).await;
    let _twins = ["b", "b"].map(|name| Host::start(&world, name, |_| {}));
    sleep(6 * limits::PRESENCE_PACE).await;
    let before = counts[0].load(Ordering::Relaxed);
    sleep(Duration::from_secs(3600)).await;
    assert_eq!(counts[0].load(Ordering::Relaxed), before);
}

/// The other process may write both records before it reads the first one.
#[tokio::test(start_paused = true)]
async fn each_record_of_another_process_is_replaced_once() {
    let (world, _hosts) = start(1).await;
    let engine = world.engine(0);
    let key = Keys::new("c").member("b");
    sleep(Duration::from_secs(1)).await;
    let own = engine.get(&key).await.unwrap().value.unwrap();
    let mut other = MemberInfo::decode(&own).unwrap();
    other.process = Id([9; 16]);
    for (epoch, is_replaced) in [(1, true), (1, false), (2, true), (2, false)] {
        other.epoch = epoch;
        let record = put(key.clone(), other.encode().into());
        engine.transact(&record).await.unwrap();
        sleep(2 * limits::PRESENCE_PACE).await;
        let found = engine.get(&key).await.unwrap().value.unwrap();
        assert_eq!(found == own, is_replaced, "epoch {epoch}");
    }
}

/// A format that only some hosts read.
const NEWER: u16 = LOG_FORMAT + 1;

/// A host that reads the log up to this format.
fn reads(world: &World, name: &str, format: u16) -> Host {
    Host::start(world, name, |it| it.log_format = format)
}

async fn upgraded(world: &World, log: &LeaderLog, newest: u16) -> Result<Upgraded, String> {
    let upgraded = upgrade(&access(world), log, newest).await;
    upgraded.map_err(|error| error.to_string())
}

#[tokio::test(start_paused = true)]
async fn upgrade_waits_for_all_members_and_stops_those_that_return() {
    let world = world(1).await;
    let leader = reads(&world, "a", NEWER);
    let log = leader.leads().await;
    let (follower, older) = (reads(&world, "b", NEWER), reads(&world, "old", LOG_FORMAT));
    sleep(Duration::from_secs(2)).await;
    let done = upgraded(&world, &log, LOG_FORMAT).await;
    assert_eq!(done, Ok(Upgraded::Unchanged(LOG_FORMAT)));

    let error = upgraded(&world, &log, NEWER).await.unwrap_err();
    assert!(error.contains("host old (version 1.2.3) reads"), "{error}");
    assert!(error.contains("cluster remove old"), "{error}");
    assert_eq!(log.log_format(), LOG_FORMAT, "it was raised nevertheless");

    drop(older);
    remove_member(&access(&world), "old").await.unwrap();
    let done = upgraded(&world, &log, NEWER).await;
    assert_eq!(done, Ok(Upgraded::Raised(NEWER)));
    // The leader goes on, and the format outlives its leadership.
    Host::append(&log, b"x").await;
    log.hand_over(None);
    let log = follower.leads().await;
    assert_eq!(log.log_format(), NEWER);

    let stop = reads(&world, "old", LOG_FORMAT).stops().await;
    let refused = Malformed::LaterFormat {
        format: NEWER,
        readable: LOG_FORMAT,
    };
    assert!(
        matches!(&stop, Stop::Head(it) if *it == refused),
        "{stop:?}"
    );
    assert!(stop.to_string().contains("update this host"), "{stop}");
}

#[tokio::test(start_paused = true)]
async fn upgrade_stops_a_running_host_that_it_did_not_know() {
    let world = world(1).await;
    let leader = reads(&world, "a", NEWER);
    let log = leader.leads().await;
    let older = reads(&world, "old", LOG_FORMAT);
    older.follows("a").await;
    sleep(Duration::from_secs(1)).await;
    remove_member(&access(&world), "old").await.unwrap();
    upgraded(&world, &log, NEWER).await.unwrap();
    let stop = older.stops().await;
    assert!(stop.to_string().contains("update this host"), "{stop}");
}

#[tokio::test(start_paused = true)]
async fn upgrade_is_refused_by_a_record_of_an_earlier_leadership() {
    let world = world(1).await;
    let first = reads(&world, "a", NEWER);
    let log = first.leads().await;
    let second = reads(&world, "b", NEWER);
    second.follows("a").await;
    sleep(Duration::from_secs(1)).await;
    drop(log);
    drop(first);
    second.member.suspect();
    let log = second.leads().await;
    sleep(Duration::from_secs(1)).await;
    let error = upgraded(&world, &log, NEWER).await.unwrap_err();
    assert!(error.contains("host a was last seen in epoch 1"), "{error}");
    remove_member(&access(&world), "a").await.unwrap();
    upgraded(&world, &log, NEWER).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn figures_follow_the_log() {
    let (world, hosts) = start(1).await;
    let log = hosts[0].leads().await;
    for _ in 0..10 {
        Host::append(&log, &[7; 1000]).await;
    }
    sleep(Duration::from_secs(3)).await;
    let [leader, follower] = [0, 1].map(|it| hosts[it].member.figures());
    for figures in [&leader, &follower] {
        // The opening record counts.
        assert_eq!((figures.log_records(), figures.lag()), (11, 0));
        assert!((10_000..12_000).contains(&figures.log_bytes()));
        assert_eq!(figures.snapshot_ms(), None);
        assert!(figures.reaches_log());
    }
    let appends = leader.appends();
    assert_eq!(appends.count(), 10);
    assert!(!appends.sum().is_zero());
    assert_eq!(follower.appends().count(), 0);
    assert_eq!(leader.takeovers(After::Silence), 0, "the first leadership");
    assert!(log.lease_left() < Duration::from_secs(2));
    log.may_decide().await.unwrap();
    assert!(log.lease_left() > Duration::from_secs(1));

    world.cut(0, true, true);
    // An idle leader asks the engine for its size every 10 s.
    sleep(Duration::from_secs(12)).await;
    assert!(!leader.reaches_log() && !follower.reaches_log());
}

#[tokio::test(start_paused = true)]
async fn figures_start_anew_with_a_snapshot() {
    let world = world(1).await;
    let small = |it: &mut crate::Options| it.sizes.snapshot_after_bytes = 50_000;
    let (leader, log) = Host::lead(&world, "a", small).await;
    let follower = Host::start(&world, "b", small);
    follower.follows("a").await;
    for _ in 0..60 {
        Host::append(&log, &[7; 1000]).await;
    }
    sleep(Duration::from_secs(1)).await;
    let newcomer = Host::start(&world, "c", small);
    newcomer.follows("a").await;
    for host in [&leader, &follower, &newcomer] {
        let figures = host.member.figures();
        assert_eq!(figures.snapshot_ms(), Some(1_000));
        assert!((1..20).contains(&figures.log_records()), "{figures:?}");
        assert!(figures.log_bytes() < 20_000, "{figures:?}");
        assert_eq!(figures.lag(), 0);
    }
    drop((leader, log));
    follower.member.suspect();
    follower.leads().await;
    assert_eq!(follower.member.figures().takeovers(After::Silence), 1);
}

/// No frame follows the snapshot, so the host receives no record.
#[tokio::test(start_paused = true)]
async fn host_that_reads_only_a_snapshot_knows_its_position() {
    let world = world(1).await;
    let small = |it: &mut crate::Options| it.sizes.snapshot_after_bytes = 50_000;
    let (_leader, log) = Host::lead(&world, "a", small).await;
    let last = Host::append(&log, &[7; 60_000]).await;
    sleep(Duration::from_secs(1)).await;
    let snapshot = head(&world).await.snapshot;
    assert_eq!(snapshot.map(|it| it.begins_after()), Some(last));
    let newcomer = Host::start(&world, "b", small);
    newcomer.follows("a").await;
    assert_eq!(newcomer.member.figures().position(), last);
}
