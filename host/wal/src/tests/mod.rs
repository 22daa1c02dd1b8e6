//! Tests of the log on a simulated disk with crashes, faults and damage.
//!
//! The store of these tests is the list of all records. A snapshot is that list in blocks, so that
//! the result of opening can be compared record by record.

mod backup;
mod close;
mod copy;
mod crash;
mod damage;
mod faults;
mod full;
mod history;
mod mutation;
mod notifying;
mod reading;
mod threads;
mod unreadable;
mod wear;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use crate::files::{self, Kind};
use crate::simulation::{Dice, Simulation};
use crate::{
    Damage, Directory, Disk, Error, Log, LogPosition, Opened, Options, Sink, Snapshot, Source,
};

/// A store that keeps every record with its position.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Records {
    by_position: BTreeMap<u64, Vec<u8>>,
    resets: u32,
    gap: Option<Damage>,
}

impl Sink for Records {
    fn reset(&mut self) {
        self.by_position.clear();
        self.resets += 1;
    }

    fn block(&mut self, block: &[u8]) -> Result<(), String> {
        let (position, record) = block.split_first_chunk::<8>().ok_or("a short block")?;
        self.by_position
            .insert(u64::from_le_bytes(*position), record.to_vec());
        Ok(())
    }

    fn record(&mut self, position: LogPosition, record: &[u8]) -> Result<(), String> {
        self.by_position.insert(position.0, record.to_vec());
        Ok(())
    }

    fn gap(&mut self, damage: &Damage) {
        self.gap = Some(damage.clone());
    }
}

impl Records {
    /// The records, which must start with the first one and have no gap.
    fn list(self) -> Vec<Vec<u8>> {
        let positions: Vec<u64> = self.by_position.keys().copied().collect();
        let expected: Vec<u64> = (1..=positions.len() as u64).collect();
        assert_eq!(positions, expected, "a gap");
        self.by_position.into_values().collect()
    }
}

fn block(position: u64, record: &[u8]) -> Vec<u8> {
    [&position.to_le_bytes(), record].concat()
}

/// A snapshot source that returns a list as blocks.
struct Blocks(Vec<Vec<u8>>, usize);

impl Source for Blocks {
    fn begin(&mut self) {
        self.1 = 0;
    }

    fn next(&mut self, into: &mut Vec<u8>) -> Result<bool, String> {
        let Some(record) = self.0.get(self.1) else {
            return Ok(false);
        };
        self.1 += 1;
        into.extend(block(self.1 as u64, record));
        Ok(true)
    }
}

/// A source that fails after its first block.
struct Failing(bool);

impl Source for Failing {
    fn begin(&mut self) {}

    fn next(&mut self, into: &mut Vec<u8>) -> Result<bool, String> {
        into.extend(block(1, b"first"));
        match std::mem::replace(&mut self.0, true) {
            false => Ok(true),
            true => Err("the source ends".to_owned()),
        }
    }
}

/// Small segments and little history, so that every test changes segments, recycles and removes
/// history.
fn small() -> Options {
    Options {
        segment_bytes: 4096,
        snapshot_min_bytes: 4096,
        history_bytes: 0,
        history_ms: 0,
        ..Options::default()
    }
}

fn all_history() -> Options {
    Options {
        history_bytes: u64::MAX,
        history_ms: u64::MAX,
        ..small()
    }
}

fn open(disk: &Simulation, options: Options) -> Result<(Log, Opened, Records), Error> {
    let mut records = Records::default();
    let disk: Arc<dyn Disk> = Arc::new(disk.clone());
    let (log, opened) = Log::open(disk, options, 1, &mut records)?;
    Ok((log, opened, records))
}

/// A new log on an empty disk.
fn new_log(options: Options) -> (Simulation, Log) {
    let disk = Simulation::new(1);
    let (log, ..) = open(&disk, options).expect("opens");
    (disk, log)
}

/// A log in a real directory, and the records that it holds.
fn open_directory(path: &Path, options: Options) -> (Log, Records) {
    let mut records = Records::default();
    let disk: Arc<dyn Disk> = Arc::new(Directory::open(path).expect("free"));
    let (log, _) = Log::open(disk, options, 1, &mut records).expect("opens");
    (log, records)
}

/// The records that a start reads.
fn reopened(disk: &Simulation) -> Vec<Vec<u8>> {
    let (.., records) = open(disk, small()).expect("opens");
    records.list()
}

/// The released and the durable position.
fn positions(log: &Log) -> (u64, u64) {
    (log.released().0, log.durable().0)
}

fn commit(log: &Log, record: &[u8]) {
    log.append(&[record]).expect("small");
    log.commit().expect("no faults");
}

/// The numbers of files in order. `wanted` returns the number of a file that counts.
fn numbers(disk: &dyn Disk, wanted: fn(Kind) -> Option<u64>) -> Vec<u64> {
    let names = disk.list().expect("a directory");
    let numbers = names.iter().filter_map(|name| wanted(files::kind(name)));
    let mut numbers: Vec<u64> = numbers.collect();
    numbers.sort_unstable();
    numbers
}

fn segments(disk: &dyn Disk) -> Vec<u64> {
    numbers(disk, |kind| match kind {
        Kind::Segment(number) => Some(number),
        _ => None,
    })
}

fn snapshots(disk: &dyn Disk) -> Vec<u64> {
    numbers(disk, |kind| match kind {
        Kind::Snapshot(position) => Some(position),
        _ => None,
    })
}

fn flip(disk: &Simulation, name: &str, at: usize) {
    let mut content = disk.content(name).expect("listed");
    content[at] ^= 1;
    disk.put(name, &content);
}

/// Takes a snapshot of a list at once.
fn snapshot(log: &Log, list: &[Vec<u8>], now_ms: u64) -> Result<LogPosition, Error> {
    let Some(mut snapshot) = log.begin_snapshot(now_ms)? else {
        return Ok(log.appended());
    };
    fill(&mut snapshot, list)?;
    log.finish_snapshot(snapshot)
}

fn fill(snapshot: &mut Snapshot, list: &[Vec<u8>]) -> Result<(), Error> {
    for (record, position) in list.iter().zip(1..) {
        snapshot.block(&block(position, record))?;
    }
    Ok(())
}

fn record(dice: &mut Dice, bytes_max: u64) -> Vec<u8> {
    let bytes = dice.below(bytes_max + 1);
    (0..bytes).map(|_| dice.roll() as u8).collect()
}

/// The seeds of a test: the value of `STATEHOUSE_SEED`, or 0 to `count`.
fn seeds(count: u64) -> std::ops::Range<u64> {
    match std::env::var("STATEHOUSE_SEED").map(|seed| seed.parse::<u64>()) {
        Ok(Ok(seed)) => seed..seed + 1,
        _ => 0..count,
    }
}

/// Prints how to repeat a failing seed.
struct Reproduce(u64);

impl Drop for Reproduce {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!(
                "failed: run it again with STATEHOUSE_SEED={} cargo test -p statehouse-wal",
                self.0
            );
        }
    }
}
