//! Blocks that the device does not return. They must have the effect of a wrong checksum at their
//! place. Files that this account may not read must never have that effect.

use std::io;

use rustix::io::Errno;

use super::*;
use crate::error::is_unreadable;
use crate::simulation::BLOCK_BYTES;
use crate::survey::Survey;
use crate::{Base, Verdict, inspect, read};

/// Four blocks per segment, and all history.
fn options() -> Options {
    Options {
        segment_bytes: 4 * BLOCK_BYTES as u64,
        ..all_history()
    }
}

/// Segments 1 and 2 hold the records 1 to 30, and segment 3 holds 31 to 40 in its first three
/// blocks. A snapshot covers 1 to 32.
fn written() -> (Simulation, Log, Vec<Vec<u8>>) {
    let (disk, log) = new_log(options());
    let mut list = Vec::new();
    for number in 1..=40 {
        let record = vec![number; 1000];
        commit(&log, &record);
        list.push(record);
        if number == 32 {
            snapshot(&log, &list, 1).expect("no faults");
        }
    }
    assert_eq!(log.segments(), 2, "after the first one");
    (disk, log, list)
}

fn refused(disk: &Simulation) -> Damage {
    match open(disk, options()) {
        Err(Error::Damaged(damage)) => damage,
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("a block is missing"),
    }
}

#[test]
fn unreadable_history_and_markers_do_not_stop_a_start() {
    let (disk, log, list) = written();
    log.close().expect("no faults");
    let disk = disk.kill();
    for name in [
        files::segment(1),
        files::segment(2),
        files::NEWEST.to_owned(),
        files::CLOSED.to_owned(),
    ] {
        let broken = disk.fork();
        broken.break_block(&name, 0);
        let (log, _, records) =
            open(&broken, options()).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert!(records.list() == list, "{name}");
        log.append(&[b"next"]).expect("small");
        log.close().expect("no faults");
        let survey = Survey::of(&broken.kill()).expect("a directory");
        assert!(survey.newest.is_some() && survey.closed.is_some(), "{name}");
    }
}

#[test]
fn unreadable_header_of_the_last_segment_is_damage() {
    let (disk, ..) = written();
    disk.break_block(&files::segment(3), 0);
    let damage = refused(&disk.kill());
    assert_eq!((damage.file, damage.offset), (files::segment(3), Some(0)));
}

#[test]
fn unreadable_block_among_the_last_frames_is_damage() {
    let (disk, _, list) = written();
    let disk = disk.kill();
    // Three frames fit the first block, and seven the first two.
    for (block, whole) in [(1, 33), (2, 37)] {
        let broken = disk.fork();
        let offset = block * BLOCK_BYTES;
        broken.break_block(&files::segment(3), offset);
        let damage = refused(&broken);
        assert_eq!(
            (damage.file, damage.offset),
            (files::segment(3), Some(offset as u64))
        );
        assert!(
            damage.reason.contains("cannot be read"),
            "{}",
            damage.reason
        );
        assert_eq!(damage.lost_from, Some(LogPosition(whole + 1)));
        // The part before it is still there for a salvage.
        let mut records = Records::default();
        read(&broken, Base::Newest, LogPosition(whole), &mut records).expect("readable");
        assert!(records.list() == list[..whole as usize]);
    }
}

#[test]
fn unreadable_block_behind_the_frames_has_no_effect() {
    let (disk, _, list) = written();
    let disk = disk.kill();
    let behind = 3 * BLOCK_BYTES;
    disk.break_block(&files::segment(3), behind);
    let report = inspect(&disk).expect("a directory");
    assert!(report.opening.is_ok());
    let file = report
        .files
        .iter()
        .find(|file| file.name == files::segment(3));
    let verdict = &file.expect("listed").verdict;
    assert!(
        matches!(verdict, Verdict::Damaged { offset, .. } if *offset == behind as u64),
        "{verdict}"
    );
    // The second start finds the copy of the segment that the first one has made.
    for _ in 0..2 {
        let (.., records) = open(&disk.kill(), options()).expect("opens");
        assert!(records.list() == list);
    }
}

#[test]
fn unreadable_end_of_the_last_frame_is_damage() {
    let (disk, log, _) = written();
    // From the third block into the fourth.
    commit(&log, &[41; 2000]);
    disk.break_block(&files::segment(3), 3 * BLOCK_BYTES);
    let damage = refused(&disk.kill());
    assert_eq!(damage.lost_from, Some(LogPosition(41)));
}

#[test]
fn unreadable_block_shortens_history_to_the_next_snapshot() {
    let (disk, _, list) = written();
    disk.break_block(&files::segment(2), BLOCK_BYTES);
    let mut records = Records::default();
    let range = read(&disk, Base::Oldest, LogPosition::END, &mut records).expect("a snapshot");
    assert_eq!((range.base, range.end), (LogPosition(32), LogPosition(40)));
    let damage = records.gap.take().expect("reported");
    assert!(records.list() == list);
    assert_eq!(
        (&damage.file, damage.offset),
        (&files::segment(2), Some(BLOCK_BYTES as u64))
    );
    assert_eq!(
        (damage.lost_from, damage.lost_to),
        (Some(LogPosition(19)), Some(LogPosition(30)))
    );
    // No snapshot replaces the block for an earlier state.
    let base = Base::Before(LogPosition(25));
    let earlier = read(&disk, base, LogPosition(25), &mut Records::default());
    assert!(
        matches!(&earlier, Err(Error::Damaged(found)) if *found == damage),
        "{earlier:?}"
    );
}

#[test]
fn only_an_error_of_the_device_is_damage() {
    assert!(is_unreadable(&Errno::IO.into()));
    for error in [Errno::MFILE, Errno::ACCESS, Errno::NOENT, Errno::NOSPC] {
        assert!(!is_unreadable(&error.into()), "{error}");
    }
}

/// Regression: a start took the snapshot for damaged, and put it aside.
#[test]
fn forbidden_file_is_an_error_and_never_damage() {
    let (disk, log, _) = written();
    log.close().expect("no faults");
    let disk = disk.kill();
    disk.put("lost+found", b"");
    let snapshot = files::snapshot(32);
    let segment = files::segment(3);
    for name in [&*snapshot, &*segment, files::NEWEST, files::CLOSED] {
        let disk = disk.fork();
        disk.forbid(name);
        let inspected = inspect(&disk).map(drop);
        let mut records = Records::default();
        let read = read(&disk, Base::Newest, LogPosition::END, &mut records).map(drop);
        let opened = open(&disk, options()).map(drop);
        assert!(disk.content(&snapshot).is_some(), "it was put aside");
        for result in [inspected, read, opened] {
            assert!(
                matches!(&result, Err(Error::Io { file, source, .. })
                    if file == name && source.kind() == io::ErrorKind::PermissionDenied),
                "{name}: {result:?}"
            );
        }
    }
    // Nothing of the log is in a file of another name.
    disk.forbid("lost+found");
    let report = inspect(&disk).expect("a directory");
    assert!(report.opening.is_ok());
    let other = report.files.iter().find(|file| file.name == "lost+found");
    assert_eq!(other.expect("listed").verdict, Verdict::Foreign);
}
