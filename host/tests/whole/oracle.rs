//! What the host must hold: the table, sessions, retained messages and expected deliveries.
//!
//! The oracle is a history of changes, each with the log positions that it depends on. A crash
//! removes the changes behind the last position that survived, and the rest is built again.

use std::collections::{BTreeMap, HashMap, HashSet};

use statehouse_protocol::SessionId;

use crate::operation::{Command, Operation, value};

/// A change, and the log positions of the packet that caused it.
struct Entry {
    first: u64,
    last: u64,
    change: Change,
}

#[derive(Clone, Debug)]
pub(crate) enum Change {
    Set {
        key: String,
        value: Vec<u8>,
        until_ms: Option<u64>,
    },
    Remove {
        key: String,
    },
    /// An exchange began. Its repetition has no effect. A request has a response.
    Done {
        number: u64,
        response: Option<Vec<u8>>,
    },
    Session {
        client: usize,
        number: SessionId,
    },
    SessionEnded {
        client: usize,
    },
    Subscribed {
        client: usize,
        filter: String,
        qos: u8,
    },
    Owed {
        client: usize,
        number: u64,
        qos: u8,
    },
    Retained {
        topic: String,
        number: Option<u64>,
    },
}

/// The value of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Value {
    pub(crate) value: Vec<u8>,
    until_ms: Option<u64>,
}

#[derive(Default)]
pub(crate) struct Oracle {
    history: Vec<Entry>,
    table: BTreeMap<String, Value>,
    done: HashMap<u64, Option<Vec<u8>>>,
    /// Requests whose handling may have survived the last crash or not.
    pub(crate) uncertain: HashSet<u64>,
    pub(crate) sessions: HashMap<usize, SessionId>,
    pub(crate) subscriptions: BTreeMap<(usize, String), u8>,
    pub(crate) owed: BTreeMap<(usize, u64), u8>,
    pub(crate) retained: BTreeMap<String, u64>,
    /// The last position of the packet that caused each operation.
    positions: HashMap<u64, u64>,
}

impl Oracle {
    pub(crate) fn note(&mut self, first: u64, last: u64, change: Change) {
        if let Change::Done { number, .. } = change {
            self.positions.remove(&number);
            if first <= last {
                self.positions.insert(number, last);
            }
        }
        self.apply(&change);
        // Without a record nothing survives a crash.
        let first = if first > last { u64::MAX } else { first };
        let last = if first == u64::MAX { u64::MAX } else { last };
        self.history.push(Entry {
            first,
            last,
            change,
        });
    }

    fn apply(&mut self, change: &Change) {
        match change.clone() {
            Change::Set {
                key,
                value,
                until_ms,
            } => {
                _ = self.table.insert(key, Value { value, until_ms });
            }
            Change::Remove { key } => _ = self.table.remove(&key),
            Change::Done { number, response } => _ = self.done.insert(number, response),
            Change::Session { client, number } => _ = self.sessions.insert(client, number),
            Change::SessionEnded { client } => {
                self.sessions.remove(&client);
                self.subscriptions.retain(|(it, _), _| *it != client);
                self.owed.retain(|(it, _), _| *it != client);
            }
            Change::Subscribed {
                client,
                filter,
                qos,
            } => {
                _ = self.subscriptions.insert((client, filter), qos);
            }
            Change::Owed {
                client,
                number,
                qos,
            } => _ = self.owed.insert((client, number), qos),
            Change::Retained { topic, number } => match number {
                Some(number) => _ = self.retained.insert(topic, number),
                None => _ = self.retained.remove(&topic),
            },
        }
    }

    /// Nothing behind this position survived. `found` is the table on the disk, `now_ms` the time.
    pub(crate) fn crash(&mut self, position: u64, found: &BTreeMap<String, Vec<u8>>, now_ms: u64) {
        let cut = |entry: &Entry| entry.first <= position && position < entry.last;
        let between = self.history.iter().any(cut);
        let whole: Vec<Entry> = std::mem::take(&mut self.history)
            .into_iter()
            .filter(|entry| entry.first <= position)
            .collect();
        self.history = whole;
        self.uncertain.clear();
        if between {
            // The table shows whether the packet at the end was handled.
            self.rebuild();
            if self.live(now_ms) != *found {
                let (kept, cut): (Vec<_>, Vec<_>) = std::mem::take(&mut self.history)
                    .into_iter()
                    .partition(|entry| entry.last <= position);
                self.history = kept;
                drop(cut);
            } else {
                for entry in self.history.iter().filter(|it| it.last > position) {
                    if let Change::Done { number, .. } = entry.change {
                        self.uncertain.insert(number);
                    }
                }
            }
        }
        self.rebuild();
        let live = self.live(now_ms);
        assert_eq!(
            live, *found,
            "obligation 1: the table after recovery of position {position} differs (left: expected)"
        );
    }

    fn rebuild(&mut self) {
        let history = std::mem::take(&mut self.history);
        let positions = std::mem::take(&mut self.positions);
        let uncertain = std::mem::take(&mut self.uncertain);
        *self = Self {
            positions,
            uncertain,
            ..Self::default()
        };
        for entry in &history {
            self.apply(&entry.change);
        }
        self.history = history;
    }

    /// The table without expired keys.
    pub(crate) fn live(&self, now_ms: u64) -> BTreeMap<String, Vec<u8>> {
        let live = self.table.iter().filter(|(_, it)| !it.expired(now_ms));
        live.map(|(key, it)| (key.clone(), it.value.clone()))
            .collect()
    }

    pub(crate) fn is_done(&self, number: u64) -> bool {
        self.done.contains_key(&number)
    }

    pub(crate) fn response(&self, number: u64) -> Option<&Vec<u8>> {
        self.done.get(&number)?.as_ref()
    }

    /// The position that must be durable before the operation is acknowledged.
    pub(crate) fn position(&self, number: u64) -> u64 {
        self.positions.get(&number).copied().unwrap_or(0)
    }

    fn value(&self, key: &str, now_ms: u64) -> Option<&Vec<u8>> {
        let found = self.table.get(key).filter(|it| !it.expired(now_ms));
        found.map(|it| &it.value)
    }

    /// The response to a request and its change, if it is handled now.
    pub(crate) fn handle(
        &self,
        operation: &Operation,
        number: u64,
        now_ms: u64,
        full: bool,
    ) -> (Vec<u8>, Option<Change>) {
        let Operation::Request { key, command } = operation else {
            return (Vec::new(), None);
        };
        let found = self.value(key, now_ms);
        let remove = || Some(Change::Remove { key: key.clone() });
        let (response, change): (&[u8], _) = match command {
            Command::Set { nx: true, .. } if found.is_some() => (b":-1\r\n", None),
            Command::Set { .. } if full => (b"-ERR the quota has been exceeded\r\n", None),
            Command::Set { px_ms, .. } => {
                let change = Change::Set {
                    key: key.clone(),
                    value: value(number),
                    until_ms: px_ms.map(|px| now_ms + px),
                };
                (b"+OK\r\n", Some(change))
            }
            Command::Get => match found {
                Some(value) => {
                    let mut response = format!("${}\r\n", value.len()).into_bytes();
                    response.extend(value);
                    response.extend(b"\r\n");
                    return (response, None);
                }
                None => (b"$-1\r\n", None),
            },
            Command::Delete | Command::DeleteIf(_) if found.is_none() => (b":0\r\n", None),
            Command::DeleteIf(value) if found != Some(value) => (b":-1\r\n", None),
            Command::Delete | Command::DeleteIf(_) => (b":1\r\n", remove()),
            Command::Watch | Command::Unwatch => (b"+OK\r\n", None),
        };
        (response.to_vec(), change)
    }
}

impl Value {
    fn expired(&self, now_ms: u64) -> bool {
        self.until_ms.is_some_and(|until| until <= now_ms)
    }
}
