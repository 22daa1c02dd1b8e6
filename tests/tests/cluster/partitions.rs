//! Networks that drop all packets between two machines.

use std::{
    thread,
    time::{Duration, Instant},
};

use statehouse_tests::{
    Admin, Client, Cluster, Store,
    cluster::NAME,
    command::{command, finish_within},
    policies, run,
    switch::Switch,
    wait::until,
};

use crate::{SHORT_LEASE, resumed::connect};

/// Two hosts over one node of etcd. The first one leads, and has this setting.
fn pair(mut cluster: Cluster, setting: (&str, &str)) -> Cluster {
    cluster.add_with(&[setting]);
    cluster[0].wait_until_ready();
    cluster.add();
    cluster[1].wait_until_ready();
    assert_eq!(cluster.present_leader().host, 0);
    cluster
}

/// Sends a SET through a host until it is answered, as a client does that reconnects.
fn set(cluster: &Cluster, host: usize, value: &str) {
    let end = Instant::now() + Duration::from_secs(60);
    let patience = Duration::from_secs(2);
    loop {
        assert!(Instant::now() < end, "no host answers");
        let address = cluster[host].address();
        let Some(client) = Client::attempt_within(address, &connect("client"), patience) else {
            thread::sleep(Duration::from_millis(100));
            continue;
        };
        let mut store = Store::new(client, "client");
        store.set("key", value);
        return;
    }
}

/// Two hosts, of which the first one leads and reaches etcd through the switch.
fn pair_at_switch() -> (Cluster, Switch) {
    let cluster = Cluster::without_hosts(1, &[SHORT_LEASE]);
    let etcd = cluster.etcd.urls()[0].strip_prefix("http://").unwrap();
    let switch = Switch::start(vec![etcd.parse().unwrap()]);
    let url = format!("http://{}", switch.address());
    (pair(cluster, ("cluster", &url)), switch)
}

/// Only the leader loses etcd, and its links to other hosts are alive. It cannot serve, so another
/// host must take over. The bound is generous, and below the 30 s of an unchanged log after which
/// followers suspect every leader.
#[test]
fn leader_that_only_loses_etcd_is_replaced() {
    let (cluster, switch) = pair_at_switch();
    set(&cluster, 1, "before");
    let leader = cluster.present_leader();
    switch.stall(true);
    let began = Instant::now();
    let next = cluster.wait_for_leader_after(leader.epoch);
    let took = began.elapsed();
    set(&cluster, 1, "during");
    eprintln!("another host leads after {} ms", took.as_millis());
    assert_eq!(next.host, 1);
    switch.stall(false);
    cluster[0].wait_for_line(&format!("following gw2 of {NAME}"));
    let value = cluster.store(0, "reader").get("key");
    assert_eq!(value, Some(b"during".to_vec()));
    assert!(took < Duration::from_secs(15), "after {took:?}");
}

/// A leader that loses etcd does not learn that another host leads. It must not answer operators
/// from its old state, and must say that it serves no clients.
#[test]
fn leader_without_etcd_answers_operators_nothing_old() {
    let (cluster, switch) = pair_at_switch();
    set(&cluster, 0, "old");
    let old = Admin::of(&cluster[0]);
    assert_eq!(old.done("GET", "/v1/key?key=key", b"")["value"], "old");
    assert_eq!(old.ask("GET", "/readyz", b"").0, 200);
    let changes = old.stream("/v1/changes?prefix=key");
    let leader = cluster.present_leader();
    let mut waiting = cluster.store(0, "waiting");
    switch.stall(true);
    let request = waiting.command(&["SET", "other", "lost"]);
    waiting.client.start(request.publish());
    cluster.wait_for_leader_after(leader.epoch);
    set(&cluster, 1, "new");
    let (status, body) = old.ask("GET", "/readyz", b"");
    assert_eq!(status, 503, "{body}");
    assert!(body.contains("does not reach the log"), "{body}");
    assert_eq!(old.done("GET", "/v1/overview", b"")["ready"], false);
    for path in ["/v1/key?key=key", "/v1/keys?prefix=k", "/v1/changes"] {
        let (status, body) = old.ask("GET", path, b"");
        assert_eq!(status, 503, "{path}: {body}");
    }
    // In the old state there is nothing to do for these.
    let acts = [
        ("POST", "/v1/policies/builtin/promote"),
        ("POST", "/v1/rollback"),
        ("DELETE", "/v1/canary"),
        ("DELETE", "/v1/shadow"),
        ("DELETE", "/v1/clients/absent"),
        ("POST", "/v1/cluster/upgrade"),
        ("POST", "/v1/cluster/handover?to=gw1"),
    ];
    thread::scope(|scope| {
        for (method, path) in acts {
            let old = &old;
            scope.spawn(move || {
                let (status, body) = old.ask(method, path, b"");
                assert_eq!(status, 503, "{method} {path}: {body}");
            });
        }
    });
    changes.expect_end();
    switch.stall(false);
    until("the host follows", || {
        old.ask("GET", "/readyz", b"").0 == 200
    });
}

/// A change of policies that waits for the log, or for the proof that its host leads, when another
/// host takes over. The change is lost, and its operator must get an answer.
#[test]
fn promotion_ends_when_another_host_takes_over() {
    let (cluster, switch) = pair_at_switch();
    let data = cluster[0].data();
    let data = ["--data", &data];
    let module = policies::marked("cluster");
    let load = ["policy", "load", module.to_str().unwrap()];
    run(&[&load[..], &data].concat(), b"").code(0);
    let leader = cluster.present_leader();
    switch.stall(true);
    let promote = command(&[&["policy", "promote", "marked-cluster"][..], &data].concat());
    let promoting = thread::spawn(move || finish_within(promote, b"", Duration::from_secs(40)));
    cluster.wait_for_leader_after(leader.epoch);
    switch.stall(false);
    cluster[0].wait_for_line(&format!("following gw2 of {NAME}"));
    let promoted = promoting.join().unwrap().code(3);
    let answers = ["the store is stopping", "it does not lead its cluster"];
    let is_known = answers.iter().any(|it| promoted.stderr.contains(it));
    assert!(is_known, "{}", promoted.stderr);
}

/// Two hosts that cannot reach each other, and both reach etcd. The leader stays. The other host
/// says that it cannot pass clients on.
#[test]
fn broken_link_between_hosts_changes_no_leader() {
    // The second host finds the first one at a switch that leads to no host.
    let switch = Switch::start(Vec::new());
    switch.stall(true);
    let cluster = Cluster::without_hosts(1, &[SHORT_LEASE]);
    let cluster = pair(cluster, ("cluster_address", &switch.address().to_string()));
    let leader = cluster.present_leader();
    set(&cluster, 0, "value");
    let before = cluster.etcd.revision();
    thread::sleep(Duration::from_secs(5));
    let writes = cluster.etcd.revision() - before;
    eprintln!("{writes} writes of etcd in 5 s");
    assert_eq!(cluster.present_leader(), leader);
    set(&cluster, 0, "after");
    let ready = |host: usize| Admin::of(&cluster[host]).ask("GET", "/readyz", b"");
    until("the host without a link is not ready", || ready(1).0 == 503);
    let (_, why) = ready(1);
    assert!(why.contains("no link to the leader"), "{why}");
    assert_eq!(ready(0).0, 200);
}
