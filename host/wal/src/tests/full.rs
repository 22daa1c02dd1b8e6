//! A log on a small disk: the log must never take the space of the next snapshot.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::*;
use crate::{Callbacks, Discard, Room, WriteAheadLog};

/// A state of a fixed size. Each record overwrites a part of it.
struct State {
    bytes: Arc<AtomicU64>,
    left: u64,
}

const BLOCK_BYTES: u64 = 4096;

impl Source for State {
    fn bytes(&self) -> Option<u64> {
        Some(self.bytes.load(Ordering::Relaxed))
    }

    fn begin(&mut self) {
        self.left = self.bytes.load(Ordering::Relaxed);
    }

    fn next(&mut self, into: &mut Vec<u8>) -> Result<bool, String> {
        let bytes = self.left.min(BLOCK_BYTES);
        self.left -= bytes;
        into.resize(bytes as usize, 7);
        Ok(bytes > 0)
    }
}

fn start(disk: &Simulation, state: u64) -> (WriteAheadLog, Arc<AtomicU64>) {
    let shared: Arc<dyn Disk> = Arc::new(disk.clone());
    let (log, _) = Log::open(shared, Options::default(), 1, &mut Discard).expect("opens");
    let bytes = Arc::new(AtomicU64::new(state));
    let source = State {
        bytes: Arc::clone(&bytes),
        left: 0,
    };
    let callbacks = Callbacks {
        released: Box::new(|_| {}),
        failed: Box::new(|failure| panic!("{failure}")),
        source: Box::new(source),
        now_ms: Box::new(|| 1),
    };
    (
        WriteAheadLog::start(log, callbacks).expect("threads"),
        bytes,
    )
}

fn wait_until(what: &str, mut so: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(30);
    while !so() {
        assert!(Instant::now() < end, "never {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Overwrites like a client that waits while the log is behind. Returns the bytes that were
/// written.
fn overwrite(wal: &WriteAheadLog, bytes: u64) {
    let record = vec![1; 20_000];
    for _ in 0..bytes / 20_000 {
        wait_until("caught up", || !wal.is_behind());
        assert_ne!(wal.room(), Room::Reserve);
        wal.append(&[&record]).expect("small");
    }
}

#[test]
fn overwriting_a_third_of_the_disk_is_not_refused() {
    const DISK: u64 = 12 << 20;
    let disk = Simulation::new(1);
    disk.limit_bytes(Some(DISK));
    let (wal, _) = start(&disk, DISK / 3);
    overwrite(&wal, 3 * DISK);
    wal.close().expect("there is room");
    assert!(disk.used_bytes() <= DISK);
    // And the same after a restart.
    let (wal, _) = start(&disk.kill(), DISK / 3);
    overwrite(&wal, DISK);
}

/// The first snapshot takes a while, and the log after it must leave space for the second one.
#[test]
fn state_growing_to_a_third_of_its_disk_is_not_refused() {
    const DISK: u64 = 24 << 20;
    let disk = Simulation::new(1);
    disk.limit_bytes(Some(DISK));
    let (wal, state) = start(&disk, 0);
    let record = vec![1; 20_000];
    while state.load(Ordering::Relaxed) < DISK / 3 {
        wait_until("caught up", || !wal.is_behind());
        wal.append(&[&record]).expect("small");
        state.fetch_add(20_000, Ordering::Relaxed);
    }
    overwrite(&wal, DISK);
}

#[test]
fn state_beyond_its_disk_is_short_until_it_shrinks() {
    const DISK: u64 = 8 << 20;
    let disk = Simulation::new(1);
    disk.limit_bytes(Some(DISK));
    let (wal, state) = start(&disk, 0);
    // The state grows with each record until growth is refused.
    let record = vec![1; 20_000];
    loop {
        wait_until("caught up", || !wal.is_behind());
        if wal.room() == Room::Reserve {
            break;
        }
        wal.append(&[&record]).expect("small");
        let grown = state.fetch_add(20_000, Ordering::Relaxed);
        assert!(grown < DISK / 2, "{grown} bytes fit in no two snapshots");
    }
    assert!(state.load(Ordering::Relaxed) > DISK / 3);
    state.store(DISK / 8, Ordering::Relaxed);
    wal.append(&[b"a removal"]).expect("small");
    wait_until("room again", || wal.room() == Room::Plenty);
    overwrite(&wal, DISK);
}

/// The figures of a directory must lead to the same decision as the log makes.
#[test]
fn disk_use_shows_whether_growth_is_refused() {
    let (disk, log) = new_log(Options {
        segment_bytes: 1 << 20,
        ..Options::default()
    });
    let append = |count| {
        for _ in 0..count {
            commit(&log, &[1; 100_000]);
        }
    };
    append(20);
    snapshot(&log, &vec![vec![7; 100_000]; 50], 1).expect("no faults");
    append(30);
    let mut shown = Vec::new();
    for megabytes in (1..64).rev() {
        disk.limit_bytes(Some(megabytes << 20));
        _ = log.maintain(1);
        let files = crate::inspect(&disk).expect("a directory").files;
        let used = crate::DiskUse::of(&disk, &files).expect("a size");
        let held = used.log + used.history + used.snapshot + used.spares;
        assert!(held <= disk.used_bytes() && held > 8 << 20, "{used:?}");
        assert_eq!(used.free, disk.free_bytes().expect("a size"));
        let refuses = !matches!(log.room(), Room::Plenty | Room::Tight);
        assert_eq!(used.refuses_writes, refuses, "{megabytes} MiB: {used:?}");
        shown.push(refuses);
        if refuses {
            break;
        }
    }
    assert_eq!(shown.last(), Some(&true));
    assert!(shown.len() > 10, "{shown:?}");
}

/// An earlier version left this directory without dividing the disk: it is full of history, without
/// space for a segment.
#[test]
fn disk_full_of_history_is_reused() {
    let (disk, log) = new_log(Options {
        history_ms: u64::MAX,
        history_bytes: u64::MAX,
        ..Options::default()
    });
    for _ in 0..4 {
        for _ in 0..60 {
            commit(&log, &[1; 100_000]);
        }
        snapshot(&log, &[vec![7; 1000]], 1).expect("no faults");
    }
    drop(log);
    for name in disk.list().expect("a directory") {
        if matches!(crate::files::kind(&name), crate::Kind::Spare(_)) {
            disk.remove(&name).expect("no faults");
        }
    }
    disk.limit_bytes(Some(disk.used_bytes()));
    let (wal, _) = start(&disk.kill(), 1000);
    wal.append(&[b"a write"]).expect("small");
    wait_until("room", || wal.room() == Room::Plenty);
    overwrite(&wal, 10 << 20);
}

/// A segment for one long record may take the room of the log. The newest snapshot holds that
/// record, so no snapshot is due before the next one.
#[test]
fn snapshot_of_all_records_leaves_nothing_to_wait_for() {
    let disk = Simulation::new(1);
    disk.limit_bytes(Some(4 << 20));
    let (log, ..) = open(&disk, Options::default()).expect("opens");
    let state = vec![vec![7; 100_000]; 12];
    commit(&log, &[1; 1_200_000]);
    snapshot(&log, &state, 1).expect("no faults");
    log.maintain(1).expect("there is room");
    assert!(log.is_short(), "the segment is not long enough");
    assert!(!log.snapshot_due());
    assert_eq!(log.room(), Room::Plenty);
    log.append(&[&[1; 1000]]).expect("small");
    assert_eq!(log.room(), Room::Tight);
    log.commit().expect("no faults");
    assert!(log.snapshot_due());
    assert_eq!(log.room(), Room::Tight);
    snapshot(&log, &state, 1).expect("no faults");
    log.maintain(1).expect("there is room");
    assert_eq!(log.room(), Room::Plenty);
    assert!(!log.is_short());
}
