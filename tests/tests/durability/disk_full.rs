//! A full disk: writes are refused with words, removals are not, nothing that was acknowledged is lost, and room that
//! is made is used. It needs a small file system of its own, so it needs root.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use statehouse_tests::{Hlc, Server, Store, client::PATIENCE};
use tempfile::TempDir;

pub(crate) const QUOTA: &[u8] = b"-ERR the quota has been exceeded\r\n";
const VALUE_BYTES: usize = 100_000;

/// A file system of so many megabytes, which goes with it.
pub(crate) struct Small {
    pub(crate) path: PathBuf,
    _directory: TempDir,
}

impl Small {
    /// None, and a line that says why, where this user may not mount anything.
    pub(crate) fn mount(megabytes: u32) -> Option<Small> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("small");
        std::fs::create_dir(&path).unwrap();
        let size = format!("size={megabytes}m");
        let arguments = ["-t", "tmpfs", "-o", &size, "statehouse-test"];
        match Command::new("mount").args(arguments).arg(&path).output() {
            Ok(output) if output.status.success() => Some(Small {
                path,
                _directory: directory,
            }),
            other => {
                eprintln!("skipped: a file system of its own cannot be mounted here: {other:?}");
                None
            }
        }
    }

    fn resize(&self, megabytes: u32) {
        let options = format!("remount,size={megabytes}m");
        let mut mount = Command::new("mount");
        let status = mount.args(["-o", &options]).arg(&self.path).status();
        assert!(status.unwrap().success());
    }

    pub(crate) fn data(&self) -> String {
        self.path
            .join("data")
            .into_os_string()
            .into_string()
            .unwrap()
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        // Lazily, since a server of a failed test may still be there.
        let _ = Command::new("umount").arg("-l").arg(&self.path).status();
    }
}

/// Different in every place, so that nothing on the way can make less of it.
fn value(n: usize) -> Vec<u8> {
    let mut dice = statehouse_tests::Dice::of(n as u64);
    (0..VALUE_BYTES).map(|_| dice.next() as u8).collect()
}

/// SETs new keys until one is refused. What was acknowledged.
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
    panic!("100 MB went to a disk that has no room for them");
}

fn check(store: &mut Store, acknowledged: &BTreeMap<usize, Hlc>) {
    for (n, version) in acknowledged {
        let key = format!("key {n}");
        assert_eq!(store.get(&key), Some(value(*n)), "{key}");
        let answer = store.ask(&["GET", &key]);
        assert_eq!(answer.version().as_ref(), Some(version), "{key}");
    }
}

/// A write goes through in the end: room is noticed by itself.
fn write_again(store: &mut Store, key: &str) -> Hlc {
    let end = Instant::now() + PATIENCE;
    loop {
        let answer = store.ask(&[b"SET", key.as_bytes(), &value(1)]);
        if answer.payload() == b"+OK\r\n" {
            return answer.version().unwrap();
        }
        assert_eq!(answer.payload(), QUOTA);
        assert!(
            Instant::now() < end,
            "there is room, and writes are refused"
        );
        thread::sleep(Duration::from_millis(50));
    }
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

#[test]
fn a_full_disk_takes_removals_and_keeps_what_it_has() {
    for megabytes in [24, 40] {
        let Some(small) = Small::mount(megabytes) else {
            return;
        };
        let mut server = start(&small, &[]);
        let mut store = server.store("client");
        let mut acknowledged = BTreeMap::new();
        fill(&mut store, &mut acknowledged);
        server.wait_for_log("the disk is full");
        assert!(acknowledged.len() > 20, "{} keys", acknowledged.len());
        // Reads, watches and removals go on, and those who hear of them do.
        let mut watcher = server.store("watcher");
        watcher.watch("key 0");
        remove(&mut store, 0, &mut acknowledged);
        assert!(watcher.notification().payload.ends_with(b"DELETE\r\n"));
        check(&mut store, &acknowledged);
        // Twice, since the first start may have changed something.
        for round in 1..=2 {
            server.kill();
            server.restart();
            store = server.store("client");
            check(&mut store, &acknowledged);
            assert_eq!(store.get("key 0"), None);
            remove(&mut store, round, &mut acknowledged);
        }
        // The operator makes the disk larger.
        small.resize(megabytes * 2);
        let version = write_again(&mut store, "again");
        assert!(acknowledged.values().all(|earlier| earlier < &version));
        server.kill();
        server.restart();
        let mut store = server.store("client");
        check(&mut store, &acknowledged);
        assert_eq!(store.get("again"), Some(value(1)));
    }
}

/// Clients try again, and a refusal must not cost what it refuses: removals still work after any number of them.
#[test]
fn a_full_disk_can_be_asked_for_ever() {
    let Some(small) = Small::mount(24) else {
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

/// Removing makes room by itself where no history is kept.
#[test]
fn removals_make_room() {
    let Some(small) = Small::mount(24) else {
        return;
    };
    let mut server = start(&small, &[("history_bytes", "0")]);
    let mut store = server.store("client");
    let mut acknowledged = BTreeMap::new();
    fill(&mut store, &mut acknowledged);
    let all: Vec<usize> = acknowledged.keys().copied().collect();
    for n in &all[..all.len() - 5] {
        remove(&mut store, *n, &mut acknowledged);
    }
    let version = write_again(&mut store, "again");
    assert!(acknowledged.values().all(|earlier| earlier < &version));
    server.kill();
    server.restart();
    let mut store = server.store("client");
    check(&mut store, &acknowledged);
    assert_eq!(store.get("again"), Some(value(1)));
}

/// Many more writes than the disk has room for, on few keys: what no longer counts makes room for what does.
#[test]
fn a_small_disk_is_enough_for_few_keys() {
    let Some(small) = Small::mount(48) else {
        return;
    };
    let mut server = start(&small, &[("history_bytes", "0")]);
    let mut store = server.store("client");
    let mut last = None;
    for n in 0..1000 {
        let answer = store.ask(&[b"SET", format!("key {}", n % 10).as_bytes(), &value(n)]);
        if answer.payload() == QUOTA {
            // A snapshot is on its way.
            thread::sleep(Duration::from_millis(100));
            last = Some(write_again(&mut store, &format!("key {}", n % 10)));
            continue;
        }
        assert_eq!(answer.payload(), b"+OK\r\n");
        last = answer.version();
    }
    server.kill();
    server.restart();
    let mut store = server.store("client");
    assert_eq!(store.ask(&["GET", "key 9"]).version(), last);
}

/// An earlier version kept no name in the data directory of an embedded broker.
#[test]
fn start_on_a_full_disk_without_a_name_serves_reads() {
    let Some(small) = Small::mount(32) else {
        return;
    };
    let mut server = Server::restartable(&[("data", &small.data())]);
    server.store("client").set("key", "value");
    server.kill();
    std::fs::remove_file(Path::new(&small.data()).join("mqtt-client-id")).unwrap();
    let filler = small.path.join("filler");
    assert!(
        std::fs::write(&filler, vec![0; 64 << 20]).is_err(),
        "it is full"
    );
    server.restart();
    let value = server.store("client").get("key");
    assert_eq!(value, Some(b"value".to_vec()));
}
