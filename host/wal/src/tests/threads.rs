//! The threads of a log, on a real directory.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex};
use std::time::Duration;

use super::*;
use crate::{Callbacks, Durability, WriteAheadLog};

/// The state that the store and the clients of a test share.
#[derive(Default)]
struct Shared {
    released: Mutex<u64>,
    moved: Condvar,
    failed: AtomicU64,
    list: Mutex<Vec<Vec<u8>>>,
    backwards: AtomicBool,
    /// True while the store has no state yet.
    is_starting: AtomicBool,
}

impl Shared {
    fn wait(&self, position: LogPosition) {
        let mut released = self.released.lock().expect("no panic");
        while *released < position.0 {
            released = self.moved.wait(released).expect("no panic");
        }
    }
}

/// Copies the list block by block, each under the list's lock.
struct Live(Arc<Shared>, usize);

impl Source for Live {
    fn ready(&self) -> bool {
        !self.0.is_starting.load(Ordering::Acquire)
    }

    fn begin(&mut self) {
        assert!(self.ready(), "blocks are requested only after ready");
        self.1 = 0;
    }

    fn next(&mut self, into: &mut Vec<u8>) -> Result<bool, String> {
        let list = self.0.list.lock().expect("no panic");
        let Some(record) = list.get(self.1) else {
            return Ok(false);
        };
        self.1 += 1;
        into.extend(block(self.1 as u64, record));
        Ok(true)
    }
}

fn start(log: Log) -> (WriteAheadLog, Arc<Shared>) {
    let shared = Arc::new(Shared::default());
    let (notified, failed) = (Arc::clone(&shared), Arc::clone(&shared));
    let callbacks = Callbacks {
        released: Box::new(move |position| {
            let mut released = notified.released.lock().expect("no panic");
            notified
                .backwards
                .fetch_or(*released >= position.0, Ordering::Relaxed);
            *released = position.0;
            notified.moved.notify_all();
        }),
        failed: Box::new(move |_| _ = failed.failed.fetch_add(1, Ordering::Relaxed)),
        source: Box::new(Live(Arc::clone(&shared), 0)),
        now_ms: Box::new(|| 1),
    };
    (
        WriteAheadLog::start(log, callbacks).expect("threads"),
        shared,
    )
}

/// For logs whose source has no blocks.
fn without_snapshots() -> Options {
    Options {
        snapshot_min_bytes: u64::MAX,
        ..small()
    }
}

/// Appends under the lock of the store, as a store does, and waits for the release.
fn clients(wal: &WriteAheadLog, shared: &Shared, threads: u64, rounds: u64) {
    std::thread::scope(|scope| {
        for thread in 0..threads {
            scope.spawn(move || {
                let mut dice = Dice::new(thread);
                for round in 0..rounds {
                    let group: Vec<Vec<u8>> = (0..1 + dice.below(3))
                        .map(|n| format!("{thread} {round} {n}").into_bytes())
                        .collect();
                    let parts: Vec<&[u8]> = group.iter().map(Vec::as_slice).collect();
                    let position = {
                        let mut list = shared.list.lock().expect("no panic");
                        let urgent = dice.once_in(3);
                        let position = if urgent {
                            wal.append_urgent(&parts)
                        } else {
                            wal.append(&parts)
                        }
                        .expect("small");
                        list.extend(group.iter().cloned());
                        assert_eq!(position.0, list.len() as u64);
                        position
                    };
                    if wal.released() < position {
                        shared.wait(position);
                    }
                    assert!(wal.released() >= position);
                }
            });
        }
    });
}

#[test]
fn clients_snapshots_and_close_on_a_real_directory() {
    let interval = Durability::Interval(Duration::from_millis(20));
    for (durability, delay) in [
        (Durability::Always, 0),
        (interval, 0),
        (Durability::Always, 1),
    ] {
        let place = tempfile::tempdir().expect("a directory");
        let options = Options {
            durability,
            commit_delay: Duration::from_millis(delay),
            ..small()
        };
        let (log, _) = open_directory(place.path(), options.clone());
        let (wal, shared) = start(log);
        clients(&wal, &shared, 8, 150);
        let disk = Directory::read_only(place.path()).expect("there");
        while snapshots(&disk).is_empty() {
            std::thread::yield_now();
        }
        wal.close().expect("no faults");
        let times = wal.figures().times;
        assert!(times.flushes.count() > 0 && times.snapshots.count() > 0);
        assert!(
            !shared.backwards.load(Ordering::Relaxed),
            "notified positions rise"
        );
        let list = shared.list.lock().expect("no panic").clone();
        assert_eq!(
            *shared.released.lock().expect("no panic"),
            list.len() as u64
        );
        let kept = snapshots(&disk).len();
        assert!((1..=2).contains(&kept), "{kept}");
        // The lock is released with the log.
        drop(wal);
        let (_, found) = open_directory(place.path(), options);
        assert!(found.list() == list);
    }
}

/// The process ends without a close. Released records must survive.
#[test]
fn released_records_survive_without_a_close() {
    let (disk, log) = new_log(small());
    let (wal, shared) = start(log);
    clients(&wal, &shared, 4, 100);
    let released = wal.released().0;
    let crashed = disk.fork().crash(4);
    drop(wal);
    let found = reopened(&crashed);
    assert!(found.len() as u64 >= released);
    assert!(found == shared.list.lock().expect("no panic")[..found.len()]);
}

#[test]
fn fault_is_reported_once_and_blocks_no_thread() {
    let (disk, log) = new_log(small());
    let (wal, shared) = start(log);
    clients(&wal, &shared, 2, 20);
    disk.fail_sync_in(Some(0));
    let before = wal.log.durable();
    let large = vec![1; 1 << 20];
    // This exceeds the buffer: an append that waited for a dead thread would block for ever.
    for _ in 0..40 {
        wal.append(&[&large]).expect("fits");
    }
    while wal.log.failure().is_none() {
        std::thread::yield_now();
    }
    for _ in 0..40 {
        wal.append(&[&large]).expect("fits");
    }
    assert_eq!(wal.log.durable(), before);
    assert!(wal.log.failure().is_some_and(|failure| !failure.panicked));
    assert!(wal.close().is_err());
    assert_eq!(shared.failed.load(Ordering::Relaxed), 1);
}

#[test]
fn close_does_not_wait_for_an_automatic_snapshot() {
    let options = Options {
        snapshot_min_bytes: 20_000,
        snapshot_bytes_per_second: 1 << 26,
        ..small()
    };
    let (disk, log) = new_log(options.clone());
    let (wal, shared) = start(log);
    while snapshots(&disk).is_empty() {
        clients(&wal, &shared, 2, 50);
    }
    wal.close().expect("no faults");
    let list = shared.list.lock().expect("no panic").clone();
    // At the slowest rate, this snapshot would take minutes.
    let disk = disk.kill();
    let slow = Options {
        snapshot_bytes_per_second: 1,
        ..options
    };
    let (log, _, records) = open(&disk, slow).expect("opens");
    assert!(records.list() == list);
    let (wal, shared) = start(log);
    let large = std::iter::repeat_n(vec![0; 1 << 20], 64);
    shared.list.lock().expect("no panic").extend(large);
    let before = snapshots(&disk).len();
    // This exceeds twice the last snapshot, so another one is due.
    wal.append(&[&[0; 1 << 20]]).expect("fits");
    let begun = || {
        let names = disk.list().expect("a directory");
        names.iter().any(|name| name == files::SNAPSHOT_TEMPORARY)
    };
    while !begun() {
        std::thread::yield_now();
    }
    wal.close().expect("no faults");
    assert!(!begun());
    assert!(snapshots(&disk).len() <= before);
}

#[test]
fn due_snapshot_waits_until_the_source_is_ready() {
    let (disk, log) = new_log(small());
    let list = vec![vec![1; 20_000]];
    commit(&log, &list[0]);
    assert!(log.snapshot_due());
    let shared = Arc::new(Shared {
        list: Mutex::new(list),
        is_starting: AtomicBool::new(true),
        ..Shared::default()
    });
    let asked = Arc::<AtomicU64>::default();
    let looks = Arc::clone(&asked);
    let callbacks = Callbacks {
        released: Box::new(|_| {}),
        failed: Box::new(|_| {}),
        source: Box::new(Live(Arc::clone(&shared), 0)),
        // Called in each round of upkeep.
        now_ms: Box::new(move || looks.fetch_add(1, Ordering::Relaxed)),
    };
    let wal = WriteAheadLog::start(log, callbacks).expect("threads");
    while asked.load(Ordering::Relaxed) < 2 {
        std::thread::yield_now();
    }
    assert!(snapshots(&disk).is_empty());
    shared.is_starting.store(false, Ordering::Release);
    while snapshots(&disk).is_empty() {
        assert!(
            asked.load(Ordering::Relaxed) < 20,
            "it comes with the next rounds"
        );
        std::thread::yield_now();
    }
    wal.close().expect("no faults");
}

/// A group that caused a change of segment was synced on the way. Its release must be notified at
/// once.
#[test]
fn urgent_group_at_segment_end_does_not_wait_for_interval() {
    let (disk, log) = new_log(Options {
        durability: Durability::Interval(Duration::from_secs(3600)),
        ..without_snapshots()
    });
    let (wal, shared) = start(log);
    // Everything is written when there is room again. Each of the large groups needs its own
    // segment.
    disk.limit_bytes(Some(disk.used_bytes()));
    wal.append(&[&[1; 10_000]]).expect("fits");
    let urgent = wal.append_urgent(&[b"urgent"]).expect("small");
    wal.append(&[&[1; 10_000]]).expect("fits");
    disk.limit_bytes(None);
    let released = shared.released.lock().expect("no panic");
    let (released, _) = shared
        .moved
        .wait_timeout_while(released, Duration::from_secs(30), |released| {
            *released < urgent.0
        })
        .expect("no panic");
    assert!(*released >= urgent.0, "notified of {released} only");
    drop(released);
    wal.close().expect("no faults");
}

/// The system refuses the third thread.
#[test]
fn partly_started_log_ends() {
    let (disk, log) = new_log(small());
    let wal = WriteAheadLog::begin(log, Box::new(|_| {}), Box::new(|_| {})).expect("threads");
    wal.append(&[b"one"]).expect("small");
    let (end, ended) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        drop(wal);
        end.send(()).expect("waited for");
    });
    ended
        .recv_timeout(Duration::from_secs(30))
        .expect("it does not hang");
    assert_eq!(reopened(&disk.kill()), [b"one".to_vec()]);
}

#[test]
fn panic_of_a_thread_is_reported_as_failure() {
    let (_, log) = new_log(small());
    let (tell, notified) = std::sync::mpsc::sync_channel(2);
    let callbacks = Callbacks {
        released: Box::new(|position| panic!("a listener that fails at {position}")),
        failed: Box::new(move |failure| tell.send(failure.clone()).expect("waited for")),
        source: Box::new(Live(Arc::default(), 0)),
        now_ms: Box::new(|| 1),
    };
    let wal = WriteAheadLog::start(log, callbacks).expect("threads");
    wal.append(&[b"one"]).expect("small");
    let failure = notified
        .recv_timeout(Duration::from_secs(30))
        .expect("a failure is reported");
    assert!(failure.panicked, "{failure}");
    // Appends must not block although no thread empties the buffer.
    for _ in 0..40 {
        wal.append(&[&[1; 1 << 20]]).expect("fits");
    }
    assert!(wal.close().is_err());
}

/// Appends happen under locks that readers need.
#[test]
fn appends_to_a_full_disk_do_not_wait() {
    let (disk, log) = new_log(Options {
        segment_bytes: 1 << 20,
        ..without_snapshots()
    });
    let (wal, _) = start(log);
    disk.limit_bytes(Some(disk.used_bytes()));
    assert!(!wal.is_behind());
    for _ in 0..40 {
        wal.append(&[&[1; 1 << 20]]).expect("fits");
    }
    // The log asks callers to wait.
    assert!(wal.is_behind());
    disk.limit_bytes(None);
    wal.close().expect("room again");
    assert!(!wal.is_behind());
    assert_eq!(reopened(&disk.kill()).len(), 40);
}

#[test]
fn close_on_a_full_disk_returns() {
    let (disk, log) = new_log(without_snapshots());
    let (wal, _) = start(log);
    disk.limit_bytes(Some(disk.used_bytes()));
    for _ in 0..40 {
        wal.append(&[&[1; 1 << 20]]).expect("fits");
    }
    let refused = wal.close().expect_err("there is no room");
    assert!(refused.is_full(), "{refused}");
}

/// A listener that appends more than the buffer holds, on the thread that has to empty it.
#[test]
fn listener_may_append_more_than_the_buffer() {
    let (_, log) = new_log(without_snapshots());
    let wal: Arc<std::sync::OnceLock<WriteAheadLog>> = Arc::default();
    let (appender, done) = (Arc::clone(&wal), Arc::new(AtomicBool::new(false)));
    let notified = Arc::clone(&done);
    let callbacks = Callbacks {
        released: Box::new(move |position| {
            let wal = appender.wait();
            if position == LogPosition(1) {
                for _ in 0..40 {
                    wal.append(&[&[1; 1 << 20]]).expect("fits");
                }
            }
            notified.store(position >= LogPosition(41), Ordering::Release);
        }),
        failed: Box::new(|_| {}),
        source: Box::new(Live(Arc::default(), 0)),
        now_ms: Box::new(|| 1),
    };
    let started = wal.get_or_init(|| WriteAheadLog::start(log, callbacks).expect("threads"));
    started.append(&[b"one"]).expect("small");
    while !done.load(Ordering::Acquire) {
        std::thread::yield_now();
    }
    assert_eq!(started.log.durable(), LogPosition(41));
    started.close().expect("no faults");
}
