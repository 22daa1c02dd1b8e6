//! Thousands of crashes at random times, and every crash of a scripted run.

use std::collections::BTreeSet;

use super::*;
use crate::Durability;

/// A log with the records that were appended and the positions that were reported durable.
struct Run {
    dice: Dice,
    disk: Simulation,
    options: Options,
    log: Log,
    /// Every record that was appended and may still exist.
    list: Vec<Vec<u8>>,
    /// The positions at which groups end.
    ends: BTreeSet<u64>,
    /// The largest position that was ever reported durable.
    durable: u64,
    snapshot: Option<(Snapshot, usize)>,
    now_ms: u64,
}

impl Run {
    fn new(seed: u64) -> Self {
        let mut dice = Dice::new(seed);
        let disk = Simulation::new(dice.roll());
        let durability = if dice.once_in(3) {
            Durability::Interval(std::time::Duration::from_secs(1))
        } else {
            Durability::Always
        };
        let history_bytes = [0, 20_000, u64::MAX][dice.below(3) as usize];
        let options = Options {
            durability,
            history_bytes,
            history_ms: u64::MAX,
            ..small()
        };
        let (log, opened, _) = open(&disk, options.clone()).expect("an empty disk");
        assert!(opened.fresh);
        let (list, ends) = (Vec::new(), BTreeSet::from([0]));
        Self {
            dice,
            disk,
            options,
            log,
            list,
            ends,
            durable: 0,
            snapshot: None,
            now_ms: 1,
        }
    }

    fn append(&mut self) {
        let bytes_max = [20, 300, 300, 300, 6000][self.dice.below(5) as usize];
        let group: Vec<Vec<u8>> = (0..1 + self.dice.below(3))
            .map(|_| record(&mut self.dice, bytes_max))
            .collect();
        let parts: Vec<&[u8]> = group.iter().map(Vec::as_slice).collect();
        let urgent = self.dice.once_in(4);
        let before = (self.log.released().0, self.list.len() as u64);
        let position = if urgent {
            self.log.append_urgent(&parts)
        } else {
            self.log.append(&parts)
        }
        .expect("small");
        self.list.extend(group);
        assert_eq!(position.0, self.list.len() as u64);
        self.ends.insert(position.0);
        if urgent && self.options.durability != Durability::Always {
            assert!(
                self.log.released().0 <= before.1.max(before.0),
                "an urgent group may not leave at once"
            );
        }
    }

    /// One random operation on a log. Returns false if the log failed.
    fn step(&mut self) -> bool {
        let outcome = match self.dice.below(12) {
            0..=4 => {
                self.append();
                Ok(())
            }
            5 | 6 => self.log.commit().map(drop),
            7 => self.log.write(),
            8 => self.log.sync().map(drop),
            9 => {
                self.now_ms += self.dice.below(1000);
                self.log.maintain(self.now_ms)
            }
            _ => self.snapshot_step(),
        };
        self.durable = self.durable.max(self.log.durable().0);
        match outcome {
            Ok(()) => {}
            Err(Error::Failed(_) | Error::Io { .. }) => {}
            Err(error) => panic!("{error}"),
        }
        assert!(self.log.durable() <= self.log.appended());
        assert!(self.log.released() <= self.log.appended());
        self.log.failure().is_none()
    }

    /// Takes a snapshot over many steps while the log is being written.
    fn snapshot_step(&mut self) -> Result<(), Error> {
        let Some((mut snapshot, mut taken)) = self.snapshot.take() else {
            self.snapshot = self
                .log
                .begin_snapshot(self.now_ms)?
                .map(|snapshot| (snapshot, 0));
            return Ok(());
        };
        let until = self
            .list
            .len()
            .min(taken + 1 + self.dice.below(60) as usize);
        for at in taken..until {
            snapshot.block(&block(at as u64 + 1, &self.list[at]))?;
        }
        taken = until;
        // Blocks may hold records after the beginning of the snapshot, but must hold all before it.
        if taken as u64 >= snapshot.position().0 && self.dice.once_in(2) {
            self.log.finish_snapshot(snapshot).map(drop)
        } else if self.dice.once_in(20) {
            drop(snapshot);
            Ok(())
        } else {
            self.snapshot = Some((snapshot, taken));
            Ok(())
        }
    }

    fn end(&mut self) {
        self.snapshot = None;
        let mut complete = false;
        self.disk = match self.dice.below(4) {
            0 => {
                complete = self.log.close().is_ok();
                if complete {
                    self.disk.crash(self.dice.roll())
                } else {
                    self.disk.kill()
                }
            }
            1 => self.disk.kill(),
            _ => self.disk.crash(self.dice.roll()),
        };
        if self.dice.once_in(3) {
            self.damage_a_snapshot();
        }
        if complete {
            self.durable = self.list.len() as u64;
        }
    }

    /// Damages the newest snapshot if there is another intact base.
    fn damage_a_snapshot(&mut self) {
        let first = segments(&self.disk).contains(&1);
        let mut snapshots = snapshots(&self.disk);
        let Some(newest) = snapshots.pop() else {
            return;
        };
        if snapshots.is_empty() && !first {
            return;
        }
        let name = files::snapshot(newest);
        let mut content = self.disk.content(&name).expect("listed");
        let at = self.dice.below(content.len() as u64) as usize;
        content[at] ^= 1 << self.dice.below(8);
        self.disk.put(&name, &content);
    }

    fn reopen(&mut self) {
        let faults = self.dice.once_in(6);
        if faults {
            self.disk.fail_sync_in(Some(self.dice.below(6)));
        }
        let (log, opened, records) = loop {
            match open(&self.disk, self.options.clone()) {
                Ok(found) => break found,
                Err(error) if faults && matches!(error, Error::Io { .. }) => {
                    self.disk = if self.dice.once_in(2) {
                        self.disk.kill()
                    } else {
                        self.disk.crash(self.dice.roll())
                    };
                }
                Err(error) => panic!("{error}"),
            }
        };
        self.disk.fail_sync_in(None);
        let found = records.list();
        let end = found.len() as u64;
        assert_eq!(opened.position.0, end);
        assert!(
            end >= self.durable,
            "durable up to {}, found {end}",
            self.durable
        );
        assert!(end <= self.list.len() as u64);
        assert!(
            self.list[..found.len()] == found[..],
            "other records than were appended"
        );
        assert!(self.ends.contains(&end), "half a group: {end}");
        self.list.truncate(found.len());
        self.ends.split_off(&(end + 1));
        assert_eq!((log.durable().0, log.released().0), (end, end));
        self.durable = end;
        self.log = log;
    }

    fn fault(&mut self) {
        let n = Some(self.dice.below(30));
        match self.dice.below(6) {
            0 => self.disk.fail_write_in(n),
            1 => self.disk.fail_sync_in(n),
            2 => self
                .disk
                .limit_bytes(Some(self.disk.used_bytes() + self.dice.below(12_000))),
            _ => {}
        }
    }
}

fn run(seed: u64, lives: u64) {
    let _reproduce = Reproduce(seed);
    let mut run = Run::new(seed);
    for _ in 0..lives {
        run.fault();
        for _ in 0..20 + run.dice.below(150) {
            if !run.step() {
                break;
            }
        }
        run.end();
        run.disk.limit_bytes(None);
        run.reopen();
    }
}

#[test]
fn durable_records_survive_random_crashes() {
    for seed in seeds(2_000) {
        run(seed, 4);
    }
}

/// Every directory that a crash may leave during a run with changes of segment, snapshots and
/// upkeep.
#[test]
fn every_crash_image_opens_with_all_durable_records() {
    let disk = Simulation::new(1);
    disk.record();
    let mut list = Vec::new();
    let mut ends = BTreeSet::from([0]);
    let mut dice = Dice::new(7);
    for life in 0..3 {
        let disk = disk.kill();
        let (log, ..) = open(&disk, small()).expect("opens");
        for round in 0..14 {
            let group: Vec<Vec<u8>> = (0..2).map(|_| record(&mut dice, 700)).collect();
            let parts: Vec<&[u8]> = group.iter().map(Vec::as_slice).collect();
            let end = log.append(&parts).expect("small");
            list.extend(group);
            ends.insert(end.0);
            if round % 3 != 1 {
                disk.mark(log.commit().expect("no faults").0);
            } else {
                log.write().expect("no faults");
            }
            if round % 5 == 4 {
                snapshot(&log, &list, round).expect("no faults");
                disk.mark(log.durable().0);
                log.maintain(round).expect("no faults");
            }
        }
        if life == 1 {
            log.close().expect("no faults");
        }
        log.commit().expect("no faults");
        disk.mark(log.durable().0);
    }
    let mut images = 0u64;
    disk.images(&mut |image| {
        let story = &image.story;
        let (log, _, records) =
            open(&image.disk, small()).unwrap_or_else(|error| panic!("{story}: {error}"));
        let found = records.list();
        let end = found.len() as u64;
        assert!(
            end >= image.marked,
            "{story}: {} were durable, {end} found",
            image.marked
        );
        assert!(list[..found.len()] == found[..], "{story}");
        assert!(ends.contains(&end), "{story}: half a group");
        // A second crash must not lose anything that the first start returned.
        drop(log);
        let (.., again) = open(&image.disk.crash(images), small())
            .unwrap_or_else(|error| panic!("{story}: {error}"));
        assert!(again.list() == found, "{story}: a second crash");
        images += 1;
    });
    assert!(images > 1_000, "{images}");
}
