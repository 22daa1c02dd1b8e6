//! A table with watches and a clock in memory, and the execution of a policy on it.

use std::collections::{BTreeMap, BTreeSet};

use crate::testing::cases::Subject;
use crate::testing::clock::{ZERO, receive};
use crate::testing::transaction::Transaction;
use crate::{
    Body, Bytes, Change, Dialect, Event, Frame, Hlc, Level, Outcome, Policy, Request, Stamp, resp,
};

/// A right that a test may deny.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Right {
    /// GET, KEYNOTIFY, SCAN.
    Read,
    /// SET, DEL, VDEL.
    Write,
}

/// A stored entry. Hidden entries share the map, under names of their own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Stored {
    pub(super) value: Vec<u8>,
    pub(super) version: Stamp,
    pub(super) fence: Option<Hlc>,
    pub(super) expires: Option<u64>,
}

impl Stored {
    pub(super) fn is_live(&self, now_ms: u64) -> bool {
        self.expires.is_none_or(|at| at > now_ms)
    }
}

/// Whether the key is hidden, and the key.
pub(super) type Name = (bool, Vec<u8>);

/// Whether a watch is of a prefix, and the key or prefix.
pub(super) type Watched = (bool, Vec<u8>);

/// A change by one request, with the value for its notification.
#[derive(Debug, Clone)]
pub(super) struct Pending {
    pub(super) change: Change,
    pub(super) value: Vec<u8>,
}

/// A store in memory.
#[derive(Debug)]
pub struct Table {
    pub(super) entries: BTreeMap<Name, Stored>,
    pub(super) clock: Stamp,
    pub(super) now_ms: u64,
    /// By watched key or prefix and client: the dialect of the last registration.
    pub(super) watches: BTreeMap<(Watched, String), Dialect>,
    /// The changes since the last call of [`Table::forget_changes`], and the version before them.
    pub(super) changes: (Stamp, Vec<Pending>),
    pub(super) keys_max: Option<usize>,
    pub(super) watches_max: Option<usize>,
    pub(super) denied: BTreeSet<(Right, Vec<u8>)>,
    pub(super) properties: Vec<(String, String)>,
    pub(super) lines: Vec<(Level, String)>,
    pub(super) counters: BTreeMap<String, u64>,
    deliveries: Vec<Delivery>,
}

/// The response to a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// The payload.
    pub bytes: Vec<u8>,
    /// The version property, if the response has one.
    pub version: Option<Stamp>,
    /// How a duplicate is answered.
    pub repeat: crate::Repeat,
    /// Index of the command for metrics.
    pub command: Option<u16>,
}

/// A published notification.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Delivery {
    /// The client that receives it.
    pub client: String,
    /// The topic it is published on.
    pub topic: String,
    /// The version property.
    pub version: Stamp,
    /// The payload.
    pub payload: Vec<u8>,
}

impl Table {
    /// An empty store at a time.
    #[must_use]
    pub fn new(now_ms: u64) -> Self {
        Self {
            entries: BTreeMap::new(),
            clock: ZERO,
            now_ms,
            watches: BTreeMap::new(),
            changes: (ZERO, Vec::new()),
            keys_max: None,
            watches_max: None,
            denied: BTreeSet::new(),
            properties: Vec::new(),
            lines: Vec::new(),
            counters: BTreeMap::new(),
            deliveries: Vec::new(),
        }
    }

    /// Limits the number of entries.
    pub fn limit_keys(&mut self, keys_max: usize) {
        self.keys_max = Some(keys_max);
    }

    /// Limits the number of watches.
    pub fn limit_watches(&mut self, watches_max: usize) {
        self.watches_max = Some(watches_max);
    }

    /// Denies all clients a right on a key. Watches do not report a key that may not be read.
    pub fn deny(&mut self, right: Right, key: &[u8]) {
        self.denied.insert((right, key.to_vec()));
    }

    /// Adds a user property to later requests.
    pub fn set_property(&mut self, name: &str, value: &str) {
        self.properties.push((name.to_owned(), value.to_owned()));
    }

    /// The lines that the policy has logged.
    #[must_use]
    pub fn lines(&self) -> &[(Level, String)] {
        &self.lines
    }

    /// The value of a counter of the policy.
    #[must_use]
    pub fn counter(&self, name: &str) -> u64 {
        self.counters.get(name).copied().unwrap_or(0)
    }

    /// The notifications since the last call.
    pub fn take_deliveries(&mut self) -> Vec<Delivery> {
        std::mem::take(&mut self.deliveries)
    }

    /// Forgets the changes so far, so that no client can ask for those that it missed.
    pub fn forget_changes(&mut self) {
        self.changes = (self.clock, Vec::new());
    }

    /// Ends a client's connection and its watches.
    pub fn disconnect(&mut self, client: &str) {
        self.watches.retain(|(_, watcher), _| watcher != client);
    }

    /// The [`Host`](crate::Host) for one request. It changes nothing if it is dropped; see
    /// [`Table::call`].
    pub fn begin<'a>(&'a mut self, request: &'a Request) -> Transaction<'a> {
        self.now_ms = self.now_ms.max(request.now);
        Transaction::new(self, request)
    }

    /// Executes one request by a policy and commits its writes.
    pub fn call(&mut self, policy: &impl Policy, request: &Request) -> Answer {
        let mut transaction = self.begin(request);
        let Outcome {
            reply,
            version,
            repeat,
            command,
        } = policy.handle(&mut transaction, request);
        let bytes = splice(&reply, &request.payload, |key| transaction.stored(key));
        let missed = transaction.take_missed();
        let (pending, watches) = transaction.commit();
        let client = request.client.clone().unwrap_or_default();
        for (change, dialect) in missed {
            self.deliver(policy, &change, client.clone(), dialect);
        }
        self.notify(policy, pending);
        for (watched, dialect) in watches {
            match dialect {
                Some(dialect) => self.watches.insert((watched, client.clone()), dialect),
                None => self.watches.remove(&(watched, client.clone())),
            };
        }
        Answer {
            bytes,
            version,
            repeat,
            command,
        }
    }

    /// Advances the time, removes expired keys and notifies their watchers.
    pub fn advance(&mut self, policy: &impl Policy, now_ms: u64) {
        self.now_ms = self.now_ms.max(now_ms);
        let mut expired: Vec<(Option<u64>, Name)> = self
            .entries
            .iter()
            .filter(|(_, stored)| !stored.is_live(self.now_ms))
            .map(|(name, stored)| (stored.expires, name.clone()))
            .collect();
        // A host removes them in the order of their deadlines, too.
        expired.sort();
        for (_, name) in expired {
            self.entries.remove(&name);
            let (hidden, key) = name;
            if !hidden {
                self.clock = receive(self.clock, None, self.now_ms);
                let change = Change {
                    event: Event::Expired,
                    key,
                    version: self.clock,
                    len: 0,
                };
                let value = Vec::new();
                self.notify(policy, vec![Pending { change, value }]);
            }
        }
    }

    /// The watchers of a key and their dialects, each client once. A watch of the key decides the
    /// dialect, else that of its longest watched prefix.
    fn watchers(&self, key: &[u8]) -> BTreeMap<String, Dialect> {
        let covering = self
            .watches
            .iter()
            .filter(|((it, _), _)| self.covers(it, key));
        let mut covering: Vec<_> = covering.collect();
        covering.sort_by_key(|(((is_prefix, watched), _), _)| (!is_prefix, watched.len()));
        let covering = covering.into_iter();
        covering
            .map(|((_, client), &dialect)| (client.clone(), dialect))
            .collect()
    }

    /// Whether a watch reports the changes of a key, which the client must be able to read.
    pub(super) fn covers(&self, (is_prefix, watched): &Watched, key: &[u8]) -> bool {
        let is_covered = match is_prefix {
            true => key.starts_with(watched),
            false => key == watched,
        };
        is_covered && !self.denied.contains(&(Right::Read, key.to_vec()))
    }

    fn notify(&mut self, policy: &impl Policy, pending: Vec<Pending>) {
        for change in pending {
            for (client, dialect) in self.watchers(&change.change.key) {
                self.deliver(policy, &change, client, dialect);
            }
            self.changes.1.push(change);
        }
    }

    fn deliver(
        &mut self,
        policy: &impl Policy,
        Pending { change, value }: &Pending,
        client: String,
        dialect: Dialect,
    ) {
        let notification = policy.notify(change, dialect);
        let payload = splice(&notification.payload, &change.key, |key| {
            assert_eq!(
                key, change.key,
                "a notification may only contain the value of its own key"
            );
            value.clone()
        });
        let name: String = client.bytes().map(|byte| format!("{byte:02X}")).collect();
        let topic = format!(
            "{}{name}{}",
            notification.topic_prefix, notification.topic_suffix
        );
        self.deliveries.push(Delivery {
            client,
            topic,
            version: change.version,
            payload,
        });
    }
}

/// Resolves a [`Bytes`] in the bytes of the current call.
pub(super) fn resolve<'a>(bytes: &'a Bytes, call: &'a [u8]) -> &'a [u8] {
    match bytes {
        Bytes::Span(span) => match call.get(resp::range(*span)) {
            Some(bytes) => bytes,
            None => panic!(
                "{span:?} is outside of the {} bytes of this call",
                call.len()
            ),
        },
        Bytes::Owned(bytes) => bytes,
    }
}

/// `head`, then the body, then CRLF if there is a body.
fn splice(frame: &Frame, call: &[u8], stored: impl FnOnce(&[u8]) -> Vec<u8>) -> Vec<u8> {
    let mut out = frame.head.clone();
    match &frame.body {
        Body::None => return out,
        Body::Stored(key) => out.extend(stored(resolve(key, call))),
        Body::Given(span) => out.extend_from_slice(resolve(&Bytes::Span(*span), call)),
    }
    out.extend_from_slice(b"\r\n");
    out
}

/// A policy with a table, for [`cases::run`](crate::testing::cases::run).
#[derive(Debug)]
pub struct Tabled<'a, P> {
    policy: &'a P,
    /// The table of the current case.
    pub table: Table,
}

impl<'a, P: Policy> Tabled<'a, P> {
    /// Starts with an empty table.
    pub fn new(policy: &'a P) -> Self {
        Self {
            policy,
            table: Table::new(0),
        }
    }
}

impl<P: Policy> Subject for Tabled<'_, P> {
    fn begin(&mut self, now_ms: u64, keys_max: Option<usize>) {
        self.table = Table::new(now_ms);
        self.table.keys_max = keys_max;
    }

    fn advance(&mut self, now_ms: u64) {
        self.table.advance(self.policy, now_ms);
    }

    fn call(&mut self, request: &Request) -> Answer {
        self.table.call(self.policy, request)
    }

    fn disconnect(&mut self, client: &str) {
        self.table.disconnect(client);
    }

    fn deliveries(&mut self) -> Vec<Delivery> {
        self.table.take_deliveries()
    }
}
