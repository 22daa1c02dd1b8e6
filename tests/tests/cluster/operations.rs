//! What operators see and do: the metrics of a cluster, its status, and the format of its log.

use std::{collections::HashMap, thread, time::Duration};

use statehouse_tests::{
    Admin, Cluster, Etcd, Store, cluster,
    command::{add_user, command, finish},
    prometheus::{Prometheus, check_page, expect_data, panels},
    reload::replace,
    run,
    wait::eventually,
    wait::until,
};

use crate::SHORT_LEASE;

/// The value of a metric of the cluster, if the host has it.
fn figure(cluster: &Cluster, host: usize, name: &str) -> Option<f64> {
    let page = cluster[host].metrics_page();
    let value = page.lines().find_map(|line| {
        let line = line.strip_prefix("statehouse_cluster_")?;
        line.strip_prefix(name)?.strip_prefix(' ')
    });
    value.map(|value| value.parse().unwrap())
}

/// How often a host has begun to lead after such an event.
fn takeovers(cluster: &Cluster, host: usize, after: &str) -> Option<f64> {
    let name = format!("takeovers_total{{after=\"{after}\"}}");
    figure(cluster, host, &name)
}

fn wait_for(cluster: &Cluster, host: usize, name: &str, expected: f64) {
    until(name, || figure(cluster, host, name) == Some(expected));
}

/// The board and the alerts see all hosts of the cluster.
fn check_board(cluster: &Cluster, store: &mut Store) {
    let targets: Vec<String> = (0..3).map(|it| cluster[it].metrics_address()).collect();
    let prometheus = Prometheus::scraping(&targets);
    let mut of_cluster = panels();
    of_cluster.retain(|it| it.row == "A cluster");
    assert!(of_cluster.len() > 5);
    let exceptions = [("Age of the newest snapshot", "a new cluster has none")];
    expect_data(&prometheus, &of_cluster, &exceptions, || {
        store.set("key", "value");
    });
    let up = prometheus.query("sum(statehouse_cluster_leads)").unwrap();
    assert_eq!(up[0]["value"][1], "1");
    for alert in prometheus.alerts() {
        assert_ne!(alert["health"], "err", "{alert:#}");
        assert_eq!(alert["state"], "inactive", "{alert:#}");
    }
}

#[test]
fn metrics_follow_the_work_and_the_leaders() {
    let metrics = ["--metrics", "127.0.0.1:0"];
    let mut cluster = Cluster::with_arguments(3, 1, &[SHORT_LEASE], &metrics);
    let leader = cluster.present_leader();
    let mut store = cluster.store(leader.host, "writer");
    for number in 0..20 {
        store.set(format!("key{number}"), "value");
    }
    let own = |name: &str| figure(&cluster, leader.host, name).unwrap();
    assert!(own("append_seconds_count") >= 20.0);
    assert!(own("append_seconds_sum") > 0.0);
    assert_eq!(
        own("append_seconds_bucket{le=\"+Inf\"}"),
        own("append_seconds_count")
    );
    assert!(own("log_records") >= 21.0);
    assert!(own("log_bytes") > 1_000.0);
    assert_eq!((own("leads"), own("reaches_log")), (1.0, 1.0));
    let follower = cluster.follower();
    wait_for(&cluster, follower, "position", own("position"));
    wait_for(&cluster, follower, "lag_records", 0.0);
    wait_for(&cluster, follower, "log_records", own("log_records"));
    assert_eq!(figure(&cluster, follower, "lease_seconds"), None);
    let overview = |host: usize| Admin::of(&cluster[host]).done("GET", "/v1/overview", b"");
    let (of_leader, of_follower) = (overview(leader.host), overview(follower));
    assert_eq!(of_leader["store"], cluster::NAME);
    assert_eq!(of_follower["store"], cluster::NAME);
    assert_eq!(of_leader["cluster"]["role"], "leader");
    assert_eq!(of_leader["cluster"]["leader"], of_leader["host"]);
    let followers = of_leader["cluster"]["followers"].as_array().unwrap();
    assert_eq!(followers.len(), 2, "{of_leader}");
    assert!(followers.contains(&of_follower["host"]), "{of_leader}");
    assert_eq!(of_follower["cluster"]["role"], "follower");
    assert_eq!(of_follower["cluster"]["leader"], of_leader["host"]);
    assert!(of_follower["rates"].is_null() && of_follower["ready"] == true);
    assert!(of_leader["store_size"]["keys"] == 20, "{of_leader}");
    // A leader without work has no lease, and renews it by the next write.
    thread::sleep(Duration::from_millis(600));
    assert_eq!(own("lease_seconds"), 0.0);
    until("a lease", || {
        store.set("key", "value");
        let left = own("lease_seconds");
        assert!(left <= 0.5, "{left}");
        left > 0.0
    });
    for host in 0..3 {
        check_page(&cluster[host].metrics_page());
        for after in ["silence", "handover", "restart"] {
            let count = takeovers(&cluster, host, after);
            assert_eq!(count, Some(0.0), "{host} {after}");
        }
    }

    check_board(&cluster, &mut store);

    let (killed, new) = cluster.fail_over();
    let after = |host: usize, after: &str| takeovers(&cluster, host, after);
    assert_eq!(after(new.host, "silence"), Some(1.0));
    let other = 3 - killed.host - new.host;
    assert_eq!(after(other, "silence"), Some(0.0));
    let data = cluster[new.host].data();
    run(&["cluster", "handover", "--data", &data], b"").code(0);
    assert_eq!(cluster.wait_for_leader_after(new.epoch).host, other);
    assert_eq!(after(other, "handover"), Some(1.0));

    wait_for(&cluster, new.host, "leads", 0.0);
    cluster.etcd.kill_all();
    for host in [new.host, other] {
        wait_for(&cluster, host, "reaches_log", 0.0);
    }
    cluster.etcd.restart_all();
    for host in [new.host, other] {
        wait_for(&cluster, host, "reaches_log", 1.0);
    }
}

/// Regression: a follower did not report files that it refused. It would lead with the former ones.
#[test]
fn follower_counts_refused_files_and_operators() {
    let files = tempfile::tempdir().unwrap();
    let users = files.path().join("users");
    add_user(&users, "anna", "secret").code(0);
    let setting = ("users", users.to_str().unwrap());
    let cluster = Cluster::with(2, 1, &[SHORT_LEASE, setting]);
    let follower = &cluster[cluster.follower()];
    assert_eq!(follower.reloads("users", "refused"), 0);
    replace(&users, "a line without a hash\n");
    until("the file is refused", || {
        follower.reloads("users", "refused") == 1
    });
    let stranger = Admin::of(follower).with_token("0123456789-another-token");
    assert_eq!(stranger.ask("GET", "/v1/overview", b"").0, 401);
    assert!(follower.refused("administer") > 0);
}

#[test]
fn status_lists_every_host() {
    let mut cluster = Cluster::with(2, 1, &[SHORT_LEASE]);
    // The number of epochs that each listed host is behind.
    let status = |cluster: &Cluster| {
        let json = cluster.ask(&["status", "--json"]).code(0).object();
        let hosts = json["hosts"].as_array().unwrap().iter();
        let behind: HashMap<String, Option<u64>> = hosts
            .map(|it| {
                let name = it["name"].as_str().unwrap();
                (name.to_owned(), it["epochs_behind"].as_u64())
            })
            .collect();
        (json, behind)
    };
    // A host that dies before it described itself is never listed.
    let first = cluster::name(cluster.present_leader().host);
    eventually("the first leader describes itself", || {
        let (_, behind) = status(&cluster);
        (behind.get(&first) == Some(&Some(0))).then_some(())
    });
    let (killed, new) = cluster.fail_over();
    let [killed, leader] = [killed.host, new.host].map(cluster::name);
    let json = eventually("the leader describes itself", || {
        let (json, behind) = status(&cluster);
        (behind.get(&killed) == Some(&Some(1)) && behind.get(&leader) == Some(&Some(0)))
            .then_some(json)
    });
    assert_eq!(json["leader"], *leader);
    assert_eq!(json["log_format"], 2);
    let text = cluster.ask(&["status"]).code(0).text();
    assert!(text.contains("1 epoch behind"), "{text}");
    for host in [&killed, &leader] {
        assert!(text.contains(&format!("\n{host}  ")), "{text}");
    }
    assert!(text.lines().all(|it| it.len() <= 80), "{text}");
}

/// The names and roles of the listed hosts.
fn listed(cluster: &Cluster) -> HashMap<String, String> {
    let json = cluster.ask(&["status", "--json"]).code(0).object();
    let hosts = json["hosts"].as_array().unwrap().iter();
    let text = |it: &serde_json::Value| it.as_str().unwrap().to_owned();
    hosts
        .map(|it| (text(&it["name"]), text(&it["role"])))
        .collect()
}

/// In an earlier version a host of an idle cluster did not return to the list.
#[test]
fn removed_host_that_runs_is_listed_again() {
    let cluster = Cluster::with(2, 1, &[SHORT_LEASE]);
    let leader = cluster.present_leader();
    let [leads, follows] = [leader.host, cluster.follower()].map(cluster::name);
    until("both hosts describe themselves", || {
        let listed = listed(&cluster);
        listed.len() == 2 && listed.values().all(|role| role != "joins")
    });
    let refused = cluster.ask(&["remove", &leads]).code(4);
    refused.says("leads the cluster plant7");
    let removed = cluster.ask(&["remove", &follows]).code(0).text();
    assert_eq!(removed, format!("removed {follows} from plant7\n"));
    until("the host is listed again", || {
        listed(&cluster).contains_key(&follows)
    });
    assert!(listed(&cluster).contains_key(&leads));
    let unknown = cluster.ask(&["remove", "gw9"]).code(1);
    unknown.says("has no host gw9");
    assert_eq!(cluster.present_leader(), leader);
}

#[test]
fn two_processes_of_one_name_warn_of_each_other() {
    let cluster = Cluster::with(2, 1, &[SHORT_LEASE]);
    let host = cluster.follower();
    let name = cluster::name(host);
    let mut twin = cluster.launch(&name);
    twin.wait_until_ready();
    let warning = format!("another process uses the name {name} of this host");
    cluster[host].wait_for_log(&warning);
    twin.wait_for_log(&warning);
}

#[test]
fn follower_with_other_settings_than_the_leader_warns() {
    let mut cluster = Cluster::with(1, 1, &[SHORT_LEASE]);
    let other = cluster.add_with(&[("node", "other")]);
    cluster[other].wait_until_ready();
    let said = cluster[other].wait_for_log("has other settings than this host");
    assert!(said.contains("--node, --dialect"), "{said}");
    until("the check names the settings", || {
        let checked = cluster.ask(&["check"]).code(0).text();
        checked.contains("different settings; give all hosts the same --node")
    });
}

#[test]
fn check_finds_a_wrong_address_and_a_cluster_without_hosts() {
    let wrong = ("cluster_address", "127.0.0.1:1");
    let mut cluster = Cluster::with(1, 1, &[SHORT_LEASE, wrong]);
    let checked = cluster.ask(&["check"]).code(0).text();
    let says = "warning: this machine does not reach gw1 at 127.0.0.1:1: it cannot be reached";
    assert!(checked.contains(says), "{checked}");
    cluster[0].stop();
    let checked = cluster.ask(&["check"]).code(1).text();
    let says = "FAILURE: gw1 has handed over and no host has taken over";
    assert!(checked.contains(says), "{checked}");
}

#[test]
fn upgrade_says_that_the_log_has_the_newest_format() {
    let cluster = Cluster::with(2, 1, &[SHORT_LEASE]);
    let before = cluster.present_leader();
    let upgrade = |host: usize| {
        let data = cluster[host].data();
        run(&["cluster", "upgrade", "--data", &data], b"")
    };
    let done = upgrade(before.host).code(0).text();
    assert!(done.contains("format 2, the newest"), "{done}");
    upgrade(cluster.follower()).fails(4, "use the admin API");
    assert_eq!(cluster.present_leader(), before);
}

/// Lists a host whose record differs from that of another host in its version.
fn add_host_of_a_later_version(etcd: &mut Etcd) {
    let members = format!("/statehouse/{}/0/member/", cluster::NAME);
    let records = etcd.all();
    let known = |key: &[u8]| key.starts_with(members.as_bytes());
    let (_, record) = records.iter().find(|it| known(&it.0)).expect("a host");
    let version = env!("CARGO_PKG_VERSION").as_bytes();
    let at = (record.windows(version.len())).rposition(|it| it == version);
    let mut record = record.clone();
    // Any later version of the same length.
    record[at.expect("its version")] = b'9';
    etcd.put(format!("{members}gw9").as_bytes(), &record);
}

#[test]
fn host_that_is_too_old_for_the_log_stops_with_78() {
    let mut cluster = Cluster::with(2, 1, &[SHORT_LEASE]);
    add_host_of_a_later_version(&mut cluster.etcd);
    let leader = cluster.present_leader().host;
    let mut writer = cluster.store(leader, "writer");
    // That host raised the format.
    let key = format!("/statehouse/{}/0/head", cluster::NAME);
    cluster.etcd.change(&key, |head| {
        assert_eq!(head[2..4], [2, 0]);
        head[2] = 3;
    });
    // The leader looks at the head when it writes.
    let follower = cluster.follower();
    for host in [follower, leader] {
        if host == leader {
            // No host can answer it.
            let request = writer.command(&["SET", "key", "value"]);
            writer.client.start(request.publish());
        }
        let ended = cluster[host].wait(Duration::from_secs(30));
        assert_eq!(ended.code(), Some(78), "while it runs");
        cluster[host].wait_for_log("reads up to format 2: update this host");
        cluster[host].wait_for_log("install Statehouse 9.");
        cluster[host].start_again(&[]);
        let ended = cluster[host].wait(Duration::from_secs(30));
        assert_eq!(ended.code(), Some(78), "when it starts");
        cluster[host].wait_for_log("reads up to format 2: update this host");
        cluster[host].wait_for_log("install Statehouse 9.");
    }
}

/// In an earlier version, commands failed during a takeover, with the advice to name all hosts.
#[test]
fn commands_wait_for_the_host_that_leads_next() {
    let token = ("admin_token", "one token for all hosts");
    let mut cluster = Cluster::with(2, 1, &[SHORT_LEASE, token]);
    let urls = [0, 1].map(|host| Admin::of(&cluster[host]).url()).join(",");
    let leader = cluster.present_leader().host;
    cluster[leader].kill();
    // A takeover on a busy machine takes longer than the command waits.
    until("a host leads", || {
        let mut list = command(&["policy", "list", "--admin", &urls]);
        list.env("STATEHOUSE_ADMIN_TOKEN", token.1);
        let ran = finish(list, b"");
        if ran.code == Some(0) {
            return true;
        }
        let ran = ran.code(3);
        assert!(!ran.stderr.contains("the address of each host"), "{ran:#?}");
        false
    });
}
