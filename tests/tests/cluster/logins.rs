//! An etcd that asks for a user and a password.

use std::fs;

use statehouse_tests::{Cluster, run};

use crate::SHORT_LEASE;

#[test]
fn hosts_log_in_at_etcd_over_every_change_of_the_login() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("password");
    fs::write(&file, "first\n").unwrap();
    let file = file.to_str().unwrap();
    let user = ("cluster_user", "statehouse");
    let settings = [SHORT_LEASE, user, ("cluster_password_file", file)];
    // Hosts can get their login before etcd asks for one.
    let mut cluster = Cluster::with(2, 1, &settings);
    let works = |cluster: &Cluster, step: &str| {
        let host = cluster.present_leader().host;
        let mut store = cluster.store(host, step);
        store.set("step", step);
        assert_eq!(store.get("step"), Some(step.as_bytes().to_vec()));
    };
    works(&cluster, "no login");
    cluster[0].wait_for_log("etcdctl auth enable");
    cluster.etcd.enable_authentication("first");
    works(&cluster, "first password");
    cluster.etcd.change_password("second");
    fs::write(file, "second\n").unwrap();
    works(&cluster, "second password");
    // A server of etcd that restarts has forgotten all logins.
    cluster.etcd.kill_all();
    cluster.etcd.restart_all();
    works(&cluster, "restarted etcd");

    let before = cluster.present_leader();
    let data = cluster[before.host].directory().join("statehouse-data");
    let hand_over = ["cluster", "handover", "--data", data.to_str().unwrap()];
    run(&hand_over, b"").code(0);
    cluster.wait_for_leader_after(before.epoch);
    works(&cluster, "handover");

    let login = ["--cluster-user", "statehouse", "--cluster-password-file"];
    for command in ["status", "check"] {
        let ran = cluster.ask(&[&[command], &login[..], &[file]].concat());
        let text = ran.code(0).text();
        assert!(text.contains("leader"), "{text}");
    }
    cluster.ask(&["status"]).code(3).says("set --cluster-user");
    fs::write(file, "wrong\n").unwrap();
    let wrong = [&["status"], &login[..], &[file]].concat();
    cluster.ask(&wrong).code(3).says("check --cluster-user");
    let missing = [&["status"], &login[..], &["missing"]].concat();
    cluster.ask(&missing).code(2).says("password file missing");
}
