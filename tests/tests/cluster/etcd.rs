//! What operators and other clients do to etcd while hosts serve: they replace a server, use up its
//! quota, and compact it.

use std::{
    thread,
    time::{Duration, Instant},
};

use statehouse_tests::{
    Admin, Client, Cluster, Etcd, Heard, Server, Store, assert_contains, cluster::NAME,
    histories::Play,
};

use crate::{
    CLIENTS, SHORT_LEASE, eventually,
    resumed::{begin, connect},
};

/// Far above an election in etcd, which takes about a second.
const ELECTION: Duration = Duration::from_secs(8);

/// A leader asks etcd for its size every 10 s.
const ROOM: Duration = Duration::from_secs(60);

/// How often etcd is filled until no host makes room any more.
const FILLINGS: usize = 20;

const QUOTA: u64 = 16 << 20;
const REFUSED: &str = "-ERR the quota has been exceeded\\r\\n";

/// Regression: a host did not start while one server of etcd refused its requests.
#[test]
fn server_of_etcd_that_refuses_requests_is_passed_over() {
    let mut etcd = Etcd::start(1);
    etcd.add_learner();
    let mut cluster = Cluster::without_hosts_on(etcd, &[SHORT_LEASE]);
    cluster.add_hosts(2);
    let mut store = cluster.store(cluster.follower(), "writer");
    store.set("key", "value");
    assert_eq!(store.get("key"), Some(b"value".to_vec()));
    let (_, after) = cluster.fail_over();
    let mut store = cluster.store(after.host, "reader");
    assert_eq!(store.get("key"), Some(b"value".to_vec()));
}

/// In an earlier version, a start and `init` waited until the connection to such a server was given
/// up, and no log line said why.
#[test]
fn frozen_server_of_etcd_is_passed_over() {
    let mut cluster = Cluster::existing_on(Etcd::start(3), &[SHORT_LEASE]);
    cluster.etcd.pause(0);
    // One of the others.
    cluster.etcd.leader();
    cluster.ask(&["init"]).code(0);
    cluster.add_hosts(2);
    let said = cluster[0].wait_for_log("does not serve this host");
    assert!(said.contains(&cluster.etcd.urls()[0]), "{said}");
    let mut store = cluster.store(cluster.follower(), "writer");
    store.set("key", "value");
    assert_eq!(store.get("key"), Some(b"value".to_vec()));
}

#[test]
fn replaced_server_of_etcd_carries_the_store() {
    let mut cluster = Cluster::with(3, 3, &[SHORT_LEASE]);
    cluster.store(0, "writer").set("key", "value");
    let mut play = Play::over(&cluster, "play", &CLIENTS);
    play.go_on();
    play.longest_gap();
    let epoch = cluster.present_leader().epoch;
    let report = |play: &mut Play, what: &str| {
        play.go_on();
        let gap = play.longest_gap();
        eprintln!("{what}: no answer for {} ms", gap.as_millis());
        assert!(gap < ELECTION, "{what}: {gap:?}");
    };
    let lost = cluster.etcd.leader();
    cluster.etcd.kill(lost);
    report(&mut play, "a server is lost");
    cluster.etcd.replace(lost);
    cluster.etcd.wait_until_ready();
    report(&mut play, "it is replaced");
    // Of the first three, one is left. Without the new one there is no majority.
    let original = (lost + 1) % 3;
    cluster.etcd.kill(original);
    report(&mut play, "another server is lost");
    cluster.etcd.restart_all();
    report(&mut play, "it has returned");
    play.end();
    assert_eq!(cluster.present_leader().epoch, epoch, "a host took over");
    let value = cluster.store(0, "reader").get("key");
    assert_eq!(value, Some(b"value".to_vec()));
}

/// A server of etcd returns with an empty directory as an etcd cluster of its own. In an earlier
/// version hosts that asked it said that etcd lost committed data, and stopped.
#[test]
fn server_of_etcd_that_returns_as_another_cluster_is_ignored() {
    let mut cluster = Cluster::with(2, 3, &[SHORT_LEASE]);
    let leader = cluster.present_leader().host;
    let mut waiting = begin(&cluster[leader], "waiting");
    waiting.set("key", "before");
    cluster.etcd.kill(2);
    cluster.etcd.return_alone(2);
    cluster.etcd.wait_until_ready();
    // Without a majority, hosts ask each server in turn.
    cluster.etcd.pause(1);
    let request = waiting.command(&["SET", "another key", "during"]);
    waiting.client.start(request.publish());
    let said = cluster[leader].wait_for_log("belongs to another etcd cluster");
    assert!(said.contains(&cluster.etcd.urls()[2]), "{said}");
    cluster.etcd.resume(1);
    for host in 0..2 {
        let id = format!("store{host}");
        let mut store = eventually("a host serves", || {
            let client = Client::attempt(cluster[host].address(), &connect(&id))?;
            Some(Store::new(client, &id))
        });
        store.set("key", "after");
        assert_eq!(store.get("key"), Some(b"after".to_vec()));
        assert!(cluster[host].runs(), "a host stopped");
    }
}

/// A cluster on an etcd with a small quota, which the hosts know.
fn small(hosts: usize) -> Cluster {
    small_on(1, hosts)
}

fn small_on(nodes: usize, hosts: usize) -> Cluster {
    let quota = format!("--quota-backend-bytes={QUOTA}");
    let etcd = Etcd::start_with(nodes, "http", &[quota]);
    let settings = [SHORT_LEASE, ("cluster_quota", &QUOTA.to_string())];
    let mut cluster = Cluster::without_hosts_on(etcd, &settings);
    cluster.add_hosts(hosts);
    cluster
}

fn name(number: usize) -> String {
    format!("key{number:05}")
}

/// Sets a key once etcd has room again, within [`ROOM`] from this moment.
fn set_when_there_is_room(store: &mut Store, key: &str, value: &str, began: Instant) {
    while store.ask(&["SET", key, value]).text() == REFUSED {
        assert!(began.elapsed() < ROOM, "no room after {ROOM:?}");
        thread::sleep(Duration::from_millis(100));
    }
}

/// Writes so many keys in turn until a write is refused, which must happen. Returns the number of
/// accepted writes.
fn write_until_refused(store: &mut Store, keys: usize) -> usize {
    for number in 0..2000 {
        let mut value = vec![b'v'; 50_000];
        value.extend(number.to_string().bytes());
        let answer = store.ask(&[b"SET", name(number % keys).as_bytes(), &value]);
        if answer.text() == REFUSED {
            eprintln!("{number} values of 50 kB fit a quota of {QUOTA} bytes");
            return number;
        }
        assert_eq!(answer.text(), "+OK\\r\\n", "write {number}");
    }
    panic!("100 MB fit a quota of {QUOTA} bytes");
}

/// The log of a small state has used up the room. The next snapshot replaces it.
#[test]
fn full_quota_refuses_writes_and_serves_reads_and_removals() {
    const STATE: usize = 20;
    let mut cluster = small(2);
    let mut store = cluster.store(cluster.follower(), "store");
    let accepted = write_until_refused(&mut store, STATE);
    let leader = cluster.present_leader().host;
    let (status, body) = Admin::of(&cluster[leader]).ask("GET", "/readyz", b"");
    assert_eq!(status, 503, "{body}");
    assert_contains!(body, "etcd's quota is used up: writes are refused");
    let last = accepted.to_string();
    let value = store.get(name(accepted % STATE)).unwrap();
    assert!(
        !value.ends_with(last.as_bytes()),
        "a refused write has an effect"
    );
    let removed = name((accepted + 1) % STATE);
    assert_eq!(store.ask(&["DEL", &removed]).text(), ":1\\r\\n");
    assert_eq!(store.get(&removed), None);

    // A host takes over although there is no room.
    let (_, next) = cluster.fail_over();
    let mut store = cluster.store(next.host, "next");
    assert_eq!(store.get(&removed), None);
    assert_eq!(store.get(name(accepted % STATE)), Some(value));
    let began = Instant::now();
    set_when_there_is_room(&mut store, "after", "value", began);
    eprintln!("room after {} ms", began.elapsed().as_millis());
    assert_eq!(store.get("after"), Some(b"value".to_vec()));
    assert_eq!(store.get(&removed), None);
}

/// The state itself has used up the room. A snapshot of it does not fit, and must not use up the
/// rest: then etcd refuses removals too.
#[test]
fn state_that_fills_the_quota_can_be_read_and_removed() {
    let cluster = small(1);
    let mut store = cluster.store(0, "store");
    let accepted = write_until_refused(&mut store, 2000);
    // Longer than the snapshot takes.
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(5) {
        assert!(store.get(name(1)).is_some());
        thread::sleep(Duration::from_millis(100));
    }
    for number in 0..accepted {
        assert_eq!(store.ask(&["DEL", &name(number)]).text(), ":1\\r\\n");
    }
    set_when_there_is_room(&mut store, "after", "value", began);
}

/// Another client uses the quota up, so that etcd refuses every write, also those of the log. No
/// write can be acknowledged then, and reads wait for a lease. The hosts make room when the keys of
/// that client are deleted.
#[test]
fn quota_used_up_by_another_client_loses_nothing() {
    let mut cluster = small(2);
    let follower = cluster.follower();
    let mut store = begin(&cluster[follower], "store");
    let mut before = b"before".to_vec();
    let mut version = store.set("key", &before);
    let mut attempts = 0..FILLINGS;
    let (value, request, packet_id) = loop {
        let attempt = attempts.next().expect("a full etcd stays full");
        cluster.etcd.fill();
        let value = format!("during {attempt}").into_bytes();
        let request = store.command(&[b"SET", b"key", &value[..]]);
        let packet_id = store.client.start(request.publish());
        let Heard::Packet(packet) = store.client.poll(Duration::from_secs(3)) else {
            break (value, request, packet_id);
        };
        // The leader made room behind the filling. What it accepted must not be lost either.
        store.client.put_back(vec![packet]);
        let answer = store.finish(&request, packet_id);
        if answer.text() != REFUSED {
            assert_eq!(answer.text(), "+OK\\r\\n");
            version = answer.version().expect("an accepted SET has a version");
            before = value;
        }
    };
    let said = "etcd's quota is used up and it accepts no writes";
    let leader = cluster.present_leader().host;
    cluster[leader].wait_for_log(said);
    cluster.etcd.delete_filling();
    let began = Instant::now();
    // The client resumes its session and sends the request again.
    let mut store = eventually("a host serves", || {
        let client = Client::attempt(cluster[follower].address(), &connect("store"))?;
        assert!(client.session_present());
        Some(Store::on(client, "store"))
    });
    let mut answer = store.redeliver(&request, packet_id, true);
    // It may be decided before the leader knows that there is room. A refusal of the original is
    // repeated, unless another host leads by now: a full etcd has no record of it.
    while answer.text() == REFUSED {
        let found = store.get("key");
        assert!(
            found
                .as_ref()
                .is_some_and(|it| [&before, &value].contains(&it))
        );
        assert!(began.elapsed() < ROOM, "no room after {ROOM:?}");
        thread::sleep(Duration::from_millis(100));
        answer = store.ask(&[b"SET", b"key", &value[..]]);
    }
    assert_eq!(answer.text(), "+OK\\r\\n");
    assert!(answer.version() > Some(version));
    eprintln!(
        "accepted {} ms after the removal",
        began.elapsed().as_millis()
    );
    assert_eq!(store.get("key"), Some(value.clone()));
    let (_, next) = cluster.fail_over();
    let found = cluster.store(next.host, "next").get("key");
    assert_eq!(found, Some(value));
}

#[test]
fn commands_try_each_server_of_etcd_and_end_without_a_majority() {
    let mut cluster = Cluster::existing_on(Etcd::start(3), &[]);
    cluster.etcd.kill(0);
    cluster.etcd.leader();
    cluster.ask(&["init"]).code(0);
    cluster.etcd.kill(1);
    let check = cluster.ask(&["check"]).code(1).text();
    assert!(check.contains("start the other servers of etcd"), "{check}");
    assert!(!check.contains("use etcd 3.5"), "{check}");
}

/// In an earlier version the command used the quota up, left what it had written, and said that
/// etcd does not answer.
#[test]
fn init_from_a_state_beyond_the_quota_is_refused() {
    let mut single = Server::restartable(&[]);
    let mut store = single.store("writer");
    for number in 0..600 {
        store.set(name(number), vec![b'v'; 50_000]);
    }
    drop(store);
    single.stop();
    let quota = format!("--quota-backend-bytes={QUOTA}");
    let mut cluster = Cluster::existing_on(Etcd::start_with(1, "http", &[quota]), &[]);
    let data = single.data();
    let init = ["init", "--from", &data];
    let before = cluster.etcd.revision();
    let bytes = QUOTA.to_string();
    let with_quota = [&init[..], &["--cluster-quota", bytes.as_str()]].concat();
    cluster.ask(&with_quota).fails(4, "quota");
    assert_eq!(cluster.etcd.revision(), before, "it wrote to etcd");
    let checked = cluster.ask(&["check"]).code(1).text();
    assert!(!checked.contains("NOSPACE"), "{checked}");
    // Without the quota, etcd 3.5 and earlier refuse a piece. Those before it are deleted.
    let refused = cluster.ask(&init).fails(4, "quota");
    assert!(!refused.stderr.contains("does not answer"), "{refused:#?}");
    let pieces = format!("/statehouse/{NAME}/0/snap/");
    assert_eq!(cluster.etcd.count_below(&pieces), 0);
}

/// The server that is down cannot be defragmented, and the others suffice.
#[test]
fn hosts_make_room_while_a_server_of_etcd_is_down() {
    let mut cluster = small_on(3, 2);
    let follower = cluster.follower();
    begin(&cluster[follower], "store").set("key", "before");
    let down = (cluster.etcd.leader() + 1) % 3;
    cluster.etcd.kill(down);
    cluster.etcd.fill();
    let leader = cluster.present_leader().host;
    cluster[leader].wait_for_log("etcd's quota is used up and it accepts no writes");
    cluster.etcd.delete_filling();
    let mut store = eventually("a host serves", || {
        let client = Client::attempt(cluster[follower].address(), &connect("store"))?;
        Some(Store::on(client, "store"))
    });
    set_when_there_is_room(&mut store, "key", "after", Instant::now());
    assert_eq!(store.get("key"), Some(b"after".to_vec()));
    cluster.etcd.restart(down);
    cluster.etcd.wait_until_ready();
    store.set("key", "all servers");
}

/// Also with `--auto-compaction`, or by a tool. A host that was down must join again from the
/// state, because etcd has deleted the history that its watch would need.
#[test]
fn compaction_by_another_client_loses_nothing() {
    let mut cluster = Cluster::with(2, 1, &[SHORT_LEASE]);
    let mut play = Play::over(&cluster, "play", &CLIENTS);
    for _ in 0..5 {
        play.go_on();
        cluster.etcd.compact();
    }
    let leader = cluster.present_leader();
    let down = cluster.follower();
    cluster[down].kill();
    play.go_on();
    let mut store = cluster.store(leader.host, "writer");
    (0..50).for_each(|n| drop(store.set(name(n), n.to_string())));
    cluster.etcd.compact();
    cluster[down].restart();
    cluster.etcd.compact();
    play.go_on();
    assert_eq!(cluster.present_leader(), leader);
    // A paused host finds that its watch was compacted.
    cluster[down].signal("STOP");
    (50..100).for_each(|n| drop(store.set(name(n), n.to_string())));
    cluster.etcd.compact();
    thread::sleep(Duration::from_secs(1));
    cluster[down].signal("CONT");
    play.go_on();
    let (old, next) = cluster.fail_over();
    play.died();
    assert_eq!(next.host, down);
    let mut store = cluster.store(next.host, "reader");
    for n in 0..100 {
        assert_eq!(store.get(name(n)), Some(n.to_string().into_bytes()));
    }
    cluster[old.host].restart();
    play.go_on();
    play.end();
}
