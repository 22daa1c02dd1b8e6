//! Crashes, restarts and recovery.
//!
//! Invariant: a start must recover every durable record, and the state after the last recovered
//! record must equal the state that the store had there.

use std::collections::BTreeMap;
use std::sync::Arc;

use statehouse::limits;
use statehouse_core::log::Image;
use statehouse_core::store::Retention;
use statehouse_protocol::SessionId;
use statehouse_wal::simulation::Simulation;
use statehouse_wal::{Disk, Error, Log, LogPosition, Opened, Options, Sink};

use crate::operation::Operation;
use crate::policies;
use crate::world::World;

struct ImageSink<'a>(Image, &'a BTreeMap<u64, Operation>);

impl Sink for ImageSink<'_> {
    fn reset(&mut self) {
        self.0.reset();
    }

    fn block(&mut self, block: &[u8]) -> Result<(), String> {
        self.0.block(block).map_err(|error| error.to_string())
    }

    fn record(&mut self, position: LogPosition, record: &[u8]) -> Result<(), String> {
        Operation::check(self.1.get(&position.0), position.0, record);
        self.0.record(record).map_err(|error| error.to_string())
    }
}

impl World {
    pub(crate) fn open_log(
        disk: &Simulation,
        options: &Options,
        retention: Retention,
        now_ms: u64,
        operations: &BTreeMap<u64, Operation>,
    ) -> Result<((Log, Image), Opened), Error> {
        let mut sink = ImageSink(Image::new(retention), operations);
        let disk: Arc<dyn Disk> = Arc::new(disk.clone());
        let (log, opened) = Log::open(disk, options.clone(), now_ms, &mut sink)?;
        sink.0.finish();
        Ok(((log, sink.0), opened))
    }

    /// Kills the process or cuts the power of the machine, and starts the process again.
    pub(crate) fn restart(&mut self, kill: bool) {
        self.snapshot = None;
        let (durable, appended) = (self.log.durable().0, self.log.appended().0);
        if kill {
            self.tally.count("kills");
            self.disk = self.disk.kill();
        } else {
            self.tally.count("power cuts");
            self.disk = self.disk.crash(self.dice.roll());
        }
        self.trace.record(format!(
            "{}, with {durable} durable of {appended}",
            if kill { "is killed" } else { "loses power" },
        ));
        self.start(durable.max(self.observed_record), appended, false);
    }

    /// Stops the process cleanly, unless the disk fails, and starts it again.
    pub(crate) fn restart_cleanly(&mut self) {
        self.snapshot = None;
        let now_ms = self.now();
        self.core.stop(now_ms);
        self.recorded.2 = now_ms;
        self.capture_state();
        let closed = self.log.close();
        self.trace
            .record(format!("closes: {:?}", closed.as_ref().err()));
        let (durable, appended) = (self.log.durable().0, self.log.appended().0);
        if closed.is_ok() {
            assert_eq!(durable, appended);
            self.tally.count("clean restarts");
        }
        self.disk = match self.dice.below(2) {
            0 => self.disk.kill(),
            _ => self.disk.crash(self.dice.roll()),
        };
        self.start(durable.max(self.observed_record), appended, closed.is_ok());
    }

    /// Starts from the disk. Every record up to `durable` must be recovered.
    fn start(&mut self, durable: u64, appended: u64, closed: bool) {
        self.drop_connections();
        let corrupted = self.dice.once_in(6) && self.corrupt_newest_snapshot();
        let faults = self.dice.once_in(6);
        if faults {
            self.disk.fail_sync_in(Some(self.dice.below(6)));
        }
        if self.fault_plan.clock_jumps && self.dice.once_in(3) {
            let wall_ms = self.now_ms + self.dice.below(100_000);
            self.source.set_wall(wall_ms.saturating_sub(50_000));
        }
        let (((log, image), opened), failed) = self.open_despite_faults(faults);
        self.clear_disk_faults();
        let found = opened.position.0;
        self.trace
            .record(format!("recovers {found} records: {opened:?}"));
        assert!(found >= durable, "records {found} to {durable} are lost");
        assert!(
            found <= appended,
            "there are records that were never appended"
        );
        assert!(
            failed || opened.clean || !closed,
            "a cleanly closed log is not clean"
        );
        let damaged = !opened.damaged_snapshots.is_empty();
        assert!(corrupted || !damaged, "a crash damaged a snapshot");
        assert!(
            damaged || !corrupted || failed,
            "a damaged snapshot was read"
        );
        if found < appended {
            self.tally.count("crashes that lost records");
        }
        if opened.torn {
            self.tally.count("torn log ends");
        }
        if opened.base > LogPosition::NONE {
            self.tally.count("starts from a snapshot");
        }
        if corrupted {
            self.tally.count("starts from an older snapshot");
        }
        self.discard_after(found);
        self.check_recovered(&image, &opened);
        self.log = Arc::new(log);
        let last = image.assignment.clone();
        let mut assignment = last.unwrap_or_else(policies::assignment);
        if self.fault_plan.policy_swaps && self.dice.once_in(4) {
            // An operator names another policy.
            let named = policies::digest(self.dice.below(2) as usize);
            let loaded = assignment.load(named).expect("there is room");
            assignment = loaded.promote(named).expect("it is loaded");
        }
        self.begin(assignment, Some(image));
    }

    /// Opens the log, with a further crash after each disk fault. Returns whether a start failed.
    fn open_despite_faults(&mut self, faults: bool) -> (((Log, Image), Opened), bool) {
        let mut failed = false;
        loop {
            let opened = Self::open_log(
                &self.disk,
                &self.options,
                self.retention,
                self.now_ms,
                &self.operations,
            );
            let error = match opened {
                Ok(opened) => return (opened, failed),
                Err(error) => error,
            };
            self.trace.record(format!("does not start: {error}"));
            assert!(
                matches!(error, Error::Io { .. }) && (faults || error.is_full()),
                "{error}"
            );
            self.tally.count("failed starts");
            failed = true;
            self.disk = match self.dice.below(2) {
                0 => self.disk.kill(),
                _ => self.disk.crash(self.dice.roll()),
            };
            self.disk.limit_bytes(None);
        }
    }

    /// Compares the recovered state with the expected one, and continues from there.
    fn check_recovered(&mut self, image: &Image, opened: &Opened) {
        let since_ms = image
            .now_ms
            .saturating_sub(limits::EXPIRIES_RENOTIFIED_MS_MAX);
        self.obligations
            .waive_expirations(opened.base.0, since_ms, &image.state.table);
        let found = opened.position.0;
        let expected = self.expected_states.iter().find(|it| it.position == found);
        let expected = expected.expect("recovery must end at the end of a step");
        expected.check(image, &self.live_sessions(), &self.all_remembered);
        assert!(
            image.state.hlc.last() >= self.observed_version,
            "versions would repeat that clients observed"
        );
        self.recorded = (expected.run, expected.assignment.clone(), expected.now_ms);
        self.expected_states.retain(|it| it.position == found);
    }

    fn live_sessions(&self) -> Vec<SessionId> {
        self.clients.iter().map(|it| it.session).collect()
    }

    /// Removes the expectations of records after the last one that was recovered.
    fn discard_after(&mut self, position: u64) {
        self.obligations.discard_after(position);
        self.all_remembered
            .retain(|_, (record, _)| *record <= position);
        self.operations.retain(|record, _| *record <= position);
        for records in self.execution_records.values_mut() {
            records.retain(|record| *record <= position);
        }
        for record in self
            .last_write
            .values_mut()
            .chain(self.last_registration.values_mut())
        {
            *record = (*record).min(position);
        }
        let always = self.is_always_durable();
        for client in &mut self.clients {
            let mut lost = Vec::new();
            for pending in client.in_flight.iter_mut().chain(&mut client.acknowledged) {
                let executed = pending.executed.as_ref();
                if executed.is_some_and(|(record, _)| *record > position) {
                    pending.executed = None;
                    lost.push(pending.id);
                }
                // The earlier execution is valid again. The store may or may not remember it.
                if pending.executed.is_none()
                    && let Some((earlier, until_ms)) = pending.earlier_execution.take()
                    && earlier.0 <= position
                {
                    self.execution_records.insert(pending.id, vec![earlier.0]);
                    self.executed_in_run.remove(&pending.id);
                    (pending.executed, pending.until_ms) = (Some(earlier), until_ms);
                }
            }
            for id in lost {
                let promised = client.supersede(id);
                assert!(
                    !always || !promised,
                    "a crash lost an answer that a client received"
                );
            }
        }
    }

    /// Flips a bit of the newest snapshot if a start can use an older snapshot or the whole log.
    /// Returns whether it did.
    fn corrupt_newest_snapshot(&mut self) -> bool {
        let names = self.disk.list().expect("a directory");
        // A start without a snapshot needs every segment since the first one. A snapshot may have
        // removed some of them.
        let logs = names.iter().filter_map(|name| name.strip_suffix(".log"));
        let mut logs = logs
            .zip(1..)
            .map(|(name, number)| name.parse() == Ok(number));
        let whole = logs.all(|follows| follows);
        let mut snapshots = names.iter().filter(|name| name.ends_with(".snapshot"));
        let (newest, others) = (snapshots.next_back(), snapshots.count());
        let Some(newest) = newest.filter(|_| whole || others > 0) else {
            return false;
        };
        let mut content = self.disk.content(newest).expect("listed");
        let at = self.dice.below(content.len() as u64) as usize;
        content[at] ^= 1 << self.dice.below(8);
        self.disk.put(newest, &content);
        self.trace
            .record(format!("{newest} is corrupted at byte {at}"));
        true
    }

    /// Checks the state that a start would recover now from a copy of the disk.
    pub(crate) fn check_recovery_of_copy(&mut self) {
        let committed = self.dice.once_in(2) && self.log.commit().is_ok();
        let copy = self.disk.fork();
        copy.limit_bytes(None);
        copy.fail_write_in(None);
        copy.fail_sync_in(None);
        let found = Self::open_log(
            &copy,
            &self.options,
            self.retention,
            self.now_ms,
            &self.operations,
        );
        let ((_, image), opened) = found.expect("a copy of a running store opens");
        let found = opened.position.0;
        self.trace.record(format!(
            "a copy has {found} records of {}",
            self.log.appended()
        ));
        assert!(!committed || found == self.log.appended().0);
        let expected = self.expected_states.iter().find(|it| it.position == found);
        let expected = expected.expect("a copy must end at the end of a step");
        expected.check(&image, &self.live_sessions(), &self.all_remembered);
    }
}
