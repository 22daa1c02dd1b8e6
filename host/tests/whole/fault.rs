//! Crashes, restarts and faults of the disk, and snapshots between them.

use statehouse_core::log::{Progress, sessions_block};
use statehouse_mqtt::ImageCursor;
use statehouse_wal::Snapshot;

use crate::node::Node;
use crate::world::World;

/// A snapshot that is being written.
pub(crate) struct Snapshotting {
    snapshot: Snapshot,
    sessions: Option<ImageCursor>,
    progress: Progress,
}

impl World {
    /// The process dies, or the machine loses power; then the host starts again.
    pub(crate) fn crash(&mut self) {
        let durable = self.node.log.durable().0;
        let appended = self.node.appended();
        self.snapshot = None;
        self.disk = if self.dice.once_in(2) {
            self.tally.count("kills");
            self.disk.kill()
        } else {
            self.tally.count("power cuts");
            self.disk.crash(self.dice.roll())
        };
        self.heal();
        if self.plan.clock_steps && self.dice.once_in(4) {
            self.step_clock();
        }
        let options = self.plan.options();
        let started = Node::start(&self.disk, &options, &self.time);
        let (node, found) = started.unwrap_or_else(|error| panic!("the start fails: {error}"));
        self.trace.add(|| {
            format!(
                "CRASH: durable {durable}, appended {appended}, found {}",
                found.position
            )
        });
        assert!(
            (durable..=appended).contains(&found.position),
            "obligation 1: durable {durable}, appended {appended}, found {}",
            found.position
        );
        if found.position < appended {
            self.tally.count("records lost in a crash");
        }
        if found.torn {
            self.tally.count("torn tails");
        }
        if found.from_snapshot {
            self.tally.count("starts from a snapshot");
        }
        self.oracle
            .crash(found.position, &found.table, self.now_ms());
        self.acked.clear();
        self.open.extend(self.unrecorded.drain());
        self.wills.crash(found.position);
        for client in &mut self.clients {
            // Drops the broker's ends while the old life exists; its log reaches no disk any more.
            client.crash(found.position, self.elapsed_ms);
        }
        self.egress.lock().expect("one thread").clear();
        self.node = node;
        self.life += 1;
        self.started_ms = self.elapsed_ms;
        self.after();
    }

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
            1 if self.plan.sync_errors => {
                let after = self.dice.below(3);
                self.disk.fail_sync_in(Some(after));
                self.trace.add(|| format!("the sync after {after} fails"));
            }
            2 if self.plan.clock_steps => {
                self.step_clock();
                self.advance(0);
            }
            _ => self.maintain(),
        }
    }

    fn maintain(&mut self) {
        let done = self.node.log.maintain(self.time.wall_ms);
        self.trace.add(|| format!("maintains: {:?}", done.err()));
        self.node.release();
        self.after();
        if self.node.log.failure().is_some() {
            self.crash();
        }
    }

    fn step_clock(&mut self) {
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
                });
            }
            return;
        };
        for _ in 0..1 + self.dice.below(6) {
            let mut block = None;
            if let Some(cursor) = &mut it.sessions {
                block = self.node.broker.image(cursor, 300);
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
