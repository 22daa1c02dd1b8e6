//! Runs a policy in the state machine of `serve`, in memory and with a scripted clock.
//!
//! Every request runs on a used and on a fresh instance of the policy. Both must give the same
//! result, because redeliveries are re-executed on fresh instances.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use statehouse_mqtt::{Properties, PropertiesBuilder, PropertyError, QoS, ReasonCode};

use super::answer::{Answer, Came, Logged, Notification, Passed, Reads};
use super::client::{Client, Publish};
use super::setup::{self, KitError};
use statehouse_core::log::Image;
use statehouse_core::policy::{Policy, Registry, Repeat};
use statehouse_core::request::{self, Delivery, Dialect, Incoming};
use statehouse_core::store::{
    Change, Duplicates, Effects, Entry, Key, Peer, Quota, RestsOn, Retention, Scope, State, Store,
    Transaction, Write,
};
use statehouse_core::{Core, Decision, Input, Now, Outcome, Output, STANDARD_POLICY, Settings};
use statehouse_offline::{Past, read_backup};
use statehouse_protocol::rights::ClientRights;
use statehouse_transcript::quote;

/// The time at which a harness begins, unless its table is from a later time.
pub const NOW_MS: u64 = 1_700_000_000_000;

/// The initial state of a harness, and its time.
#[derive(Default)]
struct Base {
    state: State,
    now_ms: u64,
}

/// A policy with its own store.
pub struct Harness {
    policy: Arc<Policy<Transaction>>,
    base: Arc<Base>,
    /// Handles every input with one instance of the policy.
    used: Core,
    /// Handles every input with a fresh instance of the policy.
    fresh: Option<Core>,
    quota: Quota,
    now_ms: u64,
    /// The instant of `started_ms`, to which expiries of requests are relative.
    started: Instant,
    started_ms: u64,
    peers: BTreeMap<String, Peer>,
    rights: BTreeMap<String, Arc<dyn ClientRights>>,
    /// The number of connections so far.
    connections: u64,
    /// The number of requests so far.
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
        Ok(Self::with(Arc::new(setup::engine()?.load(file)?)))
    }

    /// A compiled policy, over an empty table.
    pub(super) fn with(policy: Arc<Policy<Transaction>>) -> Self {
        Self::begin(policy, Arc::default())
    }

    fn begin(policy: Arc<Policy<Transaction>>, base: Arc<Base>) -> Self {
        let quota = Quota::default();
        let core = || {
            let store = Store::restore(
                Registry::new(policy.clone(), None),
                quota,
                Box::new(base.state.clone()),
                Duplicates::new(Retention::default()),
            );
            let settings = Settings {
                node: "StateStore".into(),
                ..Settings::default()
            };
            Core::in_memory(store, settings)
        };
        let now_ms = base.now_ms.max(NOW_MS);
        Self {
            used: core(),
            fresh: Some(core()),
            quota,
            now_ms,
            started: Instant::now(),
            started_ms: now_ms,
            peers: BTreeMap::new(),
            rights: BTreeMap::new(),
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

    /// The same policy over the table of a backup that `statehouse snapshot` wrote. Time continues
    /// from the time of the backup.
    pub fn on_snapshot(self, file: impl AsRef<Path>) -> Result<Self, KitError> {
        Ok(self.over(read_backup(file.as_ref())?))
    }

    /// The same policy over the table of a data directory. The directory is not changed.
    pub fn on_data(self, directory: impl AsRef<Path>) -> Result<Self, KitError> {
        Ok(self.over(Past::open(directory.as_ref())?.keys()?))
    }

    fn over(self, image: Image) -> Self {
        let base = Base {
            state: *image.state,
            now_ms: image.now_ms,
        };
        Self::begin(self.policy, Arc::new(base))
    }

    /// Removes the fresh instance: requests run once, and hidden state is not detected.
    #[must_use]
    pub fn once(mut self) -> Self {
        self.fresh = None;
        self
    }

    /// Continues with the instance that has handled the requests of another harness of the same
    /// policy, as an instance of a running store has handled earlier requests.
    pub fn use_instance_of(&mut self, mut other: Self) {
        std::mem::swap(
            self.used.store_mut().registry(),
            other.used.store_mut().registry(),
        );
    }

    /// The policy, with its name and digest.
    pub fn policy(&self) -> &Policy<Transaction> {
        &self.policy
    }

    /// The time of the store in milliseconds since 1970.
    pub fn now_ms(&self) -> u64 {
        self.now_ms
    }

    /// Sets the time. An earlier time changes nothing, because the time of a store never decreases.
    pub fn at(&mut self, now_ms: u64) -> Passed {
        self.advance(now_ms.saturating_sub(self.now_ms))
    }

    /// Advances the time. Each key expires at its own time.
    pub fn advance(&mut self, ms: u64) -> Passed {
        let end_ms = self.now_ms.saturating_add(ms);
        let mut passed = Passed::default();
        while let Some(due_ms) = self.next_expiry_ms().filter(|due_ms| *due_ms <= end_ms) {
            self.now_ms = self.now_ms.max(due_ms);
            let (decision, hidden_state, log) = self.handle(Input::Sweep);
            let effects = &decision.effects;
            passed.notifications.extend(self.notifications(effects));
            passed.failures.extend(self.failure(effects));
            passed.hidden_state.extend(hidden_state);
            passed.log.extend(log);
        }
        self.now_ms = end_ms;
        passed
    }

    /// Why the policy failed at an input, if it did. The built-in policy may have sent a
    /// notification in its place, and then the effects only count the failure.
    fn failure(&self, effects: &Effects) -> Option<String> {
        let failed = effects.failed.as_ref().map(ToString::to_string);
        let last = || self.policy.work.done().last_failure.map(|it| it.why);
        failed.or_else(|| last().filter(|_| effects.failures > 0))
    }

    /// The time at which the next key expires.
    pub fn next_expiry_ms(&self) -> Option<u64> {
        self.used.store().next_expiry_ms()
    }

    /// Sets the quota of the table, which is otherwise the default of `serve`.
    pub fn set_quota(&mut self, quota: Quota) {
        self.quota = quota;
        for core in self.cores() {
            *core.store_mut().quota() = quota;
        }
    }

    /// The quota of the table.
    pub fn quota(&self) -> Quota {
        self.quota
    }

    /// Forces the dialect of the current request topic, as the setting `dialect` does.
    pub fn force_dialect(&mut self, dialect: Option<Dialect>) {
        for core in self.cores() {
            core.settings_mut().dialect = dialect;
        }
    }

    /// Sets the name of the store in versions, which is otherwise `StateStore`.
    pub fn set_node(&mut self, node: &str) {
        for core in self.cores() {
            core.settings_mut().node = node.into();
        }
    }

    /// The name of the store in versions.
    pub fn node(&self) -> &str {
        &self.used.settings().node
    }

    /// Grants a client these rights, as authorization rules do. Without this call the client may do
    /// everything.
    pub fn set_rights(&mut self, client: &str, rights: Arc<dyn ClientRights>) {
        self.rights.insert(client.into(), rights);
    }

    fn cores(&mut self) -> impl Iterator<Item = &mut Core> {
        std::iter::once(&mut self.used).chain(self.fresh.as_mut())
    }

    /// Puts a key into the table without the policy.
    pub fn put(&mut self, key: impl AsRef<[u8]>, value: impl AsRef<[u8]>) {
        let mut hlc = self.used.store().state().hlc;
        let version = hlc.tick(self.now_ms);
        let entry = Entry::new(key.as_ref(), value.as_ref(), version, None, None);
        let write = Write::of(Change::Set(entry));
        for core in self.cores() {
            let state = core.store_mut().state_mut();
            state.write(&write);
            state.hlc = hlc;
        }
    }

    /// The entry of a key, unless it has expired.
    pub fn get(&self, key: impl AsRef<[u8]>) -> Option<&Entry> {
        let entry = self.used.store().state().table.get(key.as_ref())?;
        (!entry.expired(self.now_ms)).then_some(entry)
    }

    /// The client with this id. It connects with its first request.
    pub fn client(&mut self, id: &str) -> Client<'_> {
        Client::new(self, id)
    }

    /// Ends the connection of a client, which ends its watches.
    pub fn disconnect(&mut self, id: &str) {
        if let Some(peer) = self.peers.remove(id) {
            self.handle(Input::Disconnected(&peer));
        }
    }

    /// Hands a message to the store as a broker does.
    pub fn publish(&mut self, client: &str, mut publish: Publish) -> Came {
        self.sent += 1;
        // Unique correlation data, or the request would be a redelivery of another one.
        if let Some(correlation) = &mut publish.correlation
            && correlation.is_empty()
        {
            *correlation = self.sent.to_be_bytes().to_vec();
        }
        let peer = self.peer(client);
        let properties = match properties(&publish) {
            Ok(properties) => properties,
            // A broker ends a connection that sends a malformed packet.
            Err(text) => {
                self.disconnect(client);
                let reason = ReasonCode::PROTOCOL_ERROR.0;
                return Came::Disconnected { reason, text };
            }
        };
        let payload = Bytes::from(publish.payload);
        // Any value of 16 bits except 0 is valid (MQTT 5, section 2.2.1).
        let packet_id = u16::try_from(self.sent % 65_535).unwrap_or(0) + 1;
        let incoming = Incoming {
            topic: &publish.topic,
            payload: &payload,
            properties: &properties,
            qos: qos(publish.qos),
            delivery: Delivery::new(&peer, packet_id, false),
            expires: publish.expires_ms.map(|at_ms| self.instant(at_ms)),
            peer: &peer,
            grants: self.rights.get(client).cloned(),
        };
        let watched = |core: &Core| -> BTreeSet<(Scope, Key)> {
            let watches = core.store().state().watches.by(&peer);
            watches.map(|(scope, key)| (scope, key.clone())).collect()
        };
        let before = watched(&self.used);
        let start = Instant::now();
        let (decision, hidden_state, log) = self.handle(Input::Publish(&incoming));
        let time = start.elapsed();
        let after = watched(&self.used);
        match decision.outcome {
            Outcome::Handled(..) => {
                let answer = Answer {
                    watched: after.difference(&before).cloned().collect(),
                    unwatched: before.difference(&after).cloned().collect(),
                    time,
                    hidden_state,
                    log,
                    ..self.answer(decision)
                };
                Came::Answer(Box::new(answer))
            }
            Outcome::Answered(..) => Came::Answer(Box::new(Answer {
                reads: Reads::Keys(Vec::new()),
                ..self.answer(decision)
            })),
            Outcome::Disconnected(reason, text) => {
                self.disconnect(client);
                Came::Disconnected {
                    reason: reason.0,
                    text,
                }
            }
            Outcome::Expired
            | Outcome::Refused(..)
            | Outcome::ForbiddenResponseTopic(_)
            | Outcome::Event => self.acknowledgment(decision),
        }
    }

    /// What a client learns about a request that gets no response.
    fn acknowledgment(&self, decision: Decision<'_>) -> Came {
        let mut came = Came::Dropped;
        self.used.outputs(decision, |output| {
            if let Output::Acknowledge(reason, Some(text)) = output {
                let reason = reason.0;
                came = Came::Refused { reason, text };
            }
        });
        came
    }

    fn peer(&mut self, client: &str) -> Peer {
        if let Some(peer) = self.peers.get(client) {
            return peer.clone();
        }
        self.connections += 1;
        let peer = Peer::numbered(client, self.connections);
        self.peers.insert(client.into(), peer.clone());
        peer
    }

    /// The time as the store's clock and as an instant.
    fn now(&self) -> Now {
        Now {
            ms: self.now_ms,
            instant: self.instant(self.now_ms),
        }
    }

    fn instant(&self, ms: u64) -> Instant {
        let since_start = Duration::from_millis(ms.saturating_sub(self.started_ms));
        // Only centuries would overflow. Such a request does not expire in a test.
        (self.started.checked_add(since_start)).unwrap_or(self.started)
    }

    /// Describes the response of a decision and all of its effects.
    fn answer(&self, decision: Decision<'_>) -> Answer {
        let effects = &decision.effects;
        let (reads, writes) = match &effects.handled {
            Some(handled) => {
                let captured = handled.remembered.captured.clone();
                let reads = captured.map(|it| it.reads).map(Reads::Keys);
                (reads.unwrap_or_default(), handled.writes.clone())
            }
            None => match &effects.rests_on {
                RestsOn::Nothing => (Reads::Keys(Vec::new()), Vec::new()),
                RestsOn::Keys(reads) => (Reads::Keys(reads.clone()), Vec::new()),
                RestsOn::Everything => (Reads::Anything, Vec::new()),
            },
        };
        let answer = effects.answer.as_ref();
        let command = answer.and_then(|it| it.command).map(usize::from);
        let version = answer.and_then(|it| it.version);
        let done = Answer {
            version: version.map(|version| version.display(self.node()).to_string()),
            same_for_duplicate: answer.is_some_and(|it| it.repeat == Repeat::Same),
            command: command.and_then(|index| self.policy.commands.get(index).cloned()),
            writes,
            reads,
            notifications: self.notifications(effects).collect(),
            swept: (effects.swept.as_ref()).map_or(Vec::new(), |swept| swept.writes.clone()),
            fuel: effects.fuel,
            failure: self.failure(effects),
            ..Answer::default()
        };
        let mut response = None;
        self.used.outputs(decision, |output| {
            if let Output::Response(message) = output {
                response = Some(message);
            }
        });
        match response {
            Some(response) => Answer {
                payload: response.payload.to_vec(),
                user: user(&response.properties),
                ..done
            },
            None => done,
        }
    }

    /// Handles an input with both cores. Returns how the fresh one differed, as text, and what the
    /// used one logged. After a difference the fresh one continues from the state of the used one.
    fn handle<'a>(&mut self, input: Input<'a>) -> (Decision<'a>, Option<String>, Vec<Logged>) {
        let now = self.now();
        let lines = self.policy.counters.lines().clone();
        let end = lines.end();
        let decision = self.used.handle(input, now);
        let log = Logged::of(lines.since(end));
        let Some(fresh) = &mut self.fresh else {
            return (decision, None, log);
        };
        *fresh.store_mut().registry() = Registry::new(self.policy.clone(), None);
        let other = fresh.handle(input, now);
        let differs = difference(
            &decision.effects,
            &other.effects,
            &self.used.settings().node,
        );
        if differs.is_some() {
            *fresh.store_mut().state_mut() = self.used.store().state().clone();
        }
        (decision, differs, log)
    }

    /// All notifications, one for each watcher.
    fn notifications(&self, effects: &Effects) -> impl Iterator<Item = Notification> {
        let all = effects.expired.iter().chain(&effects.notifications);
        all.flat_map(|it| {
            let raw = request::notification_properties(it.dialect, it.version, self.node(), None);
            it.to.iter().map(move |(peer, topic)| Notification {
                client: peer.client.to_string(),
                topic: String::from_utf8_lossy(topic).into_owned(),
                payload: it.payload.to_vec(),
                user: user(&raw),
                dialect: it.dialect,
            })
        })
    }
}

/// What a fresh instance did differently, if anything.
fn difference(used: &Effects, fresh: &Effects, node: &str) -> Option<String> {
    let (a, b) = (used.answer.as_ref(), fresh.answer.as_ref());
    let payload = b.map(|it| &it.payload);
    if a.map(|it| &it.payload) != payload {
        let shown = quote(payload.map_or(&b""[..], |it| it));
        let why = fresh.failed.as_ref();
        let why = why.map_or(String::new(), |it| format!(" (the policy failed: {it})"));
        return Some(format!("a fresh instance answers {shown}{why}"));
    }
    let version = b.and_then(|it| it.version);
    if a.and_then(|it| it.version) != version {
        let shown = version.map_or("none".into(), |it| it.display(node).to_string());
        return Some(format!("a fresh instance answers with the version {shown}"));
    }
    if a.map(|it| (it.repeat, it.command)) != b.map(|it| (it.repeat, it.command)) {
        return Some(
            "a fresh instance gives the same answer, but another `repeat` or `command`".into(),
        );
    }
    let writes = |effects: &Effects| {
        let handled = effects.handled.as_ref().map(|it| it.writes.clone());
        (handled, effects.swept.as_ref().map(|it| it.writes.clone()))
    };
    if writes(used) != writes(fresh) {
        return Some("a fresh instance gives the same answer, but other writes".into());
    }
    let (notified, same) = (&used.notifications, &fresh.notifications);
    if notified != same || used.expired != fresh.expired || used.failures != fresh.failures {
        return Some("a fresh instance gives the same answer, but other notifications".into());
    }
    None
}

fn qos(level: u8) -> QoS {
    match level {
        0 => QoS::AtMostOnce,
        1 => QoS::AtLeastOnce,
        _ => QoS::ExactlyOnce,
    }
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
    // The decoder of the store accepts everything that its encoder writes.
    let properties = Properties::parse(raw.clone()).unwrap_or_default();
    let owned = |(name, value): (&str, &str)| (name.to_owned(), value.to_owned());
    properties.user().map(owned).collect()
}
