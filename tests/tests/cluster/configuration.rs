//! Settings that a host cannot join its cluster with. Each must be refused in words, and a refused
//! host must change nothing.

use std::{fs, path::Path, thread, time::Duration};

use statehouse_tests::{
    Cluster, Etcd, Ran, Server,
    cluster::{self, NAME},
    command, run, run_in,
};

use crate::{SHORT_LEASE, authority::Authority};

/// Runs a host, which must end without a signal.
fn serve(directory: &Path, urls: &str, arguments: &[&str]) -> Ran {
    let listen = ["--listen", "127.0.0.1:0", "--cluster-listen", "127.0.0.1:0"];
    let joins = ["serve", "--name", "gw9", "--cluster", urls];
    run_in(directory, &[&joins, &listen[..], arguments].concat())
}

#[test]
fn unusable_settings_are_refused_and_change_nothing() {
    let cluster = Cluster::without_hosts(1, &[]);
    let before = cluster.etcd.revision();
    let urls = cluster.urls();
    let directory = tempfile::tempdir().unwrap();
    let refused = |arguments: &[&str], code: i32, says: &[&str]| {
        let ran = serve(directory.path(), &urls, arguments).code(code);
        says.iter().fold(ran, |ran, says| ran.says(says));
    };
    refused(
        &["--cluster-name", "none"],
        2,
        &["none", "statehouse cluster init"],
    );
    let ours = ["--cluster-name", NAME];
    for (more, says) in [
        (["--policy", "x.wasm"], "statehouse policy load"),
        (
            ["--durability", "memory"],
            "durability cannot be set in a cluster",
        ),
        (["--broker", "mqtt://127.0.0.1:1"], "broker"),
        (["--name", "gw 1"], "name of the host"),
        (["--cluster-lease", "1ms"], "200ms"),
        (["--cluster-ca", "ca.pem"], "is unencrypted"),
    ] {
        // A flag can be given once, so an environment variable would hide the refusal.
        let all = ["serve", "--cluster-listen", "127.0.0.1:0", "--cluster"];
        let all = [&all[..], &[urls.as_str()], &ours, &more].concat();
        run_in(directory.path(), &all).fails(2, says);
    }
    assert_eq!(
        cluster.etcd.revision(),
        before,
        "a refused host wrote to etcd"
    );
}

/// A host that wrote some of its keys elsewhere than the others could not lead with them.
#[test]
fn servers_of_two_etcd_clusters_are_refused() {
    let (cluster, other) = (Cluster::without_hosts(1, &[]), Etcd::start(1));
    let before = (cluster.etcd.revision(), other.revision());
    let directory = tempfile::tempdir().unwrap();
    let urls = format!("{},{}", cluster.urls(), other.urls()[0]);
    let says = "belong to different etcd clusters";
    serve(directory.path(), &urls, &["--cluster-name", NAME]).fails(2, says);
    let ask = |command: &str| {
        let arguments = ["cluster", command, "--cluster", &urls];
        run(&[&arguments[..], &["--cluster-name", "new"]].concat(), b"")
    };
    ask("init").fails(3, says);
    let after = (cluster.etcd.revision(), other.revision());
    assert_eq!(after, before, "a refused host wrote to etcd");
    let checked = ask("check").code(1).text();
    assert!(checked.contains(says), "{checked}");
}

#[test]
fn data_directory_of_a_single_host_is_refused_unchanged() {
    let cluster = Cluster::without_hosts(1, &[]);
    let before = cluster.etcd.revision();
    let mut single = Server::restartable(&[]);
    single.store("writer").set("key", "value");
    single.stop();
    let ours = ["--cluster-name", NAME];
    serve(single.directory(), &cluster.urls(), &ours)
        .fails(2, "holds the store of a single host")
        .says("--data");
    assert_eq!(
        cluster.etcd.revision(),
        before,
        "a refused host wrote to etcd"
    );
    single.restart();
    let value = single.store("reader").get("key");
    assert_eq!(value, Some(b"value".to_vec()));
}

#[test]
fn init_from_a_directory_changes_no_existing_cluster() {
    let cluster = Cluster::without_hosts(1, &[]);
    let mut single = Server::restartable(&[]);
    single.store("writer").set("key", "value");
    single.stop();
    let before = cluster.etcd.revision();
    let data = single.data();
    cluster
        .ask(&["init", "--from", &data])
        .fails(1, "exists already");
    // A host may have changed or removed the directory since the cluster was created.
    for directory in [&*data, "missing"] {
        let repeated = ["init", "--if-missing", "--from", directory];
        let repeated = cluster.ask(&repeated).code(0).text();
        assert!(repeated.contains("exists already"), "{repeated}");
    }
    assert_eq!(cluster.etcd.revision(), before, "init wrote to etcd");
}

/// A mistyped name must not become a data directory, which a host would then use.
#[test]
fn init_from_a_directory_without_a_store_changes_nothing() {
    let mut cluster = Cluster::existing_on(Etcd::start(1), &[]);
    let place = tempfile::tempdir().unwrap();
    let (missing, empty) = (place.path().join("missing"), place.path().join("empty"));
    fs::create_dir(&empty).unwrap();
    for (directory, says) in [(&missing, "no directory"), (&empty, "holds no log")] {
        let from = ["init", "--from", directory.to_str().unwrap()];
        cluster.ask(&from).fails(2, says);
    }
    assert!(!missing.exists());
    assert_eq!(fs::read_dir(&empty).unwrap().count(), 0);
    assert_eq!(cluster.etcd.count_below("/statehouse/"), 0);
}

#[test]
fn host_without_etcd_waits_and_says_so() {
    let mut cluster = Cluster::without_hosts(1, &[]);
    cluster.etcd.kill_all();
    let host = cluster.add();
    let said = cluster[host].wait_for_line("waiting for etcd at ");
    assert!(said.contains(&cluster.urls()), "{said}");
    thread::sleep(Duration::from_secs(2));
    assert!(cluster[host].runs());
    let waiting = cluster[host].stdout();
    let waiting = waiting
        .iter()
        .filter(|it| it.starts_with("waiting for etcd"));
    assert_eq!(waiting.count(), 1, "one line is enough");
    cluster.etcd.restart_all();
    cluster[host].wait_until_ready();
    cluster.store(host, "client").set("key", "value");
}

#[test]
fn host_that_waits_for_etcd_stops_on_sigterm() {
    let mut cluster = Cluster::without_hosts(1, &[]);
    cluster.etcd.kill_all();
    let host = cluster.add();
    cluster[host].wait_for_line("waiting for etcd at ");
    cluster[host].stop();
}

#[test]
fn commands_of_a_cluster_tell_what_is_missing() {
    let mut cluster = Cluster::with(1, 1, &[SHORT_LEASE]);
    let urls = cluster.urls();
    let named = |command: &str, name: &str| {
        let at = ["--cluster", &urls, "--cluster-name", name];
        run(&[&["cluster", command], &at[..]].concat(), b"")
    };
    // The leader describes itself once.
    thread::sleep(Duration::from_secs(1));
    let before = cluster.etcd.revision();
    named("init", NAME).fails(1, "exists already");
    let repeated = cluster.ask(&["init", "--if-missing"]).code(0).text();
    assert!(repeated.contains("exists already"), "{repeated}");
    named("status", "none").fails(1, "cluster init");
    cluster.ask(&["remove", "gw7"]).fails(1, "has no host gw7");
    assert_eq!(cluster.etcd.revision(), before);
    let status = cluster.ask(&["status"]).code(0).text();
    assert!(status.contains("leader    gw1 at "), "{status}");
    let checked = cluster.ask(&["check"]).code(0).text();
    assert!(checked.contains("good: gw1 leads in epoch 1"), "{checked}");
    let reached = "good: gw1 accepts hosts at 127.";
    assert!(checked.contains(reached), "{checked}");
    cluster[0].kill();
    let checked = cluster.ask(&["check"]).code(1).text();
    let dead = "gw1 was the last leader and gives no sign of life";
    assert!(checked.contains(dead), "{checked}");
    cluster.etcd.kill_all();
    for command in ["init", "status"] {
        named(command, NAME).fails(3, "etcd");
    }
    named("check", NAME).code(1);
}

/// A second host with the name of the leader, by mistake. The store must stay correct, and the host
/// must say why it cannot take part.
#[test]
fn second_host_with_the_name_of_the_leader_says_so() {
    let mut cluster = Cluster::with(2, 1, &[]);
    let leader = cluster.present_leader();
    cluster.store(0, "writer").set("key", "value");
    let twin = cluster.launch(&cluster::name(leader.host));
    twin.wait_for_line("accepting hosts of the cluster on ");
    thread::sleep(Duration::from_secs(2));
    let before = cluster.etcd.revision();
    thread::sleep(Duration::from_secs(2));
    let writes = cluster.etcd.revision() - before;
    assert!(cluster[leader.host].runs());
    assert_eq!(cluster.present_leader(), leader);
    let mut store = cluster.store(cluster.follower(), "reader");
    assert_eq!(store.get("key"), Some(b"value".to_vec()));
    store.set("key", "new");
    let said = [twin.stdout(), twin.stderr()].concat().join("\n");
    let names_it = said.contains(&format!("the name {}", cluster::name(leader.host)));
    assert!(
        names_it && writes < 4,
        "{writes} writes of etcd in 2 s, and the host says only: {said}"
    );
}

#[test]
fn etcd_with_a_certificate_of_another_authority_is_refused() {
    let files = tempfile::tempdir().unwrap();
    let authority = Authority::new(files.path(), "ca");
    let other = Authority::new(files.path(), "other");
    let pair = authority.server("etcd");
    let arguments = [
        format!("--cert-file={}", pair.certificate.display()),
        format!("--key-file={}", pair.key.display()),
    ];
    let etcd = Etcd::start_with(1, "https", &arguments);
    let urls = etcd.urls().join(",");
    let ask = |ca: &Authority, command: &str| {
        let ca = ca.certificate.to_str().unwrap();
        let at = ["--cluster", &urls, "--cluster-ca", ca];
        run(&[&["cluster", command], &at[..]].concat(), b"")
    };
    ask(&other, "init").fails(3, "certificate");
    ask(&authority, "init").code(0);
    ask(&authority, "status").code(0);
    // A host waits, since the certificates of etcd can be replaced, and says why.
    let mut host = command::command(&["serve", "--listen", "127.0.0.1:0"]);
    host.args(["--cluster-listen", "127.0.0.1:0", "--cluster", &urls]);
    host.arg("--cluster-ca").arg(&other.certificate);
    let host = Server::run_unready(host);
    let said = host.wait_for_line("waiting for etcd at ");
    assert!(said.contains("certificate"), "{said}");
}
