//! Compares the store with an oracle over a plain map: random commands in all dialects,
//! redeliveries at random later times, policy swaps, and restarts from records and from snapshots
//! that were taken between requests.
//!
//! The same cases run in both modes. Behind a foreign broker only the identity of a request marks a
//! redelivery, because DUP and packet identifiers mean nothing there, and watches survive restarts.
//!
//! A case must depend on its list of operations alone, so that a failing case can be shrunk and
//! printed as that list.

mod modes;
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
use statehouse_protocol::{ConnectionId, SessionId};

use ops::{Op, Redelivery};
use oracle::{Oracle, OracleRequest, Reading, Version, WatcherNotification};

const START_MS: u64 = 1_700_000_000_000;
const CLIENTS: usize = 2;
const DIALECTS: [Dialect; 3] = [Dialect::Sdk, Dialect::Documents, Dialect::Preview];
const RETENTION: Retention = Retention {
    window_ms: 600_000,
    count_max: 100_000,
    bytes_max: 64 << 20,
    per_session: 4,
};
/// Behind a foreign broker the store remembers requests only within the window.
fn retention(mode: Mode) -> Retention {
    Retention {
        per_session: match mode {
            Mode::Embedded => RETENTION.per_session,
            Mode::Foreign => 0,
        },
        ..RETENTION
    }
}

/// A request without an expiry is remembered for this long (the protocol, section 9).
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
        // A custom section changes only the digest: id 0, its length, its name with a length.
        let twin = [STANDARD_POLICY, b"\0\x05\x04twin"].concat();
        let load = |file: &[u8]| Arc::new(engine.load(file).expect("a policy"));
        let policies = [load(STANDARD_POLICY), load(&twin)];
        (engine, policies)
    });
    policies
}

/// The policy records that a start writes.
fn records() -> Vec<PolicyRecord> {
    let all = policies().iter();
    all.map(|policy| PolicyRecord::of(policy, false)).collect()
}

/// Promotes a policy. The policy before it remains loaded.
fn promote(core: &mut Core, policy: Arc<Policy<Transaction>>) {
    let digest = policy.digest.into();
    let registry = core.store_mut().registry();
    let loaded = registry.assignment().load(digest);
    let next = loaded.and_then(|it| it.promote(digest));
    let next = next.expect("there is room for two");
    let assigned = core.assign(next, vec![Instance::new(policy)]);
    assert!(assigned.is_ok(), "every named policy is ready");
}

/// No request here expires, so the instant does not matter.
fn now(ms: u64) -> Now {
    Now {
        ms,
        instant: Instant::now(),
    }
}

/// A request that was answered.
#[derive(Clone)]
struct PastRequest {
    client: usize,
    session: SessionId,
    packet_id: u16,
    dialect: Dialect,
    words: Vec<Vec<u8>>,
    timestamp: Option<Reading>,
    token: Option<Reading>,
    properties: Properties,
    /// The answer that a redelivery must get, if it is repeatable, and the time of the answer.
    remembered_answer: Option<((Bytes, Option<Stamp>), u64)>,
    /// Whether another request is identical.
    has_identical: bool,
    /// The changed key, and its new value unless it was removed.
    changed: Option<(Vec<u8>, Option<Vec<u8>>)>,
    /// The run that handled the request.
    executed_in: u32,
    /// The last run that renotified its watchers.
    renotified_in: u32,
}

struct Model {
    mode: Mode,
    run: u32,
    core: Core,
    records: Arc<Records>,
    /// A snapshot in progress: its blocks, and the number of records at its beginning.
    snapshot_in_progress: Option<(Progress, Vec<Vec<u8>>, usize)>,
    last_snapshot: Option<(Vec<Vec<u8>>, usize)>,
    active: usize,
    oracle: Oracle,
    history: Vec<PastRequest>,
    now_ms: u64,
    /// The highest version that a client observed.
    last_version: Stamp,
    peers: Vec<Peer>,
    next_connection: ConnectionId,
    next_session: SessionId,
    next_packet_id: u16,
}

fn store_from_image(registry: Registry<Transaction>, image: Image) -> Store {
    Store::restore(registry, QUOTA, image.state, image.duplicates)
}

impl Model {
    fn new(mode: Mode) -> Self {
        let records = Arc::new(Records::default());
        let recorder = Recorder::new(records.clone(), Vec::new(), None);
        let registry = Registry::new(policies()[0].clone(), None);
        let mut image = Image::new(retention(mode));
        image.begin(mode);
        let mut core = Core::new(
            store_from_image(registry, image),
            recorder,
            1,
            Settings::default(),
        );
        core.begin(mode, crate::records(), START_MS);
        let mut model = Self {
            mode,
            run: 1,
            core,
            records,
            snapshot_in_progress: None,
            last_snapshot: None,
            active: 0,
            oracle: Oracle::new(QUOTA.keys_max as usize, QUOTA.client_keys_max as usize),
            history: Vec::new(),
            now_ms: START_MS,
            last_version: Stamp::default(),
            peers: Vec::new(),
            next_connection: ConnectionId(1),
            next_session: SessionId(1),
            next_packet_id: 1,
        };
        for client in 0..CLIENTS {
            let peer = model.peer(client, None);
            model.peers.push(peer);
        }
        model
    }

    /// A new connection of a client with the given session or a new one. The clients of a foreign
    /// broker always have the same peer, because the store does not see their connections and
    /// sessions.
    fn peer(&mut self, client: usize, session: Option<SessionId>) -> Peer {
        self.next_connection = self.next_connection.next();
        let name = format!("client-{client}");
        if self.mode == Mode::Foreign {
            let number = Mode::foreign_session(client as u64);
            return Peer {
                client: name.into(),
                connection: number.only_connection(),
                session: number,
            };
        }
        let session = session.unwrap_or_else(|| {
            self.next_session = self.next_session.next();
            self.record_sessions(&session_began(self.next_session, &name));
            self.next_session
        });
        Peer {
            client: name.into(),
            connection: self.next_connection,
            session,
        }
    }

    /// Appends a record of session changes, as the broker does.
    fn record_sessions(&self, changes: &[u8]) {
        let mut record = Vec::new();
        record::sessions(&mut record, changes);
        self.records.append(&[&record], false);
    }

    fn apply(&mut self, op: &Op) {
        match op {
            Op::Request {
                client,
                dialect,
                words,
                timestamp,
                token,
            } => {
                let words = words.iter().map(|word| word.as_bytes().to_vec()).collect();
                let (timestamp, token) = (timestamp.at(self.now_ms), token.at(self.now_ms));
                self.handle_new_request(*client, DIALECTS[*dialect], words, timestamp, token);
            }
            Op::Redeliver(which, redelivery) => self.redeliver(which, *redelivery),
            // Identical requests have the same identity there.
            Op::SendIdentical(which) if self.mode == Mode::Foreign => {
                self.redeliver(which, Redelivery::Dup)
            }
            Op::SendIdentical(which) => {
                if !self.history.is_empty() {
                    let past = which.get_mut(&mut self.history);
                    past.has_identical = true;
                    let session = self.peers[past.client].session;
                    let packet_id = self.next_packet_id;
                    self.next_packet_id += 1;
                    let identical = PastRequest {
                        packet_id,
                        session,
                        remembered_answer: None,
                        ..past.clone()
                    };
                    self.handle_as_new(identical, false);
                }
            }
            Op::Reconnect(client) => self.reconnect(*client),
            Op::Undeliverable(client, key) => {
                if self.mode == Mode::Foreign {
                    let peer = self.peers[*client].clone();
                    self.step(Input::Undeliverable(&peer, key.as_bytes()));
                    self.oracle.undeliverable(*client, key.as_bytes());
                }
            }
            Op::EndSession(_) if self.mode == Mode::Foreign => {}
            Op::EndSession(client) => {
                self.reconnect(*client);
                let ended = self.peers[*client].session;
                self.record_sessions(&session_ended(ended));
                self.step(Input::SessionsEnded(&[ended]));
                self.peers[*client] = self.peer(*client, None);
            }
            Op::Wait(ms) => {
                self.now_ms += ms;
                self.step(Input::Sweep);
            }
            Op::SwapPolicy => {
                self.active = 1 - self.active;
                let policy = &policies()[self.active];
                promote(&mut self.core, policy.clone());
            }
            Op::SnapshotBlock => self.snapshot_block(),
            Op::Restart => self.restart(),
        }
        self.compare();
    }

    fn handle_new_request(
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
        let past = PastRequest {
            client,
            session: self.peers[client].session,
            packet_id,
            dialect,
            words,
            timestamp,
            token,
            properties: Properties::parse(properties).expect("valid properties"),
            remembered_answer: None,
            has_identical: false,
            changed: None,
            executed_in: 0,
            renotified_in: 0,
        };
        self.handle_as_new(past, false);
    }

    /// Lets the store and the oracle handle a request as a new one, and compares the results.
    fn handle_as_new(&mut self, mut past: PastRequest, dup: bool) {
        let mut notifications = self.oracle.expire(self.now_ms);
        let expected = self.oracle.predict(&OracleRequest {
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
            expected.payload.escape_ascii().to_string()
        );
        assert_eq!(effects.handled.is_some(), expected.repeatable);
        match expected.version {
            Version::None => assert_eq!(answer.version, None),
            Version::Is(version) => assert_eq!(answer.version, Some(version)),
            Version::Above(wall, counter) => {
                let version = answer.version.expect("a new version");
                assert!(version > self.last_version && version > Stamp { wall, counter });
                assert_eq!(
                    version.wall,
                    self.last_version.wall.max(wall).max(self.now_ms)
                );
            }
        }
        notifications.extend(expected.notifications.iter().cloned());
        self.check_notifications(&effects, notifications);
        (past.changed, past.executed_in) = (expected.changed(), self.run);
        past.remembered_answer = expected
            .repeatable
            .then(|| ((payload.clone(), answer.version), self.now_ms));
        self.oracle.apply(expected, answer.version);
        self.last_version = self.last_version.max(answer.version.unwrap_or_default());
        self.history.push(past);
    }

    /// Redelivers a request. It must get its remembered answer, or is handled as a new request if
    /// there is none.
    fn redeliver(&mut self, which: &Index, redelivery: Redelivery) {
        let sessions: Vec<SessionId> = self.peers.iter().map(|peer| peer.session).collect();
        let is_alive = |past: &PastRequest| sessions[past.client] == past.session;
        let candidates = self.history.iter().enumerate().filter(|(at, past)| {
            is_alive(past) && (past.remembered_answer.is_none() || self.is_remembered(*at))
        });
        let candidates: Vec<usize> = candidates.map(|(at, _)| at).collect();
        if candidates.is_empty() {
            return;
        }
        let at = *which.get(&candidates);
        let mut past = self.history[at].clone();
        match redelivery {
            _ if self.mode == Mode::Foreign => {}
            Redelivery::Dup => {}
            // Only the packet identifier distinguishes identical requests.
            Redelivery::DupNewPacketId if past.has_identical => {}
            Redelivery::DupNewPacketId => past.packet_id = u16::MAX,
            Redelivery::NewConnection => self.reconnect(past.client),
        }
        let dup = !matches!(redelivery, Redelivery::NewConnection);
        let Some((first, _)) = &past.remembered_answer else {
            // An identical request may be remembered, and this one would match it.
            if !past.has_identical {
                self.handle_as_new(past, dup);
            }
            return;
        };
        let expired = self.oracle.expire(self.now_ms);
        let clock = self.core.store().state().hlc.last();
        let mut effects = self.deliver(&past, dup);
        assert_eq!((effects.failures, effects.repeated), (0, Some(Rerun::Same)));
        assert!(effects.handled.is_none() && effects.watches.is_none());
        let answer = effects
            .answer
            .as_ref()
            .expect("every request has an answer");
        assert_eq!((&answer.payload, answer.version), (&first.0, first.1));
        let renotified = self.expected_renotifications(at);
        assert_eq!(
            effects.renotified,
            (!renotified.is_empty()).then_some(Renotified::Sent)
        );
        let notifications = std::mem::take(&mut effects.notifications);
        let mut received: Vec<WatcherNotification> = notifications
            .iter()
            .flat_map(|it| self.watcher_notifications(it))
            .collect();
        received.sort();
        assert_eq!(received, renotified);
        // These versions are not new, but no client may have observed the version of an unwatched
        // removal.
        assert!(notifications.iter().all(|it| it.version <= clock));
        self.check_notifications(&effects, expired);
    }

    /// The notifications to the current watchers that a redelivered request of an earlier run must
    /// repeat: once in each run.
    fn expected_renotifications(&mut self, at: usize) -> Vec<WatcherNotification> {
        let past = &mut self.history[at];
        let earlier = self.mode == Mode::Foreign && past.executed_in < self.run;
        if !earlier || past.renotified_in == self.run || !self.oracle.is_watched() {
            return Vec::new();
        }
        past.renotified_in = self.run;
        let changed = past.changed.as_ref();
        let mut expected: Vec<WatcherNotification> = changed
            .into_iter()
            .flat_map(|(key, value)| self.oracle.notifications_of(key, value.as_deref()))
            .collect();
        expected.sort();
        expected
    }

    /// Whether the store must remember a request: within the window, or as one of the last of its
    /// session.
    fn is_remembered(&self, at: usize) -> bool {
        let past = &self.history[at];
        let newer = self.history[at + 1..].iter();
        let newer = newer.filter(|it| it.session == past.session && it.remembered_answer.is_some());
        let young = past
            .remembered_answer
            .as_ref()
            .is_some_and(|(_, ms)| self.now_ms < ms + WINDOW_MS);
        young || (newer.count() as u64) < retention(self.mode).per_session
    }

    fn deliver(&mut self, past: &PastRequest, dup: bool) -> Effects {
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
                // Every request of a foreign broker may be a redelivery.
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
        let expired = self.oracle.expire(self.now_ms);
        let effects = self.core.handle(input, now(self.now_ms)).effects;
        assert!(effects.handled.is_none() && effects.notifications.is_empty());
        self.check_notifications(&effects, expired);
    }

    /// Compares the notifications of a step with the expected ones.
    fn check_notifications(&mut self, effects: &Effects, mut expected: Vec<WatcherNotification>) {
        let mut received = Vec::new();
        let mut last = self.last_version;
        let notifications: Vec<&Notification> = effects
            .expired
            .iter()
            .chain(&effects.notifications)
            .collect();
        let mut versions: HashMap<Vec<u8>, Stamp> = HashMap::new();
        for notification in notifications {
            for it in self.watcher_notifications(notification) {
                let before = versions.insert(it.key.clone(), notification.version);
                // The notifications of one change in several dialects have the same version.
                let is_new = notification.version > self.last_version;
                assert!(is_new || before == Some(notification.version));
                last = last.max(notification.version);
                received.push(it);
            }
        }
        self.last_version = last;
        expected.sort();
        received.sort();
        assert_eq!(received, expected);
    }

    /// A notification of the store as one notification for each watcher.
    fn watcher_notifications(&self, notification: &Notification) -> Vec<WatcherNotification> {
        let of_watcher = notification.to.iter().map(|(peer, topic)| {
            let client = self.peers.iter().position(|it| it == peer);
            WatcherNotification {
                client: client.expect("a current connection"),
                key: key_of(topic, &peer.client),
                payload: notification.payload.to_vec(),
            }
        });
        of_watcher.collect()
    }

    fn reconnect(&mut self, client: usize) {
        let old = self.peers[client].clone();
        self.step(Input::Disconnected(&old));
        self.oracle.disconnected(client);
        self.peers[client] = self.peer(client, Some(old.session));
    }

    /// Adds a block to the snapshot in progress, or begins one.
    fn snapshot_block(&mut self) {
        let begun = self.records.all().len();
        let fresh = || {
            let peers = self.peers.iter().filter(|_| self.mode == Mode::Embedded);
            let began = peers.map(|it| sessions_block(&session_began(it.session, &it.client)));
            (Progress::default(), began.collect(), begun)
        };
        let (mut progress, mut blocks, begun) =
            self.snapshot_in_progress.take().unwrap_or_else(fresh);
        match self.core.snapshot(&mut progress, self.now_ms) {
            Some(block) => {
                blocks.push(block);
                self.snapshot_in_progress = Some((progress, blocks, begun));
            }
            None => self.last_snapshot = Some((blocks, begun)),
        }
    }

    /// Restarts the store from the last snapshot and the records after its beginning.
    fn restart(&mut self) {
        self.snapshot_in_progress = None;
        let mut image = Image::new(retention(self.mode));
        let (blocks, begun) = self.last_snapshot.clone().unwrap_or_default();
        for block in &blocks {
            image.block(block).expect("the store wrote this block");
        }
        for record in &self.records.all()[begun..] {
            image.record(record).expect("the store wrote this record");
        }
        image.finish();
        assert_eq!(image.run, self.run);
        self.run += 1;
        image.begin(self.mode);
        assert!(image.now_ms <= self.now_ms);
        let number = image.active.expect("the first records name a policy") as usize;
        assert_eq!(
            image.policies[number].digest,
            policies()[self.active].digest
        );
        let mut registry = Registry::new(policies()[self.active].clone(), None);
        registry.retire(policies()[1 - self.active].clone());
        let journal = self.records.clone();
        let recorder = Recorder::new(journal, image.policies.clone(), image.active);
        let store = store_from_image(registry, image);
        self.core = Core::new(store, recorder, self.run, Settings::default());
        self.core.begin(self.mode, crate::records(), self.now_ms);
        if self.mode == Mode::Foreign {
            return;
        }
        let live: Vec<SessionId> = self.peers.iter().map(|peer| peer.session).collect();
        self.core.store_mut().retain_sessions(&live);
        for client in 0..CLIENTS {
            self.oracle.disconnected(client);
            let session = self.peers[client].session;
            self.peers[client] = self.peer(client, Some(session));
        }
    }

    /// Compares the table and the watches of the store with the oracle.
    fn compare(&self) {
        let is_live = |ms: Option<u64>| ms.is_none_or(|ms| ms > self.now_ms);
        let table = self.core.store().state().table.range(b"", None);
        let table: Vec<_> = table.filter(|it| is_live(it.expires_ms())).collect();
        let map = self.oracle.keys.iter();
        let map: Vec<_> = map
            .filter(|(_, expected_entry)| is_live(expected_entry.expires_ms))
            .collect();
        assert_eq!(table.len(), map.len());
        for (entry, (expected, expected_entry)) in table.into_iter().zip(map) {
            assert_eq!(entry.key(), expected);
            let owner = format!("client-{}", expected_entry.owner);
            assert_eq!(
                self.core.store().state().owner(expected, false),
                Some(&*owner)
            );
            assert_eq!(
                (entry.value(), entry.version()),
                (&expected_entry.value[..], expected_entry.version)
            );
            assert_eq!(entry.expires_ms(), expected_entry.expires_ms);
            let fence = entry.fence();
            let fence = fence
                .as_ref()
                .map(|fence| (fence.wall, fence.counter, &*fence.node));
            assert_eq!(fence, expected_entry.fence);
        }
        self.compare_owners();
        let watches = &self.core.store().state().watches;
        assert_eq!(watches.are_durable(), self.mode == Mode::Foreign);
        assert_eq!(self.watched(watches), self.oracle.watched());
    }

    /// Checks the counters of the owners. They include expired keys that were not swept yet.
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

    /// All watches with their clients and dialects, sorted.
    fn watched(&self, watches: &Watches) -> Vec<(Vec<u8>, usize, Dialect)> {
        let mut watched = Vec::new();
        for (client, peer) in self.peers.iter().enumerate() {
            for key in watches.by(peer) {
                let dialect = watches.of(key).find(|(it, _)| *it == peer);
                let (_, dialect) = dialect.expect("both indexes agree");
                watched.push((key.to_vec(), client, dialect));
            }
        }
        watched.sort();
        assert_eq!(watched.len(), watches.len());
        watched
    }
}

/// The key in a notification topic. Checks all other parts of the topic.
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
    fn embedded_store_matches_the_protocol(ops in prop::collection::vec(ops::op(), 1..120)) {
        let mut model = Model::new(Mode::Embedded);
        for op in &ops {
            model.apply(op);
        }
    }

    #[test]
    fn foreign_store_matches_the_protocol(ops in prop::collection::vec(ops::op(), 1..120)) {
        let mut model = Model::new(Mode::Foreign);
        for op in &ops {
            model.apply(op);
        }
    }
}
