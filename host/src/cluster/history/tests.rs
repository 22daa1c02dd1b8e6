//! Tests of the copies below a data directory, without a cluster.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use statehouse_cluster::{Chain, CopyError, CopyStore, LogPoint, Resumed, SnapshotInfo, Stop};
use statehouse_offline::ClusterMark;
use statehouse_protocol::LogPosition;
use statehouse_wal::{Base, Directory, Options, Range, Sink, read};
use tempfile::TempDir;

use super::store::{CopyDirectory, write_mark};

/// A data directory of a host that has copied nothing.
fn marked() -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    let mark = ClusterMark {
        cluster: "00".repeat(16),
        name: "plant7".into(),
        copy: None,
    };
    write_mark(directory.path(), &mark).unwrap();
    directory
}

/// Opens the copies, with the position that they show.
fn opened(directory: &Path) -> (CopyDirectory, Arc<AtomicU64>) {
    let position = Arc::<AtomicU64>::default();
    let opened = CopyDirectory::open(directory, Options::default(), position.clone());
    (opened.unwrap(), position)
}

fn open(directory: &Path) -> (CopyDirectory, Option<Resumed>) {
    let (mut store, position) = opened(directory);
    let resumed = store.resume().unwrap();
    assert_eq!(position.load(Relaxed), 0);
    (store, resumed)
}

fn point(position: u64) -> LogPoint {
    LogPoint {
        seq: position,
        chain: Chain([7; 32]),
        position: LogPosition(position),
    }
}

/// Adds the records with these numbers. The bytes of each are its number times `factor`.
fn add(store: &mut CopyDirectory, from: u64, to: u64, factor: u64) -> Result<(), CopyError> {
    for position in from..=to {
        let record = (position * factor).to_le_bytes();
        store.records(LogPosition(position), &[&record])?;
    }
    Ok(())
}

/// Begins a copy, and adds the records 1 to 10.
fn copy_ten(store: &mut CopyDirectory) {
    store.begin(LogPosition::NONE).unwrap();
    store.flush(Some(point(0))).unwrap();
    add(store, 1, 10, 1).unwrap();
}

/// The time of each snapshot.
const BEGUN_MS: u64 = 5_000;

fn snapshot(store: &mut CopyDirectory, position: u64, complete: u64) {
    let info = SnapshotInfo {
        id: 1,
        first_seq: 1,
        first_position: LogPosition(position + 1),
        previous: Chain::default(),
        pieces: 1,
        bytes: 100,
        hash: [0; 32],
    };
    store.begin_snapshot(&info, BEGUN_MS).unwrap();
    store.block(b"block").unwrap();
    if position < complete {
        add(store, position + 1, complete, 1).unwrap();
    }
    store
        .end_snapshot(LogPosition(complete), point(complete))
        .unwrap();
}

#[derive(Default)]
struct Read(Vec<u64>);

impl Sink for Read {
    fn reset(&mut self) {
        self.0.clear();
    }

    fn block(&mut self, _: &[u8]) -> Result<(), String> {
        Ok(())
    }

    fn record(&mut self, position: LogPosition, record: &[u8]) -> Result<(), String> {
        assert_eq!(record, position.0.to_le_bytes());
        self.0.push(position.0);
        Ok(())
    }
}

fn copy_path(directory: &Path) -> PathBuf {
    let mark = ClusterMark::of(directory).unwrap().unwrap();
    ClusterMark::copy_path(directory, mark.copy.unwrap().number)
}

/// The records of the copy at this path, and the range that it has.
fn read_at(path: PathBuf) -> (Vec<u64>, Range) {
    let disk = Directory::read_only(path).unwrap();
    let mut found = Read::default();
    let range = read(&disk, Base::Oldest, LogPosition::END, &mut found);
    (found.0, range.unwrap())
}

/// What tools find.
fn read_copy(directory: &Path) -> Vec<u64> {
    read_at(copy_path(directory)).0
}

fn copies(directory: &Path) -> usize {
    let entries = fs::read_dir(directory).unwrap();
    let names = entries.map(|it| it.unwrap().file_name().into_string().unwrap());
    names.filter(|it| it.starts_with("history-")).count()
}

/// After a kill, the mark is older than the records. They are passed again.
#[test]
fn records_behind_the_mark_are_compared_after_a_kill() {
    let directory = marked();
    let (mut store, resumed) = open(directory.path());
    assert_eq!(resumed, None);
    copy_ten(&mut store);
    assert_eq!(read_copy(directory.path()), (1..=10).collect::<Vec<_>>());
    drop(store);

    let (mut store, resumed) = open(directory.path());
    assert_eq!(resumed.unwrap().point, point(0));
    add(&mut store, 1, 15, 1).unwrap();
    drop(store);
    let (mut store, _) = open(directory.path());
    // One group can hold records of both kinds.
    let records: Vec<[u8; 8]> = (1..=20_u64).map(u64::to_le_bytes).collect();
    let records: Vec<&[u8]> = records.iter().map(|it| &it[..]).collect();
    store.records(LogPosition(1), &records).unwrap();
    store.close(Some(point(20))).unwrap();
    drop(store);
    assert_eq!(read_copy(directory.path()), (1..=20).collect::<Vec<_>>());

    let (mut store, resumed) = open(directory.path());
    assert_eq!(resumed.unwrap().point, point(20));
    add(&mut store, 21, 30, 1).unwrap();
    drop(store);
    let (mut store, _) = open(directory.path());
    let error = add(&mut store, 21, 30, 3).unwrap_err();
    let is_ahead = matches!(error, CopyError::Log(Stop::CopyIsAhead(LogPosition(30))));
    assert!(is_ahead, "{error}");
}

#[test]
fn earlier_copy_stays_until_the_new_one_is_complete() {
    let directory = marked();
    let (mut store, _) = open(directory.path());
    copy_ten(&mut store);
    store.begin(LogPosition(50)).unwrap();
    add(&mut store, 51, 55, 1).unwrap();
    store.flush(Some(point(55))).unwrap();
    let expected = (1..=10).collect::<Vec<_>>();
    assert_eq!(
        read_copy(directory.path()),
        expected,
        "it is replaced too early"
    );
    drop(store);

    // A kill leaves the incomplete copy, which the next start removes.
    assert_eq!(copies(directory.path()), 2);
    let (mut store, resumed) = open(directory.path());
    assert_eq!(resumed.unwrap().point, point(0));
    assert_eq!(copies(directory.path()), 1);
    store.begin(LogPosition(50)).unwrap();
    snapshot(&mut store, 50, 60);
    assert_eq!(read_copy(directory.path()), (51..=60).collect::<Vec<_>>());
    assert_eq!(copies(directory.path()), 1);
    drop(store);
    let (_, resumed) = open(directory.path());
    let resumed = resumed.unwrap();
    assert_eq!((resumed.point, resumed.snapshot.0), (point(60), 50));
}

/// `statehouse doctor` shows this time.
#[test]
fn history_begins_at_the_time_of_its_first_snapshot() {
    let directory = marked();
    let (mut store, _) = open(directory.path());
    store.begin(LogPosition(50)).unwrap();
    snapshot(&mut store, 50, 60);
    let (_, range) = read_at(copy_path(directory.path()));
    assert_eq!((range.base.0, range.base_ms), (50, BEGUN_MS));
}

/// Operators would take the state at the end of the earlier copy for the present one.
#[test]
fn earlier_copy_has_no_position_while_a_new_one_begins() {
    let directory = marked();
    let (mut store, position) = opened(directory.path());
    copy_ten(&mut store);
    store.flush(None).unwrap();
    assert_eq!(position.load(Relaxed), 10);
    store.begin(LogPosition(50)).unwrap();
    store.flush(None).unwrap();
    assert_eq!(position.load(Relaxed), 0);
    snapshot(&mut store, 50, 60);
    store.flush(None).unwrap();
    assert_eq!(position.load(Relaxed), 60);
}

/// Operators would take the state at the stop of a host for the present one.
#[test]
fn resumed_copy_has_no_position_until_it_has_caught_up() {
    let directory = closed_with_ten();
    let (mut store, position) = opened(directory.path());
    assert_eq!(store.resume().unwrap().unwrap().end, LogPosition(10));
    add(&mut store, 11, 12, 1).unwrap();
    assert_eq!(position.load(Relaxed), 0);
    store.flush(Some(point(12))).unwrap();
    assert_eq!(position.load(Relaxed), 12);
}

/// The records behind the mark must not be hidden by a newer snapshot, or else a restart could not
/// compare them.
#[test]
fn mark_is_not_before_the_newest_snapshot() {
    let directory = marked();
    let (mut store, _) = open(directory.path());
    copy_ten(&mut store);
    snapshot(&mut store, 10, 20);
    add(&mut store, 21, 25, 1).unwrap();
    drop(store);
    let (mut store, resumed) = open(directory.path());
    let resumed = resumed.unwrap();
    assert_eq!((resumed.point, resumed.snapshot.0), (point(20), 10));
    add(&mut store, 21, 30, 1).unwrap();
    assert_eq!(read_copy(directory.path()), (1..=30).collect::<Vec<_>>());
}

/// A directory whose copy was closed with the records 1 to 10.
fn closed_with_ten() -> TempDir {
    let directory = marked();
    let (mut store, _) = open(directory.path());
    copy_ten(&mut store);
    store.close(Some(point(10))).unwrap();
    directory
}

const SEGMENT: &str = "000000000001.log";

/// A part of it can be salvaged.
#[test]
fn damaged_copy_starts_over_and_is_set_aside() {
    let directory = closed_with_ten();
    let aside = directory.path().join("damaged-history");
    fs::create_dir(&aside).unwrap();
    fs::write(aside.join("earlier"), "damage").unwrap();
    let segment = copy_path(directory.path()).join(SEGMENT);
    let mut bytes = fs::read(&segment).unwrap();
    bytes[100] ^= 1;
    fs::write(&segment, &bytes).unwrap();
    let (mut store, resumed) = open(directory.path());
    assert_eq!(resumed, None);
    store.begin(LogPosition(10)).unwrap();
    // Tools read what they can of the damaged one until the new one is complete. A restart finds
    // the damage again.
    drop(store);
    let (mut store, resumed) = open(directory.path());
    assert_eq!(resumed, None);
    store.begin(LogPosition(10)).unwrap();
    assert_eq!(copy_path(directory.path()).join(SEGMENT), segment);
    assert!(segment.exists() && aside.join("earlier").exists());
    snapshot(&mut store, 10, 12);
    assert!(!segment.exists() && !aside.join("earlier").exists());
    assert_eq!(copies(directory.path()), 1);
    assert_eq!(read_copy(directory.path()), [11, 12]);
    drop(store);
    let (_, resumed) = open(directory.path());
    assert_eq!(resumed.unwrap().point, point(12));
    assert!(
        fs::read(aside.join(SEGMENT)).unwrap() == bytes,
        "it was changed"
    );
}

#[test]
fn copy_that_has_lost_records_is_set_aside() {
    let directory = closed_with_ten();
    let mut mark = ClusterMark::of(directory.path()).unwrap().unwrap();
    mark.copy.as_mut().unwrap().record = 11;
    write_mark(directory.path(), &mark).unwrap();
    let (mut store, resumed) = open(directory.path());
    assert_eq!(resumed, None);
    store.begin(LogPosition::NONE).unwrap();
    assert_eq!(read_copy(directory.path()), (1..=10).collect::<Vec<_>>());
    store.flush(Some(point(0))).unwrap();
    let (found, _) = read_at(directory.path().join("damaged-history"));
    assert_eq!(found, (1..=10).collect::<Vec<_>>());
}

/// Nothing is damaged, so an operator must not look at the disk.
#[test]
fn copy_of_a_later_version_is_kept_and_needs_that_version() {
    let directory = closed_with_ten();
    let segment = copy_path(directory.path()).join(SEGMENT);
    let mut bytes = fs::read(&segment).unwrap();
    bytes[4] = 200;
    let crc = crc32c::crc32c(&bytes[..60]);
    bytes[60..64].copy_from_slice(&crc.to_le_bytes());
    fs::write(&segment, &bytes).unwrap();
    let (mut store, _) = opened(directory.path());
    let error = store.resume().unwrap_err();
    let remedy = super::remedy(&error, directory.path());
    assert!(error.to_string().contains("has format 200"), "{error}");
    assert_eq!(remedy, "Run this host with that version");
    assert!(fs::read(&segment).unwrap() == bytes, "it was changed");
}

#[test]
fn copy_that_is_not_wanted_is_removed() {
    let directory = marked();
    let (mut store, _) = open(directory.path());
    store.begin(LogPosition::NONE).unwrap();
    store.flush(Some(point(0))).unwrap();
    store.remove().unwrap();
    drop(store);
    assert_eq!(copies(directory.path()), 0);
    let mark = ClusterMark::of(directory.path()).unwrap().unwrap();
    assert_eq!(mark.copy, None);
}
