//! What writes cost flash memory: the bytes that reach the device of an ext4 file system, by the
//! store and by the file system's journal. Needs root.

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use statehouse_tests::{Server, Store, small::Small};
use statehouse_wal::{Directory, Discard, Log, Options};

/// The record of a SET with a value of 64 bytes has more.
const RECORD_BYTES_MIN: u64 = 220;

/// A store with one client that sends SETs at a steady rate.
struct Rate<'a> {
    settings: &'a [(&'a str, &'a str)],
    /// A mount option of the file system.
    mount: &'a str,
    per_second: u32,
    /// How long SETs are sent before those that count, and those that count. The journal of the
    /// file system commits a whole number of times in each.
    warm_up: Duration,
    counted: Duration,
}

impl Rate<'_> {
    /// The bytes per SET that reach the device.
    fn bytes_per_set(&self) -> Option<u64> {
        let small = Small::mount_to_measure(128)?;
        small.remount(self.mount);
        let data = small.data();
        let mut settings = self.settings.to_vec();
        settings.push(("data", &data));
        let mut server = Server::restartable(&settings);
        let mut store: Store = server.store("client");
        self.send(&mut store, self.warm_up);
        let before = small.device_bytes();
        let sets = self.send(&mut store, self.counted);
        let written = small.device_bytes() - before;
        server.kill();
        let bytes = written / sets;
        println!("{:?}, {}: {bytes} bytes each", self.settings, self.mount);
        Some(bytes)
    }

    /// Sends SETs for a time, and returns how many.
    fn send(&self, store: &mut Store, time: Duration) -> u64 {
        let began = Instant::now();
        let mut sets = 0;
        while began.elapsed() < time {
            store.set("key", "v".repeat(64));
            sets += 1;
            let due = Duration::from_secs(1) * sets / self.per_second;
            thread::sleep(due.saturating_sub(began.elapsed()));
        }
        sets.into()
    }
}

/// One SET per second for ten commits of the journal. Within this time the kernel also writes what a
/// start has changed.
const TEN_COMMITS: Rate<'_> = Rate {
    settings: &[],
    mount: "commit=5",
    per_second: 1,
    warm_up: Duration::from_secs(50),
    counted: Duration::from_secs(50),
};

#[test]
#[ignore = "writes once a second for a minute"]
fn flush_of_each_write_costs_at_most_8_kib() {
    let rate = Rate {
        settings: &[("durability", "always")],
        ..TEN_COMMITS
    };
    if let Some(bytes) = rate.bytes_per_set() {
        assert!(bytes <= 8 << 10, "{bytes} bytes for each SET");
    }
}

#[test]
#[ignore = "writes for a minute"]
fn write_within_an_interval_costs_at_most_six_times_its_record() {
    let rate = Rate {
        settings: &[("durability", "interval")],
        per_second: 10,
        ..TEN_COMMITS
    };
    if let Some(bytes) = rate.bytes_per_set() {
        assert!(bytes <= 6 * RECORD_BYTES_MIN, "{bytes} bytes for each SET");
    }
}

/// With the defaults it costs 20 times its record: `host/docs/flash.md` says why.
#[test]
#[ignore = "writes once a second for three minutes"]
fn rare_commits_keep_a_write_per_second_below_six_records() {
    let rate = Rate {
        settings: &[("durability", "interval"), ("sync_interval", "10s")],
        mount: "commit=60",
        warm_up: Duration::from_secs(70),
        counted: Duration::from_secs(120),
        ..TEN_COMMITS
    };
    if let Some(bytes) = rate.bytes_per_set() {
        assert!(bytes <= 6 * RECORD_BYTES_MIN, "{bytes} bytes for each SET");
    }
}

/// The bytes that reach the device until everything that `act` writes is on it.
fn device_bytes(small: &Small, act: impl FnOnce()) -> u64 {
    small.settle();
    let before = small.device_bytes();
    act();
    small.settle();
    small.device_bytes() - before
}

/// A state of `mib` MiB as a snapshot.
fn snapshot(log: &Log, mib: usize, now_ms: u64) {
    let mut snapshot = log.begin_snapshot(now_ms).unwrap().unwrap();
    for _ in 0..mib {
        snapshot.block(&vec![7; 1 << 20]).unwrap();
    }
    log.finish_snapshot(snapshot).unwrap();
}

#[test]
#[ignore = "mounts a file system"]
fn snapshot_and_removed_history_cost_little_beyond_their_bytes() {
    const STATE_MIB: usize = 32;
    const SEGMENTS: u64 = 16;
    let Some(small) = Small::mount_to_measure(512) else {
        return;
    };
    let disk = Arc::new(Directory::open(small.data()).unwrap());
    let options = Options {
        history_bytes: 0,
        ..Options::default()
    };
    let segment_bytes = options.segment_bytes;
    let (log, _) = Log::open(disk, options, 1, &mut Discard).unwrap();
    // Fills whole segments but for the header of a frame each.
    let fill = |segments: u64| {
        for _ in 0..4 * segments {
            log.append(&[&vec![7; (segment_bytes / 4 - 256) as usize]])
                .unwrap();
            log.commit().unwrap();
        }
    };
    log.maintain(1).unwrap();
    let created = device_bytes(&small, || fill(SEGMENTS));
    let taken = device_bytes(&small, || snapshot(&log, STATE_MIB, 2));
    fill(1);
    let least = device_bytes(&small, || snapshot(&log, 1, 3));
    // Some become spares, the others are removed. The first snapshot stays as a reserve.
    let history = log.figures().history;
    let removed = device_bytes(&small, || log.maintain(4).unwrap());
    assert_eq!(history - log.figures().history, SEGMENTS * segment_bytes);
    let recycled = device_bytes(&small, || fill(SEGMENTS));

    let of_state = (STATE_MIB as u64) << 20;
    let beyond = taken.saturating_sub(of_state);
    let of_segment = |bytes: u64| bytes as f64 / (SEGMENTS * segment_bytes) as f64;
    println!(
        "snapshot of {of_state} bytes: {beyond} more; of 1 MiB: {} more; removal of {SEGMENTS} segments: {removed}; \
         {:.3} bytes for each of the log in new segments, {:.3} in recycled ones",
        least.saturating_sub(1 << 20),
        of_segment(created),
        of_segment(recycled),
    );
    assert!(beyond <= of_state / 100, "{beyond}");
    assert!(of_segment(removed) <= 0.02, "{removed}");
    assert!(of_segment(recycled) <= 1.05, "{recycled}");
}
