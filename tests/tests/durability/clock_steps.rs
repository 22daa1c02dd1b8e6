//! A wall clock that is stepped ahead, as NTP does on a machine that keeps no time while it is off.
//! The deadlines of keys move with it. This must not take the room that removals need. The test
//! mounts a small file system, so it needs root.

use statehouse_tests::{
    Server, Store, WallClock,
    small::{FileSystem::Tmpfs, Small},
};

use crate::disk_full::{QUOTA, noise, retry_write};

/// SETs new keys with an expiry of an hour until one is refused. Returns their number.
fn fill(store: &mut Store, value: &[u8]) -> usize {
    for n in 0..5000 {
        let key = format!("key {n}");
        let answer = store.ask(&[b"SET", key.as_bytes(), value, b"PX", b"3600000"]);
        if answer.payload() == QUOTA {
            return n;
        }
        assert_eq!(answer.payload(), b"+OK\r\n");
    }
    panic!("the disk accepted 40 MB, more than it has room for");
}

fn remove(store: &mut Store, n: usize) {
    let answer = store.ask(&["DEL", &format!("key {n}")]);
    assert_eq!(answer.payload(), b":1\r\n", "{}", answer.text());
}

#[test]
fn clock_steps_on_a_full_disk_freeze_nothing() {
    let Some(small) = Small::mount(Tmpfs, 24) else {
        return;
    };
    let (clock, data) = (WallClock::right(), small.data());
    let mut server = Server::restartable_in(&[("data", &data)], &clock.environment());
    let mut store = server.store("client");
    let value = noise(1, 8000);
    let count = fill(&mut store, &value);
    assert!(count > 500, "{count} keys");
    let mut keys = 0..count;
    for step in 1..=5 {
        clock.set(2 * step);
        for n in keys.by_ref().take(20) {
            remove(&mut store, n);
        }
        let kept = format!("key {}", count - 1);
        assert_eq!(store.get(&kept).as_ref(), Some(&value));
    }
    server.wait_for_log("the deadlines of keys do not move with the clock");
    server.kill_and_restart();
    let mut store = server.store("client");
    for n in keys {
        remove(&mut store, n);
    }
    retry_write(&mut store, "again");
}
