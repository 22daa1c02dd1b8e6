//! What writes cost flash memory: the bytes that reach the device of an ext4 file system, by the
//! store and by the file system's journal. Needs root.

use std::{
    thread,
    time::{Duration, Instant},
};

use statehouse_tests::{
    Server, Store,
    small::{FileSystem::Ext4, Small},
};

/// The record of a SET with a value of 64 bytes has more.
const RECORD_BYTES_MIN: u64 = 200;

/// The bytes per SET that reach the device, with one client that sends so many per second.
fn bytes_per_set(settings: &[(&str, &str)], per_second: u32, sets: u32) -> Option<u64> {
    let small = Small::mount(Ext4, 128)?;
    let data = small.data();
    let mut settings = settings.to_vec();
    settings.push(("data", &data));
    let mut server = Server::restartable(&settings);
    let mut store: Store = server.store("client");
    store.set("key", "v".repeat(64));
    // The store prepares its spare segments, and the journal writes what the start has changed.
    thread::sleep(Duration::from_secs(12));
    let (before, began) = (small.device_bytes(), Instant::now());
    for n in 0..sets {
        let due = Duration::from_secs(1) * n / per_second;
        thread::sleep(due.saturating_sub(began.elapsed()));
        store.set("key", "v".repeat(64));
    }
    // The journal commits every 5 s.
    thread::sleep(Duration::from_secs(6));
    let written = small.device_bytes() - before;
    server.kill();
    Some(written / u64::from(sets))
}

#[test]
#[ignore = "writes once a second for a minute"]
fn flush_of_each_write_costs_at_most_8_kib() {
    let Some(bytes) = bytes_per_set(&[("durability", "always")], 1, 60) else {
        return;
    };
    println!("always, one SET per second: {bytes} bytes each");
    assert!(bytes <= 8 << 10, "{bytes} bytes for each SET");
}

#[test]
#[ignore = "writes for a minute"]
fn write_within_an_interval_costs_at_most_six_times_its_record() {
    let Some(bytes) = bytes_per_set(&[("durability", "interval")], 10, 600) else {
        return;
    };
    println!("interval, ten SETs per second: {bytes} bytes each");
    assert!(bytes <= 6 * RECORD_BYTES_MIN, "{bytes} bytes for each SET");
}
