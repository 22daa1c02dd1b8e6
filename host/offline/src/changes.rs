//! What became of one key: its changes, and its value as of a version or a time.
//!
//! What enters: a key, and the directory's oldest snapshot with every record behind it. What leaves: who changed
//! it when to what, by which policy, and how far back that is known.
//!
//! A snapshot is taken while the store goes on. Of one key it holds one entry, as of some moment while it was
//! taken, and that the key had this entry ever since the entry's version is certain whatever the moment was. That
//! a key was absent is certain only from the snapshot's end on.

use std::collections::VecDeque;
use std::sync::Arc;

use statehouse_wal::{Base, LogPosition, Sink};

use super::{Past, PastError};
use crate::limits;
use statehouse_core::clock::Stamp;
use statehouse_core::log::record::{self, PolicyRecord, Record};
use statehouse_core::log::{Block, Malformed, read_block};
use statehouse_core::store::{self, Entry, Write};

/// One change of a key.
#[derive(Debug)]
pub struct Change {
    /// The record that says so.
    pub position: LogPosition,
    /// The version of the change.
    pub version: Stamp,
    /// When, in the store's milliseconds.
    pub now_ms: u64,
    /// What happened.
    pub what: What,
    /// Whose request it was; none where the key's time was over.
    pub client: Option<String>,
    /// The policy that decided so.
    pub policy: Option<Arc<PolicyRecord>>,
}

/// What happened to a key.
#[derive(Debug)]
pub enum What {
    /// It was given a value.
    Set {
        /// The beginning of the value.
        value: Vec<u8>,
        /// Its whole length.
        bytes: usize,
        /// The fencing token that protects it.
        fence: Option<statehouse_core::clock::Fence>,
        /// When it is gone.
        expires_ms: Option<u64>,
    },
    /// It was deleted.
    Deleted,
    /// Its time was over.
    Expired,
}

/// What is known of a key.
#[derive(Debug, Default)]
pub struct History {
    /// Its last changes, the newest last.
    pub changes: VecDeque<Change>,
    /// How many there were.
    pub count: u64,
    /// From when on every change is known; none where that is since the store began.
    pub since_ms: Option<u64>,
    /// What it held before the first of them, where that is known.
    pub before: Option<Entry>,
}

/// A place in the past.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// With the change of this version, and before any later one.
    Version(Stamp),
    /// At this time, in the store's milliseconds.
    Time(u64),
}

/// What a key was at some moment.
#[derive(Debug, PartialEq, Eq)]
pub enum AsOf {
    /// It held this.
    Value(Entry),
    /// There was no such key.
    Absent,
    /// That is not known any more.
    TooOld {
        /// From when on it is.
        since_ms: u64,
    },
    /// No such version was given yet; the last one is this.
    NotYet(Stamp),
}

impl Past {
    /// The last changes of a key, at most `limit` of them.
    pub fn history(&self, key: &[u8], limit: usize) -> Result<History, PastError> {
        History::read(key, limit, |sink| self.read_oldest(sink))
    }

    /// What a key was at a moment.
    pub fn as_of(&self, key: &[u8], moment: Moment) -> Result<AsOf, PastError> {
        AsOf::read(key, moment, |sink| self.read_oldest(sink))
    }

    fn read_oldest(&self, sink: &mut dyn Sink) -> Result<(), PastError> {
        self.read(Base::Oldest, LogPosition::END, sink).map(drop)
    }
}

impl History {
    /// Listens to what `reading` reads.
    fn read<E>(
        key: &[u8],
        limit: usize,
        reading: impl FnOnce(&mut dyn Sink) -> Result<(), E>,
    ) -> Result<Self, E> {
        let mut history = Self::default();
        let mut visit = |seen: Seen<'_>| match seen {
            Seen::Nothing => history = Self::default(),
            Seen::Base(entry) => history.before = Some(entry),
            Seen::Whole { now_ms, .. } => history.since_ms = Some(now_ms),
            // Records are there from the beginning of the snapshot on.
            Seen::Passed { now_ms, .. } => {
                history.since_ms = history.since_ms.map(|since_ms| since_ms.min(now_ms));
            }
            Seen::Wrote(write, origin) => history.wrote(write, origin, limit),
        };
        reading(&mut Follower::of(key, &mut visit))?;
        Ok(history)
    }

    fn wrote(&mut self, write: &Write, origin: &Origin<'_>, limit: usize) {
        // The snapshot saw this one already, so it says nothing of before.
        if (self.before.as_ref()).is_some_and(|entry| entry.version() == write.version()) {
            self.before = None;
        }
        self.count += 1;
        if self.changes.len() == limit {
            self.changes.pop_front();
        }
        if limit > 0 {
            self.changes.push_back(Change::new(write, origin));
        }
    }
}

impl AsOf {
    /// Listens to what `reading` reads.
    fn read<E>(
        key: &[u8],
        moment: Moment,
        reading: impl FnOnce(&mut dyn Sink) -> Result<(), E>,
    ) -> Result<Self, E> {
        let mut search = Search::default();
        let mut visit = |seen: Seen<'_>| match seen {
            Seen::Nothing => search = Search::default(),
            Seen::Base(entry) => {
                // A version's wall is never behind the time at which it was given.
                if moment.holds(entry.version().wall, entry.version()) {
                    search.found = Some(Some(entry));
                } else {
                    search.later = Some(entry);
                }
            }
            Seen::Whole { now_ms, clock } => {
                search.since = Some((now_ms, clock));
                // A version runs ahead of the time where a client's clock does. At the end of the snapshot the key
                // had it, whatever it says.
                if moment.holds(now_ms, clock)
                    && let Some(entry) = search.later.take()
                {
                    search.found = Some(Some(entry));
                }
                search.pass(moment, now_ms, clock);
            }
            Seen::Passed {
                now_ms,
                clock: Some(clock),
            } => search.pass(moment, now_ms, clock),
            Seen::Passed { .. } => {}
            Seen::Wrote(write, origin) => {
                if moment.holds(origin.now_ms, write.version()) {
                    search.found = Some(write.entry().cloned());
                }
            }
        };
        reading(&mut Follower::of(key, &mut visit))?;
        Ok(search.end(moment))
    }
}

impl Change {
    fn new(write: &Write, origin: &Origin<'_>) -> Self {
        let what = match &write.change {
            store::Change::Set(entry) => {
                let value = entry.value();
                let shown = value.len().min(limits::VALUE_SHOWN_BYTES_MAX);
                What::Set {
                    value: value[..shown].to_vec(),
                    bytes: value.len(),
                    fence: entry.fence(),
                    expires_ms: entry.expires_ms(),
                }
            }
            store::Change::Expired(..) => What::Expired,
            store::Change::Deleted(..) => What::Deleted,
        };
        // A key that expired went by itself, whoever was served next.
        let by = !write.expired();
        Self {
            position: origin.position,
            version: write.version(),
            now_ms: origin.now_ms,
            what,
            client: origin.client.filter(|_| by).map(str::to_owned),
            policy: origin.policy.filter(|_| by).cloned(),
        }
    }
}

impl Moment {
    /// Whether what happened at `now_ms` and got `version` had happened by this moment.
    fn holds(self, now_ms: u64, version: Stamp) -> bool {
        match self {
            Self::Version(moment) => version <= moment,
            Self::Time(moment_ms) => now_ms <= moment_ms,
        }
    }
}

/// The search for what a key was.
#[derive(Default)]
struct Search {
    /// What it was, as far as is known: nothing, absent, or an entry.
    found: Option<Option<Entry>>,
    /// What the snapshot holds, where that may be later than the moment.
    later: Option<Entry>,
    /// The end of the snapshot.
    since: Option<(u64, Stamp)>,
    /// The store's time at the moment.
    now_ms: u64,
    /// The last clock seen.
    last: Stamp,
}

impl Search {
    fn pass(&mut self, moment: Moment, now_ms: u64, clock: Stamp) {
        self.last = self.last.max(clock);
        if moment.holds(now_ms, clock) {
            self.now_ms = now_ms;
        }
    }

    fn end(self, moment: Moment) -> AsOf {
        let now_ms = match moment {
            Moment::Version(version) if version > self.last => return AsOf::NotYet(self.last),
            Moment::Version(_) => self.now_ms,
            Moment::Time(ms) => ms,
        };
        match (self.found, self.since) {
            (Some(Some(entry)), _) if entry.expired(now_ms) => AsOf::Absent,
            (Some(Some(entry)), _) => AsOf::Value(entry),
            (Some(None), _) => AsOf::Absent,
            (None, Some((since_ms, clock)))
                if self.later.is_some() || !moment.holds(since_ms, clock) =>
            {
                AsOf::TooOld { since_ms }
            }
            (None, _) => AsOf::Absent,
        }
    }
}

/// What the journal says, as far as one key is concerned.
enum Seen<'a> {
    /// The reading begins anew.
    Nothing,
    /// The entry of the key in the snapshot.
    Base(Entry),
    /// The end of the snapshot: the store's time and clock there.
    Whole { now_ms: u64, clock: Stamp },
    /// A record: the store's time at it, and its clock behind it where it moved.
    Passed { now_ms: u64, clock: Option<Stamp> },
    /// A change of the key. It comes before its record has passed.
    Wrote(&'a Write, &'a Origin<'a>),
}

/// Where a change comes from.
struct Origin<'a> {
    position: LogPosition,
    now_ms: u64,
    client: Option<&'a str>,
    policy: Option<&'a Arc<PolicyRecord>>,
}

/// Reads a journal for what concerns one key.
struct Follower<'a> {
    key: &'a [u8],
    /// Policies by their number in records.
    policies: Vec<Arc<PolicyRecord>>,
    visit: &'a mut dyn FnMut(Seen<'_>),
}

impl<'a> Follower<'a> {
    fn of(key: &'a [u8], visit: &'a mut dyn FnMut(Seen<'_>)) -> Self {
        Self {
            key,
            policies: Vec::new(),
            visit,
        }
    }

    fn take_block(&mut self, block: &[u8]) -> Result<(), Malformed> {
        match read_block(block)? {
            Block::Entries(entries) => {
                for write in entries {
                    let write = write?;
                    if let store::Change::Set(entry) = write.change
                        && !write.hidden
                        && entry.key() == self.key
                    {
                        (self.visit)(Seen::Base(entry));
                    }
                }
            }
            Block::Meta(meta) => {
                self.policies = meta.policies.into_iter().map(Arc::new).collect();
                (self.visit)(Seen::Whole {
                    now_ms: meta.now_ms,
                    clock: meta.clock,
                });
            }
            Block::Remembered | Block::Sessions | Block::Watches | Block::Module { .. } => {}
        }
        Ok(())
    }

    fn take_record(&mut self, position: LogPosition, record: &[u8]) -> Result<(), Malformed> {
        match record::read(record)? {
            Record::Handled(handled) => {
                let now_ms = handled.remembered.context.now_ms;
                let origin = Origin {
                    position,
                    now_ms,
                    client: Some(handled.client),
                    policy: self.policies.get(handled.policy as usize),
                };
                wrote(self.key, self.visit, &handled.writes, &origin);
                (self.visit)(Seen::Passed {
                    now_ms,
                    clock: Some(handled.clock),
                });
            }
            Record::Swept {
                now_ms,
                clock,
                writes,
            } => {
                let origin = Origin {
                    position,
                    now_ms,
                    client: None,
                    policy: None,
                };
                wrote(self.key, self.visit, &writes, &origin);
                let clock = Some(clock);
                (self.visit)(Seen::Passed { now_ms, clock });
            }
            Record::Policy(policy) => {
                let known = |it: &Arc<PolicyRecord>| it.digest == policy.digest;
                if !self.policies.iter().any(known) {
                    self.policies.push(Arc::new(policy));
                }
            }
            Record::Started { now_ms, .. } | Record::Stopped { now_ms } => {
                let clock = None;
                (self.visit)(Seen::Passed { now_ms, clock });
            }
            Record::Assignment(_)
            | Record::Sessions(_)
            | Record::Watches(_)
            | Record::ReceiveMax { .. } => {}
        }
        Ok(())
    }
}

fn wrote(key: &[u8], visit: &mut dyn FnMut(Seen<'_>), writes: &[Write], origin: &Origin<'_>) {
    let of_key = |write: &&Write| !write.hidden && write.key() == key;
    for write in writes.iter().filter(of_key) {
        visit(Seen::Wrote(write, origin));
    }
}

impl Sink for Follower<'_> {
    fn reset(&mut self) {
        self.policies.clear();
        (self.visit)(Seen::Nothing);
    }

    fn block(&mut self, block: &[u8]) -> Result<(), String> {
        self.take_block(block).map_err(|error| error.to_string())
    }

    fn record(&mut self, position: LogPosition, record: &[u8]) -> Result<(), String> {
        self.take_record(position, record)
            .map_err(|error| error.to_string())
    }
}

#[cfg(test)]
mod tests;
