//! Backup files: two at the same time, snapshots that are none, and files that are replaced.

use std::path::PathBuf;

use super::*;
use crate::{Backup, limits, read_snapshot_file, write_snapshot_file};

fn list(text: &str) -> Vec<Vec<u8>> {
    (0..3).map(|n| format!("{text} {n}").into_bytes()).collect()
}

fn write(path: &Path, text: &str) -> Result<(), Error> {
    let mut blocks = Blocks(list(text), 0);
    write_snapshot_file(path, LogPosition(3), 5, &mut blocks)
}

fn read(backup: &Backup) -> Vec<Vec<u8>> {
    let mut records = Records::default();
    backup.read(&mut records).expect("whole");
    records.list()
}

fn names(directory: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).expect("there");
    let name = |entry: std::io::Result<std::fs::DirEntry>| entry.expect("listed").file_name();
    let names = entries.map(|entry| name(entry).into_string().expect("UTF-8"));
    names.collect()
}

/// The blocks of a backup. Another backup of the same path is written before the first of them.
struct Overlapping {
    path: PathBuf,
    blocks: Blocks,
    outcome: Option<Result<(), Error>>,
}

impl Source for Overlapping {
    fn begin(&mut self) {
        self.blocks.begin();
        self.outcome = Some(write(&self.path, "second"));
    }

    fn next(&mut self, into: &mut Vec<u8>) -> Result<bool, String> {
        self.blocks.next(into)
    }
}

#[test]
fn second_backup_of_a_path_is_refused_during_the_first() {
    let place = tempfile::tempdir().expect("a directory");
    let path = place.path().join("backup");
    write(&path, "old").expect("written");
    let mut source = Overlapping {
        path: path.clone(),
        blocks: Blocks(list("first"), 0),
        outcome: None,
    };
    write_snapshot_file(&path, LogPosition(3), 5, &mut source).expect("it holds the lock");
    let outcome = source.outcome.expect("it was tried");
    assert!(
        matches!(outcome, Err(Error::BackupInProgress)),
        "{outcome:?}"
    );
    assert_eq!(read(&Backup::open(&path).expect("there")), list("first"));
    assert_eq!(names(place.path()), ["backup"]);
    write(&path, "third").expect("the lock is free again");
}

#[test]
fn failed_backup_leaves_the_old_file_and_no_other() {
    let place = tempfile::tempdir().expect("a directory");
    let path = place.path().join("backup");
    write(&path, "old").expect("written");
    // A process that was killed left this file.
    let left = place.path().join("backup.statehouse-unfinished");
    std::fs::write(left, "left").expect("written");
    let failed = write_snapshot_file(&path, LogPosition(3), 5, &mut Failing(false));
    assert!(matches!(failed, Err(Error::GivenUp(_))), "{failed:?}");
    assert_eq!(read(&Backup::open(&path).expect("there")), list("old"));
    assert_eq!(names(place.path()), ["backup"]);
}

/// In an earlier version, a backup to `backup` removed the backup `backup.tmp`.
#[test]
fn other_files_with_similar_names_are_kept() {
    let place = tempfile::tempdir().expect("a directory");
    let other = place.path().join("backup.tmp");
    write(&other, "other").expect("written");
    write(&place.path().join("backup"), "first").expect("written");
    assert_eq!(read(&Backup::open(&other).expect("there")), list("other"));
    assert_eq!(names(place.path()).len(), 2);
}

#[test]
fn open_backup_is_read_also_after_its_name_is_replaced() {
    let place = tempfile::tempdir().expect("a directory");
    let path = place.path().join("backup");
    write(&path, "first").expect("written");
    let backup = Backup::open(&path).expect("there");
    assert_eq!(read(&backup), list("first"));
    write(&path, "second").expect("written");
    assert_eq!(read(&backup), list("first"));
    assert_eq!(read(&Backup::open(&path).expect("there")), list("second"));
}

#[test]
fn snapshot_that_needs_its_log_is_no_backup() {
    for is_busy in [false, true] {
        let place = tempfile::tempdir().expect("a directory");
        let (log, _) = open_directory(place.path(), small());
        let list = list("record");
        for record in &list {
            log.append(&[record]).expect("small");
        }
        let begun = log.begin_snapshot(2).expect("no faults");
        let mut snapshot = begun.expect("there are records");
        fill(&mut snapshot, &list).expect("no faults");
        if is_busy {
            log.append(&[b"later"]).expect("small");
        }
        log.finish_snapshot(snapshot).expect("no faults");
        let path = place.path().join(files::snapshot(3));
        let read = Backup::open(&path)
            .expect("there")
            .read(&mut Records::default());
        match read {
            Ok(position) => assert!(!is_busy && position == LogPosition(3)),
            Err(error) => {
                assert!(is_busy, "{error}");
                let text = error.to_string();
                assert!(
                    text.contains("records up to 4") && text.contains("--salvage"),
                    "{text}"
                );
            }
        }
        // Tools that examine a data directory read it all the same.
        read_snapshot_file(&path, &mut Records::default()).expect("whole");
    }
}

#[test]
fn position_that_leaves_no_room_is_damage() {
    let place = tempfile::tempdir().expect("a directory");
    for (position, is_whole) in [
        (limits::POSITION_MAX, true),
        (limits::POSITION_MAX + 1, false),
        (u64::MAX, false),
    ] {
        let path = place.path().join("backup");
        let mut blocks = Blocks(list("record"), 0);
        write_snapshot_file(&path, LogPosition(position), 5, &mut blocks).expect("written");
        let read = Backup::open(&path)
            .expect("there")
            .read(&mut Records::default());
        match read {
            Ok(_) => assert!(is_whole, "{position}"),
            Err(Error::Damaged(damage)) => assert!(!is_whole, "{position}: {damage}"),
            Err(error) => panic!("{position}: {error}"),
        }
    }
}
