//! Applies operations to the store and to the oracle.

use std::sync::Arc;

use bytes::Bytes;
use proptest::sample::Index;
use statehouse_core::clock::Stamp;
use statehouse_core::log::{Image, Journal, Progress, Recorder, Records, record, sessions_block};
use statehouse_core::policy::Registry;
use statehouse_core::request::{Delivery, Dialect, Incoming, PREVIEW_TOPIC, REQUEST_TOPIC};
use statehouse_core::store::{Effects, Mode, Peer, Renotified, Rerun, Scope};
use statehouse_core::{Core, Input, Settings};
use statehouse_mqtt::simulation::{session_began, session_ended};
use statehouse_mqtt::{Properties, PropertiesBuilder};
use statehouse_protocol::{ConnectionId, SessionId};

use crate::ops::{Op, Redelivery, VERSION_OF_KEY};
use crate::oracle::{Oracle, OracleRequest, Reading, Version, Watched, WatcherNotification};
use crate::{
    CLIENTS, DIALECTS, QUOTA, START_MS, WINDOW_MS, now, policies, promote, retention,
    store_from_image,
};

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
    /// The watch that the request ended.
    ended: Option<Watched>,
    /// The run that handled the request.
    executed_in: u32,
    /// The last run that renotified its watchers.
    renotified_in: u32,
}

/// The store and the oracle, which handle the same operations.
pub(crate) struct Model {
    pub(super) mode: Mode,
    run: u32,
    pub(super) core: Core,
    records: Arc<Records>,
    /// A snapshot in progress: its blocks, and the number of records at its beginning.
    snapshot_in_progress: Option<(Progress, Vec<Vec<u8>>, usize)>,
    last_snapshot: Option<(Vec<Vec<u8>>, usize)>,
    /// The number of changes at the beginning of the snapshot in progress, of the last one, and of
    /// the one that the present run began with. Later changes must be known.
    changes_at: [usize; 2],
    known_from: usize,
    active: usize,
    pub(super) oracle: Oracle,
    history: Vec<PastRequest>,
    pub(super) now_ms: u64,
    /// The highest version that a client observed.
    pub(super) last_version: Stamp,
    pub(super) peers: Vec<Peer>,
    next_connection: ConnectionId,
    next_session: SessionId,
    next_packet_id: u16,
}

impl Model {
    pub(super) fn new(mode: Mode) -> Self {
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
            changes_at: [0, 0],
            known_from: 0,
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

    pub(super) fn apply(&mut self, op: &Op) {
        match op {
            Op::Request {
                client,
                dialect,
                words,
                timestamp,
                token,
            } => {
                let word = |word: &&str| match *word {
                    VERSION_OF_KEY => self.oracle.version_of(words[1]),
                    word => word.as_bytes().to_vec(),
                };
                let words = words.iter().map(word).collect();
                let (timestamp, token) = (timestamp.at(self.now_ms), token.at(self.now_ms));
                let dialect = DIALECTS[*dialect];
                let request = self.new_request(*client, dialect, words, timestamp, token);
                self.handle_as_new(request, false);
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
                    let identical = PastRequest {
                        packet_id: self.next_packet_id,
                        session,
                        remembered_answer: None,
                        ..past.clone()
                    };
                    self.next_packet_id += 1;
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
            Op::CatchUp(client, dialect, is_prefix, key, since) => {
                let scope = match *is_prefix {
                    true => Scope::Prefix,
                    false => Scope::Key,
                };
                let watched = (scope, key.as_bytes().to_vec());
                self.catch_up(*client, DIALECTS[*dialect], watched, since);
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

    fn new_request(
        &mut self,
        client: usize,
        dialect: Dialect,
        words: Vec<Vec<u8>>,
        timestamp: Option<Reading>,
        token: Option<Reading>,
    ) -> PastRequest {
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
        PastRequest {
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
            ended: None,
            executed_in: 0,
            renotified_in: 0,
        }
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
        let shown = |payload: &[u8]| payload.escape_ascii().to_string();
        assert_eq!(shown(payload), shown(&expected.payload));
        assert_eq!(effects.handled.is_some(), expected.repeatable);
        match expected.version {
            Version::None => assert_eq!(answer.version, None),
            Version::Last => {
                assert!(answer.version >= Some(self.last_version));
                let last = self.core.store().state().hlc.last();
                assert_eq!(answer.version, Some(last));
            }
            Version::Is(version) => assert_eq!(answer.version, Some(version)),
            Version::Above(wall, counter) => {
                let version = answer.version.expect("a new version");
                assert!(version > self.last_version && version > Stamp { wall, counter });
                let latest = self.last_version.wall.max(wall).max(self.now_ms);
                assert_eq!(version.wall, latest);
            }
        }
        notifications.extend(expected.notifications.iter().cloned());
        self.check_notifications(&effects, notifications);
        (past.changed, past.executed_in) = (expected.changed(), self.run);
        past.ended = expected.ended();
        past.remembered_answer = expected
            .repeatable
            .then(|| ((payload.clone(), answer.version), self.now_ms));
        self.oracle.apply(expected, answer.version);
        self.last_version = self.last_version.max(answer.version.unwrap_or_default());
        self.history.push(past);
    }

    /// Lets a client watch from the version of an earlier change. It must get every later change
    /// once and in order, or learn that the store does not know them any more.
    fn catch_up(&mut self, client: usize, dialect: Dialect, watched: Watched, since: &Index) {
        // Notifications of expired keys would precede those of the missed changes.
        self.step(Input::Sweep);
        let changes = self.oracle.changes.iter().enumerate();
        let later = changes.filter_map(|(at, it)| Some((at + 1, it.version?)));
        let versions = std::iter::once((0, Stamp::default())).chain(later);
        let versions: Vec<_> = versions.collect();
        let (count, version) = *since.get(&versions);
        let from = format!("{}:{}:n", version.wall, version.counter);
        let mut words = vec![b"KEYNOTIFY".to_vec(), watched.1.clone()];
        if watched.0 == Scope::Prefix {
            words.push(b"PREFIX".to_vec());
        }
        words.extend([b"FROM".to_vec(), from.into_bytes()]);
        let past = self.new_request(client, dialect, words, None, None);
        let effects = self.deliver(&past, false);
        assert!(effects.handled.is_none() && effects.notifications.is_empty());
        let answer = effects.answer.expect("every request has an answer");
        let unknown = b"-ERR the changes since this version are no longer known";
        if answer.payload.starts_with(unknown) {
            let may_be_unknown = count < self.known_from || self.run > 15;
            assert!(may_be_unknown, "{count} of {versions:?}");
            assert!(effects.expired.is_empty());
            return;
        }
        assert_eq!(&answer.payload[..], b"+OK\r\n");
        let last = self.core.store().state().hlc.last();
        assert_eq!(answer.version, Some(last));
        assert!(effects.expired.is_sorted_by(|a, b| a.version < b.version));
        let is_between = |it: Stamp| version < it && it <= last;
        assert!(effects.expired.iter().all(|it| is_between(it.version)));
        let mut received = self.all_watcher_notifications(&effects.expired);
        let mut missed = self.oracle.missed(count, &watched, client, dialect);
        // Keys that expired in the same step have no order, which a stable sort by key ignores.
        received.sort_by(|a, b| a.key.cmp(&b.key));
        missed.sort_by(|a, b| a.key.cmp(&b.key));
        assert_eq!(received, missed);
        self.oracle.watch(watched, client, dialect);
        self.last_version = self.last_version.max(last);
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
        assert!(effects.handled.is_none());
        let ended = (past.ended.clone()).is_some_and(|it| self.oracle.unwatch(it, past.client));
        let recorded = effects.watches.is_some();
        assert_eq!(recorded, ended && self.mode == Mode::Foreign);
        let answer = effects.answer.take().expect("every request has an answer");
        assert_eq!((&answer.payload, answer.version), (&first.0, first.1));
        let renotified = self.expected_renotifications(at);
        let sent = (!renotified.is_empty()).then_some(Renotified::Sent);
        assert_eq!(effects.renotified, sent);
        let notifications = std::mem::take(&mut effects.notifications);
        let mut received = self.all_watcher_notifications(&notifications);
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
        let mut expected = changed.map_or(Vec::new(), |(key, value)| {
            self.oracle.notifications_of(key, value.as_deref())
        });
        expected.sort();
        expected
    }

    /// Whether the store must remember a request: within the window, or as one of the last of its
    /// session.
    fn is_remembered(&self, at: usize) -> bool {
        let past = &self.history[at];
        let newer = self.history[at + 1..].iter();
        let newer = newer.filter(|it| it.session == past.session && it.remembered_answer.is_some());
        let answered = past.remembered_answer.as_ref();
        let young = answered.is_some_and(|(_, ms)| self.now_ms < ms + WINDOW_MS);
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
            delivery: match self.mode {
                Mode::Embedded => Delivery::new(peer, past.packet_id, dup),
                // Every request of a foreign broker may be a redelivery.
                Mode::Foreign => Delivery::new(peer, 0, true),
            },
            ..Incoming::new(peer, &payload, &past.properties)
        };
        let now = now(self.now_ms);
        self.core.handle(Input::Publish(&incoming), now).effects
    }

    fn step(&mut self, input: Input<'_>) {
        let expired = self.oracle.expire(self.now_ms);
        let effects = self.core.handle(input, now(self.now_ms)).effects;
        assert!(effects.handled.is_none() && effects.notifications.is_empty());
        self.check_notifications(&effects, expired);
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
        if self.snapshot_in_progress.is_none() {
            self.changes_at[0] = self.oracle.changes.len();
        }
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
            None => {
                self.last_snapshot = Some((blocks, begun));
                self.changes_at[1] = self.changes_at[0];
            }
        }
    }

    /// Restarts the store from the last snapshot and the records after its beginning.
    fn restart(&mut self) {
        self.snapshot_in_progress = None;
        self.known_from = self.changes_at[1];
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
        let active = &policies()[self.active];
        assert_eq!(image.policies[number].digest, active.digest);
        let mut registry = Registry::new(active.clone(), None);
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
}
