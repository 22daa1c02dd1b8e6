//! The official client on a cluster of three hosts. It knows one address, behind which a switch
//! chooses a host. The client gives up if its session is lost, so it must find the session on every
//! host.

use std::time::Duration;

use azure_iot_operations_services::state_store::Operation;
use statehouse_tests::{Cluster, Dice, switch::Switch};
use tokio::task::block_in_place;

use crate::{
    peer::{Peer, TIMEOUT, expect_notification, newer, within},
    restart::{Store, run_over_kills},
};

const LEASE: Duration = Duration::from_secs(60);

/// A takeover waits for the lease of the leader that died.
const SHORT_LEASE: (&str, &str) = ("cluster_lease", "500ms");

struct Site {
    cluster: Cluster,
    switch: Switch,
}

impl Site {
    fn start() -> Site {
        let cluster = Cluster::with(3, 1, &[SHORT_LEASE]);
        let switch = Switch::start(cluster.addresses());
        Site { cluster, switch }
    }

    fn connect(&self, id: &str) -> Peer {
        Peer::connect_to(self.switch.address(), id)
    }

    /// Kills the leader, and restarts it when another host leads.
    fn fail_over(&mut self) {
        block_in_place(|| {
            let (old, _) = self.cluster.fail_over();
            self.cluster[old.host].restart();
        });
    }
}

async fn held_lock_outlives_its_leader() {
    let mut site = Site::start();
    let (one, two) = (site.connect("one"), site.connect("two"));
    let first = one.lock("lock");
    let token = first.lock(LEASE, TIMEOUT, None).await.unwrap();
    let protected = one.set_with("data", "one", Some(token.clone()), Default::default());
    protected.await;
    site.fail_over();
    let holder = two.lease("lock").get_holder(TIMEOUT).await.unwrap();
    assert_eq!(holder, Some(b"one".to_vec()));
    let second = two.lock("lock");
    let waiting = tokio::spawn(async move { second.lock(LEASE, TIMEOUT, None).await });
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert!(!waiting.is_finished(), "two holders at once");
    let protected = one.set_with("data", "still one", Some(token.clone()), Default::default());
    protected.await;
    first.unlock(TIMEOUT).await.unwrap();
    let next = within(waiting).await.unwrap().unwrap();
    assert!(newer(&next, &token));
    two.set_with("data", "two", Some(next), Default::default())
        .await;
    let late = one.try_set("data", "late", Some(token)).await;
    late.expect_err("the token is old");
    // These fail if a session was lost.
    one.leave().await;
    two.leave().await;
}

/// The client renews the lease in the background, over two failovers, for longer than the lease.
async fn renewed_lease_outlives_its_leaders() {
    let mut site = Site::start();
    let (one, two) = (site.connect("one"), site.connect("two"));
    let first = one.lease("lease");
    let (lease, period) = (Duration::from_secs(6), Duration::from_millis(500));
    let token = first.acquire(lease, TIMEOUT, Some(period)).await.unwrap();
    for _ in 0..2 {
        site.fail_over();
        tokio::time::sleep(Duration::from_secs(2)).await;
    }
    tokio::time::sleep(lease.saturating_sub(Duration::from_secs(4))).await;
    let holder = two.lease("lease").get_holder(TIMEOUT).await.unwrap();
    assert_eq!(holder, Some(b"one".to_vec()), "the lease was not renewed");
    let renewed = first.current_lease_fencing_token().expect("a token");
    assert!(newer(&renewed, &token));
    first.release(TIMEOUT).await.unwrap();
    one.leave().await;
    two.leave().await;
}

async fn observation_begins_again_after_a_failover() {
    let mut site = Site::start();
    let (peer, writer) = (site.connect("observing"), site.connect("writer"));
    let key = || b"key".to_vec();
    let mut seen = peer.store.observe(key(), TIMEOUT).await.unwrap().response;
    let before = writer.set("key", "one").await;
    expect_notification(&mut seen, Operation::Set(b"one".to_vec())).await;
    for round in 0..2 {
        site.fail_over();
        let end = within(seen.recv_notification()).await;
        assert!(end.is_none(), "the observation continues in round {round}");
        within(peer.monitor.connected()).await;
        seen = peer.store.observe(key(), TIMEOUT).await.unwrap().response;
        let value = format!("round {round}");
        let version = writer.set("key", &value).await;
        assert!(newer(&version, &before));
        expect_notification(&mut seen, Operation::Set(value.into_bytes())).await;
    }
    peer.leave().await;
    writer.leave().await;
}

/// Kills the leader, all hosts or a follower, in turn.
async fn requests_over_kills_take_effect_once(rounds: u64) {
    let Site {
        mut cluster,
        switch,
    } = Site::start();
    let mut dice = Dice::thrown();
    let kill_and_restart = |acknowledged: &mut dyn FnMut() -> Vec<u64>| -> (Vec<u64>, Store) {
        let leader = cluster.present_leader();
        let killed = match dice.below(3) {
            0 => vec![leader.host],
            1 => vec![cluster.follower()],
            _ => vec![0, 1, 2],
        };
        killed.iter().for_each(|host| cluster[*host].kill());
        let before = acknowledged();
        killed.iter().for_each(|host| cluster[*host].restart());
        (before, cluster.store(killed[0], "reader"))
    };
    run_over_kills(switch.address(), rounds, kill_and_restart).await;
}

#[test]
fn lock_of_a_client_outlives_the_leader() {
    crate::run(held_lock_outlives_its_leader());
}

#[test]
fn lease_of_a_client_is_renewed_over_failovers() {
    crate::run(renewed_lease_outlives_its_leaders());
}

#[test]
fn observation_ends_with_the_leader_and_begins_again() {
    crate::run(observation_begins_again_after_a_failover());
}

#[test]
fn requests_over_10_kills_of_hosts_take_effect_once() {
    crate::run(requests_over_kills_take_effect_once(10));
}

#[test]
#[ignore = "takes minutes"]
fn requests_over_100_kills_of_hosts_take_effect_once() {
    crate::run(requests_over_kills_take_effect_once(100));
}
