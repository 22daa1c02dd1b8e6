//! Tests of what operators see of a cluster whose hosts have ended, and of the name of its store.

use std::time::Duration;

use tokio::time::sleep;

use super::cluster::{Host, access, world};
use crate::access::put;
use crate::keys::Keys;
use crate::simulated::{Faults, World};
use crate::{Id, Report, Role, Severity, check, create, members, overview, store_name};

async fn checked(world: &World) -> Report {
    check(&access(world), 1_000, 1 << 30).await
}

/// The status 60 s after the last change, by the wall clock of the hosts.
async fn status(world: &World) -> String {
    let found = overview(&access(world), 61_000).await;
    found.unwrap().to_string()
}

#[tokio::test(start_paused = true)]
async fn leader_that_died_gives_no_sign_of_life() {
    let world = world(1).await;
    let (leader, _log) = Host::lead(&world, "a", |_| {}).await;
    sleep(Duration::from_secs(1)).await;
    let report = checked(&world).await;
    assert_eq!(report.worst(), Severity::Good, "{report}");
    let found = report.to_string();
    assert!(found.contains("good: a leads in epoch 1"), "{report}");
    drop(leader);
    sleep(Duration::from_secs(60)).await;
    let report = checked(&world).await;
    assert_eq!(report.worst(), Severity::Failure, "{report}");
    let found = report.to_string();
    let expected = "FAILURE: a was the last leader and gives no sign of life";
    assert!(found.contains(expected), "{report}");
    let shown = status(&world).await;
    for part in ["epoch 1, by the log\n", "changed   60 s ago; ", "leads  1 "] {
        assert!(shown.contains(part), "{shown}");
    }
    assert!(shown.ends_with("  -\n"), "{shown}");
}

#[tokio::test(start_paused = true)]
async fn host_that_handed_over_to_no_other_one_leads_no_more() {
    let world = world(1).await;
    let (leader, log) = Host::lead(&world, "a", |_| {}).await;
    sleep(Duration::from_secs(1)).await;
    log.hand_over(None);
    sleep(Duration::from_secs(1)).await;
    drop(leader);
    // A process that ends after its handover writes no other record.
    let access = access(&world);
    let listed = members(&access).await.unwrap();
    let mut record = listed[0].info.clone().unwrap();
    record.role = Role::Leading;
    let record = put(Keys::new("c").member("a"), record.encode().into());
    world.engine(0).transact(&record).await.unwrap();
    let shown = status(&world).await;
    for part in ["none; a has handed over\nchanged   60 s ago\n", "led   1 "] {
        assert!(shown.contains(part), "{shown}");
    }
    assert!(!shown.contains("leads"), "{shown}");
    let report = checked(&world).await;
    assert_eq!(report.worst(), Severity::Failure, "{report}");
    let expected = "FAILURE: a has handed over and no host has taken over";
    assert!(report.to_string().contains(expected), "{report}");
    assert_eq!(report.leader, None);
    // A host that took over after the head was read.
    let mut found = overview(&access, 0).await.unwrap();
    let info = found.members[0].info.as_mut().unwrap();
    assert_eq!(info.epoch, found.head.epoch);
    info.epoch += 1;
    assert_eq!(found.role(&found.members[0].info.clone().unwrap()), "leads");
}

/// A check during a handover waits for the next leader.
#[tokio::test(start_paused = true)]
async fn check_waits_for_the_host_that_takes_over() {
    let world = world(1).await;
    let (leader, log) = Host::lead(&world, "a", |_| {}).await;
    log.hand_over(None);
    leader.wait(|it| it.log.is_none().then_some(())).await;
    drop(leader);
    let starting = async {
        sleep(Duration::from_secs(1)).await;
        Host::start(&world, "b", |_| {})
    };
    let (report, _host) = tokio::join!(checked(&world), starting);
    let found = report.to_string();
    assert!(found.contains("good: b leads in epoch 2"), "{report}");
    assert_eq!(report.leader, Some(("b".to_owned(), "h:1".to_owned())));
}

#[tokio::test(start_paused = true)]
async fn leader_of_a_full_etcd_is_named_and_not_asked() {
    let world = world(1).await;
    let (leader, _log) = Host::lead(&world, "a", |_| {}).await;
    sleep(Duration::from_secs(1)).await;
    world.limit(100);
    let report = checked(&world).await;
    assert_eq!(report.worst(), Severity::Failure, "{report}");
    let found = report.to_string();
    let expected = "a was the last leader and was not asked";
    assert!(found.contains(expected), "{report}");
    drop(leader);
}

#[tokio::test(start_paused = true)]
async fn store_of_each_cluster_has_a_name_of_its_own() {
    let mut names = Vec::new();
    for id in [1, 2] {
        let world = World::new(1, Faults::default());
        let mut id = Id([id; 16]);
        // The name has the other half of the id.
        id.0[8..].fill(9);
        create(&*world.engine(0), "c", id, 0).await.unwrap();
        let found = overview(&access(&world), 0).await.unwrap();
        assert_eq!(found.store, store_name("c", id));
        assert!(found.to_string().contains(&found.store), "{found}");
        names.push(found.store);
    }
    assert_eq!(names, ["c-0101010101010101", "c-0202020202020202"]);
}
