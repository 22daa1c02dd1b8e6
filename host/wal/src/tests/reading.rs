//! Reads a real directory while a log writes to it, recycles and takes snapshots.

use std::sync::atomic::{AtomicBool, Ordering};

use super::*;
use crate::{Base, FileReport, Verdict, inspect, read};

/// The last position that was read. Every record is its position, so that a reader can check it.
struct Numbers(u64);

impl Sink for Numbers {
    fn reset(&mut self) {
        self.0 = 0;
    }

    fn block(&mut self, block: &[u8]) -> Result<(), String> {
        let (position, _) = block.split_first_chunk::<8>().ok_or("a short block")?;
        self.0 = u64::from_le_bytes(*position);
        Ok(())
    }

    fn record(&mut self, position: LogPosition, record: &[u8]) -> Result<(), String> {
        if self.0 != 0 && position.0 != self.0 + 1 {
            return Err(format!("{position} after {}", self.0));
        }
        if record[..8] != position.0.to_le_bytes() {
            return Err("another record".to_owned());
        }
        self.0 = position.0;
        Ok(())
    }
}

#[test]
fn reader_beside_a_writer_sees_a_correct_prefix() {
    let place = tempfile::tempdir().expect("a directory");
    let (log, _) = open_directory(place.path(), small());
    let done = AtomicBool::new(false);
    let reader = Directory::read_only(place.path()).expect("there");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for number in 1..=4_000u64 {
                let mut record = vec![0; 200];
                record[..8].copy_from_slice(&number.to_le_bytes());
                log.append(&[&record]).expect("small");
                log.write().expect("no faults");
                if number % 64 == 0 {
                    let mut snapshot = log
                        .begin_snapshot(number)
                        .expect("no faults")
                        .expect("new records");
                    snapshot.block(&number.to_le_bytes()).expect("no faults");
                    log.finish_snapshot(snapshot).expect("no faults");
                    log.maintain(number).expect("no faults");
                }
            }
            done.store(true, Ordering::Release);
        });
        let (mut read_whole, mut moved, mut seen) = (0, 0, 0);
        loop {
            let last_time = done.load(Ordering::Acquire);
            match read(&reader, Base::Newest, LogPosition::END, &mut Numbers(0)) {
                Ok(range) => {
                    assert!(range.end.0 >= seen, "a later look sees no less: {range:?}");
                    seen = range.end.0;
                    read_whole += 1;
                }
                Err(Error::Moved) => moved += 1,
                Err(error) => panic!("{error}"),
            }
            if read_whole % 8 == 0 {
                let report = inspect(&reader).expect("a directory");
                let is_damaged = |it: &&FileReport| matches!(it.verdict, Verdict::Damaged { .. });
                let damaged: Vec<_> = report.files.iter().filter(is_damaged).collect();
                assert!(damaged.is_empty(), "{damaged:?}");
            }
            if last_time {
                break;
            }
        }
        assert_eq!(seen, 4_000, "{moved} times moved");
        assert!(read_whole > 1);
    });
}
