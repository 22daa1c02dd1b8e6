//! An etcd that asks for a user and a password, or for a certificate.

use std::{fs, path::Path};

use statehouse_tests::{Cluster, Etcd, Server, command, run};
use tempfile::TempDir;

use crate::{
    SHORT_LEASE,
    authority::{Authority, Pair},
};

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
    let data = cluster[before.host].data();
    let hand_over = ["cluster", "handover", "--data", &data];
    run(&hand_over, b"").code(0);
    cluster.wait_for_leader_after(before.epoch);
    works(&cluster, "handover");

    let login = ["--cluster-user", "statehouse", "--cluster-password-file"];
    for command in ["status", "check"] {
        let ran = cluster.ask(&[&[command], &login[..], &[file]].concat());
        let text = ran.code(0).text();
        assert!(text.contains("leader"), "{text}");
    }
    cluster.ask(&["status"]).fails(3, "set --cluster-user");
    fs::write(file, "wrong\n").unwrap();
    let wrong = [&["status"], &login[..], &[file]].concat();
    cluster.ask(&wrong).fails(3, "check --cluster-user");
    for (arguments, says) in [
        (vec!["check"], "refuses this client"),
        (
            [&["check"], &login[..], &[file]].concat(),
            "check --cluster-user",
        ),
    ] {
        let text = cluster.ask(&arguments).code(1).text();
        assert!(text.contains(says), "{text}");
        for wrong in ["does not answer", "use etcd 3.5"] {
            assert!(!text.contains(wrong), "{text}");
        }
    }
    let missing = [&["status"], &login[..], &["missing"]].concat();
    cluster.ask(&missing).fails(2, "password file missing");
}

/// A cluster without hosts, and the directory of the file `password` with a wrong password.
fn with_a_wrong_password() -> (Cluster, TempDir) {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("password");
    fs::write(&file, "wrong\n").unwrap();
    let user = ("cluster_user", "statehouse");
    let password = ("cluster_password_file", file.to_str().unwrap());
    let mut cluster = Cluster::without_hosts(1, &[SHORT_LEASE, user, password]);
    cluster.etcd.enable_authentication("right");
    (cluster, directory)
}

/// The password may be changed in etcd before it is in the file of a host. In an earlier version
/// such a host ended with the exit code of wrong settings, so that systemd left it down.
#[test]
fn host_with_a_wrong_password_waits_and_says_so() {
    let (mut cluster, directory) = with_a_wrong_password();
    let host = cluster.add();
    let said = cluster[host].wait_for_line("waiting for etcd at ");
    assert!(said.contains("check --cluster-user"), "{said}");
    fs::write(directory.path().join("password"), "right\n").unwrap();
    cluster[host].wait_until_ready();
    cluster.store(host, "client").set("key", "value");
}

/// In an earlier version only the first reason was shown, so the refusal was not.
#[test]
fn refused_login_is_shown_after_etcd_was_down() {
    let (mut cluster, directory) = with_a_wrong_password();
    cluster.etcd.kill_all();
    let host = cluster.add();
    let waiting = format!("waiting for etcd at {}: ", cluster.urls());
    let said = cluster[host].wait_for_line(&waiting);
    assert!(said.contains("no etcd endpoint answers"), "{said}");
    cluster.etcd.restart_all();
    let refused = format!("{waiting}etcd does not let the user");
    let said = cluster[host].wait_for_line(&refused);
    assert!(said.contains("check --cluster-user"), "{said}");
    fs::write(directory.path().join("password"), "right\n").unwrap();
    cluster[host].wait_until_ready();
}

/// etcd computes the hash of a password for longer than a request waits, as it does on a small
/// machine.
#[test]
fn hosts_log_in_at_an_etcd_that_takes_its_time() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("password");
    fs::write(&file, "first\n").unwrap();
    let file = file.to_str().unwrap();
    let etcd = Etcd::start_with(1, "http", &["--bcrypt-cost=13".to_owned()]);
    let user = ("cluster_user", "statehouse");
    let settings = [SHORT_LEASE, user, ("cluster_password_file", file)];
    let mut cluster = Cluster::without_hosts_on(etcd, &settings);
    cluster.etcd.enable_authentication("first");
    cluster.add_hosts(2);
    let mut store = cluster.store(cluster.follower(), "store");
    store.set("key", "value");
    cluster.etcd.kill_all();
    cluster.etcd.restart_all();
    store.set("key", "restarted etcd");
    assert_eq!(store.get("key"), Some(b"restarted etcd".to_vec()));
}

fn text(path: &Path) -> String {
    path.to_str().unwrap().to_owned()
}

/// An etcd that asks for certificates of this authority.
fn asking_for_certificates(authority: &Authority) -> Etcd {
    let server = authority.server("etcd");
    let arguments = [
        format!("--cert-file={}", text(&server.certificate)),
        format!("--key-file={}", text(&server.key)),
        format!("--trusted-ca-file={}", text(&authority.certificate)),
        "--client-cert-auth".to_owned(),
    ];
    Etcd::start_with(1, "https", &arguments)
}

/// etcd takes the common name of the certificate as the user of a request without a login, and
/// denies the request. In an earlier version hosts then logged in after a restart only.
#[test]
fn hosts_with_certificates_log_in_once_etcd_asks_for_it() {
    let files = tempfile::tempdir().unwrap();
    let authority = Authority::new(files.path(), "ca");
    let host = authority.client("host", 1);
    let password = files.path().join("password");
    fs::write(&password, "first\n").unwrap();
    let password = text(&password);
    let ca = text(&authority.certificate);
    let (certificate, key) = (text(&host.certificate), text(&host.key));
    let settings = [
        SHORT_LEASE,
        ("cluster_ca", &*ca),
        ("cluster_cert", &certificate),
        ("cluster_key", &key),
        ("cluster_user", "statehouse"),
        ("cluster_password_file", &password),
    ];
    let mut cluster = Cluster::existing_on(asking_for_certificates(&authority), &settings);
    let ask = |cluster: &Cluster, command: &str| {
        let files = ["--cluster-cert", &certificate, "--cluster-key", &key];
        cluster.ask(&[&[command, "--cluster-ca", &ca], &files[..]].concat())
    };
    ask(&cluster, "init").code(0);
    cluster.add_hosts(2);
    cluster.store(0, "no login").set("key", "before");
    let epoch = cluster.present_leader().epoch;
    cluster.etcd.enable_authentication("first");
    let mut store = cluster.store(cluster.follower(), "login");
    store.set("key", "after");
    assert_eq!(store.get("key"), Some(b"after".to_vec()));
    assert_eq!(cluster.present_leader().epoch, epoch, "a host took over");
    ask(&cluster, "status")
        .fails(3, "took the common name of --cluster-cert")
        .says("set --cluster-user");
}

#[test]
fn hosts_show_etcd_the_certificate_it_asks_for() {
    let files = tempfile::tempdir().unwrap();
    let authority = Authority::new(files.path(), "ca");
    let host = authority.client("host", 1);
    let stranger = Authority::new(files.path(), "other").client("stranger", 2);
    let ca = text(&authority.certificate);
    let etcd = asking_for_certificates(&authority);
    let (certificate, key) = (text(&host.certificate), text(&host.key));
    let settings = [
        SHORT_LEASE,
        ("cluster_ca", &ca),
        ("cluster_cert", &certificate),
        ("cluster_key", &key),
    ];
    let mut cluster = Cluster::existing_on(etcd, &settings);
    let ask = |cluster: &Cluster, command: &str, pair: Option<&Pair>| {
        let files = pair.map(|it| (text(&it.certificate), text(&it.key)));
        let mut arguments = vec![command, "--cluster-ca", &ca];
        if let Some((certificate, key)) = &files {
            arguments.extend(["--cluster-cert", certificate, "--cluster-key", key]);
        }
        cluster.ask(&arguments)
    };
    for refused in [None, Some(&stranger)] {
        ask(&cluster, "init", refused).fails(3, "--cluster-cert");
    }
    let of_two = Pair {
        certificate: host.certificate.clone(),
        key: stranger.key.clone(),
    };
    ask(&cluster, "init", Some(&of_two)).fails(2, "--cluster-key: ");
    ask(&cluster, "init", Some(&host)).code(0);
    cluster.add_hosts(2);
    cluster.store(0, "writer").set("key", "value");
    let (_, after) = cluster.fail_over();
    let mut reader = cluster.store(after.host, "reader");
    assert_eq!(reader.get("key"), Some(b"value".to_vec()));
    let status = ask(&cluster, "status", Some(&host)).code(0).text();
    assert!(status.contains("leader"), "{status}");

    // A host without a certificate waits, and says why.
    let mut without = command::command(&["serve", "--listen", "127.0.0.1:0", "--name", "gw9"]);
    without.args(["--cluster-listen", "127.0.0.1:0", "--cluster-ca", &ca]);
    without.args(["--cluster", &cluster.urls()]);
    let without = Server::run_unready(without);
    let said = without.wait_for_line("waiting for etcd at ");
    assert!(said.contains("--cluster-cert"), "{said}");
}

/// In an earlier version a host used the certificate of its start until it was restarted, and its
/// log did not say what etcd refused.
#[test]
fn replaced_certificate_is_used_without_a_restart() {
    let files = tempfile::tempdir().unwrap();
    let [first, second] = ["first", "second"].map(|it| Authority::new(files.path(), it));
    let [former, present] = [first.client("former", 1), second.client("present", 2)];
    let at = |name: &str| files.path().join(name);
    let used = Pair {
        certificate: at("used.crt"),
        key: at("used.key"),
    };
    let replace = |by: &Pair| {
        fs::copy(&by.certificate, &used.certificate).unwrap();
        fs::copy(&by.key, &used.key).unwrap();
    };
    let (ca, certificate, key) = (
        text(&at("ca.crt")),
        text(&used.certificate),
        text(&used.key),
    );
    fs::copy(&first.certificate, &ca).unwrap();
    let settings = [
        SHORT_LEASE,
        ("cluster_ca", &*ca),
        ("cluster_cert", &certificate),
        ("cluster_key", &key),
    ];
    let mut cluster = Cluster::existing_on(asking_for_certificates(&first), &settings);
    replace(&former);
    let pair = ["--cluster-cert", &certificate, "--cluster-key", &key];
    let init = [&["init", "--cluster-ca", &ca], &pair[..]].concat();
    cluster.ask(&init).code(0);

    replace(&present);
    let host = cluster.add();
    let said = cluster[host].wait_for_line("waiting for etcd at ");
    assert!(said.contains("--cluster-cert"), "{said}");
    replace(&former);
    cluster[host].wait_until_ready();
    let mut writer = cluster.store(host, "writer");
    writer.set("key", "before");

    // etcd reads at its start which certificates it accepts.
    fs::copy(&second.certificate, &first.certificate).unwrap();
    cluster.etcd.kill_all();
    cluster.etcd.restart_all();
    let request = writer.command(&["SET", "key", "after"]);
    writer.client.start(request.publish());
    let said = cluster[host].wait_for_log("received fatal alert");
    assert!(said.contains("check --cluster-cert"), "{said}");
    replace(&present);
    cluster.store(host, "reader").set("other", "value");
}
