//! A disk that fails, or becomes full, at every single step.

use super::*;
use crate::{Room, Verdict, inspect};

#[derive(Default)]
struct Outcome {
    /// The last position that was reported durable.
    durable: u64,
    /// The appended records.
    list: Vec<Vec<u8>>,
    failed: bool,
    /// True if an operation was refused and the log continued.
    refused: bool,
}

/// Runs as far as the disk permits.
fn script(disk: &Simulation) -> Outcome {
    let mut outcome = Outcome::default();
    let Ok((log, ..)) = open(disk, small()) else {
        outcome.failed = true;
        return outcome;
    };
    for round in 0..30 {
        let record = vec![round as u8; 300];
        log.append(&[&record]).expect("small");
        outcome.list.push(record);
        outcome.refused |= log.commit().is_err();
        if round % 9 == 5 {
            outcome.refused |= snapshot(&log, &outcome.list, round).is_err();
        }
        outcome.refused |= log.maintain(round).is_err();
        let durable = log.durable().0;
        assert!(
            !outcome.failed || durable == outcome.durable,
            "nothing becomes durable after a failure"
        );
        outcome.durable = durable;
        outcome.failed = log.failure().is_some();
    }
    outcome.refused |= log.close().is_err();
    outcome.durable = outcome.durable.max(log.durable().0);
    outcome
}

fn check(disk: &Simulation, outcome: &Outcome, story: &str) {
    for (end, disk) in [
        ("crash", disk.fork().crash(1)),
        ("lost", lost(disk)),
        ("kill", disk.kill()),
    ] {
        disk.limit_bytes(None);
        let (.., records) =
            open(&disk, small()).unwrap_or_else(|error| panic!("{story}, {end}: {error}"));
        let found = records.list();
        assert!(
            found.len() as u64 >= outcome.durable,
            "{story}, {end}: {} of {}",
            found.len(),
            outcome.durable
        );
        assert!(outcome.list[..found.len()] == found[..], "{story}, {end}");
        // A crash right after a start must not lose what the start returned: the page cache is no
        // proof of durability.
        let (.., again) =
            open(&lost(&disk), small()).unwrap_or_else(|error| panic!("{story}, {end}: {error}"));
        assert!(
            again.list() == found,
            "{story}, {end}: lost after a second crash"
        );
    }
}

/// A crash that loses everything that was not synced.
fn lost(disk: &Simulation) -> Simulation {
    let seed = (0..)
        .find(|&seed| Dice::new(seed).below(5) == 0)
        .expect("one in five");
    disk.fork().crash(seed)
}

/// Lets each operation fail in turn.
fn fail_every(name: &str, fail_in: fn(&Simulation, Option<u64>)) {
    let mut failures = 0;
    for n in 0.. {
        let disk = Simulation::new(1);
        fail_in(&disk, Some(n));
        let outcome = script(&disk);
        check(&disk, &outcome, &format!("{name} {n}"));
        failures += u32::from(outcome.failed);
        if !outcome.failed && !outcome.refused {
            break;
        }
    }
    assert!(failures > 30, "{failures}");
}

#[test]
fn write_error_is_final_and_loses_nothing_durable() {
    fail_every("write", Simulation::fail_write_in);
}

#[test]
fn sync_error_is_final_and_loses_nothing_durable() {
    fail_every("sync", Simulation::fail_sync_in);
}

#[test]
fn log_continues_when_a_full_disk_has_room_again() {
    let mut refused = 0;
    for room in (0..60_000).step_by(700) {
        let disk = Simulation::new(1);
        disk.limit_bytes(Some(room));
        let outcome = script(&disk);
        if outcome.list.is_empty() {
            // Without space for a first segment nothing exists and nothing was reported.
            assert!(room < 5_000, "{room}");
            continue;
        }
        assert!(!outcome.failed, "a full disk is no failure: {room}");
        refused += u32::from(outcome.refused);
        check(&disk, &outcome, &format!("room for {room}"));
    }
    assert!(refused > 5, "{refused}");
}

#[test]
fn pending_records_are_written_when_there_is_room() {
    let (disk, log) = new_log(small());
    assert_eq!(log.room(), Room::Plenty);
    disk.limit_bytes(Some(disk.used_bytes()));
    assert!(log.maintain(1).is_err_and(|error| error.is_full()));
    assert_ne!(log.room(), Room::Plenty);
    let mut list = Vec::new();
    while log.commit().is_ok() {
        list.push(vec![list.len() as u8; 300]);
        log.append(&[&list[list.len() - 1]]).expect("small");
    }
    assert_eq!(log.room(), Room::None);
    assert!(log.failure().is_none());
    let before = log.durable();
    assert!(before < log.appended());
    assert!(log.commit().is_err_and(|error| error.is_full()));

    disk.limit_bytes(None);
    assert_eq!(log.commit().expect("room again"), log.appended());
    log.maintain(2).expect("room again");
    assert_eq!(log.room(), Room::Plenty);
    assert!(reopened(&lost(&disk)) == list);
}

#[test]
fn the_reserve_outlasts_a_full_disk() {
    let (disk, log) = new_log(quarter_mebibyte_segments());
    log.maintain(1).expect("room for spares");
    disk.limit_bytes(Some(disk.used_bytes()));
    log.maintain(2).expect("the spares are there");
    let write = || {
        log.append(&[&[1; 1000]]).expect("small");
        log.commit().expect("there are spares");
    };
    // The remaining space is the reserve.
    write();
    let mut reserve = 0;
    while log.room() == Room::Reserve {
        write();
        reserve += 1;
    }
    assert!(
        reserve > 600,
        "three segments hold more than {reserve} records"
    );
    assert_eq!(log.room(), Room::None);
    log.append(&[&[1; 1000]]).expect("small");
    log.commit()
        .expect("None leaves a little for what is under way");
}

/// Spares are too short for such a group, and later records are written after it.
#[test]
fn reserve_ends_while_a_long_group_waits_for_room() {
    let (disk, log) = new_log(small());
    log.maintain(1).expect("room for spares");
    disk.limit_bytes(Some(disk.used_bytes()));
    log.maintain(2).expect("the spares are there");
    assert_eq!(log.room(), Room::Reserve);
    log.append(&[&[1; 8000]]).expect("fits a group");
    assert!(log.commit().is_err_and(|error| error.is_full()));
    log.maintain(3).expect("the spares are there");
    assert_eq!(log.room(), Room::None);
    disk.limit_bytes(None);
    log.commit().expect("room again");
    log.maintain(4).expect("room again");
    assert_eq!(log.room(), Room::Plenty);
}

fn quarter_mebibyte_segments() -> Options {
    Options {
        segment_bytes: 1 << 18,
        ..small()
    }
}

/// A log on a disk with 4 MiB besides its segments of 256 KiB.
fn on_four_mebibytes() -> (Simulation, Log) {
    let (disk, log) = new_log(quarter_mebibyte_segments());
    log.maintain(1).expect("room for spares");
    disk.limit_bytes(Some(disk.used_bytes() + (4 << 20)));
    log.maintain(2).expect("the spares are there");
    assert_eq!(log.room(), Room::Plenty);
    (disk, log)
}

/// The free bytes do not hold the segment of this group.
#[test]
fn no_room_is_left_while_a_long_group_waits() {
    let (disk, log) = on_four_mebibytes();
    while !log.snapshot_due() {
        log.append(&[&[1; 1000]]).expect("small");
        log.commit().expect("there is room");
    }
    let group = (5 << 20) + (64 << 10);
    log.append(&[&vec![1_u8; group]]).expect("small");
    assert!(log.commit().is_err_and(|error| error.is_full()));
    for now_ms in 3..5 {
        assert_eq!(log.room(), Room::None);
        assert!(!log.snapshot_due(), "it could not be finished");
        log.maintain(now_ms).expect("nothing is prepared");
    }
    disk.limit_bytes(None);
    log.commit().expect("room again");
    log.maintain(5).expect("room again");
    assert_eq!(log.room(), Room::Plenty);
}

/// Nothing else can be written before the group.
#[test]
fn long_group_that_waits_gets_the_room_of_spares() {
    let (_, log) = on_four_mebibytes();
    let group = (4 << 20) + (64 << 10);
    log.append(&[&vec![1_u8; group]]).expect("small");
    assert!(log.commit().is_err_and(|error| error.is_full()));
    assert_eq!(log.room(), Room::None);
    assert!(!log.fits(1));
    log.maintain(3).expect("removes the spares");
    log.commit().expect("the room of the spares");
    assert!(!log.waits_for_room());
}

/// No other record can be written before the group, so the past has to go.
#[test]
fn long_group_that_waits_gets_the_room_of_history() {
    let (disk, log) = new_log(Options {
        segment_bytes: 1 << 18,
        ..all_history()
    });
    for now_ms in 0..4 {
        for _ in 0..8 {
            commit(&log, &[1; 200_000]);
        }
        let begun = log.begin_snapshot(now_ms).expect("no faults");
        log.finish_snapshot(begun.expect("records came"))
            .expect("no faults");
        log.maintain(now_ms).expect("no faults");
    }
    disk.limit_bytes(Some(disk.used_bytes() + (1 << 20)));
    log.maintain(4).expect("the spares are there");
    let free = log.figures().free;
    log.append(&[&vec![1_u8; free as usize + (1 << 20)]])
        .expect("small");
    assert!(log.commit().is_err_and(|error| error.is_full()));
    log.maintain(5).expect("removes spares and history");
    log.commit().expect("the room of the history");
}

#[test]
fn missing_inodes_are_not_reported_as_missing_bytes() {
    let disk = Simulation::new(1);
    disk.limit_bytes(Some(64 << 20));
    let (log, ..) = open(&disk, small()).expect("opens");
    disk.limit_files(Some(disk.list().expect("a directory").len()));
    assert!(log.maintain(1).is_err_and(|error| error.is_full()));
    let figures = log.figures();
    assert!(
        figures.no_free_inodes && figures.free > 32 << 20,
        "{figures:?}"
    );
    let files = inspect(&disk).expect("a directory").files;
    let used = crate::DiskUse::of(&disk, &files).expect("a size");
    assert!(used.no_free_inodes && used.free > 32 << 20, "{used:?}");
    disk.limit_files(None);
    log.maintain(2).expect("inodes again");
    assert!(!log.figures().no_free_inodes);
    assert_eq!(log.room(), Room::Plenty);
}

#[test]
fn group_of_too_many_records_is_refused() {
    let most = crate::limits::FRAME_RECORDS_MAX as usize;
    assert!(crate::log::check_count(most).is_ok());
    let refused = crate::log::check_count(most + 1);
    assert!(
        matches!(refused, Err(Error::TooMany { records, .. }) if records == most + 1),
        "{refused:?}"
    );
    // Frames of several groups cannot hold so many records.
    assert!(crate::limits::SEGMENT_BYTES_MAX <= 4 * most as u64);
}

#[test]
fn failed_log_discards_appends() {
    let (disk, log) = new_log(small());
    commit(&log, b"kept");
    disk.fail_sync_in(Some(0));
    log.append(&[b"not known"]).expect("small");
    let text = log.commit().expect_err("a fault").to_string();
    assert!(text.contains("nothing becomes durable any more"), "{text}");
    disk.fail_sync_in(None);
    for expected in 3..100 {
        let position = log.append(&[b"lost"]).expect("small");
        assert_eq!(position.0, expected);
        assert!(log.commit().is_err() && log.sync().is_err());
        assert!(log.write().is_err() && log.close().is_err());
    }
    assert!(log.begin_snapshot(1).is_err() && log.maintain(1).is_err());
    assert_eq!(positions(&log), (1, 1));
    let report = inspect(&disk).expect("a directory");
    assert!(
        !report
            .files
            .iter()
            .any(|file| matches!(file.verdict, Verdict::Damaged { .. }))
    );
}

/// The file of a snapshot may be what filled the disk.
#[test]
fn snapshot_without_room_leaves_no_file() {
    for (log_waits, what) in [
        (true, "the log has no room"),
        (false, "the snapshot has none"),
    ] {
        let (disk, log) = new_log(small());
        commit(&log, b"one");
        let begun = log.begin_snapshot(1).expect("no faults");
        let mut snapshot = begun.expect("something new");
        snapshot.block(&block(1, b"one")).expect("small");
        if log_waits {
            // Needs a segment of its own.
            log.append(&[&[1; 8000]]).expect("fits");
        }
        disk.limit_bytes(Some(disk.used_bytes()));
        let refused = log.finish_snapshot(snapshot).expect_err(what);
        assert!(refused.is_full(), "{what}: {refused}");
        let names = disk.list().expect("a directory");
        assert!(
            !names.iter().any(|name| name.ends_with(".tmp")),
            "{what}: {names:?}"
        );
        disk.limit_bytes(None);
        assert!(log.begin_snapshot(2).is_ok_and(|begun| begun.is_some()));
    }
}

#[test]
fn figures_do_not_wait_for_a_stalled_disk() {
    let (_, log) = new_log(small());
    let before = log.figures();
    let catalogue = log.catalogue.lock().expect("no panic");
    let figures = log.figures();
    drop(catalogue);
    assert_eq!((figures.log, figures.free), (before.log, before.free));
    assert!(figures.log > 0, "{figures:?}");
}
