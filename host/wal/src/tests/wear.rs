//! Tests of what a flush costs flash memory, and of what a torn flush may change.
//!
//! Frames are not padded, so consecutive flushes rewrite the block that the last one ended in.

use std::time::Duration;

use super::*;
use crate::frame;
use crate::segment::{HEADER_BYTES, Header, Magic};
use crate::simulation::{BLOCK_BYTES, Written};
use crate::{Durability, limits};

/// About the record of a SET with a value of 64 bytes.
const RECORD_BYTES: usize = 228;
const FRAME_BYTES: usize = frame::HEADER_BYTES + 4 + RECORD_BYTES;

/// A log with spare segments, after its first upkeep.
fn prepared(durability: Durability) -> (Simulation, Log) {
    let (disk, log) = new_log(Options {
        durability,
        ..Options::default()
    });
    log.maintain(1).expect("room");
    (disk, log)
}

fn append(log: &Log) {
    log.append(&[&[7; RECORD_BYTES]]).expect("small");
}

/// What `act` made syncs write.
fn cost(disk: &Simulation, act: impl FnOnce()) -> Written {
    let before = disk.written();
    act();
    let after = disk.written();
    Written {
        syncs: after.syncs - before.syncs,
        blocks: after.blocks - before.blocks,
    }
}

#[test]
fn flush_of_a_small_record_writes_its_own_blocks_only() {
    const COMMITS: usize = 2000;
    let (disk, log) = prepared(Durability::Always);
    let mut total = 0;
    for n in 0..COMMITS {
        let cost = cost(&disk, || {
            append(&log);
            log.commit().expect("room");
            // Upkeep runs once a second. It must not flush if there is nothing to do.
            log.maintain(n as u64).expect("room");
        });
        let from = HEADER_BYTES + n * FRAME_BYTES;
        let blocks = (from + FRAME_BYTES - 1) / BLOCK_BYTES - from / BLOCK_BYTES + 1;
        let expected = Written {
            syncs: 1,
            blocks: blocks as u64,
        };
        assert_eq!(cost, expected, "commit {n}");
        assert!(cost.blocks * BLOCK_BYTES as u64 <= 8 << 10, "commit {n}");
        total += cost.blocks as usize;
    }
    // Only frames that cross the end of a block cost a second one.
    let crossings = (HEADER_BYTES + COMMITS * FRAME_BYTES) / BLOCK_BYTES;
    assert!(
        total <= COMMITS + crossings,
        "{total} blocks, {crossings} crossings"
    );
}

#[test]
fn records_of_an_interval_share_their_blocks() {
    const RECORDS: usize = 100;
    let (disk, log) = prepared(Durability::Interval(Duration::from_secs(1)));
    let cost = cost(&disk, || {
        for _ in 0..RECORDS {
            append(&log);
            log.write().expect("room");
        }
        log.sync().expect("room");
    });
    assert_eq!(cost.syncs, 1);
    let full = (RECORDS * FRAME_BYTES / BLOCK_BYTES) as u64;
    assert!(cost.blocks <= full + 2, "{cost:?}");
    let device_bytes = cost.blocks * BLOCK_BYTES as u64;
    let record_bytes = (RECORDS * RECORD_BYTES) as u64;
    assert!(
        device_bytes <= 2 * record_bytes,
        "{device_bytes} of {record_bytes}"
    );
}

/// A change of segment recycles a spare: its header, its entry in `newest`, and no content.
#[test]
fn change_of_segment_costs_a_few_blocks() {
    let (disk, log) = prepared(Durability::Always);
    let room = Options::default().segment_bytes as usize - HEADER_BYTES - frame::HEADER_BYTES;
    for _ in 0..room / (4 + RECORD_BYTES) {
        append(&log);
    }
    log.commit().expect("room");
    let cost = cost(&disk, || {
        append(&log);
        log.commit().expect("room");
    });
    assert_eq!(log.segments(), 1);
    assert!(cost.blocks <= 4, "{cost:?}");
}

/// A power failure while a block is rewritten leaves any part of the new bytes. The frames that it
/// held before must survive, and the new one completely or not at all.
#[test]
fn torn_rewrite_of_a_shared_block_keeps_acknowledged_frames() {
    const RECORDS: u64 = 16;
    let (disk, log) = new_log(small());
    let name = files::segment(1);
    let segment = |disk: &Simulation| disk.content(&name).expect("the first segment");
    let mut offset = HEADER_BYTES;
    for durable in 0..RECORDS {
        let before = segment(&disk);
        log.append(&[&[durable as u8 + 1; 90]]).expect("small");
        log.write().expect("room");
        let after = segment(&disk);
        let end = offset + frame::HEADER_BYTES + 4 + 90;
        assert_eq!(after[end..], before[end..], "nothing behind the frame");
        assert_eq!(after[..offset], before[..offset], "nothing before it");
        for cut in (offset..=end).step_by(7).chain([end]) {
            let first_part = [&after[..cut], &before[cut..]].concat();
            let last_part = [&before[..cut], &after[cut..]].concat();
            for (torn, is_whole) in [(first_part, cut == end), (last_part, cut == offset)] {
                let image = disk.fork();
                image.put(&name, &torn);
                let found = open(&image, small()).expect("a torn tail").2.list();
                assert_eq!(
                    found.len() as u64,
                    durable + u64::from(is_whole),
                    "cut at {cut}"
                );
                assert!(
                    (0..)
                        .zip(&found)
                        .all(|(n, record)| record[..] == [n + 1; 90])
                );
            }
        }
        log.sync().expect("room");
        offset = end;
    }
    // All frames were in the first block of the file, which was rewritten for each of them.
    assert!(offset < BLOCK_BYTES && small().segment_bytes >= limits::SEGMENT_BYTES_MIN);
    Header::decode(&segment(&disk), Magic::Segment).expect("the header survived");
}
