//! Ends and starts of the process, and what must be there afterwards.

use std::collections::BTreeMap;
use std::sync::Arc;

use statehouse::limits;
use statehouse_core::log::Image;
use statehouse_core::store::Retention;
use statehouse_wal::simulation::Simulation;
use statehouse_wal::{Disk, Error, Log, LogPosition, Opened, Options, Sink};

use crate::deed::Deed;
use crate::policies;
use crate::world::World;

struct ImageSink<'a>(Image, &'a BTreeMap<u64, Deed>);

impl Sink for ImageSink<'_> {
    fn reset(&mut self) {
        self.0.reset();
    }

    fn block(&mut self, block: &[u8]) -> Result<(), String> {
        self.0.block(block).map_err(|error| error.to_string())
    }

    fn record(&mut self, position: LogPosition, record: &[u8]) -> Result<(), String> {
        Deed::check(self.1.get(&position.0), position.0, record);
        self.0.record(record).map_err(|error| error.to_string())
    }
}

impl World {
    pub(crate) fn open(
        disk: &Simulation,
        options: &Options,
        retention: Retention,
        now_ms: u64,
        deeds: &BTreeMap<u64, Deed>,
    ) -> Result<((Log, Image), Opened), Error> {
        let mut sink = ImageSink(Image::new(retention), deeds);
        let disk: Arc<dyn Disk> = Arc::new(disk.clone());
        let (log, opened) = Log::open(disk, options.clone(), now_ms, &mut sink)?;
        sink.0.finish();
        Ok(((log, sink.0), opened))
    }

    /// The process is killed, or the machine loses power; then it starts again.
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
        self.story.tell(format!(
            "{}, with {durable} durable of {appended}",
            if kill { "is killed" } else { "loses power" },
        ));
        self.start(durable.max(self.floor), appended, false);
    }

    /// The process ends as it should, if the disk lets it.
    pub(crate) fn restart_cleanly(&mut self) {
        self.snapshot = None;
        let now_ms = self.now();
        self.core.stop(now_ms);
        self.recorded.2 = now_ms;
        self.moment();
        let closed = self.log.close();
        self.story
            .tell(format!("closes: {:?}", closed.as_ref().err()));
        let (durable, appended) = (self.log.durable().0, self.log.appended().0);
        if closed.is_ok() {
            assert_eq!(durable, appended);
            self.tally.count("clean restarts");
        }
        self.disk = match self.dice.below(2) {
            0 => self.disk.kill(),
            _ => self.disk.crash(self.dice.roll()),
        };
        self.start(durable.max(self.floor), appended, closed.is_ok());
    }

    /// Starts on what is on the disk, where everything up to `durable` must be.
    fn start(&mut self, durable: u64, appended: u64, closed: bool) {
        self.hang_up();
        let spoiled = self.dice.once_in(6) && self.spoil_a_snapshot();
        let faults = self.dice.once_in(6);
        if faults {
            self.disk.fail_sync_in(Some(self.dice.below(6)));
        }
        if self.habits.jumps && self.dice.once_in(3) {
            let wall_ms = self.now_ms + self.dice.below(100_000);
            self.source.set_wall(wall_ms.saturating_sub(50_000));
        }
        let mut failed = false;
        let ((log, image), opened) = loop {
            let found = Self::open(
                &self.disk,
                &self.options,
                self.retention,
                self.now_ms,
                &self.deeds,
            );
            let error = match found {
                Ok(found) => break found,
                Err(error) => error,
            };
            self.story.tell(format!("does not start: {error}"));
            assert!(
                matches!(error, Error::Io { .. }) && (faults || error.is_full()),
                "{error}"
            );
            self.tally.count("starts that failed");
            failed = true;
            self.disk = match self.dice.below(2) {
                0 => self.disk.kill(),
                _ => self.disk.crash(self.dice.roll()),
            };
            self.disk.limit_bytes(None);
        };
        self.heal();
        let found = opened.position.0;
        self.story
            .tell(format!("finds {found} records: {opened:?}"));
        assert!(found >= durable, "records {found} to {durable} are lost");
        assert!(found <= appended, "records come from nowhere");
        assert!(failed || opened.clean || !closed, "it was closed");
        let damaged = !opened.damaged_snapshots.is_empty();
        assert!(spoiled || !damaged, "a crash damaged a snapshot");
        assert!(damaged || !spoiled || failed, "a damaged snapshot was read");
        if found < appended {
            self.tally.count("crashes that lost records");
        }
        if opened.torn {
            self.tally.count("torn ends");
        }
        if opened.base > LogPosition::NONE {
            self.tally.count("starts from a snapshot");
        }
        if spoiled {
            self.tally.count("starts from an older snapshot");
        }
        self.forget_behind(found);
        let since_ms = image
            .now_ms
            .saturating_sub(limits::EXPIRIES_RENOTIFIED_MS_MAX);
        self.promises
            .forgive_ends(opened.base.0, since_ms, &image.state.table);
        let moment = self.moments.iter().find(|it| it.position == found);
        let moment = moment.expect("what survives ends where a step ended");
        moment.check(&image, &self.living(), &self.ever);
        assert!(
            image.state.hlc.last() >= self.told,
            "versions that were told come again"
        );
        self.recorded = (moment.run, moment.assignment.clone(), moment.now_ms);
        self.moments.retain(|it| it.position == found);
        self.log = Arc::new(log);
        let last = image.assignment.clone();
        let mut assignment = last.unwrap_or_else(policies::assignment);
        if self.habits.swaps && self.dice.once_in(4) {
            // An operator names another one.
            let named = policies::digest(self.dice.below(2) as usize);
            let loaded = assignment.load(named).expect("there is room");
            assignment = loaded.promote(named).expect("it is loaded");
        }
        self.begin(assignment, Some(image));
    }

    fn living(&self) -> Vec<u64> {
        self.clients.iter().map(|it| it.session).collect()
    }

    /// What is behind the last record that survived did not happen.
    fn forget_behind(&mut self, position: u64) {
        self.promises.forget_behind(position);
        self.ever.retain(|_, (record, _)| *record <= position);
        self.deeds.retain(|record, _| *record <= position);
        for records in self.ran.values_mut() {
            records.retain(|record| *record <= position);
        }
        for record in self
            .written
            .values_mut()
            .chain(self.registered.values_mut())
        {
            *record = (*record).min(position);
        }
        let always = self.always();
        for client in &mut self.clients {
            let mut lost = Vec::new();
            for asked in client.in_flight.iter_mut().chain(&mut client.done) {
                let ran = asked.ran.as_ref();
                if ran.is_some_and(|(record, _)| *record > position) {
                    asked.ran = None;
                    lost.push(asked.id);
                }
                // What it did the first time is there again, and may or may not be remembered.
                if asked.ran.is_none()
                    && let Some((before, until_ms)) = asked.before.take()
                    && before.0 <= position
                {
                    self.ran.insert(asked.id, vec![before.0]);
                    self.ran_in.remove(&asked.id);
                    (asked.ran, asked.until_ms) = (Some(before), until_ms);
                }
            }
            for id in lost {
                let promised = client.disown(id);
                assert!(!always || !promised, "an answer that was heard is lost");
            }
        }
    }

    /// The newest snapshot rots, where there is an older beginning that never did.
    fn spoil_a_snapshot(&mut self) -> bool {
        let names = self.disk.list().expect("a directory");
        // The beginning itself, and all log since: a part of it may be left over.
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
        self.story.tell(format!("{newest} rots at byte {at}"));
        true
    }

    /// Looks at what a start would find now, without one.
    pub(crate) fn look(&mut self) {
        let quiet = self.dice.once_in(2) && self.log.commit().is_ok();
        let copy = self.disk.fork();
        copy.limit_bytes(None);
        copy.fail_write_in(None);
        copy.fail_sync_in(None);
        let found = Self::open(
            &copy,
            &self.options,
            self.retention,
            self.now_ms,
            &self.deeds,
        );
        let ((_, image), opened) = found.expect("a copy of a running store opens");
        let found = opened.position.0;
        self.story.tell(format!(
            "a copy has {found} records of {}",
            self.log.appended()
        ));
        assert!(!quiet || found == self.log.appended().0);
        let moment = self.moments.iter().find(|it| it.position == found);
        let moment = moment.expect("what is on disk ends where a step ended");
        moment.check(&image, &self.living(), &self.ever);
    }
}
