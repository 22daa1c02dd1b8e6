//! One run: a store, its disk, its clients and the time, and what must hold after each step.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use statehouse_core::clock::{Clock, ManualSource, Stamp};
use statehouse_core::log::{Progress, Recorder, record};
use statehouse_core::policy::{Assignment, CanaryRule, Digest, Registry, Repeat};
use statehouse_core::request::Incoming;
use statehouse_core::store::{
    Duplicates, Effects, Exceeded, Key, Mode, Peer, Quota, Remembered, Renotified, Rerun,
    Retention, State, Store, Transaction, WatchChange,
};
use statehouse_core::{Core, Decision, Input, Now, Outcome, Settings};
use statehouse_mqtt::simulation::{session_began, session_ended};
use statehouse_mqtt::{QoS, Recovery};
use statehouse_wal::simulation::{Dice, Simulation};
use statehouse_wal::{Durability, Log, Options, Room, Snapshot};

use crate::client::{About, Arrival, Asked, Client, Said, Taste};
use crate::deed::Deed;
use crate::exit::{Exit, Left, OnLog, Out};
use crate::habits::{CLIENTS_MAX, Habits, Kind};
use crate::history::{self, Moment};
use crate::policies;
use crate::promises::Promises;
use crate::story::{Story, Tally};

/// The wall clock at the beginning of every run.
const START_MS: u64 = 1_700_000_000_000;

pub(crate) struct World {
    pub(crate) dice: Dice,
    pub(crate) mode: Mode,
    in_flight_max: u64,
    pub(crate) habits: Habits,
    pub(crate) taste: Taste,
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
    pub(crate) exit: Exit,
    /// What left the store and has not reached a foreign broker, which does not take it while its own is on its way.
    wire: VecDeque<Left>,
    pub(crate) promises: Promises,
    /// Faults are over.
    calm: bool,
    /// The store behind every record that a crash may leave as the last.
    pub(crate) moments: VecDeque<Moment>,
    /// What records say besides: the run, the policy, the time.
    pub(crate) recorded: (u32, Option<Assignment>, u64),
    /// What each record is about.
    pub(crate) deeds: BTreeMap<u64, Deed>,
    /// Everything that was ever remembered, with its record.
    pub(crate) ever: BTreeMap<u64, (u64, Remembered)>,
    /// The last record that wrote a key.
    pub(crate) written: HashMap<Key, u64>,
    /// The last record with which a watch began.
    pub(crate) registered: HashMap<(Arc<str>, Key), u64>,
    /// The records of what each request did, and the run.
    pub(crate) ran: HashMap<u64, Vec<u64>>,
    pub(crate) ran_in: HashMap<u64, u32>,
    /// What was told to somebody depends on the records up to here, and versions up to there.
    pub(crate) floor: u64,
    pub(crate) told: Stamp,
    next_id: u64,
    next_session: u64,
    next_connection: u64,
    pub(crate) tally: Tally,
    pub(crate) story: Story,
}

impl World {
    /// Runs a seed to its end.
    pub(crate) fn run(seed: u64) -> Tally {
        let mut world = Self::new(seed);
        for _ in 0..100 + world.dice.below(150) {
            world.event();
            world.check();
        }
        world.settle();
        world.tally
    }

    fn new(seed: u64) -> Self {
        let mut dice = Dice::new(seed);
        let Kind {
            mode,
            in_flight_max,
            habits,
            taste,
            options,
            retention,
        } = Kind::of(&mut dice);
        let source = Arc::new(ManualSource::at(START_MS));
        let disk = Simulation::new(dice.roll());
        let assignment = policies::assignment();
        let (log, mut image) = Self::open(&disk, &options, retention, START_MS, &BTreeMap::new())
            .expect("an empty disk")
            .0;
        let log = Arc::new(log);
        image.begin(mode);
        let recorder = Recorder::new(Arc::new(OnLog(log.clone())), Vec::new(), None);
        let registry = policies::registry(&assignment, None);
        let store = unguarded(registry, image.state, image.duplicates);
        let core = Core::new(store, recorder, 1, Settings::default());
        let clients = 1 + dice.below(CLIENTS_MAX);
        let mut world = Self {
            clients: (0..clients as usize)
                .map(|index| {
                    let number = index as u64 + 1;
                    let session = match mode {
                        Mode::Embedded => number,
                        Mode::Foreign => Mode::foreign_session(number),
                    };
                    Client::new(index, session, &mut dice)
                })
                .collect(),
            dice,
            mode,
            in_flight_max,
            habits,
            taste,
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
            exit: Exit::default(),
            wire: VecDeque::new(),
            promises: Promises::default(),
            calm: false,
            moments: VecDeque::new(),
            recorded: (0, None, 0),
            deeds: BTreeMap::new(),
            ever: BTreeMap::new(),
            written: HashMap::new(),
            registered: HashMap::new(),
            ran: HashMap::new(),
            ran_in: HashMap::new(),
            floor: 0,
            told: Stamp::default(),
            next_id: 1,
            next_session: clients + 1,
            next_connection: 1,
            tally: Tally::default(),
            story: Story::new(seed),
        };
        if mode == Mode::Foreign {
            world.tally.count("runs behind a foreign broker");
        }
        world.story.tell(format!(
            "{mode:?} {:?} {:?} {:?} {:?}",
            world.habits, world.taste, world.options, world.retention
        ));
        world.moment();
        world.begin(assignment, None);
        world
    }

    /// Takes a store into use, as a start does once it has recovered one.
    pub(crate) fn begin(
        &mut self,
        mut assignment: Assignment,
        image: Option<statehouse_core::log::Image>,
    ) {
        let (mut last_ms, mut ends) = (0, Vec::new());
        if let Some(mut image) = image {
            image.begin(self.mode);
            ends = image.ends();
            last_ms = image.now_ms;
            self.run = image.run + 1;
            let journal = Arc::new(OnLog(self.log.clone()));
            let recorder = Recorder::new(journal, image.policies, image.active);
            let missing = 1 + self.dice.below(2) as usize;
            let lost = policies::digest(missing);
            let missing = (self.habits.missing && lost != assignment.active).then_some(missing);
            if missing.is_some() {
                assignment = assignment.without(lost);
            }
            let registry = policies::registry(&assignment, missing);
            let watches = &image.state.watches;
            self.promises.resume(watches);
            self.tally
                .add_to("watches found by a start", watches.len() as u64);
            let store = unguarded(registry, image.state, image.duplicates);
            self.core = Core::new(store, recorder, self.run, Settings::default());
            self.resume_sessions(&image.sessions);
            if self.mode == Mode::Embedded {
                let live: Vec<u64> = self.clients.iter().map(|it| it.session).collect();
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
        // The start and the policies are records of their own.
        self.moment_at(before + 1);
        self.recorded.1 = Some(assignment.clone());
        self.assignment = assignment;
        self.moment();
        if !ends.is_empty() {
            self.tally
                .add_to("ends that a start told again", ends.len() as u64);
            self.step(Input::Expired(&ends));
        }
    }

    pub(crate) fn always(&self) -> bool {
        self.options.durability == Durability::Always
    }

    pub(crate) fn now(&mut self) -> u64 {
        let now_ms = self.clock.read().now_ms;
        assert!(now_ms >= self.now_ms, "the store's time went back");
        self.now_ms = now_ms;
        now_ms
    }

    /// Remembers the store behind its last record.
    pub(crate) fn moment(&mut self) {
        self.moment_at(self.log.appended().0);
    }

    fn moment_at(&mut self, position: u64) {
        if self
            .moments
            .back()
            .is_some_and(|last| last.position == position)
        {
            return;
        }
        let (run, assignment, now_ms) = self.recorded.clone();
        let (state, duplicates) = (self.core.store().state(), self.core.store().duplicates());
        self.moments.push_back(Moment::of(
            position, now_ms, state, duplicates, run, assignment,
        ));
        // No crash goes back behind what is durable.
        let durable = self.log.durable().0;
        while self
            .moments
            .get(1)
            .is_some_and(|second| second.position <= durable)
        {
            self.moments.pop_front();
        }
    }

    /// A new request, or one that is sent again.
    pub(crate) fn send(&mut self, who: usize) {
        if self.mode == Mode::Foreign && self.clients[who].connection.is_none() {
            self.attach();
        }
        let client = &mut self.clients[who];
        if client.connection.is_none() {
            client.connection = Some(self.next_connection);
            self.next_connection += 1;
            self.story
                .tell(format!("{} connects: {:?}", client.name, client.connection));
        }
        let again = client.to_send_again();
        let at = again.unwrap_or(client.in_flight.len());
        if again.is_none() {
            if client.in_flight.len() as u64 >= self.in_flight_max {
                return;
            }
            client.think(self.next_id, self.now_ms, self.taste, &mut self.dice);
            self.next_id += 1;
        }
        self.ask(who, at);
    }

    /// A foreign broker has the store again, and brings what it did not acknowledge.
    fn attach(&mut self) {
        self.story
            .tell(format!("attaches: {}", self.next_connection));
        for client in &mut self.clients {
            client.connection = Some(self.next_connection);
        }
        self.next_connection += 1;
    }

    /// A client as the store sees it.
    pub(crate) fn peer(&self, who: usize) -> Peer {
        let Client {
            name,
            session,
            connection,
            ..
        } = &self.clients[who];
        Peer {
            client: name.clone(),
            connection: match self.mode {
                Mode::Embedded => connection.expect("connected"),
                Mode::Foreign => *session,
            },
            session: *session,
        }
    }

    /// Lets the store handle a request, and checks what it did.
    pub(crate) fn ask(&mut self, who: usize, at: usize) {
        let full = self.log.room() != Room::Plenty;
        self.core.store_mut().quota().journal_full = full;
        let now_ms = self.now();
        let delivery = self.clients[who].send(at);
        let peer = self.peer(who);
        let client = &self.clients[who];
        let connection = client.connection.expect("connected");
        let asked = &client.in_flight[at];
        let incoming = Incoming {
            topic: asked.topic,
            payload: &asked.payload,
            properties: &asked.properties,
            qos: QoS::AtLeastOnce,
            delivery,
            expires: None,
            peer: &peer,
            grants: None,
        };
        let clock = self.core.store().state().hlc.last();
        let decision = self.core.handle(Input::Publish(&incoming), now(now_ms));
        let Decision {
            position,
            outcome: Outcome::Handled(request, reply_to),
            mut effects,
            ..
        } = decision
        else {
            panic!("{} is no request", asked.words);
        };
        let urgent = reply_to.is_urgent();
        let behind = self.log.appended().0;
        if effects.swept.is_some() || effects.handled.is_some() {
            self.recorded.2 = now_ms;
        }
        let answer = effects.answer.take().expect("every request has an answer");
        let (id, mut first) = (asked.id, asked.ran.as_ref().map(|(_, said)| said.clone()));
        let (sent, packet_id, until_ms) = (asked.sent, asked.packet_id, asked.until_ms);
        let said = (answer.payload, answer.version);
        self.story.tell(format!(
            "{} asks {id} ({}) over {connection} packet {packet_id} dup {} at {now_ms}: {:?} {:?} {:?}, record {behind}",
            client.name, asked.words, delivery.dup,
            String::from_utf8_lossy(&said.0).chars().take(30).collect::<String>(), said.1, effects.repeated,
        ));
        self.tally.count("requests");
        if matches!(effects.exceeded, Some(Exceeded::ClientKeys(_))) {
            self.tally.count("refused for the part of a client");
        }
        if full && *said.0 == *b"-ERR the quota has been exceeded\r\n" {
            self.tally.count("refused for a full disk");
        }
        let deeds = Deed::of(Some(&request), &effects);
        if first.is_some() && effects.repeated.is_none() && now_ms >= until_ms {
            // What the protocol says of a foreign broker: only for a while.
            assert_eq!(self.mode, Mode::Foreign, "request {id} was forgotten");
            self.tally
                .count("requests that came again after their time");
            self.forget(who, at);
            first = None;
        }
        self.note(deeds, &effects);
        self.check_effects(clock, &effects, effects.renotified.is_some());
        assert!(
            !full || !answer.put || effects.repeated.is_some(),
            "the disk is full, and {id} put something"
        );
        let mut owed = false;
        match first {
            Some(first) => {
                owed = true;
                assert!(
                    effects.handled.is_none(),
                    "request {id} had an effect twice"
                );
                self.check_told_again(id, &effects);
                assert_eq!(said, first, "request {id} was answered otherwise before");
                match effects.repeated {
                    Some(Rerun::Same) => self.tally.count("duplicates run again"),
                    Some(Rerun::Stored) => {
                        self.tally.count("duplicates answered from the record");
                        assert!(
                            self.taste.fat || self.habits.missing,
                            "nothing to run {id} on"
                        );
                    }
                    other => panic!("request {id}: {other:?}"),
                }
            }
            None => {
                assert_eq!(effects.repeated, None, "request {id} is no duplicate");
                let by = effects.by.as_ref().expect("it was just asked");
                let expected = self.who(&self.clients[who].name, &self.clients[who].in_flight[at]);
                let clear = !said.0.starts_with(b"-ERR syntax error");
                if let Some(expected) = expected.filter(|_| clear) {
                    assert_eq!(Digest::from(by.digest), expected, "another answers {id}");
                }
                if Digest::from(by.digest) != self.assignment.active {
                    self.tally.count("requests of a canary or a route");
                }
                let policy = by.digest;
                assert_eq!(effects.renotified, None, "request {id} is new");
                if let Some(handled) = &effects.handled {
                    if self.mode == Mode::Foreign {
                        let (writes, notices) = (&handled.writes, &effects.notifications);
                        self.promises.owe((id, sent), behind, writes, notices);
                    }
                    owed = handled.repeatable;
                    assert_eq!(handled.remembered.context.policy, policy);
                    let records = self.ran.entry(id).or_default();
                    records.push(behind);
                    assert_eq!(records.len(), 1, "request {id} ran twice");
                    self.ran_in.insert(id, self.run);
                    if sent > 1 {
                        self.tally.count("requests run anew after a crash");
                    }
                    let remembered = handled.remembered.clone();
                    self.ever.insert(remembered.number, (behind, remembered));
                }
                // On a full disk what changes nothing takes no room.
                let wrote = effects.handled.as_ref();
                let wrote = wrote.is_some_and(|it| !it.writes.is_empty());
                let must = answer.repeat == Repeat::Same && (wrote || !full);
                assert_eq!(owed, must, "request {id} is not remembered as it should be");
                if owed {
                    let asked = &mut self.clients[who].in_flight[at];
                    asked.ran = Some((behind, said.clone()));
                    let handled = effects.handled.as_ref();
                    asked.until_ms = handled.map_or(0, |it| it.remembered.until_ms);
                }
            }
        }
        let rests_on = self.rests_on(who, at, &effects, &said);
        let out = Out {
            rests_on,
            clock: if owed {
                self.core.store().state().hlc.last()
            } else {
                Stamp::default()
            },
            client: who,
            session: delivery.session,
            lane: delivery.connection,
            connection,
            id,
            copy: sent,
            owed,
            urgent: urgent && answer.put,
            said,
        };
        let told = self.exit.push(position, &effects, behind, Some(out));
        self.tally.add_to("notifications", told - 1);
        self.moment();
    }

    /// A request is a new one again.
    fn forget(&mut self, who: usize, at: usize) {
        let client = &mut self.clients[who];
        let asked = &mut client.in_flight[at];
        let id = asked.id;
        asked.before = asked.ran.take().map(|ran| (ran, asked.until_ms));
        client.disown(id);
        for left in &mut self.wire {
            if let Some((.., arrival)) = &mut left.arrival {
                arrival.disown(id);
            }
        }
        self.exit.forget(id);
        self.ran.remove(&id);
        self.promises.forgive(id);
    }

    /// A duplicate tells nobody anything, but where an earlier run may not have.
    fn check_told_again(&mut self, id: u64, effects: &Effects) {
        match effects.renotified {
            None => assert!(
                effects.notifications.is_empty(),
                "request {id} was told of twice"
            ),
            Some(_) if self.ran_in.get(&id) == Some(&self.run) => {
                panic!("request {id} is of this run");
            }
            Some(Renotified::Sent) => {
                self.tally
                    .count("requests of an earlier run that were told of again");
            }
            Some(Renotified::Incomplete) => {
                self.tally.count("requests that could not be told of again");
                assert_ne!(effects.repeated, Some(Rerun::Same));
                self.promises.forgive(id);
            }
        }
    }

    /// Who is to answer a request, by the assignment; none where that depends on how a policy reads it.
    fn who(&self, client: &str, asked: &Asked) -> Option<Digest> {
        let words = statehouse_offline::words(&asked.payload)?;
        let key = match words[0] {
            b"HIDE" => return None,
            b"SCAN" => None,
            _ => Some(words[1]),
        };
        let routes = self.assignment.routes.iter();
        let owners = routes.filter(|it| key.is_some_and(|key| key.starts_with(&it.prefix.0)));
        if let Some(owner) = owners.max_by_key(|it| it.prefix.0.len()) {
            return Some(owner.policy);
        }
        let canary = self.assignment.canary.as_ref().filter(|it| match &it.rule {
            CanaryRule::Percent(percent) => *percent == 100,
            CanaryRule::Clients(name) => name == client,
            CanaryRule::Keys(name) => key == Some(name.as_bytes()),
        });
        Some(canary.map_or(self.assignment.active, |it| it.policy))
    }

    /// The last record that an answer tells of.
    fn rests_on(&self, who: usize, at: usize, effects: &Effects, said: &Said) -> u64 {
        let asked = &self.clients[who].in_flight[at];
        if let Some((record, _)) = &asked.ran
            && !self.always()
        {
            // In interval mode only its own record is ever promised.
            return *record;
        }
        let about_all = effects.handled.is_some() || effects.repeated.is_some();
        if about_all || effects.swept.is_some() || effects.watches.is_some() {
            // The last one of the store: those of sessions tell nobody anything of it.
            return self.deeds.last_key_value().map_or(0, |(record, _)| *record);
        }
        match &asked.about {
            _ if said.0.starts_with(b"-ERR") => 0,
            About::Key(key) => self.written.get(key).copied().unwrap_or(0),
            About::Watch(key) => {
                let watched = (self.clients[who].name.clone(), key.clone());
                self.registered.get(&watched).copied().unwrap_or(0)
            }
            About::All => self.written.values().max().copied().unwrap_or(0),
            About::Nothing => 0,
        }
    }

    /// A step without a request.
    pub(crate) fn step(&mut self, input: Input<'_>) {
        let now_ms = self.now();
        let clock = self.core.store().state().hlc.last();
        let Decision {
            position, effects, ..
        } = self.core.handle(input, now(now_ms));
        if effects.swept.is_some() {
            self.recorded.2 = now_ms;
        }
        self.note(Deed::of(None, &effects), &effects);
        self.check_effects(clock, &effects, matches!(input, Input::Expired(_)));
        let record = match (&input, &effects.swept) {
            // It was found on the disk.
            (Input::Expired(_), None) => 0,
            _ => self.log.appended().0,
        };
        let told = self.exit.push(position, &effects, record, None);
        self.tally.add_to("notifications", told);
        self.moment();
    }

    /// Takes down what the last records are about.
    fn note(&mut self, deeds: Vec<Deed>, effects: &Effects) {
        let last = self.log.appended().0;
        let first = last + 1 - deeds.len() as u64;
        self.deeds.extend((first..).zip(deeds));
        if self.mode == Mode::Foreign
            && let Some(swept) = &effects.swept
        {
            // Before watches change: they are told of it first.
            self.promises.owe_ends(first, swept, &effects.expired);
        }
        assert!(self.mode == Mode::Foreign || effects.watches.is_none());
        let Some(watches) = &effects.watches else {
            return;
        };
        self.promises.note(watches);
        for change in &watches.changes {
            if let WatchChange::Began(key, _) = change {
                let watched = (watches.peer.client.clone(), key.clone());
                self.registered.insert(watched, last);
            }
        }
    }

    fn check_effects(&mut self, before: Stamp, effects: &Effects, again: bool) {
        let mut last = before.max(self.told);
        let handled = effects.handled.iter().flat_map(|it| &it.writes);
        let swept = effects.swept.iter().flat_map(|it| &it.writes);
        let record = self.log.appended().0;
        for write in swept.chain(handled) {
            if !write.hidden {
                let key = Key::copy_from_slice(write.key());
                self.written.insert(key, record);
            }
            self.story.tell(format!(
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
                "a version did not rise: {write:?} after {last:?}"
            );
            last = write.version();
        }
        // A step removes far more keys than there are here.
        let next_ms = self.core.store().next_expiry_ms();
        let gone = next_ms.is_none_or(|ms| ms > self.now_ms);
        assert!(gone, "a key is there that has expired");
        let clock = self.core.store().state().hlc.last();
        assert!(
            clock >= last || clock == before,
            "a version above the clock"
        );
        for notice in effects.expired.iter().chain(&effects.notifications) {
            // What is told again is no news.
            assert!(again || notice.version > before);
            assert!(notice.version <= clock);
        }
        if effects.swept.is_some() {
            self.tally.count("sweeps");
        }
        if effects.failures > 0 {
            self.tally.count("policies that failed");
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

    /// What may leave leaves, and holds from then on.
    fn release(&mut self) {
        let (released, durable) = (self.log.released(), self.log.durable());
        if self.always() {
            assert!(released <= durable, "released what is not durable");
        }
        for left in self.exit.release(released, durable.0, self.always()) {
            self.floor = self.floor.max(left.floor);
            self.told = self.told.max(left.told);
            self.wire.push_back(left);
        }
        let all = self.wire.len();
        let some = match self.mode {
            Mode::Foreign if !self.calm => self.dice.below(all as u64 + 1) as usize,
            _ => all,
        };
        for left in self.wire.drain(..some).collect::<Vec<_>>() {
            self.arrive(left);
        }
    }

    fn arrive(&mut self, left: Left) {
        if let Some(heard) = left.heard.filter(|_| self.mode == Mode::Foreign) {
            self.promises.heard(heard);
        }
        let Some((client, session, connection, arrival)) = left.arrival else {
            return;
        };
        let client = &mut self.clients[client];
        // An answer goes to the session, a PUBACK to the connection. A foreign broker has the session all the time.
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
            let told = self.promises.acknowledged(id, copy);
            self.tally
                .add_to("watchers told before the acknowledgement", told);
        }
        client.inbox.push_back(arrival);
    }

    /// After every event.
    fn check(&mut self) {
        if self.log.failure().is_some() {
            self.tally.count("disks that failed");
            self.story.tell(format!("failed: {:?}", self.log.failure()));
            let kill = self.dice.once_in(2);
            self.restart(kill);
        }
        self.release();
        if self.dice.once_in(8) {
            history::recount(self.core.store().state(), self.core.store().duplicates());
        }
    }

    /// Every connection ends, and what was to go over them is gone.
    pub(crate) fn hang_up(&mut self) {
        self.exit = Exit::default();
        self.wire.clear();
        for client in &mut self.clients {
            client.disconnect();
        }
    }

    /// After a start the records say again which sessions there are: the last ones that were lost with a crash,
    /// and their clients do not know of it here.
    fn resume_sessions(&mut self, found: &Recovery) {
        if self.mode == Mode::Foreign {
            return;
        }
        let lives = |number: &u64| self.clients.iter().any(|it| it.session == *number);
        let over = found.session_numbers().filter(|number| !lives(number));
        let mut changes: Vec<_> = over.map(session_ended).collect();
        let begun = self.clients.iter();
        let begun = begun.filter(|it| !found.has_session(it.session));
        changes.extend(begun.map(|it| session_began(it.session, &it.name)));
        for changes in changes {
            self.record_sessions(&changes);
        }
    }

    /// Records what the broker says of sessions.
    fn record_sessions(&mut self, changes: &[u8]) {
        let mut record = Vec::new();
        record::sessions(&mut record, changes);
        self.core.journal().append(&[&record], false);
        self.moment();
    }

    pub(crate) fn end_session(&mut self, who: usize) {
        self.tally.count("ended sessions");
        let ended = self.clients[who].session;
        self.story.tell(format!("session {ended} ends"));
        self.record_sessions(&session_ended(ended));
        self.step(Input::SessionsEnded(&[ended]));
        self.clients[who].begin_session(self.next_session);
        self.record_sessions(&session_began(
            self.next_session,
            &self.clients[who].name.clone(),
        ));
        self.next_session += 1;
        self.check_sessions();
    }

    /// The faults end, everyone is answered, and everything is as it should be.
    fn settle(&mut self) {
        self.story.tell("settling".into());
        self.heal();
        self.calm = true;
        for _ in 0..10 * self.in_flight_max + 10 {
            for who in 0..self.clients.len() {
                while self.clients[who].to_send_again().is_some() {
                    self.send(who);
                }
                let idle = self.clients[who].connection.is_none()
                    && !self.clients[who].in_flight.is_empty();
                if idle {
                    self.send(who);
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
                "{} was not answered",
                client.name
            );
        }
        let told = self.promises.settle();
        self.tally.add_to("watchers told of ends", told);
        history::recount(self.core.store().state(), self.core.store().duplicates());
        self.restart_cleanly();
    }

    /// Of sessions that are no more nothing is remembered.
    pub(crate) fn check_sessions(&self) {
        for remembered in self.core.store().duplicates().range(0) {
            let session = remembered.delivery.session;
            let lives = self.clients.iter().any(|it| it.session == session);
            assert!(lives, "session {session} ended, and is remembered");
        }
    }

    fn commit_and_check(&mut self) {
        let committed = self.log.commit();
        assert!(
            committed.is_ok() || self.log.failure().is_some(),
            "{committed:?}"
        );
        self.check();
    }
}

/// No request in a simulation expires, so the instant does not matter.
fn now(ms: u64) -> Now {
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
