//! Logs that are copies: they begin after some record, and get snapshots of the past.

use super::*;
use crate::{Base, read};

fn number(position: u64) -> Vec<u8> {
    position.to_le_bytes().to_vec()
}

fn append(log: &Log, positions: std::ops::RangeInclusive<u64>) {
    for position in positions {
        assert_eq!(log.append(&[&number(position)]).unwrap().0, position);
    }
    log.commit().unwrap();
}

fn snapshot_of_the_past(log: &Log, position: u64, complete: u64) {
    let begun = log.begin_snapshot_at(LogPosition(position), Some(1000), 5);
    let mut snapshot = begun.unwrap().expect("it is the newest one");
    let list: Vec<Vec<u8>> = (1..=complete).map(number).collect();
    fill(&mut snapshot, &list).unwrap();
    let finished = log.finish_snapshot_at(snapshot, LogPosition(complete));
    assert_eq!(finished.unwrap().0, position);
}

#[test]
fn snapshot_of_the_past_replaces_the_records_before_it() {
    let (disk, log) = new_log(small());
    append(&log, 1..=100);
    snapshot_of_the_past(&log, 40, 70);
    append(&log, 101..=120);
    let before = log.begin_snapshot_at(LogPosition(40), None, 6).unwrap();
    assert!(before.is_none(), "an older snapshot than the newest");
    let disk = disk.kill();
    let (log, opened, records) = open(&disk, small()).unwrap();
    assert_eq!((opened.base.0, opened.position.0), (40, 120));
    assert_eq!(records.list(), (1..=120).map(number).collect::<Vec<_>>());
    let mut all = Records::default();
    let range = read(&disk, Base::Newest, LogPosition::END, &mut all).unwrap();
    assert_eq!((range.base.0, range.complete.0), (40, 70));
    drop(log);
}

#[test]
fn log_that_begins_later_opens_only_with_its_snapshot() {
    let disk = Simulation::new(1);
    let shared: Arc<dyn Disk> = Arc::new(disk.clone());
    let log = Log::create(shared.clone(), small(), LogPosition(50), 1).unwrap();
    append(&log, 51..=80);
    let found = read(
        &disk,
        Base::Newest,
        LogPosition::END,
        &mut Records::default(),
    );
    assert!(found.is_err(), "it has no beginning");
    snapshot_of_the_past(&log, 50, 60);
    append(&log, 81..=90);
    let again = Log::create(shared, small(), LogPosition(50), 1);
    assert!(matches!(again, Err(Error::NotEmpty { .. })));
    let (_, opened, records) = open(&disk.kill(), small()).unwrap();
    assert_eq!((opened.base.0, opened.position.0), (50, 90));
    assert_eq!(records.list(), (1..=90).map(number).collect::<Vec<_>>());
}
