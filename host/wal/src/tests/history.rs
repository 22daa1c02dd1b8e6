//! Retention of history, and the stale content of recycled segments.

use std::sync::atomic::Ordering;

use super::*;
use crate::limits;
use crate::{Base, Durability, Range, Verdict, inspect, read};

fn count(disk: &Simulation, wanted: fn(Kind) -> bool) -> usize {
    let names = disk.list().expect("a directory");
    names
        .iter()
        .filter(|name| wanted(files::kind(name)))
        .count()
}

fn spares(disk: &Simulation) -> usize {
    count(disk, |kind| matches!(kind, Kind::Spare(_)))
}

/// Appends about 1 KiB per round, with a snapshot every fifth.
fn grow(log: &Log, list: &mut Vec<Vec<u8>>, rounds: u64, from_ms: u64) {
    for round in 0..rounds {
        let record = vec![list.len() as u8; 1000];
        commit(log, &record);
        list.push(record);
        if round % 5 == 4 {
            // A small snapshot: only the last records of this store matter.
            snapshot(log, list, from_ms + round).expect("no faults");
        }
        log.maintain(from_ms + round).expect("no faults");
    }
}

#[test]
fn no_history_keeps_two_snapshots_and_recycles_segments() {
    let (disk, log) = new_log(small());
    let mut list = Vec::new();
    grow(&log, &mut list, 61, 0);
    assert_eq!(snapshots(&disk).len(), 2);
    let segments = segments(&disk);
    assert!((2..=6).contains(&segments.len()), "{segments:?}");
    assert!((2..=12).contains(&spares(&disk)));
    let disk = disk.kill();
    // A recycled segment holds frames of its previous use after its end, which must be ignored.
    let names = disk.list().expect("a directory");
    let last = names
        .iter()
        .rfind(|name| name.ends_with(".log"))
        .expect("segments");
    let content = disk.content(last).expect("listed");
    let stale = content[1_300..3_000].iter().any(|&byte| byte != 0);
    assert!(stale);
    assert!(reopened(&disk) == list);
}

/// A disk that is full for a moment is enough to cause a snapshot this early.
#[test]
fn snapshot_in_the_first_segment_does_not_pin_history() {
    let (disk, log) = new_log(small());
    let mut list = vec![b"one".to_vec()];
    log.append(&[b"one"]).expect("small");
    snapshot(&log, &list, 0).expect("no faults");
    grow(&log, &mut list, 61, 0);
    assert_eq!(snapshots(&disk).len(), 2);
    let segments = segments(&disk);
    assert!((2..=6).contains(&segments.len()), "{segments:?}");
    assert!(reopened(&disk.kill()) == list);
}

/// History frees segments in batches: none at some snapshots, two at others. A segment that is
/// removed and created again is written twice.
#[test]
fn steady_load_neither_removes_nor_creates_segments() {
    let options = Options {
        history_bytes: 64 << 10,
        history_ms: u64::MAX,
        ..small()
    };
    let (disk, log) = new_log(options.clone());
    let last = [vec![7; 1000]];
    let mut segments = Vec::new();
    for round in 0..60 {
        // The log grows while a snapshot is taken.
        for _ in 0..[26, 34, 30][round % 3] {
            commit(&log, &last[0]);
            log.maintain(0).expect("no faults");
        }
        snapshot(&log, &last, 0).expect("no faults");
        log.maintain(0).expect("no faults");
        segments.push(count(&disk, |kind| {
            matches!(kind, Kind::Segment(_) | Kind::Spare(_))
        }));
    }
    let (first, rest) = segments.split_at(30);
    assert!(rest.iter().all(|it| *it == rest[0]), "{rest:?}");
    assert!(rest[0] < 40, "{first:?}");
    let before = spares(&disk);
    assert!(before > 10, "{before}");
    // A restart does not remove any spare either; only time does.
    let disk = disk.kill();
    let (log, ..) = open(&disk, options).expect("opens");
    log.maintain(limits::SPARES_KEPT_MS).expect("no faults");
    let after = spares(&disk);
    assert!(
        (before - 1..=before).contains(&after),
        "{after} of {before}"
    );
    log.maintain(limits::SPARES_KEPT_MS + 1).expect("no faults");
    let grows = (64 << 10) / 4 / 4096;
    assert_eq!(spares(&disk), limits::SPARE_SEGMENTS + grows);
}

/// A file whose removal failed must be removed before any newer one.
#[test]
fn failed_removal_leaves_no_gap() {
    for fault in 0..40 {
        let (disk, log) = new_log(all_history());
        let mut list = Vec::new();
        grow(&log, &mut list, 40, 0);
        let disk = disk.kill();
        let (log, ..) = open(&disk, small()).expect("opens");
        if fault % 2 == 0 {
            disk.fail_write_in(Some(fault / 2));
        } else {
            disk.fail_sync_in(Some(fault / 2));
        }
        let failed = log.maintain(100).is_err();
        assert!(failed || fault > 20, "{fault}");
        disk.fail_write_in(None);
        disk.fail_sync_in(None);
        for seed in 0..3 {
            let left = segments(&disk.fork().crash(seed));
            let whole: Vec<u64> = (left[0]..left[0] + left.len() as u64).collect();
            assert_eq!(left, whole, "a gap after fault {fault}");
        }
        log.maintain(101).expect("no faults any more");
        assert_eq!(snapshots(&disk), [35, 40], "fault {fault}");
        assert!(segments(&disk).len() <= 4, "fault {fault}");
        let known_bytes = log.spare_bytes.load(Ordering::Acquire);
        assert_eq!(known_bytes, spares(&disk) as u64 * 4096, "fault {fault}");
    }
}

#[test]
fn history_is_kept_by_bytes_and_by_age() {
    let by_bytes = Options {
        history_bytes: 165_000,
        history_ms: u64::MAX,
        ..small()
    };
    let by_age = Options {
        history_bytes: u64::MAX,
        history_ms: 20,
        ..small()
    };
    let mut oldest = Vec::new();
    for options in [all_history(), by_bytes, by_age] {
        let (disk, log) = new_log(options.clone());
        let mut list = Vec::new();
        grow(&log, &mut list, 60, 1_000);
        let disk = disk.kill();
        let mut records = Records::default();
        let range = read(&disk, Base::Oldest, LogPosition::END, &mut records).expect("whole");
        assert!(records.list() == list);
        assert_eq!(range.end, LogPosition(60));
        oldest.push((range.base.0, range.base_ms));
        let (.., records) = open(&disk, options).expect("opens");
        assert!(records.list() == list);
    }
    assert_eq!(oldest[0], (0, 0), "everything is kept");
    // Kept are the snapshots at 40 (41 KB), 45 (46 KB) and 50 (51 KB) and the 5 segments between 40
    // and 55.
    assert_eq!(oldest[1].0, 40);
    // The unit that ends within 20 ms of the last upkeep at 1059 began at the previous snapshot.
    assert_eq!(oldest[2], (35, 1_034));
}

/// Reads up to a record, from the newest snapshot before it.
fn read_before(disk: &Simulation, position: u64, records: &mut Records) -> Result<Range, Error> {
    let position = LogPosition(position);
    read(disk, Base::Before(position), position, records)
}

#[test]
fn past_state_is_read_from_the_previous_snapshot() {
    let (disk, log) = new_log(all_history());
    let mut list = Vec::new();
    grow(&log, &mut list, 30, 0);
    for position in 1..=30 {
        let mut records = Records::default();
        let range = read_before(&disk, position, &mut records).expect("kept");
        assert!(
            range.base.0 < position && position - range.base.0 <= 5,
            "{range:?}"
        );
        assert_eq!(range.end, LogPosition(position));
        assert!(records.list() == list[..position as usize]);
    }
}

#[test]
fn removed_history_is_reported_as_not_retained() {
    let (disk, log) = new_log(small());
    let mut list = Vec::new();
    grow(&log, &mut list, 30, 0);
    match read_before(&disk, 3, &mut Records::default()) {
        Err(Error::NotRetained { position }) => assert_eq!(position.0, 3),
        other => panic!("{other:?}"),
    }
}

/// Damage is reported only if it prevents reading the requested state.
#[test]
fn later_damage_does_not_explain_removed_history() {
    let (disk, log) = new_log(all_history());
    grow(&log, &mut Vec::new(), 40, 0);
    let (log, ..) = open(&disk.kill(), small()).expect("opens");
    log.maintain(100).expect("no faults");
    grow(&log, &mut vec![Vec::new(); 40], 10, 200);
    drop(log);
    let disk = disk.kill();
    let before = |disk: &Simulation, position| read_before(disk, position, &mut Records::default());
    let removed = |outcome| matches!(outcome, Err(Error::NotRetained { .. }));
    let kept = snapshots(&disk);
    let [older, newer] = kept[..] else {
        panic!("{kept:?}")
    };
    assert!(before(&disk, newer + 1).is_ok() && before(&disk, older + 1).is_ok());
    assert!(removed(before(&disk, 3)));
    for damaged in [older, newer] {
        let disk = disk.fork();
        let name = files::snapshot(damaged);
        flip(&disk, &name, 2);
        assert!(
            removed(before(&disk, 3)),
            "{damaged} is not what is missing"
        );
        match before(&disk, older + 1) {
            Err(Error::Damaged(damage)) if damaged == older => assert_eq!(damage.file, name),
            Ok(range) if damaged == newer => assert_eq!(range.base.0, older),
            outcome => panic!("{damaged}: {outcome:?}"),
        }
    }
}

#[test]
fn damaged_snapshot_is_replaced_by_the_older_one() {
    let (disk, log) = new_log(small());
    let mut list = Vec::new();
    grow(&log, &mut list, 23, 0);
    drop(log);
    let name = files::snapshot(20);
    for at in [0, 70, 2000] {
        let disk = disk.fork().kill();
        flip(&disk, &name, at);
        let (log, opened, records) = open(&disk, small()).expect("opens");
        assert_eq!(opened.damaged_snapshots.len(), 1);
        // Damage of the header is detected at once, damage of a block only after other blocks were
        // passed on.
        assert_eq!(records.resets, u32::from(at > 0));
        assert_eq!(
            (opened.base, opened.position),
            (LogPosition(15), LogPosition(23))
        );
        assert!(records.list() == list);
        assert_eq!(count(&disk, |kind| kind == Kind::DamagedSnapshot(20)), 1);
        // The damaged snapshot is removed together with its history.
        let mut list = list.clone();
        grow(&log, &mut list, 20, 100);
        assert_eq!(
            count(&disk, |kind| matches!(kind, Kind::DamagedSnapshot(_))),
            0
        );
    }
}

#[test]
fn snapshot_without_new_records_is_not_taken() {
    let (disk, log) = new_log(small());
    log.append(&[b"one"]).expect("small");
    snapshot(&log, &[b"one".to_vec()], 1).expect("no faults");
    assert!(log.begin_snapshot(2).expect("no faults").is_none());
    log.append(&[b"two"]).expect("small");
    let begun = log.begin_snapshot(3).expect("no faults");
    let running = begun.expect("there is something new");
    assert!(matches!(log.begin_snapshot(3), Err(Error::Busy)));
    drop(running);
    assert_eq!(count(&disk, |kind| kind == Kind::Temporary), 0);
    assert!(log.begin_snapshot(4).expect("no faults").is_some());
}

#[test]
fn snapshot_is_due_by_the_length_of_the_log() {
    let options = Options {
        snapshot_min_bytes: 10_000,
        snapshot_factor: 2,
        ..small()
    };
    let (disk, log) = new_log(options.clone());
    let mut list = Vec::new();
    while !log.snapshot_due() {
        list.push(vec![1; 1000]);
        commit(&log, &[1; 1000]);
    }
    assert_eq!(list.len(), 10);
    // A restart must keep the length of the log.
    let (log, ..) = open(&disk.kill(), options).expect("opens");
    assert!(log.snapshot_due());
    snapshot(&log, &list, 1).expect("no faults");
    assert!(!log.snapshot_due());
    for appended in 1.. {
        commit(&log, &[1; 1000]);
        if log.snapshot_due() {
            assert_eq!(appended, 20, "twice the ten records of the snapshot");
            break;
        }
    }
}

#[test]
fn snapshot_is_due_later_if_history_is_kept() {
    let due_after = |history_bytes, history_ms| {
        let (_, log) = new_log(Options {
            history_bytes,
            history_ms,
            ..small()
        });
        log.maintain(0).expect("no faults");
        let mut appended = 0;
        while !log.snapshot_due() {
            commit(&log, &[1; 1000]);
            appended += 1;
        }
        appended
    };
    assert_eq!(due_after(0, u64::MAX), 4);
    assert_eq!(due_after(80_000, u64::MAX), 19);
    assert_eq!(due_after(80_000, 1), 19);
    assert_eq!(due_after(80_000, 0), 4, "none of it is");
}

#[test]
fn interval_mode_delays_only_urgent_groups() {
    let (_, log) = new_log(Options {
        durability: Durability::Interval(std::time::Duration::from_secs(1)),
        ..small()
    });
    log.append(&[b"1"]).expect("small");
    assert_eq!(positions(&log), (1, 0));
    log.append_urgent(&[b"2", b"3"]).expect("small");
    log.append(&[b"4"]).expect("small");
    assert_eq!(log.released(), LogPosition(1));
    log.write().expect("no faults");
    assert_eq!(log.released(), LogPosition(1));
    log.sync().expect("no faults");
    assert_eq!(positions(&log), (4, 4));
    log.append(&[b"5"]).expect("small");
    assert_eq!(positions(&log), (5, 4));
}

#[test]
fn inspection_reports_stale_files() {
    let (disk, log) = new_log(all_history());
    grow(&log, &mut Vec::new(), 30, 0);
    // Simulates a removal of history that was interrupted after its first steps.
    disk.remove(&files::segment(1)).expect("there");
    for snapshot in [5, 10] {
        disk.remove(&files::snapshot(snapshot)).expect("there");
    }
    let report = inspect(&disk).expect("a directory");
    assert!(report.opening.is_ok());
    let stale: Vec<&str> = report
        .files
        .iter()
        .filter(|file| file.verdict == Verdict::Stale)
        .map(|file| file.name.as_str())
        .collect();
    assert_eq!(
        stale.first(),
        Some(&files::segment(2).as_str()),
        "{stale:?}"
    );
    assert!(stale.len() < 6);
}

#[test]
fn finished_snapshot_has_a_durable_name() {
    let (disk, log) = new_log(small());
    log.append(&[b"one"]).expect("small");
    let position = snapshot(&log, &[b"one".to_vec()], 1).expect("no faults");
    assert_eq!(position, LogPosition(1));
    for seed in 0..20 {
        let crashed = disk.fork().crash(seed);
        assert_eq!(count(&crashed, |kind| kind == Kind::Snapshot(1)), 1);
    }
}

#[test]
fn snapshot_threshold_follows_history_and_free_space() {
    let after = |history_bytes, free_bytes| {
        let (_, log) = new_log(Options {
            history_bytes,
            ..Options::default()
        });
        log.free_bytes.store(free_bytes, Ordering::Release);
        log.snapshot_after_bytes() >> 20
    };
    assert_eq!(after(256 << 20, u64::MAX), 64);
    assert_eq!(after(u64::MAX, u64::MAX), 64, "a start has to read it");
    assert_eq!(after(128 << 20, u64::MAX), 32);
    assert_eq!(after(0, u64::MAX), 8);
    assert_eq!(after(256 << 20, 160 << 20), 20);
    assert_eq!(after(256 << 20, 0), 8);
}
