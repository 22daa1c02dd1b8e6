//! Crashes, clean stops and starts.
//!
//! A start must find every durable record, and the state behind the last record that it finds must
//! equal the state that the store had there.

use statehouse_config::limits;
use statehouse_core::policy::Assignment;
use statehouse_core::store::Remembered;
use statehouse_wal::simulation::Simulation;
use statehouse_wal::{Disk, Error, LogPosition};

use crate::captured::{Captured, check_remembered};
use crate::node::{Found, Node};
use crate::oracle::Change;
use crate::policies;
use crate::world::World;

impl World {
    /// The process dies, the machine loses power, or the host stops; then it starts again.
    pub(crate) fn crash(&mut self) {
        self.snapshot = None;
        self.note_figures();
        let closed = self.dice.once_in(6) && self.stop();
        let (durable, appended) = (self.node.log.durable().0, self.node.appended());
        let remembered: Vec<Remembered> =
            (self.node.server).inspect(|store| store.duplicates().recorded(0).collect());
        self.power_off();
        let damaged = self.dice.once_in(6) && self.damage_snapshot();
        if self.plan.clock_steps && self.dice.once_in(4) {
            self.step_clock();
        }
        let (found, failed) = self.read_despite_faults();
        let position = found.opened.position.0;
        self.trace
            .add(|| format!("CRASH: durable {durable}, appended {appended}, found {position}"));
        assert!(
            (durable..=appended).contains(&position),
            "obligation 1: durable {durable}, appended {appended}, found {position}"
        );
        assert!(
            failed || found.opened.clean || !closed,
            "a cleanly closed log is not clean"
        );
        let noticed = !found.opened.damaged_snapshots.is_empty();
        assert!(damaged || !noticed, "a crash damaged a snapshot");
        assert!(noticed || !damaged || failed, "a damaged snapshot was read");
        for (what, happened) in [
            ("clean stops", closed),
            ("failed starts", failed),
            ("records lost in a crash", position < appended),
            ("torn tails", found.opened.torn),
            (
                "starts from a snapshot",
                found.opened.base > LogPosition::NONE,
            ),
            ("starts from an older snapshot", damaged),
        ] {
            self.tally.add_to(what, u64::from(happened));
        }
        // An earlier start of the store is not remembered for ever.
        let forgets = position < appended || found.opened.base > LogPosition::NONE;
        self.ledger.may_forget |= forgets || self.life >= 15;
        let lossy = self.plan.interval && position < appended;
        self.ledger.lossy |= lossy;
        self.check_found(&found, &remembered);
        self.forget_behind(position);
        for client in self.clients.iter_mut().filter(|_| lossy) {
            // Its subscription may be lost.
            client.subscribed = false;
        }
        self.foreign_crash(&found);
        self.restart(found);
    }

    /// Stops the host. Returns whether the log was closed.
    fn stop(&mut self) -> bool {
        self.node.server.stop();
        self.capture();
        let closed = self.node.log.close();
        self.trace
            .add(|| format!("stops: {:?}", closed.as_ref().err()));
        closed.is_ok()
    }

    fn power_off(&mut self) {
        self.disk = if self.dice.once_in(2) {
            self.tally.count("kills");
            self.disk.kill()
        } else {
            self.tally.count("power cuts");
            self.disk.crash(self.dice.roll())
        };
        self.heal();
    }

    /// Reads the disk, with a further crash after each error of the disk. Returns whether there was
    /// one.
    fn read_despite_faults(&mut self) -> (Found, bool) {
        if self.plan.disk_errors && self.dice.once_in(4) {
            self.disk.fail_sync_in(Some(self.dice.below(6)));
        }
        let mut failed = false;
        loop {
            let wall_ms = self.time.wall_ms;
            match Found::read(&self.disk, &self.plan, wall_ms, &self.sent) {
                Ok(found) => {
                    self.heal();
                    return (found, failed);
                }
                Err(error) => {
                    let expected = self.plan.disk_errors && !failed;
                    let io = matches!(error, Error::Io { .. });
                    assert!(expected && io, "the start fails: {error}");
                    failed = true;
                    self.power_off();
                }
            }
        }
    }

    /// Compares what was found with the state that the store had at that position.
    fn check_found(&mut self, found: &Found, remembered: &[Remembered]) {
        let position = found.opened.position.0;
        self.compare(&found.captured());
        let clock = found.image.state.hlc.last();
        assert!(
            self.plan.interval || clock >= self.ledger.observed,
            "obligation 1: versions would repeat: {clock:?} is below {:?}",
            self.ledger.observed
        );
        let now_ms = self.now_ms();
        let table = found.table(self.time.wall_ms);
        self.oracle.crash(position, &table, now_ms);
        assert_eq!(
            found.image.assignment, self.oracle.assignment,
            "obligation 9: the assignment of policies (right: expected)"
        );
        let active = found.image.active;
        let active = active.map(|active| found.image.policies[active as usize].digest.into());
        let assigned = found.image.assignment.as_ref().map(|it| it.active);
        assert_eq!(active, assigned, "obligation 9: the active policy");
        let sessions = &found.image.sessions;
        let foreign = self.plan.foreign;
        check_remembered(remembered, &found.image.duplicates, |session| {
            foreign || sessions.has_session(session)
        });
    }

    /// Compares a recovered state with the captured one. A position inside a packet has none.
    fn compare(&mut self, found: &Captured) {
        let expected = self
            .captured
            .iter()
            .find(|it| it.position == found.position);
        if let Some(expected) = expected {
            assert_eq!(
                found, expected,
                "obligation 1: the recovered state (right: expected)"
            );
            self.tally.count("recovered states compared");
            let hidden = found.hidden.len() as u64;
            self.tally.add_to("hidden keys recovered", hidden);
        }
    }

    /// Removes the expectations of records behind this position.
    fn forget_behind(&mut self, position: u64) {
        self.captured.retain(|it| it.position == position);
        self.ledger.acked.clear();
        self.ledger.open.extend(self.ledger.unrecorded.drain());
        let in_memory = self.ledger.in_memory.drain();
        self.ledger.forgotten.extend(in_memory);
        let possible = self
            .ledger
            .possible
            .values_mut()
            .flat_map(|it| it.values_mut());
        for needed in self.ledger.needed.values_mut().chain(possible) {
            *needed = (*needed).min(position);
        }
        self.wills.crash(position);
        for client in &mut self.clients {
            // Drops the broker's ends while the old life exists; its log reaches no disk any more.
            client.crash(position, self.elapsed_ms);
        }
        self.egress.lock().expect("one thread").clear();
    }

    fn restart(&mut self, found: Found) {
        let recorded = found.image.assignment.clone();
        let mut assignment = recorded.unwrap_or_else(|| policies::assignment(policies::STANDARD));
        if self.plan.policies && self.dice.once_in(4) {
            // The operator names another policy.
            let named = policies::digest(self.dice.below(2) as usize);
            let loaded = assignment.load(named).expect("there is room");
            assignment = loaded.promote(named).expect("it is loaded");
        }
        let missing = 1 + self.dice.below(2) as usize;
        let lost = policies::digest(missing);
        let missing = (self.plan.missing_policy && lost != assignment.active).then_some(missing);
        if missing.is_some() {
            assignment = assignment.without(lost);
            self.tally.count("policies missing at a start");
        }
        self.run = found.image.run + 1;
        let before = found.image.state.hlc.last();
        let foreign = &self.foreign;
        self.node = Node::start(
            found,
            &self.plan,
            &self.time,
            (&assignment, missing),
            |log| foreign.outlet(log),
        );
        self.life += 1;
        self.started_ms = self.elapsed_ms;
        self.begin(assignment);
        let began = self.node.began;
        if self.node.appended() > began {
            // The start has removed expired keys before it repeated notifications.
            self.swept(before, began + 1);
        }
        self.after();
    }

    /// The host has recorded its start.
    pub(crate) fn begin(&mut self, assignment: Assignment) {
        let began = self.node.began;
        (self.ledger.failures, self.ledger.failed) = (0, 0);
        self.ledger.counted.clear();
        let change = Change::Assigned(Box::new(assignment));
        self.oracle.note((began, began), change);
        self.capture();
    }

    /// Captures the state behind the last record.
    pub(crate) fn capture(&mut self) {
        let position = self.node.appended();
        if self
            .captured
            .back()
            .is_some_and(|it| it.position == position)
        {
            return;
        }
        let (run, assignment) = (self.run, self.oracle.assignment.as_ref());
        let captured = (self.node.server)
            .inspect(|store| Captured::of(position, run, assignment, store.state()));
        self.captured.push_back(captured);
        // A crash never loses durable records.
        let durable = self.node.log.durable().0;
        while self
            .captured
            .get(1)
            .is_some_and(|it| it.position <= durable)
        {
            self.captured.pop_front();
        }
    }

    /// Flips a bit of the newest snapshot if a start can use an older one or the whole log. Returns
    /// whether it did.
    fn damage_snapshot(&mut self) -> bool {
        let names = self.disk.list().expect("a directory");
        // A start without a snapshot needs every segment since the first one.
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
            .add(|| format!("{newest} is damaged at byte {at}"));
        true
    }

    /// Checks the state that a start would find now on a copy of the disk.
    pub(crate) fn check_copy(&mut self) {
        let committed = self.dice.once_in(2) && self.node.log.commit().is_ok();
        let copy: Simulation = self.disk.fork();
        copy.limit_bytes(None);
        copy.fail_write_in(None);
        copy.fail_sync_in(None);
        let wall_ms = self.time.wall_ms;
        let found = Found::read(&copy, &self.plan, wall_ms, &self.sent);
        let found = found.expect("a copy of a running store opens");
        assert!(!committed || found.opened.position.0 == self.node.appended());
        self.compare(&found.captured());
        self.after_log();
    }

    /// Checks and counts what the server counted in this life.
    pub(crate) fn note_figures(&mut self) {
        let stats = self.node.server.stats();
        assert_eq!(
            stats.duplicates_different, 0,
            "obligation 2: a redelivery was answered otherwise"
        );
        assert_eq!(stats.forgotten, 0, "obligation 2: requests were evicted");
        assert_eq!(
            stats.policy_failures, self.ledger.failed,
            "obligation 9: failures of policies (right: expected)"
        );
        for (what, count) in [
            ("duplicates answered", stats.duplicates),
            ("policy failures", stats.policy_failures),
            ("requests renotified", stats.renotified),
            ("requests not renotified", stats.not_renotified),
        ] {
            self.tally.add_to(what, count);
        }
    }

    /// The earliest time of expirations that a start on this disk renotifies.
    pub(crate) fn renotified_since(found: &Found) -> u64 {
        let now_ms = found.image.now_ms;
        now_ms.saturating_sub(limits::EXPIRIES_RENOTIFIED_MS_MAX)
    }
}
