//! Faults of the disk and steps of the clock, and snapshots between them.

use statehouse_core::log::{Progress, sessions_block};
use statehouse_mqtt::ImageCursor;
use statehouse_wal::Snapshot;

use crate::world::World;

/// A snapshot that is being written.
pub(crate) struct Snapshotting {
    snapshot: Snapshot,
    sessions: Option<ImageCursor>,
    progress: Progress,
    /// How many steps wrote a part of it.
    steps: u32,
}

impl World {
    /// The disk is in order again.
    pub(crate) fn heal(&mut self) {
        self.disk.limit_bytes(None);
        self.disk.fail_write_in(None);
        self.disk.fail_sync_in(None);
    }

    /// One of the faults of this run's plan.
    pub(crate) fn fault(&mut self) {
        match self.dice.below(3) {
            0 if self.plan.full => {
                if self.node.has_room() {
                    let bytes = self.disk.used_bytes() + self.dice.below(6_000);
                    self.disk.limit_bytes(Some(bytes));
                    self.tally.count("full disks");
                } else {
                    self.heal();
                }
                self.maintain();
            }
            1 if self.plan.disk_errors => {
                let after = self.dice.below(4);
                match self.dice.once_in(2) {
                    true => self.disk.fail_sync_in(Some(after)),
                    false => self.disk.fail_write_in(Some(after)),
                }
                self.trace
                    .add(|| format!("the disk fails after {after} operations"));
            }
            2 if self.plan.clock_steps => {
                self.step_clock();
                self.advance(0);
            }
            0 | 1 => self.write_or_sync(),
            _ => self.maintain(),
        }
    }

    fn maintain(&mut self) {
        let done = self.node.log.maintain(self.time.wall_ms);
        self.trace.add(|| format!("maintains: {:?}", done.err()));
        self.after_log();
    }

    pub(crate) fn step_clock(&mut self) {
        let by = self.dice.below(120_000);
        self.time.wall_ms = (self.time.wall_ms + by).saturating_sub(60_000);
        self.time.source.set_wall(self.time.wall_ms);
        self.tally.count("steps of the clock");
        self.trace
            .add(|| format!("the wall clock steps by {by} - 60000 ms"));
    }

    /// Begins a snapshot, or writes its next block.
    pub(crate) fn snapshot_step(&mut self) {
        let Some(mut it) = self.snapshot.take() else {
            if let Ok(Some(snapshot)) = self.node.log.begin_snapshot(self.time.wall_ms) {
                self.snapshot = Some(Snapshotting {
                    snapshot,
                    sessions: Some(ImageCursor::default()),
                    progress: Progress::default(),
                    steps: 0,
                });
            }
            return;
        };
        it.steps += 1;
        if self.dice.once_in(30) {
            // It is given up.
            return;
        }
        for _ in 0..1 + self.dice.below(6) {
            let mut block = None;
            let broker = self.node.broker.as_ref();
            if let Some((cursor, broker)) = it.sessions.as_mut().zip(broker) {
                block = broker.image(cursor, 300);
                block = block.map(|changes| sessions_block(&changes));
                if block.is_none() {
                    it.sessions = None;
                }
            }
            let block = block.or_else(|| self.node.server.snapshot(&mut it.progress));
            let Some(block) = block else {
                let finished = self.node.log.finish_snapshot(it.snapshot);
                self.trace
                    .add(|| format!("finishes a snapshot: {finished:?}"));
                if finished.is_ok() {
                    self.tally.count("snapshots");
                    let several = u64::from(it.steps > 2);
                    self.tally.add_to("snapshots over several steps", several);
                }
                return;
            };
            if it.snapshot.block(&block).is_err() {
                return;
            }
        }
        self.snapshot = Some(it);
    }
}
