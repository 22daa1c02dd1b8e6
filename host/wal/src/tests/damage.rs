//! Damage that is not caused by a crash: every byte of a directory, one at a time.

use proptest::prelude::*;

use super::*;
use crate::segment::{Frames, Header, Magic};
use crate::{Base, Verdict, inspect, read};

/// Segments, two snapshots, spares and stale content of recycled segments.
fn directory(close: bool) -> (Simulation, Vec<Vec<u8>>, u64) {
    let disk = Simulation::new(3);
    let (log, ..) = open(&disk, small()).expect("opens");
    let mut dice = Dice::new(5);
    let mut list = Vec::new();
    // The last frame cannot cover its own commit.
    let mut proven = 0;
    for round in 0..40 {
        let record = record(&mut dice, 500);
        log.append(&[&record]).expect("small");
        list.push(record);
        proven = log.durable().0;
        log.commit().expect("no faults");
        if round % 12 == 7 {
            snapshot(&log, &list, round).expect("no faults");
            log.maintain(round).expect("no faults");
        }
    }
    if close {
        log.close().expect("no faults");
        proven = list.len() as u64;
    }
    (disk.kill(), list, proven)
}

fn flip_every_byte(close: bool) {
    let (disk, list, proven) = directory(close);
    let (mut refused, mut whole, mut torn) = (0, 0, 0);
    for name in disk.list().expect("a directory") {
        let content = disk.content(&name).expect("listed");
        for at in 0..content.len() {
            let mut flipped = content.clone();
            flipped[at] ^= 1 << (at % 8);
            let damaged = disk.fork();
            damaged.put(&name, &flipped);
            match open(&damaged, small()) {
                Err(Error::Damaged(_)) => refused += 1,
                Err(error) => panic!("{name} byte {at}: {error}"),
                Ok((.., records)) => {
                    let found = records.list();
                    assert!(
                        list[..found.len()] == found[..],
                        "{name} byte {at}: a wrong record"
                    );
                    assert!(
                        found.len() as u64 >= proven,
                        "{name} byte {at}: {} of {proven}",
                        found.len()
                    );
                    if found.len() == list.len() {
                        whole += 1
                    } else {
                        torn += 1
                    }
                }
            }
        }
    }
    assert!(refused > 1_000 && whole > 1_000, "{refused} {whole}");
    assert_eq!(
        torn == 0,
        close,
        "only the last commit before a crash may look torn: {torn}"
    );
}

#[test]
fn flipped_byte_of_a_closed_log_is_detected() {
    flip_every_byte(true);
}

#[test]
fn flipped_byte_loses_only_records_without_witness() {
    flip_every_byte(false);
}

#[test]
fn missing_file_is_detected_or_not_needed() {
    let (disk, list, _) = directory(true);
    let (mut refused, mut named) = (0, 0);
    for name in disk.list().expect("a directory") {
        let without = disk.fork();
        without.remove(&name).expect("listed");
        match open(&without, small()) {
            Err(Error::Damaged(damage)) => {
                refused += 1;
                named += u32::from(damage.file == name && damage.reason == "the file is missing");
                assert!(damage.to_string().contains("statehouse doctor"), "{damage}");
            }
            Err(error) => panic!("{name}: {error}"),
            Ok((.., records)) => assert!(records.list() == list, "{name}"),
        }
    }
    assert!(named >= 2 && refused == named, "{refused} {named}");
}

#[test]
fn refusal_names_the_place_and_the_loss() {
    let (disk, ..) = directory(true);
    let report = inspect(&disk).expect("a directory");
    let needed = |file: &&crate::FileReport| {
        matches!(file.kind, Kind::Segment(_)) && file.verdict == Verdict::Clean
    };
    let segments: Vec<_> = report.files.iter().filter(needed).collect();
    let [.., middle, _] = segments[..] else {
        panic!("two segments")
    };
    flip(&disk, &middle.name, 200);
    let Err(Error::Damaged(damage)) = open(&disk, small()) else {
        panic!("damage")
    };
    assert_eq!((&damage.file, damage.offset), (&middle.name, Some(64)));
    assert_eq!(
        (damage.lost_from, damage.lost_to),
        (middle.first, middle.last)
    );
}

#[test]
fn swapped_blocks_are_damage() {
    let (disk, log) = new_log(small());
    let list = [b"first".to_vec(), b"other".to_vec()];
    log.append(&[&list[0], &list[1]]).expect("small");
    snapshot(&log, &list, 1).expect("no faults");
    let name = files::snapshot(2);
    let mut content = disk.content(&name).expect("there");
    // Each block has a length, a checksum, a position and five bytes.
    let (left, right) = content[64..].split_at_mut(21);
    left.swap_with_slice(&mut right[..21]);
    disk.put(&name, &content);
    let (_, opened, records) = open(&disk, small()).expect("opens");
    assert_eq!(opened.damaged_snapshots.len(), 1);
    assert!(records.list() == list);
}

#[test]
fn files_of_another_store_are_rejected() {
    let (disk, list, _) = directory(true);
    let other = Simulation::new(99);
    let (log, ..) = open(&other, small()).expect("opens");
    for _ in 0..40 {
        commit(&log, &[1; 400]);
    }
    let mut refused = 0;
    for name in other
        .list()
        .expect("a directory")
        .iter()
        .filter(|name| name.ends_with(".log"))
    {
        if disk.content(name).is_some() {
            let mix = disk.fork();
            mix.put(name, &other.content(name).expect("listed"));
            match open(&mix, small()) {
                Err(_) => refused += 1,
                // Files from before the newest snapshot are not read.
                Ok((.., records)) => assert!(records.list() == list, "{name}"),
            }
        }
    }
    assert!(refused > 1, "{refused}");
}

/// A killed log of 40 records: three in each segment, and a snapshot after every fifth.
fn with_snapshots() -> (Simulation, Vec<Vec<u8>>) {
    let (disk, log) = new_log(all_history());
    let mut list = Vec::new();
    for round in 0..40 {
        list.push(vec![round as u8; 1000]);
        commit(&log, &list[list.len() - 1]);
        if round % 5 == 4 {
            snapshot(&log, &list, round).expect("no faults");
        }
    }
    (disk.kill(), list)
}

/// Nothing reads the files before a break in the chain of segments, so they are history.
#[test]
fn files_before_a_break_are_removed_as_history() {
    let options = |history_bytes, history_ms| Options {
        history_bytes,
        history_ms,
        ..small()
    };
    let (disk, list) = with_snapshots();
    // It holds the records 16 to 18.
    flip(&disk, &files::segment(6), 0);
    let before = |disk: &Simulation| {
        let segments = segments(disk).into_iter().filter(|it| *it <= 6);
        let snapshots = snapshots(disk).into_iter().filter(|it| *it <= 15);
        segments.count() + snapshots.count()
    };
    // The first snapshot after the break is from time 19.
    for (history_bytes, history_ms, now_ms, left) in [
        (u64::MAX, u64::MAX, 1_000, 9),
        (u64::MAX, 50, 69, 9),
        (u64::MAX, 50, 70, 0),
        (0, u64::MAX, 20, 0),
    ] {
        let disk = disk.fork();
        let (log, _, records) = open(&disk, options(history_bytes, history_ms)).expect("opens");
        assert!(records.list() == list);
        assert_eq!(before(&disk), 9);
        log.maintain(now_ms).expect("no faults");
        assert_eq!(before(&disk), left, "{history_bytes} {history_ms} {now_ms}");
        assert!(reopened(&disk.kill()) == list);
    }
}

/// Regression: one damaged byte made all history unreadable, although the store started.
#[test]
fn history_begins_after_damage_that_a_snapshot_covers() {
    let (disk, list) = with_snapshots();
    let oldest = |disk: &Simulation| {
        let mut records = Records::default();
        let range = read(disk, Base::Oldest, LogPosition::END, &mut records);
        range.map(|range| (range.base.0, records))
    };
    let (base, records) = oldest(&disk).expect("whole");
    assert_eq!((base, records.gap), (0, None));

    // A byte of a frame or of the header. Segment 6 holds the records 16 to 18.
    for (segments, at) in [(&[6][..], 100), (&[3, 6][..], 100), (&[6][..], 0)] {
        let disk = disk.fork();
        for segment in segments {
            flip(&disk, &files::segment(*segment), at);
        }
        let (base, mut records) = oldest(&disk).expect("a snapshot covers the damage");
        let gap = records.gap.take().expect("reported");
        assert_eq!((base, gap.file), (20, files::segment(6)), "{segments:?}");
        assert!(records.list() == list);
        assert!(open(&disk.fork(), small()).is_ok());

        // Without these snapshots, the end of the log cannot be read.
        for position in [20, 25, 30, 35, 40] {
            disk.remove(&files::snapshot(position)).expect("listed");
        }
        let damage = match oldest(&disk).map(|(base, _)| base) {
            Err(Error::Damaged(damage)) => damage,
            other => panic!("{other:?}"),
        };
        assert_eq!(damage.file, files::segment(6));
    }
}

/// Regression: the range of lost records began after the snapshot, although segments follow it.
#[test]
fn loss_begins_after_the_segments_before_a_break() {
    let (disk, _) = with_snapshots();
    // The snapshot of record 5 remains. Each segment holds three records, number 4 from 10 on.
    for position in snapshots(&disk).into_iter().filter(|it| *it > 5) {
        disk.remove(&files::snapshot(position)).expect("listed");
    }
    let lost = |disk: &Simulation| match open(disk, small()) {
        Err(Error::Damaged(it)) => (it.lost_from.map(|it| it.0), it.lost_to.map(|it| it.0)),
        other => panic!("{:?}", other.map(|_| ())),
    };
    let without = |segments: &[u64]| {
        let disk = disk.fork();
        for segment in segments {
            disk.remove(&files::segment(*segment)).expect("listed");
        }
        disk
    };
    assert_eq!(lost(&without(&[4])), (Some(10), Some(12)));
    assert_eq!(lost(&without(&[4, 6])), (Some(10), Some(18)));
    assert_eq!(lost(&without(&[2, 6])), (Some(6), Some(18)));
    // The header of a segment, and a frame of one before the break.
    let flipped = disk.fork();
    flip(&flipped, &files::segment(4), 0);
    assert_eq!(lost(&flipped), (Some(10), Some(12)));
    let broken = without(&[4]);
    flip(&broken, &files::segment(3), 100);
    assert_eq!(lost(&broken), (Some(7), Some(12)));
}

/// A start begins a segment, and a large record the next one, so the first has no records.
#[test]
fn missing_segment_without_records_contains_no_lost_record() {
    let (disk, log) = new_log(all_history());
    commit(&log, b"first");
    let disk = disk.kill();
    let (log, ..) = open(&disk, all_history()).expect("opens");
    commit(&log, &[2; 8000]);
    let disk = disk.kill();
    assert_eq!(segments(&disk), [1, 2, 3]);
    disk.remove(&files::segment(2)).expect("listed");
    match open(&disk, small()) {
        Err(Error::Damaged(it)) => {
            assert_eq!((it.lost_from, it.lost_to), (Some(LogPosition(2)), None));
        }
        other => panic!("{:?}", other.map(|_| ())),
    }
}

#[test]
fn inspection_agrees_with_opening() {
    let (disk, list, _) = directory(false);
    let report = inspect(&disk).expect("a directory");
    assert_eq!(
        report.opening.expect("whole").end,
        LogPosition(list.len() as u64)
    );
    let verdicts: Vec<&Verdict> = report.files.iter().map(|file| &file.verdict).collect();
    assert!(verdicts.contains(&&Verdict::Spare));
    assert!(
        !verdicts
            .iter()
            .any(|verdict| matches!(verdict, Verdict::Damaged { .. } | Verdict::TornTail { .. }))
    );

    // Damages the last segment with frames: first its tail, then its middle.
    let last = report
        .files
        .iter()
        .rfind(|file| file.name.ends_with(".log") && file.last.is_some());
    let last = last.expect("a segment").clone();
    let content = disk.content(&last.name).expect("listed");
    // After its end, a recycled segment holds its previous content.
    let header = Header::decode(&content, Magic::Segment).expect("whole");
    let mut frames = Frames::new(header, &content);
    assert!(frames.by_ref().count() > 1);
    let end = frames.offset - 1;
    for (at, torn) in [(end, true), (200, false)] {
        let damaged = disk.fork();
        flip(&damaged, &last.name, at);
        let report = inspect(&damaged).expect("a directory");
        let file = report
            .files
            .iter()
            .find(|file| file.name == last.name)
            .expect("listed");
        let text = file.verdict.to_string();
        if torn {
            assert!(matches!(file.verdict, Verdict::TornTail { .. }), "{text}");
            assert!(report.opening.is_ok());
        } else {
            assert!(
                matches!(
                    file.verdict,
                    Verdict::Damaged {
                        lost_records: Some(1..),
                        ..
                    }
                ),
                "{text}"
            );
            assert!(report.opening.is_err());
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(300) })]

    /// Random overwrites must neither cause a panic nor yield a record that was not appended.
    #[test]
    fn overwritten_ranges_give_a_prefix_or_a_refusal(
        file in any::<prop::sample::Index>(),
        at in any::<prop::sample::Index>(),
        bytes in prop::collection::vec(any::<u8>(), 1..300),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let (disk, list, _) = directory(false);
        let names = disk.list().expect("a directory");
        let name = file.get(&names);
        let mut content = disk.content(name).expect("listed");
        if !content.is_empty() {
            let at = at.index(content.len());
            let to = content.len().min(at + bytes.len());
            content[at..to].copy_from_slice(&bytes[..to - at]);
        }
        if let Some(cut) = cut {
            content.truncate(cut.index(content.len() + 1));
        }
        disk.put(name, &content);
        inspect(&disk).expect("a directory");
        if let Ok((.., records)) = open(&disk, small()) {
            let found = records.list();
            prop_assert!(list[..found.len()] == found[..]);
        }
    }

    /// Files with arbitrary content.
    #[test]
    fn files_of_noise_are_refused(
        bytes in prop::collection::vec(any::<u8>(), 0..5_000),
        snapshot in any::<bool>(),
    ) {
        let disk = Simulation::new(1);
        disk.put(&if snapshot { files::snapshot(5) } else { files::segment(1) }, &bytes);
        inspect(&disk).expect("a directory");
        prop_assert!(open(&disk, small()).is_err());
    }
}
