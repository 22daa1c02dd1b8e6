//! The table, the watches and the clock of a test, and a policy run over them.

use std::collections::{BTreeMap, BTreeSet};

use crate::testing::cases::Subject;
use crate::testing::{Transaction, receive};
use crate::{
    Body, Bytes, Change, Dialect, Event, Frame, Hlc, Level, Outcome, Policy, Request, Stamp, resp,
};

/// What a rule may deny.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Right {
    /// GET, KEYNOTIFY, SCAN.
    Read,
    /// SET, DEL, VDEL.
    Write,
}

/// An entry as it is kept. A hidden one lives beside the others, under a name of its own.
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

/// Whether a key is hidden, and the key.
pub(super) type Name = (bool, Vec<u8>);

/// What one request changed, with the value that its notification carries.
#[derive(Debug)]
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
    /// By key and client: the dialect of the last registration.
    pub(super) watches: BTreeMap<(Vec<u8>, String), Dialect>,
    pub(super) keys_max: Option<usize>,
    pub(super) watches_max: Option<usize>,
    pub(super) denied: BTreeSet<(Right, Vec<u8>)>,
    pub(super) properties: Vec<(String, String)>,
    pub(super) lines: Vec<(Level, String)>,
    pub(super) counters: BTreeMap<String, u64>,
    deliveries: Vec<Delivery>,
}

/// The answer to a request as it goes out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// The payload.
    pub bytes: Vec<u8>,
    /// The version property, where there is one.
    pub version: Option<Stamp>,
    /// What a duplicate is owed.
    pub repeat: crate::Repeat,
    /// Index of the command for metrics.
    pub command: Option<u16>,
}

/// A notification as it goes out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Delivery {
    /// Whom it goes to.
    pub client: String,
    /// Where it goes.
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
            clock: Stamp {
                wall: 0,
                counter: 0,
            },
            now_ms,
            watches: BTreeMap::new(),
            keys_max: None,
            watches_max: None,
            denied: BTreeSet::new(),
            properties: Vec::new(),
            lines: Vec::new(),
            counters: BTreeMap::new(),
            deliveries: Vec::new(),
        }
    }

    /// Allows this many entries.
    pub fn limit_keys(&mut self, keys_max: usize) {
        self.keys_max = Some(keys_max);
    }

    /// Allows this many watches.
    pub fn limit_watches(&mut self, watches_max: usize) {
        self.watches_max = Some(watches_max);
    }

    /// Denies a right on a key to everybody.
    pub fn deny(&mut self, right: Right, key: &[u8]) {
        self.denied.insert((right, key.to_vec()));
    }

    /// Gives later requests a user property.
    pub fn set_property(&mut self, name: &str, value: &str) {
        self.properties.push((name.to_owned(), value.to_owned()));
    }

    /// What the policy has logged.
    #[must_use]
    pub fn lines(&self) -> &[(Level, String)] {
        &self.lines
    }

    /// What the policy has counted under a name.
    #[must_use]
    pub fn counter(&self, name: &str) -> u64 {
        self.counters.get(name).copied().unwrap_or(0)
    }

    /// The notifications since the last call.
    pub fn take_deliveries(&mut self) -> Vec<Delivery> {
        std::mem::take(&mut self.deliveries)
    }

    /// A client's connection ends, and its watches with it.
    pub fn disconnect(&mut self, client: &str) {
        self.watches.retain(|(_, watcher), _| watcher != client);
    }

    /// What a policy sees during a request. Dropped, it changes nothing; see [`Table::call`].
    pub fn begin<'a>(&'a mut self, request: &'a Request) -> Transaction<'a> {
        self.now_ms = self.now_ms.max(request.now);
        Transaction::new(self, request)
    }

    /// Runs a policy for one request and commits what it staged.
    pub fn call(&mut self, policy: &impl Policy, request: &Request) -> Answer {
        let mut transaction = self.begin(request);
        let Outcome {
            reply,
            version,
            repeat,
            command,
        } = policy.handle(&mut transaction, request);
        let bytes = splice(&reply, &request.payload, |key| transaction.stored(key));
        let pending = transaction.commit();
        self.notify(policy, pending);
        Answer {
            bytes,
            version,
            repeat,
            command,
        }
    }

    /// Lets time pass; what is expired by then is removed, and its watchers are told.
    pub fn advance(&mut self, policy: &impl Policy, now_ms: u64) {
        self.now_ms = self.now_ms.max(now_ms);
        let expired: Vec<Name> = self
            .entries
            .iter()
            .filter(|(_, stored)| !stored.is_live(self.now_ms))
            .map(|(name, _)| name.clone())
            .collect();
        for name in expired {
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
                self.notify(
                    policy,
                    vec![Pending {
                        change,
                        value: Vec::new(),
                    }],
                );
            }
        }
    }

    fn notify(&mut self, policy: &impl Policy, pending: Vec<Pending>) {
        for Pending { change, value } in pending {
            for ((key, client), &dialect) in &self.watches {
                if *key != change.key {
                    continue;
                }
                let told = policy.notify(&change, dialect);
                let payload = splice(&told.payload, &change.key, |key| {
                    assert_eq!(
                        key, change.key,
                        "a notification carries its own key's value"
                    );
                    value.clone()
                });
                let name: String = client.bytes().map(|byte| format!("{byte:02X}")).collect();
                self.deliveries.push(Delivery {
                    client: client.clone(),
                    topic: format!("{}{name}{}", told.topic_prefix, told.topic_suffix),
                    version: change.version,
                    payload,
                });
            }
        }
    }
}

/// The bytes that a [`Bytes`] names in the bytes of the current call.
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

/// `head`, then the body, then CRLF where there is a body.
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

/// A policy over a table, for [`cases::run`](crate::testing::cases::run).
#[derive(Debug)]
pub struct Tabled<'a, P> {
    policy: &'a P,
    /// The table of the current case.
    pub table: Table,
}

impl<'a, P: Policy> Tabled<'a, P> {
    /// Over an empty table.
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
