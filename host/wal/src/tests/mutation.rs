//! Files that were truncated, removed, or shifted by inserted or deleted bytes.
//!
//! Invariant: such a directory must open with every durable record, or be refused with the name of
//! the file. Only a change inside the last commits that keeps the length of the file may look like
//! a torn write.

use super::*;
use crate::segment::{Frames, HEADER_BYTES, Header, Magic};
use crate::survey::Survey;

/// How the process that wrote the directory ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Killed,
    /// Upkeep ran after the last commit.
    KilledLater,
    KilledAfterRestart,
    Closed,
}

struct Written {
    disk: Simulation,
    list: Vec<Vec<u8>>,
    /// The last position that a file other than a segment proves durable.
    proven: u64,
}

/// Creates several segments, two snapshots, spares, and stale content after the last frame.
fn written(end: End) -> Written {
    let mut disk = Simulation::new(3);
    let mut dice = Dice::new(5);
    let mut list = Vec::new();
    for life in 0..2 {
        let (log, ..) = open(&disk, small()).expect("opens");
        for round in 0..30 {
            let record = record(&mut dice, 500);
            commit(&log, &record);
            list.push(record);
            if round % 12 == 7 {
                snapshot(&log, &list, life * 100 + round).expect("no faults");
                log.maintain(life * 100 + round).expect("no faults");
            }
        }
        match end {
            End::Closed => log.close().expect("no faults"),
            End::KilledLater => log.maintain(1_000).expect("no faults"),
            End::Killed | End::KilledAfterRestart => {}
        }
        disk = disk.kill();
        if end != End::KilledAfterRestart {
            break;
        }
    }
    let proven = Survey::of(&disk).expect("a directory").witness();
    Written { disk, list, proven }
}

/// Both ends of each frame, of the header and of the file, their neighbours, and some places in
/// between.
fn places(content: &[u8]) -> Vec<usize> {
    let mut places = vec![0, HEADER_BYTES, content.len()];
    places.extend((0..content.len()).step_by(512));
    if let Ok(header) = Header::decode(content, Magic::Segment) {
        let mut frames = Frames::new(header, content);
        while frames.next().is_some() {
            places.push(frames.offset);
            places.push(frames.offset + 20);
        }
    }
    let around = |at: &usize| [at.saturating_sub(1), *at, at + 1];
    let mut places: Vec<usize> = places.iter().flat_map(around).collect();
    places.retain(|at| *at <= content.len());
    places.sort_unstable();
    places.dedup();
    places
}

/// Damaged contents of a file, each with a name.
fn mutations(content: &[u8]) -> Vec<(String, Vec<u8>)> {
    let mut mutations = Vec::new();
    for at in places(content) {
        mutations.push((format!("cut to {at} bytes"), content[..at].to_vec()));
        for bytes in [1, 56, 512] {
            let inserted = [&content[..at], &vec![0x5A; bytes], &content[at..]].concat();
            let to = content.len().min(at + bytes);
            let deleted = [&content[..at], &content[to..]].concat();
            for (what, mutated) in [("inserted", inserted), ("deleted", deleted)] {
                let what = format!("{bytes} bytes {what} at {at}");
                let mut padded = mutated.clone();
                padded.resize(content.len(), 0);
                mutations.push((format!("{what}, of the old length"), padded));
                mutations.push((what, mutated));
            }
        }
    }
    mutations.retain(|(_, mutated)| mutated != content);
    mutations
}

/// Whether the directory was refused.
fn judge(disk: &Simulation, written: &Written, is_new_length: bool, story: &str) -> bool {
    match open(disk, small()) {
        Err(Error::Damaged(damage)) => {
            let text = damage.to_string();
            let named = text.contains(&damage.file) && !damage.file.is_empty();
            assert!(
                named && text.contains("statehouse doctor") && text.contains("--salvage"),
                "{story}: {text}"
            );
            true
        }
        Err(error) => panic!("{story}: {error}"),
        Ok((.., records)) => {
            let found = records.list();
            let least = if is_new_length {
                written.list.len()
            } else {
                written.proven as usize
            };
            assert!(
                found.len() >= least && written.list[..found.len()] == found[..],
                "{story}: {} of {} records",
                found.len(),
                written.list.len()
            );
            false
        }
    }
}

fn mutate_every_file(end: End) {
    let written = written(end);
    let (mut refused, mut opened) = (0, 0);
    let mut count = |is_refused: bool| match is_refused {
        true => refused += 1,
        false => opened += 1,
    };
    for name in written.disk.list().expect("a directory") {
        let content = written.disk.content(&name).expect("listed");
        let without = written.disk.fork();
        without.remove(&name).expect("listed");
        let story = format!("{end:?}: {name} removed");
        count(judge(&without, &written, true, &story));
        for (what, mutated) in mutations(&content) {
            let disk = written.disk.fork();
            disk.put(&name, &mutated);
            let story = format!("{end:?}: {name}, {what}");
            let is_new_length = mutated.len() != content.len();
            count(judge(&disk, &written, is_new_length, &story));
        }
    }
    assert!(refused > 500 && opened > 500, "{refused} {opened}");
}

#[test]
fn mutated_files_after_a_kill_open_whole_or_refuse() {
    mutate_every_file(End::Killed);
}

#[test]
fn mutated_files_after_a_later_kill_open_whole_or_refuse() {
    let written = written(End::KilledLater);
    assert_eq!(written.proven, written.list.len() as u64);
    mutate_every_file(End::KilledLater);
}

#[test]
fn mutated_files_after_a_restart_open_whole_or_refuse() {
    mutate_every_file(End::KilledAfterRestart);
}

#[test]
fn mutated_files_after_a_close_open_whole_or_refuse() {
    mutate_every_file(End::Closed);
}

/// All segments from some number on were removed.
#[test]
fn removed_newest_segments_are_refused_by_name() {
    let written = written(End::Killed);
    let numbers = segments(&written.disk);
    assert!(numbers.len() > 2, "{numbers:?}");
    for removed in 1..=numbers.len() {
        let disk = written.disk.fork();
        for number in &numbers[numbers.len() - removed..] {
            disk.remove(&files::segment(*number)).expect("listed");
        }
        let Err(Error::Damaged(damage)) = open(&disk, small()) else {
            panic!("{removed} segments are missing")
        };
        assert!(damage.reason.contains("missing"), "{damage}");
    }
}

/// The format before segments recorded their length and `newest` recorded the newest segment.
#[test]
fn directory_without_recorded_lengths_opens() {
    let written = written(End::Killed);
    for name in written.disk.list().expect("a directory") {
        let mut content = written.disk.content(&name).expect("listed");
        if let Ok(header) = Header::decode(&content, Magic::Segment) {
            assert_eq!(header.bytes, content.len() as u64, "{name}");
            let earlier = Header { bytes: 0, ..header };
            content[..HEADER_BYTES].copy_from_slice(&earlier.encode(Magic::Segment));
            written.disk.put(&name, &content);
        }
    }
    written.disk.remove(files::NEWEST).expect("there");
    assert!(reopened(&written.disk) == written.list);
    // From here on the directory has the protection of the current format.
    let disk = written.disk.kill();
    assert!(disk.content(files::NEWEST).is_some());
}
