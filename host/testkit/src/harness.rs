//! A policy over the store of `serve`, in memory, with a scripted clock.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use statehouse_mqtt::{Properties, PropertiesBuilder, PropertyError, QoS, ReasonCode};

use super::answer::{Answer, Came, Notification, Reads, is_same};
use super::client::{Client, Publish};
use super::setup::{self, Base, KitError};
use statehouse_core::STANDARD_POLICY;
use statehouse_core::clock::Hlc;
use statehouse_core::policy::{Policy, Registry};
use statehouse_core::request::{self, Delivery, Dialect, Early, Incoming, Parsed, Request};
use statehouse_core::store::{
    Change, Duplicates, Effects, Entry, Event, Key, Notification as StoreNotification, Peer, Quota,
    RestsOn, Retention, Store, Swept, Transaction, Write,
};

/// The time at which a harness begins where nobody says another.
pub const NOW_MS: u64 = 1_700_000_000_000;

/// A policy over a store of its own.
pub struct Harness {
    policy: Arc<Policy<Transaction>>,
    base: Arc<Base>,
    /// Its instance answers everything.
    used: Store,
    /// The same store, with a fresh instance for everything.
    fresh: Option<Store>,
    quota: Quota,
    forced: Option<Dialect>,
    node: String,
    now_ms: u64,
    peers: BTreeMap<String, Peer>,
    /// Connections so far.
    connections: u64,
    /// Requests so far.
    sent: u64,
}

impl Harness {
    /// The policy in a file, over an empty table.
    pub fn load(path: impl AsRef<Path>) -> Result<Self, KitError> {
        Self::of(&setup::read_policy(path.as_ref())?)
    }

    /// The built-in policy.
    pub fn standard() -> Result<Self, KitError> {
        Self::of(STANDARD_POLICY)
    }

    /// The policy of these bytes: a component or a core module.
    pub fn of(file: &[u8]) -> Result<Self, KitError> {
        let engine = setup::engine()?;
        Ok(Self::with(setup::compile(&engine, file)?))
    }

    /// A policy that is compiled already, over an empty table.
    pub(super) fn with(policy: Arc<Policy<Transaction>>) -> Self {
        Self::begin(policy, Arc::default())
    }

    fn begin(policy: Arc<Policy<Transaction>>, base: Arc<Base>) -> Self {
        let quota = Quota::default();
        let store = || {
            Store::restore(
                Registry::new(policy.clone(), None),
                quota,
                Box::new(base.state.clone()),
                Duplicates::new(Retention::default()),
            )
        };
        Self {
            used: store(),
            fresh: Some(store()),
            quota,
            forced: None,
            node: "StateStore".into(),
            now_ms: base.now_ms.max(NOW_MS),
            peers: BTreeMap::new(),
            connections: 0,
            sent: 0,
            policy,
            base,
        }
    }

    /// The same policy over the table that this harness began with.
    #[must_use]
    pub fn anew(&self) -> Self {
        Self::begin(self.policy.clone(), self.base.clone())
    }

    /// The same policy over the table of a backup, as `statehouse snapshot` writes it. Time goes on where it was.
    pub fn on_snapshot(self, file: impl AsRef<Path>) -> Result<Self, KitError> {
        let base = Base::of_backup(file.as_ref())?;
        Ok(Self::begin(self.policy, Arc::new(base)))
    }

    /// The same policy over the table of a data directory, of which nothing is changed.
    pub fn on_data(self, directory: impl AsRef<Path>) -> Result<Self, KitError> {
        let base = Base::of_data(directory.as_ref())?;
        Ok(Self::begin(self.policy, Arc::new(base)))
    }

    /// Without a fresh instance beside the used one: requests run once, and hidden state is not looked for.
    #[must_use]
    pub fn once(mut self) -> Self {
        self.fresh = None;
        self
    }

    /// What the policy calls itself, and its digest.
    pub fn policy(&self) -> &Policy<Transaction> {
        &self.policy
    }

    /// The store's time in milliseconds since 1970.
    pub fn now_ms(&self) -> u64 {
        self.now_ms
    }

    /// Sets the time. It never goes back, as that of a store does not: an earlier time changes nothing.
    pub fn at(&mut self, now_ms: u64) -> Vec<Notification> {
        self.advance(now_ms.saturating_sub(self.now_ms))
    }

    /// Lets time pass. Keys expire on their way, each at its time; what their watchers are told is given back.
    pub fn advance(&mut self, ms: u64) -> Vec<Notification> {
        let end_ms = self.now_ms.saturating_add(ms);
        let mut told = Vec::new();
        while let Some(due_ms) = self.next_expiry_ms().filter(|due_ms| *due_ms <= end_ms) {
            self.now_ms = self.now_ms.max(due_ms);
            let (effects, _) = self.step(Event::Sweep);
            self.tell(effects.expired, &mut told);
        }
        self.now_ms = end_ms;
        told
    }

    /// When the next key expires.
    pub fn next_expiry_ms(&self) -> Option<u64> {
        self.used.next_expiry_ms()
    }

    /// Bounds of the table, instead of the defaults of `serve`.
    pub fn set_quota(&mut self, quota: Quota) {
        self.quota = quota;
        for store in [Some(&mut self.used), self.fresh.as_mut()]
            .into_iter()
            .flatten()
        {
            *store.quota() = quota;
        }
    }

    /// The bounds of the table.
    pub fn quota(&self) -> Quota {
        self.quota
    }

    /// Forces the dialect of the current request topic, as the setting `dialect` does.
    pub fn force_dialect(&mut self, dialect: Option<Dialect>) {
        self.forced = dialect;
    }

    /// How the store calls itself in versions, instead of `StateStore`.
    pub fn set_node(&mut self, node: &str) {
        self.node = node.into();
    }

    /// The name of the store in versions.
    pub fn node(&self) -> &str {
        &self.node
    }

    /// Puts a key into the table, past the policy.
    pub fn put(&mut self, key: impl AsRef<[u8]>, value: impl AsRef<[u8]>) {
        let mut hlc = self.used.state().hlc;
        let version = hlc.tick(self.now_ms);
        let entry = Entry::new(key.as_ref(), value.as_ref(), version, None, None);
        self.put_entry(entry, hlc);
    }

    fn put_entry(&mut self, entry: Entry, hlc: Hlc) {
        let write = Write::of(Change::Set(entry));
        for store in [Some(&mut self.used), self.fresh.as_mut()]
            .into_iter()
            .flatten()
        {
            let state = store.state_mut();
            state.write(&write);
            state.hlc = hlc;
        }
    }

    /// What a key holds.
    pub fn get(&self, key: impl AsRef<[u8]>) -> Option<&Entry> {
        let entry = self.used.state().table.get(key.as_ref())?;
        (!entry.expired(self.now_ms)).then_some(entry)
    }

    /// A client of this id, which connects where it is not connected.
    pub fn client(&mut self, id: &str) -> Client<'_> {
        Client::new(self, id)
    }

    /// Ends a client's connection, and its watches with it.
    pub fn disconnect(&mut self, id: &str) {
        if let Some(peer) = self.peers.remove(id) {
            self.step(Event::Gone(&peer));
        }
    }

    /// Hands a message to the store as a broker does.
    pub fn publish(&mut self, client: &str, mut publish: Publish) -> Came {
        self.sent += 1;
        if let Some(correlation) = &mut publish.correlation {
            // Never the same twice, so that no request is taken for another one's redelivery.
            if correlation.is_empty() {
                *correlation = self.sent.to_be_bytes().to_vec();
            }
        }
        let peer = self.peer(client);
        let properties = match properties(&publish) {
            Ok(properties) => properties,
            // A broker ends a connection that sends what is no packet.
            Err(text) => {
                self.disconnect(client);
                let reason = ReasonCode::PROTOCOL_ERROR.0;
                return Came::Disconnected { reason, text };
            }
        };
        let payload = Bytes::from(publish.payload);
        let incoming = Incoming {
            topic: &publish.topic,
            payload: &payload,
            properties: &properties,
            qos: match publish.qos {
                0 => QoS::AtMostOnce,
                1 => QoS::AtLeastOnce,
                _ => QoS::ExactlyOnce,
            },
            delivery: Delivery {
                session: peer.session,
                connection: peer.connection,
                // Any 16 bits but 0 are one (MQTT 5, section 2.2.1).
                packet_id: u16::try_from(self.sent % 65_535).unwrap_or(0) + 1,
                dup: false,
            },
            expires: None,
            peer: &peer,
            grants: None,
        };
        match request::parse(&incoming, self.forced) {
            Parsed::Run(request, reply_to) => {
                let mut answer = self.run(&request);
                let raw = reply_to.properties(answer.0, &self.node, None, None);
                answer.1.user = user(&raw);
                Came::Answer(Box::new(answer.1))
            }
            Parsed::Answer(reply_to, early) => {
                let (raw, payload) = match early {
                    Early::UnsupportedVersion(asked) => (reply_to.unsupported_version(asked), ""),
                    Early::QosZero => (
                        reply_to.properties(None, &self.node, None, None),
                        request::QOS_ZERO_ANSWER,
                    ),
                };
                Came::Answer(Box::new(Answer {
                    payload: payload.into(),
                    user: user(&raw),
                    reads: Reads::Keys(Vec::new()),
                    ..Answer::default()
                }))
            }
            Parsed::Refuse(..) if publish.qos == 0 => Came::Dropped,
            Parsed::Refuse(reason, text) => Came::Refused {
                reason: reason.0,
                text,
            },
            Parsed::Disconnect(reason, text) => {
                self.disconnect(client);
                Came::Disconnected {
                    reason: reason.0,
                    text,
                }
            }
        }
    }

    fn peer(&mut self, client: &str) -> Peer {
        if let Some(peer) = self.peers.get(client) {
            return peer.clone();
        }
        self.connections += 1;
        let peer = Peer {
            client: client.into(),
            connection: self.connections,
            session: self.connections,
        };
        self.peers.insert(client.into(), peer.clone());
        peer
    }

    /// Runs a request, and its twin on a fresh instance.
    fn run(&mut self, request: &Request<'_>) -> (Option<statehouse_core::clock::Stamp>, Answer) {
        let watched = |store: &Store| -> BTreeSet<Key> {
            store.state().watches.by(request.peer).cloned().collect()
        };
        let before = watched(&self.used);
        let start = Instant::now();
        let (effects, hidden_state) = self.step(Event::Request(request));
        let time = start.elapsed();
        let after = watched(&self.used);
        let mut notifications = Vec::new();
        self.tell(effects.expired, &mut notifications);
        self.tell(effects.notices, &mut notifications);
        // Every step about a request makes one.
        let answer = effects.answer.unwrap_or_else(unanswered);
        let (reads, writes) = match effects.handled {
            Some(handled) => {
                let evidence = handled.remembered.captured.clone();
                let reads = evidence.map(|it| it.reads).map(Reads::Keys);
                (reads.unwrap_or_default(), handled.writes)
            }
            None => match effects.rests_on {
                RestsOn::Nothing => (Reads::Keys(Vec::new()), Vec::new()),
                RestsOn::Keys(reads) => (Reads::Keys(reads), Vec::new()),
                RestsOn::Everything => (Reads::Anything, Vec::new()),
            },
        };
        let command = answer.command.map(usize::from);
        let done = Answer {
            payload: answer.payload.to_vec(),
            user: Vec::new(),
            version: answer
                .version
                .map(|version| version.display(&self.node).to_string()),
            same_for_duplicate: is_same(answer.repeat),
            command: command.and_then(|index| self.policy.commands.get(index).cloned()),
            writes,
            reads,
            watched: after.difference(&before).cloned().collect(),
            unwatched: before.difference(&after).cloned().collect(),
            notifications,
            swept: effects
                .swept
                .map_or(Vec::new(), |swept: Swept| swept.writes),
            fuel: effects.fuel,
            time,
            failure: effects.failed.map(|failure| failure.to_string()),
            hidden_state,
        };
        (answer.version, done)
    }

    /// One step of both stores. What the fresh one did differently is given in words; from then on it goes on
    /// from the state of the used one.
    fn step(&mut self, event: Event<'_>) -> (Effects, Option<String>) {
        let effects = self.used.step(event, self.now_ms);
        let Some(fresh) = &mut self.fresh else {
            return (effects, None);
        };
        *fresh.registry() = Registry::new(self.policy.clone(), None);
        let other = fresh.step(event, self.now_ms);
        let differs = difference(&effects, &other, &self.node);
        if differs.is_some() {
            *fresh.state_mut() = self.used.state().clone();
        }
        (effects, differs)
    }

    fn tell(&self, notices: Vec<StoreNotification>, told: &mut Vec<Notification>) {
        for notice in notices {
            let raw = request::notification_properties(notice.dialect, notice.version, &self.node);
            for (peer, topic) in &notice.to {
                told.push(Notification {
                    client: peer.client.to_string(),
                    topic: String::from_utf8_lossy(topic).into_owned(),
                    payload: notice.payload.to_vec(),
                    user: user(&raw),
                    dialect: notice.dialect,
                });
            }
        }
    }
}

fn unanswered() -> statehouse_core::store::Answer {
    statehouse_core::store::Answer {
        payload: Bytes::new(),
        version: None,
        repeat: statehouse_core::policy::Repeat::Free,
        command: None,
        put: false,
    }
}

/// What a fresh instance did differently, if anything.
fn difference(used: &Effects, fresh: &Effects, node: &str) -> Option<String> {
    let (a, b) = (used.answer.as_ref(), fresh.answer.as_ref());
    let payload = |effects: &Effects| effects.answer.as_ref().map(|it| it.payload.clone());
    if payload(used) != payload(fresh) {
        let shown = payload(fresh).unwrap_or_default();
        let why = fresh.failed.as_ref();
        let why = why.map_or(String::new(), |it| format!(" (the policy failed: {it})"));
        return Some(format!(
            "a fresh instance answers {}{why}",
            statehouse_transcript::quote(&shown)
        ));
    }
    let version =
        |answer: Option<&statehouse_core::store::Answer>| answer.and_then(|it| it.version);
    if version(a) != version(b) {
        let shown = version(b).map_or("none".into(), |it| it.display(node).to_string());
        return Some(format!("a fresh instance answers with the version {shown}"));
    }
    let owed = |answer: Option<&statehouse_core::store::Answer>| {
        answer.map(|it| (is_same(it.repeat), it.command))
    };
    if owed(a) != owed(b) {
        return Some(
            "a fresh instance gives the same answer, but another `repeat` or `command`".into(),
        );
    }
    let writes = |effects: &Effects| {
        let handled = effects.handled.as_ref().map(|it| it.writes.clone());
        (handled, effects.swept.as_ref().map(|it| it.writes.clone()))
    };
    if writes(used) != writes(fresh) {
        return Some("a fresh instance gives the same answer, and writes something else".into());
    }
    if used.notices != fresh.notices || used.expired != fresh.expired {
        return Some(
            "a fresh instance gives the same answer, and tells the watchers otherwise".into(),
        );
    }
    None
}

/// The MQTT properties of a message.
fn properties(publish: &Publish) -> Result<Properties, &'static str> {
    let mut builder = PropertiesBuilder::new();
    if let Some(topic) = &publish.response_topic {
        builder = builder.response_topic(topic);
    }
    if let Some(correlation) = &publish.correlation {
        builder = builder.correlation_data(correlation);
    }
    for (name, value) in &publish.user {
        builder = builder.user(name, value);
    }
    let parsed = builder.finish().and_then(Properties::parse);
    parsed.map_err(|error| match error {
        PropertyError::Invalid(text) => text,
        PropertyError::Topic => "the response topic is empty or holds a wildcard",
        PropertyError::TooLong => "a property is longer than 65535 bytes",
        PropertyError::Nul => "a property holds the character U+0000",
    })
}

/// The user properties among the properties that the store wrote.
fn user(raw: &Bytes) -> Vec<(String, String)> {
    // The store's own encoding is never refused by its own decoder.
    let properties = Properties::parse(raw.clone()).unwrap_or_default();
    let owned = |(name, value): (&str, &str)| (name.to_owned(), value.to_owned());
    properties.user().map(owned).collect()
}
