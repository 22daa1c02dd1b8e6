//! A full disk. The server must refuse writes with an error text, accept removals, lose nothing
//! that was acknowledged, and use room as soon as it is freed. These tests mount a small file
//! system, so they need root.

use std::{
    collections::BTreeMap, fs, io::Write, os::unix::fs::symlink, path::Path, thread, time::Duration,
};

use statehouse_tests::{
    Admin, Dice, Hlc, Server, Store,
    client::PATIENCE,
    files::of_kind,
    small::{
        FileSystem::{self, Ext4, Tmpfs},
        Small,
    },
    wait::{eventually, until},
};

pub(crate) const QUOTA: &[u8] = b"-ERR the quota has been exceeded\r\n";
const VALUE_BYTES: usize = 100_000;

/// Random bytes, which cannot be compressed on their way to the disk.
pub(crate) fn noise(seed: u64, bytes: usize) -> Vec<u8> {
    let mut dice = Dice::of(seed);
    (0..bytes).map(|_| dice.next() as u8).collect()
}

fn value(n: usize) -> Vec<u8> {
    noise(n as u64, VALUE_BYTES)
}

/// SETs new keys until one is refused, and adds the acknowledged ones to `acknowledged`.
fn fill(store: &mut Store, acknowledged: &mut BTreeMap<usize, Hlc>) {
    let from = acknowledged.keys().next_back().map_or(0, |last| last + 1);
    for n in from..from + 1000 {
        let answer = store.ask(&[b"SET", format!("key {n}").as_bytes(), &value(n)]);
        if answer.payload() == QUOTA {
            assert_eq!(answer.version(), None);
            return;
        }
        assert_eq!(answer.payload(), b"+OK\r\n");
        acknowledged.insert(n, answer.version().unwrap());
    }
    panic!("the disk accepted 100 MB, more than it has room for");
}

fn check(store: &mut Store, acknowledged: &BTreeMap<usize, Hlc>) {
    for (n, version) in acknowledged {
        let key = format!("key {n}");
        assert_eq!(store.get(&key), Some(value(*n)), "{key}");
        let answer = store.ask(&["GET", &key]);
        assert_eq!(answer.version().as_ref(), Some(version), "{key}");
    }
}

/// Retries a write until it is accepted. The server must detect free room without an operator.
pub(crate) fn retry_write(store: &mut Store, key: &str) -> Hlc {
    eventually("writes are accepted, since there is room", || {
        let answer = store.ask(&[b"SET", key.as_bytes(), &value(1)]);
        if answer.payload() == b"+OK\r\n" {
            return Some(answer.version().unwrap());
        }
        assert_eq!(answer.payload(), QUOTA);
        None
    })
}

fn remove(store: &mut Store, n: usize, acknowledged: &mut BTreeMap<usize, Hlc>) {
    let answer = store.ask(&["DEL", &format!("key {n}")]);
    assert_eq!(answer.payload(), b":1\r\n", "{}", answer.text());
    assert_eq!(answer.version(), acknowledged.remove(&n));
}

pub(crate) fn start(small: &Small, more: &[(&str, &str)]) -> Server {
    let data = small.data();
    let settings = [&[("data", data.as_str())], more].concat();
    let server = Server::restartable(&settings);
    assert!(Path::new(&data).exists());
    server
}

/// Fills a disk and restarts the server on it. Then the operator makes the disk larger.
fn fill_and_resize(kind: FileSystem, megabytes: u32) {
    let Some(small) = Small::mount(kind, megabytes) else {
        return;
    };
    let mut server = start(&small, &[]);
    let mut store = server.store("client");
    let mut acknowledged = BTreeMap::new();
    fill(&mut store, &mut acknowledged);
    server.wait_for_log("the disk is full");
    assert!(acknowledged.len() > 20, "{} keys", acknowledged.len());
    // Reads, watches and removals still work, and watchers are notified.
    let mut watcher = server.store("watcher");
    watcher.watch("key 0");
    remove(&mut store, 0, &mut acknowledged);
    assert!(watcher.notification().payload.ends_with(b"DELETE\r\n"));
    check(&mut store, &acknowledged);
    // Restarts twice, since the first start may have changed something.
    for round in 1..=2 {
        server.kill_and_restart();
        store = server.store("client");
        check(&mut store, &acknowledged);
        assert_eq!(store.get("key 0"), None);
        remove(&mut store, round, &mut acknowledged);
    }
    small.resize(megabytes * 2, &mut server);
    store = server.store("client");
    growth_is_accepted_and_kept(server, store, &acknowledged);
}

/// Retries a write. The write and all acknowledged ones must survive a kill.
fn growth_is_accepted_and_kept(
    mut server: Server,
    mut store: Store,
    acknowledged: &BTreeMap<usize, Hlc>,
) {
    let version = retry_write(&mut store, "again");
    assert!(acknowledged.values().all(|earlier| earlier < &version));
    server.kill_and_restart();
    let mut store = server.store("client");
    check(&mut store, acknowledged);
    assert_eq!(store.get("again"), Some(value(1)));
}

#[test]
fn full_disk_accepts_removals_and_loses_nothing() {
    for (kind, megabytes) in [(Tmpfs, 24), (Tmpfs, 40), (Ext4, 24)] {
        fill_and_resize(kind, megabytes);
    }
}

/// Clients retry, so a refusal must not take room on the disk. Removals must still work after any
/// number of refusals.
fn refuse_many_writes(kind: FileSystem) {
    let Some(small) = Small::mount(kind, 24) else {
        return;
    };
    let server = start(&small, &[]);
    let mut store = server.store("client");
    let mut acknowledged = BTreeMap::new();
    fill(&mut store, &mut acknowledged);
    for n in 0..600 {
        let answer = store.ask(&[b"SET", format!("more {n}").as_bytes(), &value(n)]);
        assert_eq!(answer.payload(), QUOTA);
    }
    remove(&mut store, 0, &mut acknowledged);
    check(&mut store, &acknowledged);
}

#[test]
fn full_disk_after_many_refusals_accepts_removals() {
    refuse_many_writes(Tmpfs);
}

/// If the server keeps no history, removals alone free room.
fn free_room_by_removals(kind: FileSystem) {
    let Some(small) = Small::mount(kind, 24) else {
        return;
    };
    let server = start(&small, &[("history_bytes", "0")]);
    let mut store = server.store("client");
    let mut acknowledged = BTreeMap::new();
    fill(&mut store, &mut acknowledged);
    let all: Vec<usize> = acknowledged.keys().copied().collect();
    for n in &all[..all.len() - 5] {
        remove(&mut store, *n, &mut acknowledged);
    }
    growth_is_accepted_and_kept(server, store, &acknowledged);
}

#[test]
fn removals_without_history_free_room() {
    free_room_by_removals(Tmpfs);
}

/// Writes far more bytes to few keys than the disk has room for. Overwritten values must free room
/// for new ones.
fn overwrite_few_keys(kind: FileSystem) {
    let Some(small) = Small::mount(kind, 48) else {
        return;
    };
    let mut server = start(&small, &[("history_bytes", "0")]);
    let mut store = server.store("client");
    let mut last = None;
    for n in 0..1000 {
        let answer = store.ask(&[b"SET", format!("key {}", n % 10).as_bytes(), &value(n)]);
        if answer.payload() == QUOTA {
            // The server is writing a snapshot, which frees room.
            thread::sleep(Duration::from_millis(100));
            last = Some(retry_write(&mut store, &format!("key {}", n % 10)));
            continue;
        }
        assert_eq!(answer.payload(), b"+OK\r\n");
        last = answer.version();
    }
    server.kill_and_restart();
    let mut store = server.store("client");
    assert_eq!(store.ask(&["GET", "key 9"]).version(), last);
}

#[test]
fn small_disk_holds_unlimited_overwrites_of_few_keys() {
    overwrite_few_keys(Tmpfs);
}

/// The cases of this module that the quick tests run only on tmpfs.
#[test]
#[ignore = "takes minutes"]
fn full_ext4_disk_behaves_as_tmpfs() {
    fill_and_resize(Ext4, 40);
    refuse_many_writes(Ext4);
    free_room_by_removals(Ext4);
    overwrite_few_keys(Ext4);
}

/// Takes the last free bytes of a file system, as a log file of another program may.
fn take_all_room(small: &Small) -> std::path::PathBuf {
    let path = small.path().join("of another program");
    let mut file = fs::File::options()
        .create(true)
        .append(true)
        .open(&path)
        .unwrap();
    for bytes in [1 << 20, 4096] {
        while file.write_all(&vec![1; bytes]).is_ok() {}
    }
    path
}

/// Removals use up the segments in reserve. Then they are refused, since nobody could say when they
/// would be on the disk, and no start finds room for the log.
#[test]
fn removals_beyond_the_reserve_are_refused() {
    const KEYS: usize = 400;
    const PART: &str = "a long key, so that a removal takes much of the log ";
    let Some(small) = Small::mount(Tmpfs, 40) else {
        return;
    };
    let mut server = start(&small, &[("history_bytes", "0")]);
    let mut store = server.store("client");
    let key = |n: usize| format!("{n} {}", PART.repeat(400));
    for n in 0..KEYS {
        store.set(key(n), "value");
    }
    let expires = store.ask(&["SET", "expires", "value", "PX", "1000"]);
    assert_eq!(expires.payload(), b"+OK\r\n");
    let other = take_all_room(&small);
    let mut removed = 0;
    while removed < KEYS {
        // The disk stays full also when a snapshot has freed segments.
        take_all_room(&small);
        match store.ask(&["DEL", &key(removed)]).payload() {
            b":1\r\n" => removed += 1,
            answer => {
                assert_eq!(answer, QUOTA);
                break;
            }
        }
    }
    assert!((1..KEYS).contains(&removed), "{removed} of {KEYS} removals");
    // Reads do not wait for the record of an expiry either.
    thread::sleep(Duration::from_millis(1100));
    assert_eq!(store.get(key(removed)), Some(b"value".to_vec()));
    assert_eq!(store.get("expires"), None);
    assert_eq!(store.ask(&["DEL", "absent"]).payload(), b":0\r\n");
    server.wait_for_log("no room on the disk for the next records");
    server.kill();
    while small.free_bytes() > 0 {
        take_all_room(&small);
    }
    server.start_again(&[]);
    let status = server.wait(PATIENCE);
    assert_eq!(status.code(), Some(75), "{:?}", server.stderr());
    fs::remove_file(other).unwrap();
    server.restart();
    let mut store = server.store("client");
    for n in 0..KEYS {
        let expected = (n >= removed).then(|| b"value".to_vec());
        assert_eq!(store.get(key(n)), expected, "{n}");
    }
    assert_eq!(store.ask(&["DEL", &key(removed)]).payload(), b":1\r\n");
}

/// An earlier version stored no store name in the data directory of an embedded broker. No write
/// to `/dev/full` finds room.
#[test]
fn full_disk_without_a_store_name_serves_reads() {
    let mut server = Server::restartable(&[("data", "data")]);
    server.store("client").set("key", "value");
    server.kill();
    let name = server.directory().join("data/mqtt-client-id");
    fs::remove_file(&name).unwrap();
    symlink("/dev/full", name.with_extension("new")).unwrap();
    server.restart();
    server.wait_for_log("this run has a name of its own");
    assert!(!name.exists());
    let value = server.store("client").get("key");
    assert_eq!(value, Some(b"value".to_vec()));
}

/// Waits until the server counts with at most this much room. It asks the file system once a second.
fn wait_for_free_bytes(small: &Small, most: u64) {
    until("the server notices that other files fill the disk", || {
        let (_, page) = Admin::at(small.data().as_ref()).ask("GET", "/metrics", b"");
        let value = |line: &str| {
            line.strip_prefix("statehouse_disk_free_bytes ")?
                .parse()
                .ok()
        };
        let free: u64 = page.lines().find_map(value).unwrap();
        free <= most
    });
}

/// Regression: the record of a long write needs a segment of its own, and the disk had no room for
/// it beside the spare segments. All other writes waited behind it without end.
#[test]
fn long_write_gets_the_room_of_spare_segments() {
    const FREE: usize = 900_000;
    let Some(small) = Small::mount(Tmpfs, 8) else {
        return;
    };
    let server = start(&small, &[]);
    let mut store = server.store("client");
    store.set("old", "value");
    until("the log has prepared its segments", || {
        of_kind(small.data().as_ref(), "spare").len() >= 2
    });
    let filler = small.path().join("of another program");
    fs::write(&filler, vec![1; small.free_bytes() - FREE]).unwrap();
    wait_for_free_bytes(&small, FREE as u64);
    let long = vec![b'x'; 1_000_000];
    let answer = store.ask(&[b"SET".as_slice(), b"long", &long]);
    assert_eq!(answer.payload(), b"+OK\r\n");
    assert_eq!(store.get("old"), Some(b"value".to_vec()));
    fs::remove_file(filler).unwrap();
    retry_write(&mut store, "next");
}
