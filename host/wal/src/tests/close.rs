//! Clean closes, later formats and sizes: the result of opening an undamaged directory.

use super::*;
use crate::limits;
use crate::segment::{Header, Magic};
use crate::{read_snapshot_file, write_snapshot_file};

fn filled(records: usize) -> (Simulation, Log, Vec<Vec<u8>>) {
    let (disk, log) = new_log(small());
    let list: Vec<Vec<u8>> = (0..records)
        .map(|n| format!("record {n}").into_bytes())
        .collect();
    for record in &list {
        commit(&log, record);
    }
    (disk, log, list)
}

#[test]
fn missing_tail_after_a_clean_close_is_damage() {
    let (disk, log, list) = filled(10);
    log.close().expect("no faults");
    let disk = disk.crash(1);
    let name = files::segment(1);
    let content = disk.content(&name).expect("the segment");
    for bytes in 0..content.len() {
        let cut = disk.fork();
        cut.put(&name, &content[..bytes]);
        match open(&cut, small()) {
            Err(Error::Damaged(damage)) => assert_eq!(damage.file, name),
            Err(error) => panic!("{bytes}: {error}"),
            Ok((.., records)) => assert!(records.list() == list, "cut to {bytes}"),
        }
    }
    let truncated = disk.fork();
    truncated.remove(&name).expect("there");
    let text = open(&truncated, small())
        .expect_err("the log is missing")
        .to_string();
    assert!(
        text.contains("the whole log is missing") && text.contains("Records 1 to 10 were durable"),
        "{text}"
    );
}

#[test]
fn clean_close_differs_from_a_crash() {
    let (disk, log, list) = filled(3);
    log.close().expect("no faults");
    let (log, opened, records) = open(&disk.kill(), small()).expect("opens");
    assert!(opened.clean && !opened.torn && !opened.fresh);
    assert_eq!(opened.position, LogPosition(3));
    assert!(records.list() == list);
    commit(&log, b"more");
    let (_, opened, _) = open(&disk.kill(), small()).expect("opens");
    assert!(!opened.clean);
    assert_eq!(opened.position, LogPosition(4));
}

/// Regression: the close before the lost run counted as its own.
#[test]
fn crash_that_loses_a_whole_run_is_no_clean_close() {
    let (disk, log, _) = filled(3);
    log.close().expect("no faults");
    let open_at = |disk: &Simulation, now_ms| {
        let disk: Arc<dyn Disk> = Arc::new(disk.clone());
        Log::open(disk, small(), now_ms, &mut Records::default()).expect("opens")
    };
    let disk = disk.kill();
    let (log, opened) = open_at(&disk, 2);
    assert!(opened.clean);
    log.append(&[b"lost"]).expect("small");
    let disk = disk.kill();
    let (_, opened) = open_at(&disk, 3);
    assert_eq!((opened.position, opened.clean), (LogPosition(3), false));
}

#[test]
fn many_starts_leave_few_files() {
    let options = Options {
        segment_bytes: 1 << 20,
        ..small()
    };
    let (disk, log) = new_log(options.clone());
    commit(&log, b"one");
    for _ in 0..50 {
        open(&disk.kill(), options.clone()).expect("opens");
    }
    assert!(disk.used_bytes() < 3 << 20, "{}", disk.used_bytes());
    assert!(disk.kill().list().expect("a directory").len() <= 3);
}

#[test]
fn later_format_is_refused() {
    let (disk, log, list) = filled(3);
    snapshot(&log, &list, 1).expect("no faults");
    log.close().expect("no faults");
    for name in [
        files::segment(1),
        files::snapshot(3),
        files::CLOSED.to_owned(),
    ] {
        let later = disk.fork();
        let mut content = later.content(&name).expect("there");
        content[4] = 9;
        let crc = crc32c::crc32c(&content[..60]).to_le_bytes();
        content[60..64].copy_from_slice(&crc);
        later.put(&name, &content);
        let text = open(&later.kill(), small())
            .expect_err("a later format")
            .to_string();
        assert!(text.contains("format 9") && text.contains(&name), "{text}");
    }
}

#[test]
fn group_larger_than_a_segment_gets_its_own_segment() {
    let (disk, log) = new_log(small());
    let large = vec![7; limits::RECORD_BYTES_MAX + 1];
    assert!(matches!(log.append(&[&large]), Err(Error::TooLarge { .. })));
    let half = vec![7; limits::GROUP_BYTES_MAX / 2];
    assert!(matches!(
        log.append(&[&half, &half]),
        Err(Error::TooLarge { .. })
    ));
    assert_eq!(log.append(&[]).expect("nothing"), LogPosition::NONE);

    let record = vec![9; 3 << 20];
    for expected in 1..=3 {
        assert_eq!(log.append(&[&record]).expect("fits"), LogPosition(expected));
        assert_eq!(log.commit().expect("no faults"), LogPosition(expected));
    }
    assert!(reopened(&disk.crash(3)) == [record.clone(), record.clone(), record]);
}

#[test]
fn largest_record_is_written_and_read() {
    let record = vec![5; limits::RECORD_BYTES_MAX];
    let (disk, log) = new_log(Options::default());
    log.append(&[b"small", &record]).expect("fits");
    log.commit().expect("no faults");
    let (.., records) = open(&disk.kill(), Options::default()).expect("opens");
    assert!(records.list() == [b"small".to_vec(), record]);
}

#[test]
fn directory_has_one_writer_and_many_readers() {
    let place = tempfile::tempdir().expect("a directory");
    let path = place.path().join("deep").join("data");
    let first = Directory::open(&path).expect("created");
    let text = Directory::open(&path).expect_err("in use").to_string();
    assert!(text.contains("in use by another process"), "{text}");
    let reader = Directory::read_only(&path).expect("reading takes no lock");
    assert!(reader.create("x").is_err() && reader.remove(files::LOCK).is_err());
    drop(first);
    Directory::open(&path).expect("free again");
    use std::os::unix::fs::PermissionsExt;
    let mode = std::fs::metadata(&path)
        .expect("there")
        .permissions()
        .mode();
    assert_eq!(mode & 0o777, 0o700);
    assert!(Directory::read_only(path.join("missing")).is_err());
}

#[test]
fn removed_lock_file_admits_no_second_process() {
    let place = tempfile::tempdir().expect("a directory");
    let first = Directory::open(place.path()).expect("free");
    std::fs::remove_file(place.path().join(files::LOCK)).expect("there");
    let error = Directory::open(place.path()).expect_err("still in use");
    assert!(matches!(error, Error::Locked { .. }), "{error}");
    let why = first.displaced().expect("looked").expect("removed");
    assert!(why.contains("`lock`") && why.contains("removed"), "{why}");
    drop(first);
    let second = Directory::open(place.path()).expect("free");
    assert_eq!(second.displaced().expect("looked"), None);
}

/// A log in a real directory, with a record in it.
fn in_use(path: &Path) -> Log {
    let (log, _) = open_directory(path, small());
    commit(&log, b"one");
    log
}

#[test]
fn removed_segment_stops_acknowledgements() {
    for replaced in [false, true] {
        let place = tempfile::tempdir().expect("a directory");
        let log = in_use(place.path());
        let segment = place.path().join(files::segment(1));
        if replaced {
            // Opening the log makes the same change as a second process.
            let copy = place.path().join("copy");
            std::fs::copy(&segment, &copy).expect("copied");
            std::fs::rename(&copy, &segment).expect("renamed");
        } else {
            std::fs::remove_file(&segment).expect("there");
        }
        log.append(&[b"two"]).expect("small");
        let error = log.commit().expect_err("lost").to_string();
        assert!(error.contains(&files::segment(1)), "{error}");
        assert_eq!(positions(&log), (1, 1));
    }
}

#[test]
fn log_fails_when_its_directory_or_lock_is_replaced() {
    type Change = fn(&Path);
    let changes: [(&str, Change); 4] = [
        ("removed", |path| {
            std::fs::remove_file(path.join(files::LOCK)).expect("there");
        }),
        ("removed", |path| {
            std::fs::rename(path, path.with_extension("old")).expect("there");
        }),
        ("replaced", |path| {
            std::fs::rename(path, path.with_extension("old")).expect("there");
            std::fs::create_dir(path).expect("free");
        }),
        ("cannot look at", |path| {
            std::fs::rename(path, path.with_extension("old")).expect("there");
            std::os::unix::fs::symlink(path, path).expect("free");
        }),
    ];
    for (what, change) in changes {
        let place = tempfile::tempdir().expect("a directory");
        let path = place.path().join("data");
        let log = in_use(&path);
        log.maintain(1).expect("nothing changed");
        change(&path);
        let error = log.maintain(2).expect_err("changed").to_string();
        assert!(error.contains(what), "{error}");
        assert!(log.failure().is_some() && log.append(&[b"two"]).is_ok());
        assert!(log.commit().is_err());
        assert_eq!(log.released(), LogPosition(1));
    }
}

#[test]
fn backup_follows_no_link_and_keeps_no_mode() {
    use std::os::unix::fs::{PermissionsExt, symlink};
    let place = tempfile::tempdir().expect("a directory");
    let path = |name: &str| place.path().join(name);
    std::fs::write(path("other"), "other").expect("written");
    symlink(path("other"), path("linked.statehouse-unfinished")).expect("free");
    std::fs::write(path("open.statehouse-unfinished"), "left").expect("written");
    let open = std::fs::Permissions::from_mode(0o666);
    std::fs::set_permissions(path("open.statehouse-unfinished"), open).expect("set");
    for name in ["linked", "open"] {
        let mut blocks = Blocks(vec![b"block".to_vec()], 0);
        write_snapshot_file(path(name), LogPosition(1), 5, &mut blocks).expect("written");
        let backup = std::fs::symlink_metadata(path(name)).expect("there");
        assert!(backup.is_file());
        assert_eq!(backup.permissions().mode() & 0o777, 0o600, "{name}");
    }
    let other = std::fs::read(path("other")).expect("there");
    assert_eq!(other, b"other");
}

#[test]
fn backup_file_restores_a_log() {
    let place = tempfile::tempdir().expect("a directory");
    let file = place.path().join("backup");
    let list: Vec<Vec<u8>> = (0..100).map(|n| vec![n; usize::from(n) * 100]).collect();
    write_snapshot_file(&file, LogPosition(100), 5, &mut Blocks(list.clone(), 0)).expect("written");

    let mut records = Records::default();
    assert_eq!(
        read_snapshot_file(&file, &mut records).expect("whole"),
        LogPosition(100)
    );
    assert!(records.list() == list);

    let disk = Simulation::new(1);
    let create = || {
        let log = Log::create(Arc::new(disk.clone()), small(), LogPosition(100), 5)?;
        snapshot(&log, &list, 5)?;
        log.close()
    };
    create().expect("new");
    assert!(matches!(create(), Err(Error::NotEmpty { .. })));
    let (log, opened, records) = open(&disk.crash(1), small()).expect("opens");
    assert!(records.list() == list);
    assert_eq!(
        (opened.base, opened.position, opened.clean),
        (LogPosition(100), LogPosition(100), true)
    );
    assert_eq!(log.append(&[b"next"]).expect("small"), LogPosition(101));

    let content = std::fs::read(&file).expect("there");
    for at in (0..content.len())
        .step_by(997)
        .chain(content.len() - 40..content.len())
        .chain(0..80)
    {
        let mut flipped = content.clone();
        flipped[at] ^= 0x10;
        std::fs::write(&file, &flipped).expect("written");
        assert!(
            read_snapshot_file(&file, &mut Records::default()).is_err(),
            "byte {at}"
        );
    }
}

#[test]
fn interrupted_restore_does_not_open_empty() {
    let disk = Simulation::new(1);
    let log = Log::create(Arc::new(disk.clone()), small(), LogPosition(7), 5).expect("new");
    let begun = log.begin_snapshot(5).expect("no faults");
    let mut snapshot = begun.expect("the first one");
    snapshot.block(&block(1, b"first")).expect("small");
    drop(snapshot);
    let opened = open(&disk.kill(), small());
    assert!(matches!(opened, Err(Error::Damaged(_))));
}

/// A client that controls the content of a record could put a frame into it. Recovery of a recycled
/// segment with a torn tail could then take it for a frame of the log. This requires the store id,
/// which is secret.
#[test]
fn frame_inside_a_record_is_not_read() {
    let (disk, log, _) = filled(1);
    let name = files::segment(1);
    let content = disk.content(&name).expect("there");
    let header = Header::decode(&content, Magic::Segment).expect("whole");
    let end = 64 + crate::frame::HEADER_BYTES + 4 + "record 0".len();
    log.commit().expect("no faults");
    let right = header.place(end);
    for (store, believed) in [
        (0, false),
        (right.store ^ 1, false),
        // Only with knowledge of the store id does the forged frame count.
        (right.store, true),
    ] {
        let mut forged = vec![0; crate::frame::HEADER_BYTES];
        crate::frame::push(&mut forged, b"never appended");
        crate::frame::seal(&mut forged, crate::frame::Place { store, ..right }, 2, 1, 1);
        let disk = disk.fork();
        let mut content = content.clone();
        content[end..end + forged.len()].copy_from_slice(&forged);
        disk.put(&name, &content);
        assert_eq!(reopened(&disk).len() == 2, believed, "{store}");
    }
}

#[test]
fn foreign_files_in_the_directory_are_untouched() {
    let (disk, ..) = filled(3);
    disk.put("backup.tmp", b"another program writes this");
    disk.put(files::SNAPSHOT_TEMPORARY, b"half a snapshot");
    assert_eq!(reopened(&disk.kill()).len(), 3);
    assert!(disk.content("backup.tmp").is_some());
    assert!(disk.content(files::SNAPSHOT_TEMPORARY).is_none());
}

#[test]
fn log_with_spares_opens_on_a_full_disk() {
    let (disk, log, list) = filled(3);
    log.maintain(1).expect("room for spares");
    // No witness covers the last record, so the tail is rewritten.
    let disk = disk.kill();
    disk.limit_bytes(Some(disk.used_bytes()));
    disk.limit_files(Some(disk.list().expect("a directory").len()));
    assert!(reopened(&disk) == list, "there are two spares");
}

/// The disk has room for files, and none for their names. A segment may then be partly activated,
/// so a running log must fail. A start may be repeated.
#[test]
fn full_disk_at_a_rename_is_temporary_only_at_a_start() {
    let disk = Simulation::new(1);
    disk.refuse_renames(true);
    let error = open(&disk, small()).expect_err("no name for a segment");
    assert!(error.is_full() && error.is_temporary(), "{error}");
    disk.refuse_renames(false);
    let (log, ..) = open(&disk, small()).expect("room");
    commit(&log, &[1; 3000]);
    disk.refuse_renames(true);
    log.append(&[&[2; 3000]]).expect("small");
    let error = log.commit().expect_err("no name for a segment");
    assert!(matches!(error, Error::Failed(_)), "{error}");
    assert!(log.failure().is_some() && !error.is_temporary());
}

#[test]
fn missing_log_without_a_witness_names_no_last_record() {
    let (disk, ..) = filled(3);
    let disk = disk.kill();
    disk.remove(&files::segment(1)).expect("there");
    let text = open(&disk, small())
        .expect_err("the log is missing")
        .to_string();
    assert!(text.contains("Records from 1 on"), "{text}");
}
