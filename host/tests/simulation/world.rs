//! One run: a store with its disk, clients and clock.
//!
//! Invariants: versions only rise, an answer leaves only when its records are durable, and every
//! request is answered in the end.

use statehouse_protocol::ConnectionId;
use statehouse_protocol::SessionId;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use statehouse_core::clock::{Clock, ManualSource, Stamp};
use statehouse_core::log::{Image, Progress, Recorder, record};
use statehouse_core::policy::{Assignment, Registry};
use statehouse_core::store::{
    Duplicates, Effects, Key, Mode, Quota, Remembered, Retention, State, Store, Transaction,
    WatchChange,
};
use statehouse_core::{Core, Decision, Input, Now, Settings};
use statehouse_mqtt::Recovery;
use statehouse_mqtt::simulation::{session_began, session_ended};
use statehouse_wal::simulation::{Dice, Simulation};
use statehouse_wal::{Durability, Log, Options, Snapshot};

use crate::client::{Arrival, Client};
use crate::egress::{Egress, LogJournal, Released};
use crate::fault_plan::{CLIENTS_MAX, FaultPlan, RunPlan};
use crate::history::{self, ExpectedState};
use crate::obligations::Obligations;
use crate::operation::Operation;
use crate::policies;
use crate::trace::{Tally, Trace};
use crate::workload::Workload;

/// The wall clock at the beginning of every run.
const START_MS: u64 = 1_700_000_000_000;

pub(crate) struct World {
    pub(crate) dice: Dice,
    pub(crate) mode: Mode,
    pub(crate) in_flight_max: u64,
    pub(crate) fault_plan: FaultPlan,
    pub(crate) workload: Workload,
    pub(crate) options: Options,
    pub(crate) retention: Retention,
    pub(crate) disk: Simulation,
    pub(crate) log: Arc<Log>,
    pub(crate) source: Arc<ManualSource>,
    pub(crate) clock: Clock,
    pub(crate) now_ms: u64,
    pub(crate) core: Core,
    pub(crate) run: u32,
    pub(crate) assignment: Assignment,
    pub(crate) snapshot: Option<(Snapshot, Progress, u32)>,
    pub(crate) clients: Vec<Client>,
    pub(crate) egress: Egress,
    /// The outputs that left the store. A foreign broker receives them some time later.
    pub(crate) in_transit: VecDeque<Released>,
    pub(crate) obligations: Obligations,
    /// Whether the run ends, without further faults.
    finishing: bool,
    /// The state after every record that may be the last one after a crash.
    pub(crate) expected_states: VecDeque<ExpectedState>,
    /// The run, assignment and time according to the last records.
    pub(crate) recorded: (u32, Option<Assignment>, u64),
    /// The operation of each record.
    pub(crate) operations: BTreeMap<u64, Operation>,
    /// Every request that was ever remembered, with its record.
    pub(crate) all_remembered: BTreeMap<u64, (u64, Remembered)>,
    /// The last record that wrote a key.
    pub(crate) last_write: HashMap<Key, u64>,
    /// The record in which each watch last began.
    pub(crate) last_registration: HashMap<(Arc<str>, Key), u64>,
    /// The records of each request's execution.
    pub(crate) execution_records: HashMap<u64, Vec<u64>>,
    /// The run that executed each request.
    pub(crate) executed_in_run: HashMap<u64, u32>,
    /// The last record that an output depended on. No crash may lose it.
    pub(crate) observed_record: u64,
    /// The highest version that a client observed.
    pub(crate) observed_version: Stamp,
    pub(crate) next_id: u64,
    next_session: SessionId,
    pub(crate) next_connection: ConnectionId,
    pub(crate) tally: Tally,
    pub(crate) trace: Trace,
}

impl World {
    pub(crate) fn run(seed: u64) -> Tally {
        let mut world = Self::new(seed);
        for _ in 0..100 + world.dice.below(150) {
            world.random_event();
            world.check_after_event();
        }
        world.finish();
        world.tally
    }

    fn new(seed: u64) -> Self {
        let mut dice = Dice::new(seed);
        let RunPlan {
            mode,
            in_flight_max,
            fault_plan,
            workload,
            options,
            retention,
        } = RunPlan::random(&mut dice);
        let source = Arc::new(ManualSource::at(START_MS));
        let disk = Simulation::new(dice.roll());
        let assignment = policies::assignment();
        let (log, mut image) =
            Self::open_log(&disk, &options, retention, START_MS, &BTreeMap::new())
                .expect("an empty disk")
                .0;
        let log = Arc::new(log);
        image.begin(mode);
        let recorder = Recorder::new(Arc::new(LogJournal(log.clone())), Vec::new(), None);
        let registry = policies::registry(&assignment, None);
        let store = unguarded(registry, image.state, image.duplicates);
        let core = Core::new(store, recorder, 1, Settings::default());
        let clients = 1 + dice.below(CLIENTS_MAX);
        let mut world = Self {
            clients: (0..clients as usize)
                .map(|index| {
                    let number = index as u64 + 1;
                    let session = match mode {
                        Mode::Embedded => SessionId(number),
                        Mode::Foreign => Mode::foreign_session(number),
                    };
                    Client::new(index, session, &mut dice)
                })
                .collect(),
            dice,
            mode,
            in_flight_max,
            fault_plan,
            workload,
            options,
            retention,
            disk,
            log,
            clock: Clock::new(source.clone()),
            source,
            now_ms: START_MS,
            core,
            run: 1,
            assignment: assignment.clone(),
            snapshot: None,
            egress: Egress::default(),
            in_transit: VecDeque::new(),
            obligations: Obligations::default(),
            finishing: false,
            expected_states: VecDeque::new(),
            recorded: (0, None, 0),
            operations: BTreeMap::new(),
            all_remembered: BTreeMap::new(),
            last_write: HashMap::new(),
            last_registration: HashMap::new(),
            execution_records: HashMap::new(),
            executed_in_run: HashMap::new(),
            observed_record: 0,
            observed_version: Stamp::default(),
            next_id: 1,
            next_session: SessionId(clients + 1),
            next_connection: ConnectionId(1),
            tally: Tally::default(),
            trace: Trace::new(seed),
        };
        if mode == Mode::Foreign {
            world.tally.count("runs behind a foreign broker");
        }
        world.trace.record(format!(
            "{mode:?} {:?} {:?} {:?} {:?}",
            world.fault_plan, world.workload, world.options, world.retention
        ));
        world.capture_state();
        world.begin(assignment, None);
        world
    }

    /// Starts a store, on the recovered image if there is one.
    pub(crate) fn begin(&mut self, mut assignment: Assignment, image: Option<Image>) {
        let (mut last_ms, mut expirations) = (0, Vec::new());
        if let Some(mut image) = image {
            image.begin(self.mode);
            expirations = image.ends();
            last_ms = image.now_ms;
            self.run = image.run + 1;
            let journal = Arc::new(LogJournal(self.log.clone()));
            let recorder = Recorder::new(journal, image.policies, image.active);
            let missing = 1 + self.dice.below(2) as usize;
            let lost = policies::digest(missing);
            let missing =
                (self.fault_plan.missing_policy && lost != assignment.active).then_some(missing);
            if missing.is_some() {
                assignment = assignment.without(lost);
            }
            let registry = policies::registry(&assignment, missing);
            let watches = &image.state.watches;
            self.obligations.resume_watches(watches);
            self.tally
                .add_to("watches recovered by a start", watches.len() as u64);
            let store = unguarded(registry, image.state, image.duplicates);
            self.core = Core::new(store, recorder, self.run, Settings::default());
            self.resume_sessions(&image.sessions);
            if self.mode == Mode::Embedded {
                let live: Vec<SessionId> = self.clients.iter().map(|it| it.session).collect();
                self.core.store_mut().retain_sessions(&live);
            }
            self.check_sessions();
        } else {
            self.resume_sessions(&Recovery::default());
        }
        self.clock = Clock::resume(self.source.clone(), last_ms);
        self.now_ms = last_ms;
        let now_ms = self.now();
        let before = self.log.appended().0;
        self.core.begin(self.mode, policies::records(), now_ms);
        (self.recorded.0, self.recorded.2) = (self.run, now_ms);
        // The start and the policies are separate records.
        self.capture_state_at(before + 1);
        self.recorded.1 = Some(assignment.clone());
        self.assignment = assignment;
        self.capture_state();
        if !expirations.is_empty() {
            self.tally.add_to(
                "expirations renotified by a start",
                expirations.len() as u64,
            );
            self.step(Input::Expired(&expirations));
        }
    }

    pub(crate) fn is_always_durable(&self) -> bool {
        self.options.durability == Durability::Always
    }

    pub(crate) fn now(&mut self) -> u64 {
        let now_ms = self.clock.read().now_ms;
        assert!(now_ms >= self.now_ms, "the time of the store decreased");
        self.now_ms = now_ms;
        now_ms
    }

    /// Captures the state of the store after its last record.
    pub(crate) fn capture_state(&mut self) {
        self.capture_state_at(self.log.appended().0);
    }

    fn capture_state_at(&mut self, position: u64) {
        if self
            .expected_states
            .back()
            .is_some_and(|last| last.position == position)
        {
            return;
        }
        let (run, assignment, now_ms) = self.recorded.clone();
        let (state, duplicates) = (self.core.store().state(), self.core.store().duplicates());
        self.expected_states.push_back(ExpectedState::capture(
            position, now_ms, state, duplicates, run, assignment,
        ));
        // A crash never loses durable records, so older states are not needed.
        let durable = self.log.durable().0;
        while self
            .expected_states
            .get(1)
            .is_some_and(|second| second.position <= durable)
        {
            self.expected_states.pop_front();
        }
    }

    /// Lets the store handle an input other than a request.
    pub(crate) fn step(&mut self, input: Input<'_>) {
        let now_ms = self.now();
        let clock = self.core.store().state().hlc.last();
        let Decision {
            position, effects, ..
        } = self.core.handle(input, now(now_ms));
        if effects.swept.is_some() {
            self.recorded.2 = now_ms;
        }
        self.record_operations(Operation::of(None, &effects), &effects);
        self.check_effects(clock, &effects, matches!(input, Input::Expired(_)));
        let record = match (&input, &effects.swept) {
            // The expirations were recovered, so their records are durable.
            (Input::Expired(_), None) => 0,
            _ => self.log.appended().0,
        };
        let notifications = self.egress.push(position, &effects, record, None);
        self.tally.add_to("notifications", notifications);
        self.capture_state();
    }

    /// Records the operations of the last records.
    pub(crate) fn record_operations(&mut self, operations: Vec<Operation>, effects: &Effects) {
        let last = self.log.appended().0;
        let first = last + 1 - operations.len() as u64;
        self.operations.extend((first..).zip(operations));
        if self.mode == Mode::Foreign
            && let Some(swept) = &effects.swept
        {
            // The store notifies watchers of expired keys before it changes watches.
            self.obligations
                .expect_expirations(first, swept, &effects.expired);
        }
        assert!(self.mode == Mode::Foreign || effects.watches.is_none());
        let Some(watches) = &effects.watches else {
            return;
        };
        self.obligations.watches_changed(watches);
        for change in &watches.changes {
            if let WatchChange::Began(key, _) = change {
                let watched = (watches.peer.client.clone(), key.clone());
                self.last_registration.insert(watched, last);
            }
        }
    }

    /// Checks the effects of a step. `before` is the clock before the step. `renotified` is whether
    /// the step repeats notifications.
    pub(crate) fn check_effects(&mut self, before: Stamp, effects: &Effects, renotified: bool) {
        let mut last = before.max(self.observed_version);
        let handled = effects.handled.iter().flat_map(|it| &it.writes);
        let swept = effects.swept.iter().flat_map(|it| &it.writes);
        let record = self.log.appended().0;
        for write in swept.chain(handled) {
            if !write.hidden {
                let key = Key::copy_from_slice(write.key());
                self.last_write.insert(key, record);
            }
            self.trace.record(format!(
                "  writes {} {:?}",
                write.key().escape_ascii(),
                write
                    .entry()
                    .map(|entry| (entry.version(), entry.expires_ms()))
            ));
            if write.hidden && write.entry().is_none() {
                self.tally.count("removals of hidden keys");
                continue;
            }
            assert!(
                write.version() > last,
                "a version is not above the last one: {write:?} after {last:?}"
            );
            last = write.version();
        }
        // A step may remove far more keys than a run has.
        let next_ms = self.core.store().next_expiry_ms();
        let swept = next_ms.is_none_or(|ms| ms > self.now_ms);
        assert!(swept, "an expired key is in the table");
        let clock = self.core.store().state().hlc.last();
        assert!(
            clock >= last || clock == before,
            "a version is above the clock"
        );
        for notification in effects.expired.iter().chain(&effects.notifications) {
            assert!(renotified || notification.version > before);
            assert!(notification.version <= clock);
        }
        if effects.swept.is_some() {
            self.tally.count("sweeps");
        }
        if effects.failures > 0 {
            self.tally.count("policy failures");
            assert!(
                effects.handled.is_none(),
                "a policy failed and had an effect"
            );
            let by = effects.by.as_ref().map(|by| by.digest.into());
            assert_eq!(
                by,
                Some(policies::digest(policies::FAULTY)),
                "the standard policy failed"
            );
        }
    }

    /// Releases the outputs that may leave, and delivers those that arrive now.
    fn release(&mut self) {
        let (released, durable) = (self.log.released(), self.log.durable());
        if self.is_always_durable() {
            assert!(
                released <= durable,
                "the log released a position that is not durable"
            );
        }
        for output in self
            .egress
            .release(released, durable.0, self.is_always_durable())
        {
            self.observed_record = self.observed_record.max(output.observed_record);
            self.observed_version = self.observed_version.max(output.observed_version);
            self.in_transit.push_back(output);
        }
        let all = self.in_transit.len();
        let some = match self.mode {
            Mode::Foreign if !self.finishing => self.dice.below(all as u64 + 1) as usize,
            _ => all,
        };
        for output in self.in_transit.drain(..some).collect::<Vec<_>>() {
            self.deliver(output);
        }
    }

    fn deliver(&mut self, output: Released) {
        let foreign = self.mode == Mode::Foreign;
        if let Some(notification) = output.notification.filter(|_| foreign) {
            self.obligations.record_delivery(notification);
        }
        let Some((client, session, connection, arrival)) = output.arrival else {
            return;
        };
        let client = &mut self.clients[client];
        // An answer belongs to the session, a PUBACK to the connection. A foreign broker always has
        // the session.
        let here = client.connection.is_some() && client.session == session;
        let arrives = match arrival {
            Arrival::Answer { .. } => here || client.is_foreign(),
            Arrival::Acknowledgement { .. } => here && client.connection == Some(connection),
        };
        if !arrives {
            return;
        }
        if let Arrival::Acknowledgement { id, copy } = arrival
            && client.is_foreign()
        {
            let notified = self.obligations.check_acknowledged(id, copy);
            self.tally
                .add_to("watchers notified before the acknowledgement", notified);
        }
        client.inbox.push_back(arrival);
    }

    /// Checks the store after an event, and restarts it if its disk failed.
    fn check_after_event(&mut self) {
        if self.log.failure().is_some() {
            self.tally.count("disk failures");
            self.trace
                .record(format!("failed: {:?}", self.log.failure()));
            let kill = self.dice.once_in(2);
            self.restart(kill);
        }
        self.release();
        if self.dice.once_in(8) {
            history::check_counters(self.core.store().state(), self.core.store().duplicates());
        }
    }

    /// Ends every connection, and drops the outputs that were not delivered.
    pub(crate) fn drop_connections(&mut self) {
        self.egress = Egress::default();
        self.in_transit.clear();
        for client in &mut self.clients {
            client.disconnect();
        }
    }

    /// Records the sessions again that a crash lost, because the clients of a run keep their
    /// sessions. Ends the recovered sessions that no client has.
    fn resume_sessions(&mut self, found: &Recovery) {
        if self.mode == Mode::Foreign {
            return;
        }
        let exists = |session: &SessionId| self.clients.iter().any(|it| it.session == *session);
        let ended = found.session_numbers().filter(|number| !exists(number));
        let mut changes: Vec<_> = ended.map(session_ended).collect();
        let begun = self.clients.iter();
        let begun = begun.filter(|it| !found.has_session(it.session));
        changes.extend(begun.map(|it| session_began(it.session, &it.name)));
        for changes in changes {
            self.record_sessions(&changes);
        }
    }

    /// Appends a record of session changes, as the broker does.
    fn record_sessions(&mut self, changes: &[u8]) {
        let mut record = Vec::new();
        record::sessions(&mut record, changes);
        self.core.journal().append(&[&record], false);
        self.capture_state();
    }

    pub(crate) fn end_session(&mut self, index: usize) {
        self.tally.count("ended sessions");
        let ended = self.clients[index].session;
        self.trace.record(format!("session {ended} ends"));
        self.record_sessions(&session_ended(ended));
        self.step(Input::SessionsEnded(&[ended]));
        self.clients[index].begin_session(self.next_session);
        self.record_sessions(&session_began(
            self.next_session,
            &self.clients[index].name.clone(),
        ));
        self.next_session = self.next_session.next();
        self.check_sessions();
    }

    /// Ends the faults, and checks that every request is answered and every watcher notified.
    fn finish(&mut self) {
        self.trace.record("finishing".into());
        self.clear_disk_faults();
        self.finishing = true;
        for _ in 0..10 * self.in_flight_max + 10 {
            for index in 0..self.clients.len() {
                while self.clients[index].next_to_resend().is_some() {
                    self.send(index);
                }
                let idle = self.clients[index].connection.is_none()
                    && !self.clients[index].in_flight.is_empty();
                if idle {
                    self.send(index);
                }
            }
            self.commit_and_check();
            for client in &mut self.clients {
                while !client.inbox.is_empty() {
                    client.read();
                }
            }
        }
        for client in &self.clients {
            assert!(
                client.in_flight.is_empty(),
                "a request of {} was not answered",
                client.name
            );
        }
        let notified = self.obligations.check_expirations();
        self.tally
            .add_to("watchers notified of expirations", notified);
        history::check_counters(self.core.store().state(), self.core.store().duplicates());
        self.restart_cleanly();
    }

    /// Checks that no request of an ended session is remembered.
    pub(crate) fn check_sessions(&self) {
        for remembered in self.core.store().duplicates().range(0) {
            let session = remembered.delivery.session;
            let exists = self.clients.iter().any(|it| it.session == session);
            assert!(
                exists,
                "requests of the ended session {session} are remembered"
            );
        }
    }

    fn commit_and_check(&mut self) {
        let committed = self.log.commit();
        assert!(
            committed.is_ok() || self.log.failure().is_some(),
            "{committed:?}"
        );
        self.check_after_event();
    }
}

/// No request in a simulation expires, so the instant does not matter.
pub(crate) fn now(ms: u64) -> Now {
    Now {
        ms,
        instant: Instant::now(),
    }
}

/// A store without the guard: the workload assigns policies itself.
fn unguarded(registry: Registry<Transaction>, state: Box<State>, duplicates: Duplicates) -> Store {
    let mut store = Store::restore(registry, quota(), state, duplicates);
    store.supervision().guard.failures_max = 0;
    store
}

fn quota() -> Quota {
    Quota {
        keys_max: 18,
        client_keys_max: 6,
        bytes_max: 1 << 20,
        key_bytes_max: 100,
        value_bytes_max: 20_000,
        ..Quota::default()
    }
}
