//! The history that each host of a cluster keeps, as the commands find it in the data
//! directory of a host, while the host runs and after it has stopped.

use std::{
    fs,
    path::Path,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;
use statehouse_tests::{
    Admin, Client, Cluster, Connect, Etcd, Hlc, Ran, Server, Store,
    client::PATIENCE,
    cluster::NAME,
    command, run,
    server::own_address,
    small::{FileSystem, Small},
    wait::eventually,
    wait::until,
};

use crate::SHORT_LEASE;

/// The changes of a key, newest first, and the line about the beginning of the history. None if the
/// directory holds no history yet.
fn history(server: &Server, key: &str) -> Option<(Vec<Value>, Value)> {
    let ran = server.run(&["history", key, "--json", "--limit", "100000"]);
    if ran.code != Some(0) {
        return None;
    }
    let mut lines = ran.objects();
    let beginning = lines.pop().unwrap();
    assert_eq!(beginning["event"], "beginning");
    Some((lines, beginning))
}

/// The values that a key had, oldest first; `None` for a deletion.
fn values(changes: &[Value]) -> Vec<Option<String>> {
    let value = |change: &Value| match change["event"].as_str().unwrap() {
        "set" => Some(change["value"].as_str().unwrap().to_owned()),
        "deleted" => None,
        other => panic!("{other}"),
    };
    changes.iter().rev().map(value).collect()
}

/// Waits until the history of a host has this many changes of a key.
fn wait_for_changes(server: &Server, key: &str, count: usize) -> (Vec<Value>, Value) {
    eventually(&format!("{count} changes of {key}"), || {
        history(server, key).filter(|(changes, _)| changes.len() >= count)
    })
}

/// Writes of one key that clients got answers to.
#[derive(Default)]
struct Written(Vec<(Option<String>, Option<Hlc>)>);

impl Written {
    fn set(&mut self, store: &mut Store, count: usize) {
        for _ in 0..count {
            let value = format!("value {}", self.0.len());
            let version = store.set("key", &value);
            self.0.push((Some(value), Some(version)));
        }
    }

    fn delete(&mut self, store: &mut Store) {
        let answer = store.ask(&["DEL", "key"]);
        assert_eq!(answer.payload(), b":1\r\n");
        // The answer has the version of the value that was deleted.
        self.0.push((None, None));
    }

    /// Asserts that the history of a host has exactly these writes.
    fn check(&self, server: &Server) {
        let (changes, beginning) = wait_for_changes(server, "key", self.0.len());
        let expected: Vec<Option<String>> = self.0.iter().map(|it| it.0.clone()).collect();
        assert_eq!(values(&changes), expected);
        assert_eq!(beginning["since"], Value::Null, "{beginning}");
        for ((value, answered), change) in self.0.iter().zip(changes.iter().rev()) {
            let version = change["version"].as_str().unwrap();
            if let Some(answered) = answered {
                assert_eq!(version, answered.to_string());
            }
            let ran = server.run(&["get", "key", "--as-of", version]);
            match value {
                Some(value) => assert_eq!(ran.code(0).text(), *value),
                None => _ = ran.code(1),
            }
        }
    }
}

/// Every recorded write must give the same answer again, and the newest state can be asked.
fn check_replay(server: &Server, writes: usize, last: &str) {
    let replayed = server.run(&["replay"]).code(0).text();
    let all = replayed.lines().find(|line| line.starts_with("all "));
    let same = all.and_then(|line| line.split_whitespace().nth(1));
    assert_eq!(same, Some(&*writes.to_string()), "{replayed}");
    let explain = ["explain", "--data", "statehouse-data", "--", "GET", "key"];
    let explained = server.run(&explain).code(0);
    assert!(explained.text().contains(last), "{explained:#?}");
    check_doctor(server);
}

fn check_doctor(server: &Server) {
    let found = server.run(&["doctor"]).code(0).text();
    assert!(found.ends_with("all is well\n"), "{found}");
}

#[test]
fn history_of_each_host_holds_what_clients_wrote() {
    let mut cluster = Cluster::with(3, 1, &[SHORT_LEASE]);
    let mut written = Written::default();
    let mut store = cluster.store(0, "first");
    written.set(&mut store, 5);
    written.delete(&mut store);
    written.set(&mut store, 5);
    for host in 0..3 {
        written.check(&cluster[host]);
    }
    drop(store);

    let (killed, next) = cluster.fail_over();
    let mut store = cluster.store(next.host, "second");
    written.set(&mut store, 5);
    cluster[killed.host].restart();
    written.set(&mut store, 5);
    let follower = cluster.follower();
    cluster[follower].stop();
    written.set(&mut store, 5);
    drop(store);
    for host in (0..3).filter(|host| *host != follower) {
        written.check(&cluster[host]);
        check_replay(&cluster[host], written.0.len(), "value 25");
    }
    cluster[follower].restart();
    written.check(&cluster[follower]);
    // What a host answered before SIGTERM is in its history.
    let leader = cluster.present_leader().host;
    written.set(&mut cluster.store(leader, "third"), 5);
    for host in 0..3 {
        cluster[host].stop();
    }
    written.check(&cluster[leader]);
    check_replay(&cluster[leader], written.0.len(), "value 30");
}

/// Sets a key. Just before a truncation, a small quota refuses writes for some moments.
fn set_when_there_is_room(store: &mut Store, key: &str, value: impl AsRef<[u8]>, end: Instant) {
    let request = [b"SET", key.as_bytes(), value.as_ref()];
    while store.ask(&request).payload() != b"+OK\r\n" {
        assert!(Instant::now() < end, "etcd stays full");
        thread::sleep(Duration::from_millis(100));
    }
}

/// Writes values of 100 kB until the leader has truncated its log. The quota in the settings makes
/// it do so early. Returns how many values of `key` were written.
fn write_until_truncated(cluster: &Cluster, host: usize, written: usize) -> usize {
    let mut store = cluster.store(host, "writer");
    let (end, mut count) = (Instant::now() + 3 * PATIENCE, written);
    loop {
        for n in 0..20 {
            let large = vec![b'v'; 100_000];
            set_when_there_is_room(&mut store, &format!("large {n}"), &large, end);
        }
        set_when_there_is_room(&mut store, "key", format!("value {count}"), end);
        count += 1;
        let status = cluster.ask(&["status"]).code(0).text();
        if count > written + 8 && !status.contains("snapshot  none yet") {
            return count;
        }
        assert!(Instant::now() < end, "{status}");
    }
}

#[test]
fn history_survives_the_truncation_of_the_log() {
    let mut cluster = Cluster::with(3, 1, &[SHORT_LEASE, ("cluster_quota", "16777216")]);
    let leader = cluster.present_leader();
    let away = cluster.follower();
    let stays = cluster.other_than(&[leader.host, away]);
    cluster.store(leader.host, "first").set("key", "value 0");
    wait_for_changes(&cluster[away], "key", 1);
    cluster[away].kill();
    let count = write_until_truncated(&cluster, leader.host, 1);
    let expected = |from: usize| -> Vec<Option<String>> {
        (from..count)
            .map(|it| Some(format!("value {it}")))
            .collect()
    };
    for host in [leader.host, stays] {
        let (changes, beginning) = wait_for_changes(&cluster[host], "key", count);
        assert_eq!(values(&changes), expected(0));
        assert_eq!(beginning["since"], Value::Null, "{beginning}");
    }
    // The host that was away finds a truncated log, and starts over behind its snapshot.
    cluster[away].restart();
    cluster[away].wait_for_log("starts over");
    let mut last = cluster.store(leader.host, "last");
    set_when_there_is_room(&mut last, "key", "end", Instant::now() + PATIENCE);
    let (changes, beginning) = eventually("the new history", || {
        let found = history(&cluster[away], "key");
        found.filter(|(changes, _)| changes.first().is_some_and(|it| it["value"] == "end"))
    });
    assert!(beginning["since"].is_string(), "{beginning}");
    let values = values(&changes);
    let from = count + 1 - values.len();
    assert!(from > 1);
    assert_eq!(values[..values.len() - 1], expected(from));
    check_doctor(&cluster[away]);
    let copies = fs::read_dir(cluster[away].data_directory()).unwrap();
    let is_copy = |name: &String| name.starts_with("history-");
    let names = copies.map(|it| it.unwrap().file_name().into_string().unwrap());
    assert_eq!(names.filter(is_copy).count(), 1, "an old copy remains");
}

/// The store must go on without a history.
fn check_goes_on(cluster: &Cluster, host: usize) {
    let mut store = cluster.store(host, "after");
    for n in 0..20 {
        store.set("key", format!("after {n}"));
    }
    assert_eq!(store.get("key"), Some(b"after 19".to_vec()));
}

/// The host, which leads, must not answer with its old copy as if that were the present state.
fn check_past_is_refused(admin: &Admin) {
    for (path, expected) in [
        ("/v1/history?key=key", 421),
        ("/v1/value?key=key&as_of=0s", 421),
        ("/v1/replay", 503),
    ] {
        let (status, body) = admin.ask("GET", path, b"");
        assert_eq!(status, expected, "{path}: {body}");
        assert!(body.contains("up to date"), "{path}: {body}");
    }
}

#[test]
fn removed_history_ends_without_harm_and_starts_over_at_a_start() {
    let mut cluster = Cluster::with(1, 1, &[SHORT_LEASE]);
    cluster.store(0, "first").set("key", "value");
    wait_for_changes(&cluster[0], "key", 1);
    assert!(cluster[0].metric("cluster_history_position") > 0);
    fs::remove_dir_all(cluster[0].data_directory().join("history-1")).unwrap();
    cluster.store(0, "second").set("key", "value");
    let line = cluster[0].wait_for_log("keeps no history from now on");
    assert!(line.contains("restart this host"), "{line}");
    check_goes_on(&cluster, 0);
    assert_eq!(cluster[0].metric("cluster_history_position"), 0);
    check_past_is_refused(&Admin::of(&cluster[0]));
    cluster[0].stop();
    cluster[0].restart();
    wait_for_changes(&cluster[0], "key", 22);
}

/// In an earlier version the damaged history was removed, although the log of the host said that it
/// could be salvaged.
#[test]
fn damaged_history_is_set_aside_and_can_be_salvaged() {
    let mut cluster = Cluster::with(1, 1, &[SHORT_LEASE]);
    let directory = cluster[0].data_directory();
    let segment = directory.join("history-1/000000000001.log");
    cluster.store(0, "first").set("early", "value");
    wait_for_changes(&cluster[0], "early", 1);
    let before = fs::read(&segment).unwrap();
    cluster.store(0, "second").set("late", "value");
    wait_for_changes(&cluster[0], "late", 1);
    cluster[0].stop();
    let mut bytes = fs::read(&segment).unwrap();
    let mut added = before.iter().zip(&bytes);
    let at = added.position(|(before, after)| before != after).unwrap();
    bytes[at] ^= 1;
    fs::write(&segment, bytes).unwrap();

    cluster[0].restart();
    cluster[0].wait_for_log("is damaged, so it starts over");
    // The new history is complete, and the damaged one stays.
    cluster[0].wait_for_log("damaged-history --salvage FILE");
    wait_for_changes(&cluster[0], "late", 1);
    check_doctor(&cluster[0]);
    let aside = directory.join("damaged-history");
    let aside = aside.to_str().unwrap();
    let place = tempfile::tempdir().unwrap();
    let [backup, restored] = ["backup", "restored"].map(|it| place.path().join(it));
    let [backup, restored] = [&backup, &restored].map(|it| it.to_str().unwrap());
    let salvage = run(&["doctor", aside, "--salvage", backup], b"").code(1);
    assert!(salvage.text().contains("wrote "), "{salvage:#?}");
    run(&["restore", backup, "--data", restored], b"").code(0);
    let get = |key: &str| run(&["get", key, "--as-of", "0s", "--data", restored], b"");
    assert_eq!(get("early").code(0).text(), "value");
    get("late").code(1);
}

#[test]
fn full_disk_of_a_host_does_not_stop_its_store() {
    let Some(small) = Small::mount(FileSystem::Tmpfs, 40) else {
        return;
    };
    let mut cluster = Cluster::without_hosts(1, &[SHORT_LEASE]);
    let data = small.data();
    let host = cluster.add_with(&[("data", &data)]);
    cluster[host].wait_until_ready();
    let mut store = cluster.store(host, "writer");
    for n in 0..500 {
        store.set(format!("key {}", n % 10), vec![b'v'; 100_000]);
    }
    cluster[host].wait_for_log("keeps no history from now on");
    check_goes_on(&cluster, host);
    check_past_is_refused(&Admin::at(Path::new(&data)));
    let at_present = ["get", "key", "--as-of", "0s", "--data", &data];
    run(&at_present, b"").says("later writes are not in it");
    cluster[host].stop();
    cluster[host].restart();
    cluster[host].wait_for_log("keeps no history from now on");
    check_goes_on(&cluster, host);
}

#[test]
fn host_without_history_keeps_no_copy() {
    let mut cluster = Cluster::with(1, 1, &[SHORT_LEASE]);
    cluster.store(0, "first").set("key", "value");
    wait_for_changes(&cluster[0], "key", 1);
    cluster[0].stop();
    cluster[0].restart_with(&[("history_bytes", "0")]);
    cluster.store(0, "second").set("key", "value");
    until("the removal of the history", || {
        let ran = cluster[0].run(&["history", "key"]);
        ran.code == Some(2) && ran.stderr.contains("--history-bytes")
    });
    assert!(!cluster[0].data_directory().join("history-1").exists());
}

const TOKEN: (&str, &str) = ("admin_token", "one token for all hosts");

/// Starts two hosts, of which `bare` keeps no copy of the log, and asks `bare` first for the past.
/// It must leave the question to the next host that is named.
fn check_past_is_asked_of_the_other(bare: usize) -> (Cluster, String) {
    let mut cluster = Cluster::without_hosts(1, &[SHORT_LEASE, TOKEN]);
    for host in 0..2 {
        let settings: &[(&str, &str)] = match host == bare {
            true => &[("history_bytes", "0")],
            false => &[],
        };
        cluster.add_with(settings);
        cluster[host].wait_until_ready();
    }
    assert_eq!(cluster.wait_for_leader_after(0).host, 0);
    cluster.store(0, "first").set("key", "value");
    let (whole, bare) = (Admin::of(&cluster[1 - bare]), Admin::of(&cluster[bare]));
    until("the other host has a history", || {
        let (status, body) = whole.ask("GET", "/v1/history?key=key", b"");
        status == 200 && body.contains("\"value\"")
    });
    for path in ["/v1/history?key=key", "/v1/value?key=key&as_of=0s"] {
        let (status, body) = bare.ask("GET", path, b"");
        assert_eq!(status, 421, "{path}: {body}");
    }
    let hosts = format!("{},{}", bare.url(), whole.url());
    for arguments in [&["history", "key"][..], &["get", "key", "--as-of", "0s"]] {
        let found = ask_hosts(arguments, &hosts).code(0).text();
        assert!(found.contains("value"), "{found}");
    }
    (cluster, hosts)
}

/// Runs a command that asks these addresses of the admin API.
fn ask_hosts(arguments: &[&str], hosts: &str) -> Ran {
    let mut asked = command(&[arguments, &["--admin", hosts]].concat());
    asked.env("STATEHOUSE_ADMIN_TOKEN", TOKEN.1);
    command::finish(asked, b"")
}

#[test]
fn follower_without_history_leaves_the_past_to_the_leader() {
    check_past_is_asked_of_the_other(1);
}

/// In an earlier version, the command failed at the leader, or got an old state from it.
#[test]
fn leader_without_history_leaves_the_past_to_a_follower() {
    let (_cluster, hosts) = check_past_is_asked_of_the_other(0);
    // A follower does not replay, so the leader says why there is no answer.
    ask_hosts(&["replay"], &hosts).fails(3, "up to date");
}

fn serve(directory: &Path, arguments: &[&str]) -> Ran {
    let all = ["serve", "--listen", "127.0.0.1:0", "--data"];
    let directory = directory.to_str().unwrap();
    run(&[&all, &[directory][..], arguments].concat(), b"")
}

#[test]
fn directory_of_a_host_is_refused_elsewhere_and_can_begin_anew() {
    let mut cluster = Cluster::with(2, 1, &[SHORT_LEASE]);
    let mut written = Written::default();
    written.set(&mut cluster.store(0, "first"), 5);
    written.check(&cluster[0]);
    let directory = cluster[0].data_directory();
    let path = directory.to_str().unwrap().to_owned();
    let backup = directory.with_file_name("backup");
    let backup = backup.to_str().unwrap();
    let copied = "holds a copy of the log of the cluster plant7, which ends at record";
    run(&["snapshot", backup, "--data", &path], b"")
        .code(0)
        .says(copied);
    let history = run(&["history", "key", "--data", &path], b"");
    history.code(0).says(copied);
    let get = |moment: &str| run(&["get", "key", "--as-of", moment, "--data", &path], b"");
    get("0s").code(0).says(copied);
    let first = written.0[0].1.as_ref().unwrap().to_string();
    let earlier = get(&first).code(0);
    assert_eq!(earlier.stderr, "", "later writes do not matter");
    cluster[0].kill();
    cluster[1].kill();

    let refused = serve(&directory, &[]).code(2);
    refused
        .says(NAME)
        .says("cluster init --from")
        .says("--cluster");
    run(&["restore", backup, "--data", &path], b"").fails(2, NAME);
    let other = Cluster::without_hosts(1, &[SHORT_LEASE]);
    let urls = other.urls();
    let joins = ["--cluster", &urls, "--cluster-name", NAME, "--name", "gw1"];
    let joins = [&joins[..], &["--cluster-listen", "127.0.0.1:0"]].concat();
    serve(&directory, &joins).fails(2, "another cluster");

    // The cluster is lost. Another one begins with the copy.
    let etcd = Etcd::start(1);
    let new = ["--cluster", &etcd.urls()[0], "--cluster-name", NAME];
    let init = ["cluster", "init", "--from", &path];
    let created = run(&[&init[..], &new].concat(), b"").code(0);
    assert!(created.text().contains("with 1 key"), "{created:#?}");
    created.says("ends at record");
    let address = own_address();
    let listens = address.to_string();
    let mut host = command(&["serve", "--listen", &listens, "--name", "new"]);
    host.args(["--cluster-listen", "127.0.0.1:0"]).args(new);
    let mut host = Server::run_unready(host);
    host.wait_until_ready();
    let mut store = Store::new(Client::connect(address, &Connect::new("new")), "new");
    assert_eq!(store.get("key"), Some(b"value 4".to_vec()));
    store.set("key", "value 5");
    wait_for_changes(&host, "key", 1);
    // The directory is as it was.
    cluster[0].restart();
    written.set(&mut cluster.store(0, "second"), 5);
    written.check(&cluster[0]);
}

fn copy(from: &Path, to: &Path) {
    let copied = Command::new("cp").arg("-a").args([from, to]).status();
    assert!(copied.unwrap().success());
}

/// etcd is restored from a backup that lacks acknowledged writes. In an earlier version hosts that
/// started then served the older state, and removed their copies of the newer one.
#[test]
fn restored_etcd_stops_hosts_and_leaves_their_history() {
    let place = tempfile::tempdir().unwrap();
    let etcd = Etcd::start_in(place.path(), 1);
    let directories = fs::read_dir(place.path()).unwrap();
    let [directory] = &directories.map(|it| it.unwrap().path()).collect::<Vec<_>>()[..] else {
        panic!("one etcd has one directory");
    };
    let (data, backup) = (directory.join("0"), place.path().join("backup"));
    let mut cluster = Cluster::without_hosts_on(etcd, &[SHORT_LEASE]);
    cluster.add_hosts(1);
    cluster.store(0, "client").set("key", "old");
    wait_for_changes(&cluster[0], "key", 1);
    cluster[0].stop();
    cluster.etcd.kill_all();
    copy(&data, &backup);
    cluster.etcd.restart_all();
    cluster[0].restart();
    cluster.store(0, "client").set("key", "new");
    wait_for_changes(&cluster[0], "key", 2);
    cluster[0].kill();

    cluster.etcd.kill_all();
    fs::remove_dir_all(&data).unwrap();
    copy(&backup, &data);
    cluster.etcd.restart_all();
    for _ in 0..2 {
        cluster[0].start_again(&[]);
        let status = cluster[0].wait(PATIENCE);
        assert_eq!(status.code(), Some(65), "{:#?}", cluster[0].stderr());
        let (changes, _) = history(&cluster[0], "key").expect("the copy is still there");
        let expected = ["old", "new"].map(|it| Some(it.to_owned()));
        assert_eq!(values(&changes), expected);
    }
}

/// The process of a copied data directory may be running. In an earlier version the new host took
/// the lead from it at once, and both answered reads.
#[test]
fn copied_data_directory_does_not_depose_the_leader() {
    let mut cluster = Cluster::with(1, 1, &[SHORT_LEASE]);
    let before = cluster.present_leader();
    let place = tempfile::tempdir().unwrap();
    let directory = place.path().join("copy");
    copy(&cluster[0].data_directory(), &directory);
    let added = cluster.add_with(&[("data", directory.to_str().unwrap())]);
    cluster[added].wait_until_ready();
    let mut store = cluster.store(added, "client");
    store.set("key", "value");
    assert_eq!(store.get("key"), Some(b"value".to_vec()));
    assert_eq!(cluster.present_leader().epoch, before.epoch);
}
