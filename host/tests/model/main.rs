//! The store against a plain map: random commands in all dialects, redeliveries at random later times, policy swaps,
//! restarts from records and from snapshots that were taken while requests went on.
//!
//! The same runs as the broker and behind a foreign one, where nothing but the identity tells a redelivery, requests come
//! again without DUP and packet ids that mean anything, and watches survive restarts.
//!
//! A failing case is shrunk and printed as the list of what happened, which is all there is to it.

mod kept;
mod ops;
mod oracle;
mod scan;

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use bytes::Bytes;
use proptest::prelude::*;
use proptest::sample::Index;
use statehouse::STANDARD_POLICY;
use statehouse_core::clock::Stamp;
use statehouse_core::log::record::PolicyRecord;
use statehouse_core::log::{Image, Journal, Progress, Recorder, Records, record, sessions_block};
use statehouse_core::policy::{Engine, Instance, Policy, Registry};
use statehouse_core::request::{Delivery, Dialect, Incoming, PREVIEW_TOPIC, REQUEST_TOPIC};
use statehouse_core::store::{
    Effects, Mode, Notification, Peer, Quota, Renotified, Rerun, Retention, Store, Transaction,
    Watches,
};
use statehouse_core::{Core, Input, Now, Settings};
use statehouse_mqtt::simulation::{session_began, session_ended};
use statehouse_mqtt::{Properties, PropertiesBuilder, QoS};

use ops::{How, Op};
use oracle::{Asked, Oracle, Reading, Told, Version};

const START_MS: u64 = 1_700_000_000_000;
const CLIENTS: usize = 2;
const DIALECTS: [Dialect; 3] = [Dialect::Sdk, Dialect::Documents, Dialect::Preview];
const RETENTION: Retention = Retention {
    window_ms: 600_000,
    count_max: 100_000,
    bytes_max: 64 << 20,
    per_session: 4,
};
/// Behind a foreign broker only the window keeps.
fn retention(mode: Mode) -> Retention {
    Retention {
        per_session: match mode {
            Mode::Embedded => RETENTION.per_session,
            Mode::Foreign => 0,
        },
        ..RETENTION
    }
}

/// A request that says nothing of its expiry is remembered for this long (the protocol, section 9).
const WINDOW_MS: u64 = 60_000;
const QUOTA: Quota = Quota {
    keys_max: 4,
    bytes_max: 1 << 20,
    client_keys_max: 3,
    client_bytes_max: 1 << 20,
    key_bytes_max: 100,
    value_bytes_max: 100,
    watches_max: 1_000_000,
    watches_per_connection_max: 10_000,
    watch_bytes_max: 512 << 20,
    unreleased_bytes_max: 256 << 20,
    fuel_max: statehouse::limits::FUEL_PER_CALL_DEFAULT,
    journal_full: false,
};

type Policies = [Arc<Policy<Transaction>>; 2];

fn policies() -> &'static Policies {
    static POLICIES: OnceLock<(Engine<Transaction>, Policies)> = OnceLock::new();
    let (_, policies) = POLICIES.get_or_init(|| {
        let engine = Engine::without_watchdog().expect("an engine");
        // A custom section makes another build of it: id 0, its length, its name with a length.
        let twin = [STANDARD_POLICY, b"\0\x05\x04twin"].concat();
        let load = |file: &[u8]| Arc::new(engine.load(file).expect("a policy"));
        let policies = [load(STANDARD_POLICY), load(&twin)];
        (engine, policies)
    });
    policies
}

/// What is recorded of each.
fn records() -> Vec<PolicyRecord> {
    let all = policies().iter();
    all.map(|policy| PolicyRecord::of(policy, false)).collect()
}

/// Lets another policy answer from the next request on; the one before it stays behind it.
fn promote(core: &mut Core, policy: Arc<Policy<Transaction>>) {
    let digest = policy.digest.into();
    let registry = core.store_mut().registry();
    let loaded = registry.assignment().load(digest);
    let next = loaded.and_then(|it| it.promote(digest));
    let next = next.expect("there is room for two");
    let assigned = core.assign(next, vec![Instance::new(policy)]);
    assert!(assigned.is_ok(), "all that are named are here");
}

/// No request here expires, so the instant does not matter.
fn now(ms: u64) -> Now {
    Now {
        ms,
        instant: Instant::now(),
    }
}

/// A request that was answered once.
#[derive(Clone)]
struct Past {
    client: usize,
    session: u64,
    packet_id: u16,
    dialect: Dialect,
    words: Vec<Vec<u8>>,
    timestamp: Option<Reading>,
    token: Option<Reading>,
    properties: Properties,
    /// What a redelivery is owed, and when it was answered.
    owed: Option<((Bytes, Option<Stamp>), u64)>,
    /// Whether another one is the very same.
    twin: bool,
    /// What it changed: the key, and the value that it holds since.
    changed: Option<(Vec<u8>, Option<Vec<u8>>)>,
    /// The run that handled it, and the last one that told of it again.
    ran: u32,
    told_again: u32,
}

struct Model {
    mode: Mode,
    run: u32,
    core: Core,
    records: Arc<Records>,
    /// Blocks of a snapshot that is being taken, and how many records there were at its beginning.
    taking: Option<(Progress, Vec<Vec<u8>>, usize)>,
    taken: Option<(Vec<Vec<u8>>, usize)>,
    active: usize,
    oracle: Oracle,
    past: Vec<Past>,
    now_ms: u64,
    /// The last version that anybody saw.
    last: Stamp,
    peers: Vec<Peer>,
    next_connection: u64,
    next_session: u64,
    next_packet_id: u16,
}

fn quiet(registry: Registry<Transaction>, image: Image) -> Store {
    Store::restore(registry, QUOTA, image.state, image.duplicates)
}

impl Model {
    fn new(mode: Mode) -> Self {
        let records = Arc::new(Records::default());
        let recorder = Recorder::new(records.clone(), Vec::new(), None);
        let registry = Registry::new(policies()[0].clone(), None);
        let mut image = Image::new(retention(mode));
        image.begin(mode);
        let mut core = Core::new(quiet(registry, image), recorder, 1, Settings::default());
        core.begin(mode, crate::records(), START_MS);
        let mut model = Self {
            mode,
            run: 1,
            core,
            records,
            taking: None,
            taken: None,
            active: 0,
            oracle: Oracle::new(QUOTA.keys_max as usize, QUOTA.client_keys_max as usize),
            past: Vec::new(),
            now_ms: START_MS,
            last: Stamp::default(),
            peers: Vec::new(),
            next_connection: 1,
            next_session: 1,
            next_packet_id: 1,
        };
        for client in 0..CLIENTS {
            let peer = model.peer(client, None);
            model.peers.push(peer);
        }
        model
    }

    /// A connection of a client, over its session or a new one. Of a foreign broker's neither is seen.
    fn peer(&mut self, client: usize, session: Option<u64>) -> Peer {
        self.next_connection += 1;
        let name = format!("client-{client}");
        if self.mode == Mode::Foreign {
            let number = Mode::foreign_session(client as u64);
            return Peer {
                client: name.into(),
                connection: number,
                session: number,
            };
        }
        let session = session.unwrap_or_else(|| {
            self.next_session += 1;
            self.sessions(&session_began(self.next_session, &name));
            self.next_session
        });
        Peer {
            client: name.into(),
            connection: self.next_connection,
            session,
        }
    }

    /// Records what the broker says of sessions.
    fn sessions(&self, changes: &[u8]) {
        let mut record = Vec::new();
        record::sessions(&mut record, changes);
        self.records.append(&[&record], false);
    }

    fn run(&mut self, op: &Op) {
        match op {
            Op::Ask {
                client,
                dialect,
                words,
                timestamp,
                token,
            } => {
                let words = words.iter().map(|word| word.as_bytes().to_vec()).collect();
                let (timestamp, token) = (timestamp.at(self.now_ms), token.at(self.now_ms));
                self.ask_new(*client, DIALECTS[*dialect], words, timestamp, token);
            }
            Op::Again(which, how) => self.ask_again(which, *how),
            // Nothing but the identity tells requests apart there.
            Op::Repeat(which) if self.mode == Mode::Foreign => self.ask_again(which, How::Dup),
            Op::Repeat(which) => {
                if !self.past.is_empty() {
                    let past = which.get_mut(&mut self.past);
                    past.twin = true;
                    let session = self.peers[past.client].session;
                    let packet_id = self.next_packet_id;
                    self.next_packet_id += 1;
                    let again = Past {
                        packet_id,
                        session,
                        owed: None,
                        ..past.clone()
                    };
                    self.ask(again, false);
                }
            }
            Op::Reconnect(client) => self.reconnect(*client),
            Op::Unheard(client, key) => {
                if self.mode == Mode::Foreign {
                    let peer = self.peers[*client].clone();
                    self.step(Input::Undeliverable(&peer, key.as_bytes()));
                    self.oracle.unheard(*client, key.as_bytes());
                }
            }
            Op::EndSession(_) if self.mode == Mode::Foreign => {}
            Op::EndSession(client) => {
                self.reconnect(*client);
                let ended = self.peers[*client].session;
                self.sessions(&session_ended(ended));
                self.step(Input::SessionsEnded(&[ended]));
                self.peers[*client] = self.peer(*client, None);
            }
            Op::Wait(ms) => {
                self.now_ms += ms;
                self.step(Input::Sweep);
            }
            Op::Swap => {
                self.active = 1 - self.active;
                let policy = &policies()[self.active];
                promote(&mut self.core, policy.clone());
            }
            Op::SnapshotPiece => self.snapshot_piece(),
            Op::Restart => self.restart(),
        }
        self.compare();
    }

    fn ask_new(
        &mut self,
        client: usize,
        dialect: Dialect,
        words: Vec<Vec<u8>>,
        timestamp: Option<Reading>,
        token: Option<Reading>,
    ) {
        let packet_id = self.next_packet_id;
        self.next_packet_id += 1;
        let mut properties = PropertiesBuilder::new()
            .response_topic(&format!("answers/{client}"))
            .correlation_data(&packet_id.to_be_bytes());
        for (name, reading) in [
            (dialect.version_property(), &timestamp),
            (dialect.fencing_property(), &token),
        ] {
            if let Some(reading) = reading {
                properties = properties.user(name, &reading.text());
            }
        }
        let properties = properties.finish().expect("short properties");
        let past = Past {
            client,
            session: self.peers[client].session,
            packet_id,
            dialect,
            words,
            timestamp,
            token,
            properties: Properties::parse(properties).expect("just made"),
            owed: None,
            twin: false,
            changed: None,
            ran: 0,
            told_again: 0,
        };
        self.ask(past, false);
    }

    /// Lets store and oracle handle a request as a new one.
    fn ask(&mut self, mut past: Past, dup: bool) {
        let mut told = self.oracle.expire(self.now_ms);
        let due = self.oracle.ask(&Asked {
            client: past.client,
            dialect: past.dialect,
            words: &past.words,
            timestamp: past.timestamp.as_ref(),
            token: past.token.as_ref(),
            now_ms: self.now_ms,
        });
        let mut effects = self.deliver(&past, dup);
        assert_eq!((effects.failures, effects.repeated), (0, None));
        let answer = effects.answer.take().expect("every request has an answer");
        let payload = &answer.payload;
        assert_eq!(
            payload.escape_ascii().to_string(),
            due.payload.escape_ascii().to_string()
        );
        assert_eq!(effects.handled.is_some(), due.owed);
        match due.version {
            Version::None => assert_eq!(answer.version, None),
            Version::Is(version) => assert_eq!(answer.version, Some(version)),
            Version::Above(wall, counter) => {
                let version = answer.version.expect("a new version");
                assert!(version > self.last && version > Stamp { wall, counter });
                assert_eq!(version.wall, self.last.wall.max(wall).max(self.now_ms));
            }
        }
        told.extend(due.told.iter().cloned());
        self.hear(&effects, told);
        (past.changed, past.ran) = (due.changed(), self.run);
        past.owed = due
            .owed
            .then(|| ((payload.clone(), answer.version), self.now_ms));
        self.oracle.apply(due, answer.version);
        self.last = self.last.max(answer.version.unwrap_or_default());
        self.past.push(past);
    }

    /// A request comes again. What its answer must be depends on whether one is owed.
    fn ask_again(&mut self, which: &Index, how: How) {
        let sessions: Vec<u64> = self.peers.iter().map(|peer| peer.session).collect();
        let lives = |past: &Past| sessions[past.client] == past.session;
        let candidates =
            self.past.iter().enumerate().filter(|(at, past)| {
                lives(past) && (past.owed.is_none() || self.is_remembered(*at))
            });
        let candidates: Vec<usize> = candidates.map(|(at, _)| at).collect();
        if candidates.is_empty() {
            return;
        }
        let at = *which.get(&candidates);
        let mut past = self.past[at].clone();
        match how {
            _ if self.mode == Mode::Foreign => {}
            How::Dup => {}
            // Which of two that are the very same is meant, only the packet identifier tells.
            How::DupElsewhere if past.twin => {}
            How::DupElsewhere => past.packet_id = u16::MAX,
            How::Resumed => self.reconnect(past.client),
        }
        let dup = !matches!(how, How::Resumed);
        let Some((said, _)) = &past.owed else {
            // A twin of it may be remembered that this one is taken for.
            if !past.twin {
                self.ask(past, dup);
            }
            return;
        };
        let told = self.oracle.expire(self.now_ms);
        let clock = self.core.store().state().hlc.last();
        let mut effects = self.deliver(&past, dup);
        assert_eq!((effects.failures, effects.repeated), (0, Some(Rerun::Same)));
        assert!(effects.handled.is_none() && effects.watches.is_none());
        let answer = effects
            .answer
            .as_ref()
            .expect("every request has an answer");
        assert_eq!((&answer.payload, answer.version), (&said.0, said.1));
        let again = self.due_again(at);
        assert_eq!(
            effects.renotified,
            (!again.is_empty()).then_some(Renotified::Sent)
        );
        let notices = std::mem::take(&mut effects.notifications);
        let mut heard: Vec<Told> = notices.iter().flat_map(|it| self.heard(it)).collect();
        heard.sort();
        assert_eq!(heard, again);
        // None of their versions is new. That of a removal which nobody watched is one that nobody has seen so far.
        assert!(notices.iter().all(|it| it.version <= clock));
        self.hear(&effects, told);
    }

    /// What is told again where a request of an earlier run comes again, to whoever watches now: once in each run.
    fn due_again(&mut self, at: usize) -> Vec<Told> {
        let past = &mut self.past[at];
        let earlier = self.mode == Mode::Foreign && past.ran < self.run;
        if !earlier || past.told_again == self.run || !self.oracle.is_watched() {
            return Vec::new();
        }
        past.told_again = self.run;
        let changed = past.changed.as_ref();
        let mut due: Vec<Told> = changed
            .into_iter()
            .flat_map(|(key, value)| self.oracle.watchers(key, value.as_deref()))
            .collect();
        due.sort();
        due
    }

    /// Whether a request must still be remembered: for a while, and as one of the last of its session.
    fn is_remembered(&self, at: usize) -> bool {
        let past = &self.past[at];
        let newer = self.past[at + 1..].iter();
        let newer = newer.filter(|it| it.session == past.session && it.owed.is_some());
        let young = past
            .owed
            .as_ref()
            .is_some_and(|(_, ms)| self.now_ms < ms + WINDOW_MS);
        young || (newer.count() as u64) < retention(self.mode).per_session
    }

    fn deliver(&mut self, past: &Past, dup: bool) -> Effects {
        let words: Vec<&[u8]> = past.words.iter().map(Vec::as_slice).collect();
        let payload = Bytes::from(statehouse_policy::resp::request(&words));
        let peer = &self.peers[past.client];
        self.core.settings_mut().dialect = Some(past.dialect);
        let incoming = Incoming {
            topic: match past.dialect {
                Dialect::Preview => PREVIEW_TOPIC,
                Dialect::Sdk | Dialect::Documents => REQUEST_TOPIC,
            },
            payload: &payload,
            properties: &past.properties,
            qos: QoS::AtLeastOnce,
            delivery: Delivery {
                session: peer.session,
                connection: peer.connection,
                packet_id: match self.mode {
                    Mode::Embedded => past.packet_id,
                    Mode::Foreign => 0,
                },
                // Each may have come before.
                dup: dup || self.mode == Mode::Foreign,
            },
            expires: None,
            peer,
            grants: None,
        };
        let decision = self
            .core
            .handle(Input::Publish(&incoming), now(self.now_ms));
        decision.effects
    }

    fn step(&mut self, input: Input<'_>) {
        let told = self.oracle.expire(self.now_ms);
        let effects = self.core.handle(input, now(self.now_ms)).effects;
        assert!(effects.handled.is_none() && effects.notifications.is_empty());
        self.hear(&effects, told);
    }

    /// Compares who heard of what with who should have.
    fn hear(&mut self, effects: &Effects, mut due: Vec<Told>) {
        let mut heard = Vec::new();
        let mut last = self.last;
        let notices: Vec<&Notification> = effects
            .expired
            .iter()
            .chain(&effects.notifications)
            .collect();
        let mut versions: HashMap<Vec<u8>, Stamp> = HashMap::new();
        for notice in notices {
            for told in self.heard(notice) {
                let before = versions.insert(told.key.clone(), notice.version);
                // One change may be told in several dialects; all say the same version.
                assert!(notice.version > self.last || before == Some(notice.version));
                last = last.max(notice.version);
                heard.push(told);
            }
        }
        self.last = last;
        due.sort();
        heard.sort();
        assert_eq!(heard, due);
    }

    /// Who hears of a change, and what.
    fn heard(&self, notice: &Notification) -> Vec<Told> {
        let told = notice.to.iter().map(|(peer, topic)| {
            let client = self.peers.iter().position(|it| it == peer);
            Told {
                client: client.expect("a connection that is there"),
                key: key_of(topic, &peer.client),
                payload: notice.payload.to_vec(),
            }
        });
        told.collect()
    }

    fn reconnect(&mut self, client: usize) {
        let old = self.peers[client].clone();
        self.step(Input::Disconnected(&old));
        self.oracle.gone(client);
        self.peers[client] = self.peer(client, Some(old.session));
    }

    fn snapshot_piece(&mut self) {
        let begun = self.records.all().len();
        let fresh = || {
            let peers = self.peers.iter().filter(|_| self.mode == Mode::Embedded);
            let began = peers.map(|it| sessions_block(&session_began(it.session, &it.client)));
            (Progress::default(), began.collect(), begun)
        };
        let (mut progress, mut blocks, begun) = self.taking.take().unwrap_or_else(fresh);
        match self.core.snapshot(&mut progress, self.now_ms) {
            Some(block) => {
                blocks.push(block);
                self.taking = Some((progress, blocks, begun));
            }
            None => self.taken = Some((blocks, begun)),
        }
    }

    /// The store is rebuilt from the last snapshot and the records behind its beginning.
    fn restart(&mut self) {
        self.taking = None;
        let mut image = Image::new(retention(self.mode));
        let (blocks, begun) = self.taken.clone().unwrap_or_default();
        for block in &blocks {
            image.block(block).expect("a block that was written");
        }
        for record in &self.records.all()[begun..] {
            image.record(record).expect("a record that was written");
        }
        image.finish();
        assert_eq!(image.run, self.run);
        self.run += 1;
        image.begin(self.mode);
        assert!(image.now_ms <= self.now_ms);
        let number = image.active.expect("a policy is recorded first") as usize;
        assert_eq!(
            image.policies[number].digest,
            policies()[self.active].digest
        );
        let mut registry = Registry::new(policies()[self.active].clone(), None);
        registry.retire(policies()[1 - self.active].clone());
        let journal = self.records.clone();
        let recorder = Recorder::new(journal, image.policies.clone(), image.active);
        let store = quiet(registry, image);
        self.core = Core::new(store, recorder, self.run, Settings::default());
        self.core.begin(self.mode, crate::records(), self.now_ms);
        if self.mode == Mode::Foreign {
            return;
        }
        let live: Vec<u64> = self.peers.iter().map(|peer| peer.session).collect();
        self.core.store_mut().retain_sessions(&live);
        for client in 0..CLIENTS {
            self.oracle.gone(client);
            let session = self.peers[client].session;
            self.peers[client] = self.peer(client, Some(session));
        }
    }

    /// The table is the map.
    fn compare(&self) {
        let due = |ms: Option<u64>| ms.is_none_or(|ms| ms > self.now_ms);
        let table = self.core.store().state().table.range(b"", None);
        let table: Vec<_> = table.filter(|it| due(it.expires_ms())).collect();
        let map = self.oracle.keys.iter();
        let map: Vec<_> = map.filter(|(_, held)| due(held.expires_ms)).collect();
        assert_eq!(table.len(), map.len());
        for (entry, (expected, held)) in table.into_iter().zip(map) {
            assert_eq!(entry.key(), expected);
            let owner = format!("client-{}", held.owner);
            assert_eq!(
                self.core.store().state().owner(expected, false),
                Some(&*owner)
            );
            assert_eq!(
                (entry.value(), entry.version()),
                (&held.value[..], held.version)
            );
            assert_eq!(entry.expires_ms(), held.expires_ms);
            let fence = entry.fence();
            let fence = fence
                .as_ref()
                .map(|fence| (fence.wall, fence.counter, &*fence.node));
            assert_eq!(fence, held.fence);
        }
        self.compare_owners();
        let watches = &self.core.store().state().watches;
        assert_eq!(watches.are_durable(), self.mode == Mode::Foreign);
        assert_eq!(self.watched(watches), self.oracle.watched());
    }

    /// What the clients own is what the map says, with what has expired and was not swept.
    fn compare_owners(&self) {
        let mut owned: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
        let state = self.core.store().state();
        for entry in state.table.range(b"", None) {
            let owner = state.owner(entry.key(), false).expect("a client wrote it");
            let (keys, bytes) = owned.entry(owner).or_default();
            (*keys, *bytes) = (*keys + 1, *bytes + entry.weight());
        }
        let counted = state.owners.all();
        let counted: BTreeMap<_, _> = counted
            .map(|(it, keys, bytes)| (it, (keys, bytes)))
            .collect();
        assert_eq!(counted, owned);
    }

    /// Who watches what, in which dialect.
    fn watched(&self, watches: &Watches) -> Vec<(Vec<u8>, usize, Dialect)> {
        let mut watched = Vec::new();
        for (client, peer) in self.peers.iter().enumerate() {
            for key in watches.by(peer) {
                let dialect = watches.of(key).find(|(it, _)| *it == peer);
                let (_, dialect) = dialect.expect("both indexes say the same");
                watched.push((key.to_vec(), client, dialect));
            }
        }
        watched.sort();
        assert_eq!(watched.len(), watches.len());
        watched
    }
}

/// The key that a notification's topic names, and nothing else may differ.
fn key_of(topic: &Bytes, client: &str) -> Vec<u8> {
    let hex = |bytes: &[u8]| {
        bytes
            .iter()
            .map(|byte| format!("{byte:02X}"))
            .collect::<String>()
    };
    let before = format!(
        "clients/statestore/v1/FA9AE35F-2F64-47CD-9BFF-08E2B32A0FE8/{}/command/notify/",
        hex(client.as_bytes())
    );
    let topic = std::str::from_utf8(topic).expect("a topic");
    let named = topic.strip_prefix(&before).expect("the client's own topic");
    assert_eq!(named, named.to_uppercase());
    let digits = named.as_bytes().chunks(2);
    let byte =
        |pair| u8::from_str_radix(std::str::from_utf8(pair).expect("ASCII"), 16).expect("Base 16");
    digits.map(byte).collect()
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 1_000,
        failure_persistence: None,
        max_shrink_iters: 2_000,
        ..ProptestConfig::default()
    })]

    #[test]
    fn the_store_is_the_protocol_over_a_map(ops in prop::collection::vec(ops::op(), 1..120)) {
        let mut model = Model::new(Mode::Embedded);
        for op in &ops {
            model.run(op);
        }
    }

    #[test]
    fn behind_a_foreign_broker_too(ops in prop::collection::vec(ops::op(), 1..120)) {
        let mut model = Model::new(Mode::Foreign);
        for op in &ops {
            model.run(op);
        }
    }
}
