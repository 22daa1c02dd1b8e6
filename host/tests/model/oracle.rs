//! The state store protocol over a plain map, written from the protocol text and independently of
//! the store's code.
//!
//! The oracle gets a request as words and clock readings, and predicts the answer and the
//! notifications. It only bounds versions, because the protocol promises no more about them.

use std::collections::BTreeMap;

use statehouse_core::clock::Stamp;
use statehouse_core::request::Dialect;
use statehouse_core::store::Scope;

use crate::options::{Condition, Options, keynotify_options, set_options};
use crate::pattern::matches;

/// A clock reading as a client writes it, or a text that is not one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Reading {
    Clock(u64, u32, &'static str),
    Malformed(&'static str),
}

impl Reading {
    pub(crate) fn text(&self) -> String {
        match self {
            Self::Clock(wall, counter, node) => format!("{wall:015}:{counter:05}:{node}"),
            Self::Malformed(text) => (*text).to_owned(),
        }
    }
}

/// A fencing token: ordered by wall, counter, node.
type Token = (u64, u32, &'static str);

#[derive(Clone, Debug)]
pub(crate) struct OracleEntry {
    /// The client that wrote the key.
    pub(crate) owner: usize,
    pub(crate) value: Vec<u8>,
    pub(crate) version: Stamp,
    pub(crate) fence: Option<Token>,
    pub(crate) expires_ms: Option<u64>,
}

/// The parts of a request that the protocol depends on.
pub(crate) struct OracleRequest<'a> {
    pub(crate) client: usize,
    pub(crate) dialect: Dialect,
    pub(crate) words: &'a [Vec<u8>],
    pub(crate) timestamp: Option<&'a Reading>,
    pub(crate) token: Option<&'a Reading>,
    pub(crate) now_ms: u64,
}

/// The version that an answer must carry.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Version {
    None,
    Is(Stamp),
    /// A new version above this clock reading.
    Above(u64, u32),
    /// The version of the last change.
    Last,
}

/// A watched key or prefix.
pub(crate) type Watched = (Scope, Vec<u8>);

/// The predicted effects of a request.
#[derive(Debug)]
pub(crate) struct Prediction {
    pub(crate) payload: Vec<u8>,
    pub(crate) version: Version,
    /// Whether a redelivery must get the same answer.
    pub(crate) repeatable: bool,
    pub(crate) notifications: Vec<WatcherNotification>,
    change: Change,
}

/// A notification to one client.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct WatcherNotification {
    pub(crate) client: usize,
    pub(crate) key: Vec<u8>,
    pub(crate) payload: Vec<u8>,
}

#[derive(Debug)]
enum Change {
    Nothing,
    Put(Vec<u8>, OracleEntry),
    Remove(Vec<u8>),
    Watch(Watched, usize, Dialect),
    Unwatch(Watched, usize),
}

/// A change of a key: its new value, or its removal. The version of a removal is not known.
#[derive(Clone, Debug)]
pub(crate) struct PastChange {
    key: Vec<u8>,
    value: Option<Vec<u8>>,
    pub(crate) version: Option<Stamp>,
}

#[derive(Default)]
pub(crate) struct Oracle {
    /// All changes, in order.
    pub(crate) changes: Vec<PastChange>,
    pub(crate) keys: BTreeMap<Vec<u8>, OracleEntry>,
    watches: BTreeMap<Watched, BTreeMap<usize, Dialect>>,
    keys_max: usize,
    client_keys_max: usize,
}

const AHEAD_MS: u64 = 60_000;

impl Oracle {
    /// An empty store with these limits: for all keys, and for those of one client.
    pub(crate) fn new(keys_max: usize, client_keys_max: usize) -> Self {
        Self {
            keys_max,
            client_keys_max,
            ..Self::default()
        }
    }

    /// Removes expired keys. Returns the notifications to their watchers.
    pub(crate) fn expire(&mut self, now_ms: u64) -> Vec<WatcherNotification> {
        let is_expired = |entry: &OracleEntry| entry.expires_ms.is_some_and(|ms| ms <= now_ms);
        let expired = self.keys.iter().filter(|(_, entry)| is_expired(entry));
        let expired: Vec<Vec<u8>> = expired.map(|(key, _)| key.clone()).collect();
        let mut notifications = Vec::new();
        for key in expired {
            self.keys.remove(&key);
            notifications.extend(self.notifications_of(&key, None));
            self.note_change(&key, None, None);
        }
        notifications
    }

    fn note_change(&mut self, key: &[u8], value: Option<Vec<u8>>, version: Option<Stamp>) {
        self.changes.push(PastChange {
            key: key.to_vec(),
            value,
            version,
        });
    }

    /// The notifications of the changes behind the first `count` ones, to a client that missed
    /// them.
    pub(crate) fn missed(
        &self,
        count: usize,
        watched: &Watched,
        client: usize,
        dialect: Dialect,
    ) -> Vec<WatcherNotification> {
        let changes = self.changes[count..].iter();
        let missed = changes.filter(|it| covers(watched, &it.key));
        let missed = missed.map(|it| notification(&it.key, it.value.as_deref(), client, dialect));
        missed.collect()
    }

    /// A client watches a key or prefix.
    pub(crate) fn watch(&mut self, watched: Watched, client: usize, dialect: Dialect) {
        let watchers = self.watches.entry(watched).or_default();
        watchers.insert(client, dialect);
    }

    /// Ends a watch. False if the client does not have it.
    pub(crate) fn unwatch(&mut self, watched: Watched, client: usize) -> bool {
        let watchers = self.watches.entry(watched).or_default();
        watchers.remove(&client).is_some()
    }

    /// Ends the watches of a client whose connection ended.
    pub(crate) fn disconnected(&mut self, client: usize) {
        for watchers in self.watches.values_mut() {
            watchers.remove(&client);
        }
    }

    /// Ends the watches of a key after a notification was not deliverable.
    pub(crate) fn undeliverable(&mut self, client: usize, key: &[u8]) {
        for (watched, watchers) in &mut self.watches {
            if covers(watched, key) {
                watchers.remove(&client);
            }
        }
    }

    /// All watches, sorted by key and client.
    pub(crate) fn watched(&self) -> Vec<(Watched, usize, Dialect)> {
        let of = |(key, watchers): (&Watched, &BTreeMap<usize, Dialect>)| {
            let watchers = watchers.iter();
            let watched = watchers.map(|(client, dialect)| (key.clone(), *client, *dialect));
            watched.collect::<Vec<_>>()
        };
        self.watches.iter().flat_map(of).collect()
    }

    pub(crate) fn is_watched(&self) -> bool {
        self.watches.values().any(|watchers| !watchers.is_empty())
    }

    /// The notifications that a key was set to this value, or removed.
    pub(crate) fn notifications_of(
        &self,
        key: &[u8],
        value: Option<&[u8]>,
    ) -> Vec<WatcherNotification> {
        let covering = self.watches.iter().filter(|(it, _)| covers(it, key));
        let mut covering: Vec<_> = covering.collect();
        // The most specific watch of a client decides the dialect.
        covering.sort_by_key(|((scope, watched), _)| (*scope == Scope::Key, watched.len()));
        let watchers = covering.into_iter().flat_map(|(_, watchers)| watchers);
        let watchers: BTreeMap<&usize, &Dialect> = watchers.collect();
        let all = watchers.into_iter();
        all.map(|(client, dialect)| notification(key, value, *client, *dialect))
            .collect()
    }

    /// Predicts the effects of a request without applying them, because its version is not known
    /// yet.
    pub(crate) fn predict(&self, request: &OracleRequest<'_>) -> Prediction {
        let decided = self.decide(request);
        decided.unwrap_or_else(|(text, repeatable)| Prediction {
            repeatable,
            ..Prediction::new(format!("-ERR {text}\r\n").as_bytes(), Version::None)
        })
    }

    /// Applies a prediction with the version that the store chose.
    pub(crate) fn apply(&mut self, prediction: Prediction, version: Option<Stamp>) {
        match prediction.change {
            Change::Nothing => {}
            Change::Put(key, entry) => {
                let version = version.expect("a successful SET has a version");
                self.note_change(&key, Some(entry.value.clone()), Some(version));
                self.keys.insert(key, OracleEntry { version, ..entry });
            }
            Change::Remove(key) => {
                self.note_change(&key, None, None);
                self.keys.remove(&key);
            }
            Change::Watch(key, client, dialect) => self.watch(key, client, dialect),
            Change::Unwatch(key, client) => _ = self.unwatch(key, client),
        }
    }

    /// The version of a key as a client writes it; of an absent key, one that it never had.
    pub(crate) fn version_of(&self, key: &str) -> Vec<u8> {
        let entry = self.keys.get(key.as_bytes());
        let version = entry.map_or_else(Stamp::default, |entry| entry.version);
        format!("{}:{}:StateStore", version.wall, version.counter).into_bytes()
    }

    fn decide(&self, request: &OracleRequest<'_>) -> Result<Prediction, (&'static str, bool)> {
        // Neither a format error nor a read is repeatable.
        let format_error = |text| Err((text, false));
        let verb = request.words[0].to_ascii_uppercase();
        let words: Vec<&[u8]> = request.words[1..].iter().map(Vec::as_slice).collect();
        let preview = request.dialect == Dialect::Preview;
        let (least, most) = match &verb[..] {
            b"SET" => (2, usize::MAX),
            b"GET" | b"DEL" => (1, 1),
            b"VDEL" => (2, 2),
            b"KEYNOTIFY" if !preview => (1, 4),
            b"SCAN" => (1, 2),
            b"META" if !preview => (1, 1),
            _ => return format_error("unknown command"),
        };
        if words.len() < least {
            return format_error("wrong number of arguments");
        }
        if words.len() > most {
            // A surplus option of KEYNOTIFY is an unknown or a repeated option.
            return format_error(match &verb[..] {
                b"KEYNOTIFY" => "syntax error",
                _ => "wrong number of arguments",
            });
        }
        let options = match &verb[..] {
            b"SET" => Some(set_options(&words[2..]).ok_or(("syntax error", false))?),
            _ => None,
        };
        let (stop, scope) = match &verb[..] {
            b"KEYNOTIFY" => keynotify_options(&words[1..]).ok_or(("syntax error", false))?,
            _ => (false, Scope::Key),
        };
        let key = words[0];
        if key.is_empty() && scope == Scope::Key {
            return format_error("the key length is zero");
        }
        match (&verb[..], options) {
            (b"SET", Some(options)) => self.set(request, key, words[1], &options),
            (b"GET", _) => Ok(self.get(key)),
            (b"DEL", _) => self.delete(request, key, None),
            (b"VDEL", _) => self.delete(request, key, Some(words[1])),
            (b"SCAN", _) => Ok(self.scan(key)),
            (b"META", _) => Ok(self.meta(key, request.now_ms)),
            _ => Ok(self.keynotify(request, (scope, key.to_vec()), stop)),
        }
    }

    fn set(
        &self,
        request: &OracleRequest<'_>,
        key: &[u8],
        value: &[u8],
        options: &Options<'_>,
    ) -> Result<Prediction, (&'static str, bool)> {
        let (wall, counter) = match request.timestamp {
            None => return Err(("missing timestamp", false)),
            Some(Reading::Malformed(_)) => return Err(("malformed timestamp", false)),
            Some(Reading::Clock(wall, counter, _)) => (*wall, *counter),
        };
        if wall > request.now_ms + AHEAD_MS {
            return Err((
                "the request timestamp is too far in the future; ensure that the client and broker system clocks are synchronized",
                true,
            ));
        }
        let token = token(request)?;
        let entry = self.keys.get(key);
        let fence = fenced(request, entry, token)?;
        let holds = match (&options.condition, entry) {
            (Condition::Always, _) => true,
            (Condition::Absent, entry) => entry.is_none(),
            (Condition::AbsentOrEqual(expected), entry) => {
                entry.is_none_or(|entry| entry.value == expected.unwrap_or(value))
            }
            (Condition::Version(expected), entry) => {
                entry.is_some_and(|entry| entry.version == *expected)
            }
        };
        if !holds {
            let payload: &[u8] = match request.dialect {
                Dialect::Documents => b"-1\r\n",
                _ => b":-1\r\n",
            };
            let version = entry.map_or(Version::None, |entry| Version::Is(entry.version));
            return Ok(Prediction::new(payload, version).repeatable());
        }
        let is_its_own = |entry: &OracleEntry| entry.owner == request.client;
        let owned = self.keys.values().filter(|it| is_its_own(it)).count();
        let full = entry.is_none() && self.keys.len() >= self.keys_max;
        if full || (!entry.is_some_and(is_its_own) && owned >= self.client_keys_max) {
            return Err(("the quota has been exceeded", true));
        }
        let entry = OracleEntry {
            owner: request.client,
            value: value.to_vec(),
            version: Stamp::default(),
            fence,
            expires_ms: (options.px_ms)
                .map(|ms| request.now_ms.saturating_add(ms).min(i64::MAX as u64)),
        };
        Ok(Prediction {
            notifications: self.notifications_of(key, Some(value)),
            change: Change::Put(key.to_vec(), entry),
            ..Prediction::new(b"+OK\r\n", Version::Above(wall, counter)).repeatable()
        })
    }

    fn get(&self, key: &[u8]) -> Prediction {
        match self.keys.get(key) {
            Some(entry) => {
                let mut payload = Vec::new();
                push_bulk(&mut payload, &entry.value);
                Prediction::new(&payload, Version::Is(entry.version))
            }
            None => Prediction::new(b"$-1\r\n", Version::None),
        }
    }

    fn meta(&self, key: &[u8], now_ms: u64) -> Prediction {
        let Some(entry) = self.keys.get(key) else {
            return Prediction::new(b"$-1\r\n", Version::None);
        };
        let mut words = vec!["bytes".to_owned(), entry.value.len().to_string()];
        if let Some(ms) = entry.expires_ms {
            words.extend(["expires".to_owned(), ms.to_string()]);
            words.extend(["ttl".to_owned(), (ms - now_ms).to_string()]);
        }
        if let Some((wall, counter, node)) = entry.fence {
            let fence = Reading::Clock(wall, counter, node).text();
            words.extend(["fence".to_owned(), fence]);
        }
        let mut payload = format!("*{}\r\n", words.len()).into_bytes();
        for word in words {
            push_bulk(&mut payload, word.as_bytes());
        }
        Prediction::new(&payload, Version::Is(entry.version))
    }

    fn delete(
        &self,
        request: &OracleRequest<'_>,
        key: &[u8],
        expected: Option<&[u8]>,
    ) -> Result<Prediction, (&'static str, bool)> {
        let token = token(request)?;
        let Some(entry) = self.keys.get(key) else {
            return Ok(Prediction::new(b":0\r\n", Version::None).repeatable());
        };
        fenced(request, Some(entry), token)?;
        if expected.is_some_and(|expected| expected != entry.value) {
            let payload: &[u8] = match request.dialect {
                Dialect::Sdk => b":-1\r\n",
                Dialect::Documents => b"-1\r\n",
                Dialect::Preview => b":0\r\n",
            };
            return Ok(Prediction::new(payload, Version::Is(entry.version)).repeatable());
        }
        Ok(Prediction {
            notifications: self.notifications_of(key, None),
            change: Change::Remove(key.to_vec()),
            ..Prediction::new(b":1\r\n", Version::Is(entry.version)).repeatable()
        })
    }

    fn keynotify(&self, request: &OracleRequest<'_>, key: Watched, stop: bool) -> Prediction {
        let watched = self.watches.get(&key);
        let watched = watched.is_some_and(|watchers| watchers.contains_key(&request.client));
        let version = match key.0 {
            Scope::Key => Version::None,
            Scope::Prefix => Version::Last,
        };
        match (stop, watched) {
            (false, _) => Prediction {
                change: Change::Watch(key, request.client, request.dialect),
                ..Prediction::new(b"+OK\r\n", version)
            },
            (true, true) => Prediction {
                change: Change::Unwatch(key, request.client),
                ..Prediction::new(b"+OK\r\n", Version::None).repeatable()
            },
            (true, false) => Prediction::new(b":0\r\n", Version::None).repeatable(),
        }
    }

    /// The answer is a single page, because a case has few keys.
    fn scan(&self, pattern: &[u8]) -> Prediction {
        let found = self.keys.keys().filter(|key| matches(pattern, key));
        let found: Vec<&Vec<u8>> = found.collect();
        let mut payload = format!("*1\r\n*{}\r\n", found.len()).into_bytes();
        for key in found {
            push_bulk(&mut payload, key);
        }
        Prediction::new(&payload, Version::None)
    }
}

impl Prediction {
    /// The key that changes, and its new value unless it is removed.
    pub(crate) fn changed(&self) -> Option<(Vec<u8>, Option<Vec<u8>>)> {
        match &self.change {
            Change::Put(key, entry) => Some((key.clone(), Some(entry.value.clone()))),
            Change::Remove(key) => Some((key.clone(), None)),
            Change::Nothing | Change::Watch(..) | Change::Unwatch(..) => None,
        }
    }

    /// The watch that ends.
    pub(crate) fn ended(&self) -> Option<Watched> {
        match &self.change {
            Change::Unwatch(key, _) => Some(key.clone()),
            _ => None,
        }
    }

    fn new(payload: &[u8], version: Version) -> Self {
        Self {
            payload: payload.to_vec(),
            version,
            repeatable: false,
            notifications: Vec::new(),
            change: Change::Nothing,
        }
    }

    fn repeatable(self) -> Self {
        Self {
            repeatable: true,
            ..self
        }
    }
}

/// The fencing token of a request. Its format is checked before its skew.
fn token(request: &OracleRequest<'_>) -> Result<Option<Token>, (&'static str, bool)> {
    match request.token {
        None => Ok(None),
        Some(Reading::Malformed(_)) => Err(("malformed timestamp", false)),
        Some(Reading::Clock(wall, ..)) if *wall > request.now_ms + AHEAD_MS => Err((
            "the request fencing token timestamp is too far in the future; ensure that the client and broker system clocks are synchronized",
            true,
        )),
        Some(Reading::Clock(wall, counter, node)) => Ok(Some((*wall, *counter, node))),
    }
}

/// Checks a request against the fence of its key. Returns the fence that a SET stores.
fn fenced(
    request: &OracleRequest<'_>,
    entry: Option<&OracleEntry>,
    token: Option<Token>,
) -> Result<Option<Token>, (&'static str, bool)> {
    match (entry.and_then(|entry| entry.fence), token) {
        (None, token) => Ok(token),
        (Some(_), None) => Err(("a fencing token is required for this request", true)),
        (Some(fence), Some(token)) if token < fence => Err((
            match request.dialect {
                Dialect::Sdk => {
                    "the request fencing token is a lower version than the fencing token protecting the resource"
                }
                _ => {
                    "the request fencing token is a lower version that the fencing token protecting the resource"
                }
            },
            true,
        )),
        (Some(_), Some(token)) => Ok(Some(token)),
    }
}

/// The notification that a key was set to this value, or removed.
fn notification(
    key: &[u8],
    value: Option<&[u8]>,
    client: usize,
    dialect: Dialect,
) -> WatcherNotification {
    WatcherNotification {
        client,
        key: key.to_vec(),
        payload: match (value, dialect) {
            (Some(value), _) => [
                b"*4\r\n$6\r\nNOTIFY\r\n$3\r\nSET\r\n$5\r\nVALUE\r\n$",
                value.len().to_string().as_bytes(),
                b"\r\n",
                value,
                b"\r\n",
            ]
            .concat(),
            (None, Dialect::Sdk) => b"*2\r\n$6\r\nNOTIFY\r\n$6\r\nDELETE\r\n".to_vec(),
            (None, _) => b"*2\r\n$6\r\nNOTIFY\r\n$3\r\nDEL\r\n".to_vec(),
        },
    }
}

/// Whether a watch reports the changes of a key.
fn covers((scope, watched): &Watched, key: &[u8]) -> bool {
    match scope {
        Scope::Key => watched == key,
        Scope::Prefix => key.starts_with(watched),
    }
}

fn push_bulk(out: &mut Vec<u8>, bytes: &[u8]) {
    out.extend_from_slice(format!("${}\r\n", bytes.len()).as_bytes());
    out.extend_from_slice(bytes);
    out.extend_from_slice(b"\r\n");
}
