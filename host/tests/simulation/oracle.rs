//! What the host must hold: the table, sessions, retained messages and expected deliveries.
//!
//! The oracle is a history of changes, each with the log positions that it depends on. A crash
//! removes the changes behind the last position that survived, and the rest is built again.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use statehouse_core::clock::Stamp;
use statehouse_core::policy::Assignment;
use statehouse_core::store::INTERNAL_ERROR;
use statehouse_protocol::SessionId;
use statehouse_tests::resp;

use crate::operation::{Command, TOKEN, fault, value};

/// The first and the last log position of what the host did about a packet.
pub(crate) type Records = (u64, u64);

pub(crate) const NO_RECORDS: Records = (1, 0);

/// A change, and the log positions of the packet that caused it.
struct Entry {
    first: u64,
    last: u64,
    /// The version of a change of a key.
    version: Stamp,
    change: Change,
}

/// A change of a key that has a version.
pub(crate) struct Versioned<'a> {
    pub(crate) version: Stamp,
    pub(crate) key: &'a str,
    /// The new value; none if the key was removed.
    pub(crate) value: Option<&'a [u8]>,
    /// The position that its notifications depend on.
    pub(crate) needed: u64,
}

#[derive(Clone, Debug)]
pub(crate) enum Change {
    Set {
        key: String,
        value: Vec<u8>,
        until_ms: Option<u64>,
        owner: usize,
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
    Assigned(Box<Assignment>),
    /// Behind a foreign broker: whether a client watches a key.
    Watch(usize, String, bool),
}

/// A request that is handled now.
pub(crate) struct Asked<'a> {
    pub(crate) client: usize,
    pub(crate) key: &'a str,
    pub(crate) command: &'a Command,
    pub(crate) number: u64,
    pub(crate) now_ms: u64,
    /// Whether the disk is full.
    pub(crate) full: bool,
    /// Whether the faulty policy handles it.
    pub(crate) faulty: bool,
    pub(crate) client_keys_max: Option<u64>,
}

pub(crate) const QUOTA_EXCEEDED: &[u8] = b"-ERR the quota has been exceeded\r\n";

/// The value of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Value {
    pub(crate) value: Vec<u8>,
    until_ms: Option<u64>,
    owner: usize,
    version: Stamp,
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
    pub(crate) assignment: Option<Assignment>,
    pub(crate) watches: BTreeSet<(usize, String)>,
    /// The last position of the packet that caused each operation.
    positions: HashMap<u64, u64>,
    /// The last position that changed each key.
    changed: HashMap<String, u64>,
}

impl Oracle {
    pub(crate) fn note(&mut self, records: Records, change: Change) {
        self.note_version(records, change, Stamp::default());
    }

    /// Notes a change of a key, which has this version.
    pub(crate) fn note_version(&mut self, records: Records, change: Change, version: Stamp) {
        let (first, last) = records;
        let recorded = first <= last;
        match &change {
            Change::Done { number, .. } if recorded => _ = self.positions.insert(*number, last),
            Change::Done { number, .. } => _ = self.positions.remove(number),
            Change::Set { key, .. } | Change::Remove { key } if recorded => {
                self.changed.insert(key.clone(), last);
            }
            _ => {}
        }
        self.apply(&change, version);
        // Without a record nothing survives a crash.
        let (first, last) = if recorded {
            records
        } else {
            (u64::MAX, u64::MAX)
        };
        self.history.push(Entry {
            first,
            last,
            version,
            change,
        });
    }

    fn apply(&mut self, change: &Change, version: Stamp) {
        match change.clone() {
            Change::Set {
                key,
                value,
                until_ms,
                owner,
            } => {
                let value = Value {
                    value,
                    until_ms,
                    owner,
                    version,
                };
                _ = self.table.insert(key, value);
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
            Change::Assigned(assignment) => self.assignment = Some(*assignment),
            Change::Watch(client, key, true) => _ = self.watches.insert((client, key)),
            Change::Watch(client, key, false) => _ = self.watches.remove(&(client, key)),
        }
    }

    /// Nothing behind this position survived. `found` is the table on the disk, `now_ms` the time.
    pub(crate) fn crash(&mut self, position: u64, found: &BTreeMap<String, Vec<u8>>, now_ms: u64) {
        let cut = |entry: &Entry| entry.first <= position && position < entry.last;
        let between = self.history.iter().any(cut);
        self.history.retain(|entry| entry.first <= position);
        self.uncertain.clear();
        let changed = self.changed.values_mut();
        for reached in self.positions.values_mut().chain(changed) {
            *reached = (*reached).min(position);
        }
        if between {
            // The table shows whether the packet at the end was handled.
            self.rebuild();
            if self.live(now_ms) != *found {
                self.history.retain(|entry| entry.last <= position);
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
        let changed = std::mem::take(&mut self.changed);
        *self = Self {
            positions,
            uncertain,
            changed,
            ..Self::default()
        };
        for entry in &history {
            self.apply(&entry.change, entry.version);
        }
        self.history = history;
    }

    /// The changes of keys with this prefix after a version, in order.
    pub(crate) fn since(
        &self,
        prefix: &str,
        version: Stamp,
    ) -> impl DoubleEndedIterator<Item = Versioned<'_>> {
        let entries = self.history.iter();
        let changes = entries.filter_map(move |entry| {
            let (key, value) = match &entry.change {
                Change::Set { key, value, .. } => (key, Some(&value[..])),
                Change::Remove { key } => (key, None),
                _ => return None,
            };
            Some(Versioned {
                version: entry.version,
                key,
                value,
                needed: if entry.last == u64::MAX {
                    0
                } else {
                    entry.last
                },
            })
        });
        changes.filter(move |it| it.version > version && it.key.starts_with(prefix))
    }

    /// The version of a key; of an absent key one that no key has.
    pub(crate) fn version(&self, key: &str) -> Stamp {
        self.table
            .get(key)
            .map_or(Stamp::default(), |it| it.version)
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

    /// The position that a read of the key, or of all keys, depends on.
    pub(crate) fn changed(&self, key: &str, all: bool) -> u64 {
        let changed = self.changed.iter().filter(|(it, _)| all || *it == key);
        changed.map(|(_, position)| *position).max().unwrap_or(0)
    }

    /// The keys that have expired and are not removed.
    pub(crate) fn expired(&self, now_ms: u64) -> Vec<String> {
        let expired = self.table.iter().filter(|(_, it)| it.expired(now_ms));
        expired.map(|(key, _)| key.clone()).collect()
    }

    /// Whether a SET of this key exceeds the limit of its client.
    fn exceeds(&self, asked: &Asked<'_>, found: Option<&Value>) -> bool {
        let live = self.table.values().filter(|it| !it.expired(asked.now_ms));
        let owned = live.filter(|it| it.owner == asked.client).count() as u64;
        let grows = found.is_none_or(|it| it.owner != asked.client);
        grows && asked.client_keys_max.is_some_and(|max| owned >= max)
    }

    /// The response to a META.
    fn meta(key: &str, found: &Value, now_ms: u64) -> Vec<u8> {
        let mut words = vec!["bytes".to_owned(), found.value.len().to_string()];
        if let Some(until_ms) = found.until_ms {
            words.extend(["expires".to_owned(), until_ms.to_string()]);
            words.extend(["ttl".to_owned(), (until_ms - now_ms).to_string()]);
        }
        if key.starts_with('f') {
            words.extend(["fence".to_owned(), TOKEN.to_owned()]);
        }
        resp::array(&words)
    }

    /// The response to a SCAN of all keys.
    fn scan(&self, now_ms: u64) -> Vec<u8> {
        let keys: Vec<String> = self.live(now_ms).into_keys().collect();
        [&b"*1\r\n"[..], &resp::array(&keys)].concat()
    }

    /// The response to a request and its change, if it is handled now.
    pub(crate) fn handle(&self, asked: &Asked<'_>) -> (Vec<u8>, Option<Change>) {
        let &Asked {
            client,
            key,
            command,
            number,
            now_ms,
            full,
            faulty,
            ..
        } = asked;
        let found = self.table.get(key).filter(|it| !it.expired(now_ms));
        let set = |value, until_ms| {
            Some(Change::Set {
                key: key.to_owned(),
                value,
                until_ms,
                owner: client,
            })
        };
        let remove = || {
            Some(Change::Remove {
                key: key.to_owned(),
            })
        };
        let fails = !matches!(
            command,
            Command::Fault { fine: true }
                | Command::Get
                | Command::Watch
                | Command::Unwatch
                | Command::Follow(_)
        );
        let (response, change): (&[u8], _) = match command {
            // What it answers is open, since other policies do not know the command.
            Command::Hide => (b"", None),
            _ if faulty && (fails || full && matches!(command, Command::Fault { .. })) => {
                (INTERNAL_ERROR, None)
            }
            Command::Set { nx: true, .. } if found.is_some() => (b":-1\r\n", None),
            Command::SetIf(version) if found.is_none_or(|it| it.version != *version) => {
                (b":-1\r\n", None)
            }
            Command::Set { .. } | Command::SetIf(_) | Command::Fault { .. }
                if full || self.exceeds(asked, found) =>
            {
                (QUOTA_EXCEEDED, None)
            }
            Command::Fault { fine } => {
                let until_ms = faulty.then_some(now_ms + 1_000);
                (b"+OK\r\n", set(fault(*fine), until_ms))
            }
            Command::Set { px_ms, .. } => {
                let until_ms = px_ms.map(|px| now_ms + px);
                (b"+OK\r\n", set(value(number), until_ms))
            }
            Command::SetIf(_) => (b"+OK\r\n", set(value(number), None)),
            Command::Scan => return (self.scan(now_ms), None),
            Command::Meta => match found {
                Some(found) => return (Self::meta(key, found, now_ms), None),
                None => (b"$-1\r\n", None),
            },
            Command::Get => match found {
                Some(Value { value, .. }) => return (resp::bulk(value), None),
                None => (b"$-1\r\n", None),
            },
            Command::Delete | Command::DeleteIf(_) if found.is_none() => (b":0\r\n", None),
            Command::DeleteIf(of) if found.is_some_and(|it| it.value != value(*of)) => {
                (b":-1\r\n", None)
            }
            Command::Delete | Command::DeleteIf(_) => (b":1\r\n", remove()),
            Command::Watch | Command::Unwatch | Command::Follow(_) => (b"+OK\r\n", None),
        };
        (response.to_vec(), change)
    }
}

impl Value {
    fn expired(&self, now_ms: u64) -> bool {
        self.until_ms.is_some_and(|until| until <= now_ms)
    }
}
