//! The history of one key: its changes, its value as of a version or a time, and its last writer.
//!
//! The history begins with the oldest snapshot of the directory and covers every record after it.
//! If damage separates this snapshot from the rest, it begins with the next snapshot after the
//! damage.
//!
//! A snapshot is taken while the store continues, so the entry of a key is captured at some moment
//! while the snapshot is taken. The key certainly had this entry from the version of the entry
//! until that moment. If the snapshot has no entry, the key was certainly absent only at the end of
//! the snapshot.

use std::collections::VecDeque;
use std::sync::Arc;

use statehouse_wal::{Base, Damage, LogPosition, Sink};

use super::{Past, PastError, shown};
use statehouse_core::clock::Stamp;
use statehouse_core::log::record::{self, PolicyRecord, Record};
use statehouse_core::log::{Block, Malformed, read_block};
use statehouse_core::store::{self, Entry, NewDeadline, Write};
use statehouse_mqtt::SessionUsers;

mod writer;

pub use writer::Writer;

/// One change of a key.
#[derive(Debug)]
pub struct Change {
    /// The record of the change.
    pub position: LogPosition,
    /// The version of the change.
    pub version: Stamp,
    /// The time of the change, in milliseconds of the store's time.
    pub now_ms: u64,
    /// The kind of the change.
    pub what: What,
    /// The client whose request made the change; `None` if the key expired.
    pub client: Option<String>,
    /// The user of that client. `None` if the client was anonymous, or if the user is not recorded:
    /// behind a foreign broker, by older versions of the program for sessions that end with their
    /// connection, and for sessions that ended while the oldest snapshot was taken.
    pub user: Option<Arc<str>>,
    /// The policy that made the change; `None` if the key expired.
    pub policy: Option<Arc<PolicyRecord>>,
}

/// The kind of a change.
#[derive(Debug)]
pub enum What {
    /// The key was set.
    Set {
        /// The beginning of the value.
        value: Vec<u8>,
        /// The length of the whole value.
        bytes: usize,
        /// The fencing token that protects the key.
        fence: Option<statehouse_core::clock::Fence>,
        /// The time at which the key expires, in milliseconds of the store's time. Steps of the
        /// clock have moved it.
        expires_ms: Option<u64>,
    },
    /// The key was deleted.
    Deleted,
    /// The key expired.
    Expired,
}

/// The recorded changes of a key.
#[derive(Debug, Default)]
pub struct History {
    /// The last changes, the newest last.
    pub changes: VecDeque<Change>,
    /// The number of all recorded changes.
    pub count: u64,
    /// The time from which on every change is recorded; `None` if since the store began.
    pub since_ms: Option<u64>,
    /// The entry before the first recorded change, if it is known.
    pub before: Option<Entry>,
    /// Whether the key certainly did not exist before the first recorded change. If not, and
    /// without an entry, it is unknown whether it did.
    pub absent_before: bool,
    /// The damage because of which earlier changes cannot be read, if there is any.
    pub damage: Option<String>,
    /// The memory of `changes`.
    bytes: usize,
}

/// A point in the history.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// After the change of this version and before any later change.
    Version(Stamp),
    /// At this time, in milliseconds of the store's time.
    Time(u64),
}

/// The state of a key at a moment.
#[derive(Debug, PartialEq, Eq)]
pub enum AsOf {
    /// The key had this entry.
    Value(Entry),
    /// The key did not exist.
    Absent,
    /// The moment is before the recorded history.
    TooOld {
        /// The time from which on the history is recorded, in milliseconds of the store's time.
        since_ms: u64,
        /// The damage because of which earlier history cannot be read, if there is any.
        damage: Option<String>,
    },
    /// The store has not reached this version; its last version is this.
    NotYet(Stamp),
}

impl Past {
    /// The last changes of a key, at most `limit` of them and `bytes_max` bytes of memory.
    pub fn history(
        &self,
        key: &[u8],
        limit: usize,
        bytes_max: usize,
    ) -> Result<History, PastError> {
        History::read(key, limit, bytes_max, |sink| self.read_oldest(sink))
    }

    /// The state of a key at a moment.
    pub fn as_of(&self, key: &[u8], moment: Moment) -> Result<AsOf, PastError> {
        AsOf::read(key, moment, |sink| self.read_oldest(sink))
    }

    fn read_oldest(&self, sink: &mut dyn Sink) -> Result<(), PastError> {
        self.read(Base::Oldest, LogPosition::END, sink).map(drop)
    }
}

impl History {
    /// Builds the history from the blocks and records that `reading` delivers.
    fn read<E>(
        key: &[u8],
        limit: usize,
        bytes_max: usize,
        reading: impl FnOnce(&mut dyn Sink) -> Result<(), E>,
    ) -> Result<Self, E> {
        let mut history = Self::default();
        // The clock at the end of the snapshot, and the version of the first change.
        let (mut known_from, mut first) = (None, None);
        let mut visit = |event: KeyEvent<'_>| match event {
            KeyEvent::Reset => {
                history = Self::default();
                (known_from, first) = (None, None);
            }
            KeyEvent::SnapshotEntry(entry, _) => history.before = Some(entry),
            KeyEvent::SnapshotEnd { now_ms, clock } => {
                history.since_ms = Some(now_ms);
                known_from = Some(clock);
            }
            // The records begin where the snapshot began, which is before its end.
            KeyEvent::RecordEnd { now_ms, .. } => {
                history.since_ms = history.since_ms.map(|since_ms| since_ms.min(now_ms));
            }
            KeyEvent::Written(write, origin) => {
                first.get_or_insert(write.version());
                history.add(write, origin, limit, bytes_max);
            }
            KeyEvent::Deadline { expires_ms, .. } => history.move_deadline(expires_ms),
            KeyEvent::Gap(damage) => history.damage = Some(damage.place()),
        };
        reading(&mut KeyReader::of(key, &mut visit))?;
        // A key that the snapshot lacks was absent at its end. Until then it may have been removed.
        let is_after = |first: Stamp| known_from.is_none_or(|known_from| first > known_from);
        history.absent_before = history.before.is_none() && first.is_none_or(is_after);
        Ok(history)
    }

    /// Moves the deadline of the last change, which is no change of its own.
    fn move_deadline(&mut self, new_ms: u64) {
        if let Some(change) = self.changes.back_mut()
            && let What::Set {
                expires_ms: Some(expires_ms),
                ..
            } = &mut change.what
        {
            *expires_ms = new_ms;
        }
    }

    fn add(&mut self, write: &Write, origin: &Origin<'_>, limit: usize, bytes_max: usize) {
        // The snapshot already contains this write, so the entry before it is unknown.
        if (self.before.as_ref()).is_some_and(|entry| entry.version() == write.version()) {
            self.before = None;
        }
        self.count += 1;
        let change = Change::new(write, origin);
        self.bytes += change.bytes();
        self.changes.push_back(change);
        while self.changes.len() > limit || self.bytes > bytes_max {
            let Some(oldest) = self.changes.pop_front() else {
                break;
            };
            self.bytes -= oldest.bytes();
        }
    }
}

impl AsOf {
    /// Finds the state in the blocks and records that `reading` delivers.
    fn read<E>(
        key: &[u8],
        moment: Moment,
        reading: impl FnOnce(&mut dyn Sink) -> Result<(), E>,
    ) -> Result<Self, E> {
        let mut search = Search::default();
        let mut visit = |event: KeyEvent<'_>| match event {
            KeyEvent::Reset => search = Search::default(),
            KeyEvent::SnapshotEntry(entry, _) => {
                // The wall of a version is never less than the time at which the version was given.
                if moment.includes(entry.version().wall, entry.version()) {
                    search.found = Some(Some(entry));
                } else {
                    search.later = Some(entry);
                }
            }
            KeyEvent::SnapshotEnd { now_ms, clock } => {
                search.since = Some((now_ms, clock));
                // If a client's clock is ahead, so are the versions of its writes. At the end of
                // the snapshot the key certainly had the entry.
                if moment.includes(now_ms, clock)
                    && let Some(entry) = search.later.take()
                {
                    search.found = Some(Some(entry));
                }
                search.advance(moment, now_ms, clock);
            }
            KeyEvent::RecordEnd {
                now_ms,
                clock: Some(clock),
            } => search.advance(moment, now_ms, clock),
            KeyEvent::RecordEnd { .. } => {}
            KeyEvent::Written(write, origin) => {
                if moment.includes(origin.now_ms, write.version()) {
                    search.found = Some(write.entry().cloned());
                } else {
                    search.is_over = true;
                }
            }
            KeyEvent::Deadline { now_ms, expires_ms } => {
                // The key existed until this record, also during the time that the clock skipped,
                // unless it had expired before. Then the deadline before is the one that counts.
                if let Some(Some(entry)) = &mut search.found
                    && !search.is_over
                    && entry.expires_ms().is_some()
                    && expires_ms > now_ms
                {
                    *entry = entry.with_deadline(expires_ms);
                }
            }
            KeyEvent::Gap(damage) => search.damage = Some(damage.place()),
        };
        reading(&mut KeyReader::of(key, &mut visit))?;
        Ok(search.finish(moment))
    }
}

impl Change {
    /// The memory of this change.
    fn bytes(&self) -> usize {
        let value = match &self.what {
            What::Set { value, .. } => value.len(),
            What::Deleted | What::Expired => 0,
        };
        size_of::<Self>() + value + self.client.as_ref().map_or(0, String::len)
    }

    fn new(write: &Write, origin: &Origin<'_>) -> Self {
        let what = match &write.change {
            store::Change::Set(entry) => {
                let value = entry.value();
                What::Set {
                    value: shown(value).to_vec(),
                    bytes: value.len(),
                    fence: entry.fence(),
                    expires_ms: entry.expires_ms(),
                }
            }
            store::Change::Expired(..) => What::Expired,
            store::Change::Deleted(..) => What::Deleted,
        };
        // The record of the next request contains the expiry, but this request did not cause it.
        let is_of_request = !write.expired();
        Self {
            position: origin.position,
            version: write.version(),
            now_ms: origin.now_ms,
            what,
            client: origin.client.filter(|_| is_of_request).map(str::to_owned),
            user: origin.user.filter(|_| is_of_request).cloned(),
            policy: origin.policy.filter(|_| is_of_request).cloned(),
        }
    }
}

impl Moment {
    /// Whether a change at `now_ms` with this version is not later than this moment.
    fn includes(self, now_ms: u64, version: Stamp) -> bool {
        match self {
            Self::Version(moment) => version <= moment,
            Self::Time(moment_ms) => now_ms <= moment_ms,
        }
    }
}

/// The search for the state of a key at a moment.
#[derive(Default)]
struct Search {
    /// The last known state until the moment: unknown, absent, or an entry.
    found: Option<Option<Entry>>,
    /// Whether the key was written after the moment. New deadlines are of that write.
    is_over: bool,
    /// The entry of the snapshot, if it may be later than the moment.
    later: Option<Entry>,
    /// The time and clock at the end of the snapshot.
    since: Option<(u64, Stamp)>,
    /// The store's time at the moment.
    now_ms: u64,
    /// The latest clock that was read.
    last: Stamp,
    /// The damage because of which earlier history was not read.
    damage: Option<String>,
}

impl Search {
    fn advance(&mut self, moment: Moment, now_ms: u64, clock: Stamp) {
        self.last = self.last.max(clock);
        if moment.includes(now_ms, clock) {
            self.now_ms = now_ms;
        }
    }

    fn finish(self, moment: Moment) -> AsOf {
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
                if self.later.is_some() || !moment.includes(since_ms, clock) =>
            {
                let damage = self.damage;
                AsOf::TooOld { since_ms, damage }
            }
            (None, _) => AsOf::Absent,
        }
    }
}

/// One finding about a key while the log is read.
enum KeyEvent<'a> {
    /// Reading restarts from the beginning.
    Reset,
    /// The entry of the key in the snapshot, and the client that wrote it.
    SnapshotEntry(Entry, Option<&'a str>),
    /// The end of the snapshot, with the store's time and clock.
    SnapshotEnd { now_ms: u64, clock: Stamp },
    /// The end of a record: the store's time, and the clock after the record if it changed.
    RecordEnd { now_ms: u64, clock: Option<Stamp> },
    /// A change of the key. It precedes the end of its record.
    Written(&'a Write, &'a Origin<'a>),
    /// A new deadline of the key. It precedes the end of its record.
    Deadline { now_ms: u64, expires_ms: u64 },
    /// Earlier history is damaged. It follows all records.
    Gap(&'a Damage),
}

struct Origin<'a> {
    position: LogPosition,
    now_ms: u64,
    client: Option<&'a str>,
    user: Option<&'a Arc<str>>,
    policy: Option<&'a Arc<PolicyRecord>>,
}

/// Reads a log and reports the findings about one key.
struct KeyReader<'a> {
    key: &'a [u8],
    /// Policies by their number in records.
    policies: Vec<Arc<PolicyRecord>>,
    users: SessionUsers,
    visit: &'a mut dyn FnMut(KeyEvent<'_>),
}

impl<'a> KeyReader<'a> {
    fn of(key: &'a [u8], visit: &'a mut dyn FnMut(KeyEvent<'_>)) -> Self {
        Self {
            key,
            policies: Vec::new(),
            users: SessionUsers::default(),
            visit,
        }
    }

    fn handle_block(&mut self, block: &[u8]) -> Result<(), Malformed> {
        match read_block(block)? {
            Block::Entries(entries) => {
                for entry in entries {
                    let (write, client) = entry?;
                    if let store::Change::Set(entry) = write.change
                        && !write.hidden
                        && entry.key() == self.key
                    {
                        (self.visit)(KeyEvent::SnapshotEntry(entry, client));
                    }
                }
            }
            Block::Meta(meta) => {
                self.policies = meta.policies.into_iter().map(Arc::new).collect();
                (self.visit)(KeyEvent::SnapshotEnd {
                    now_ms: meta.now_ms,
                    clock: meta.clock,
                });
            }
            Block::Sessions(changes) => self.note_users(changes)?,
            Block::Remembered | Block::Watches | Block::Module { .. } => {}
        }
        Ok(())
    }

    fn note_users(&mut self, changes: &[u8]) -> Result<(), Malformed> {
        let applied = self.users.apply(changes);
        applied.map_err(|_| Malformed("session changes that this version cannot decode"))
    }

    fn handle_record(&mut self, position: LogPosition, record: &[u8]) -> Result<(), Malformed> {
        let (now_ms, clock) = match record::read(record)? {
            Record::Handled(handled) => {
                let now_ms = handled.remembered.context.now_ms;
                let origin = Origin {
                    position,
                    now_ms,
                    client: Some(handled.client),
                    user: self.users.user(handled.remembered.delivery.session),
                    policy: self.policies.get(handled.policy as usize),
                };
                visit_writes(self.key, self.visit, &handled.writes, &origin);
                (now_ms, Some(handled.clock))
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
                    user: None,
                    policy: None,
                };
                visit_writes(self.key, self.visit, &writes, &origin);
                (now_ms, Some(clock))
            }
            Record::Started { now_ms, .. }
            | Record::Stopped { now_ms }
            | Record::Postponed { now_ms, .. } => (now_ms, None),
            Record::Deadlines { now_ms, deadlines } => {
                let of_key = |it: &&NewDeadline| !it.hidden && *it.key == *self.key;
                if let Some(it) = deadlines.iter().find(of_key) {
                    let expires_ms = it.expires_ms;
                    (self.visit)(KeyEvent::Deadline { now_ms, expires_ms });
                }
                (now_ms, None)
            }
            Record::Policy(policy) => {
                let known = |it: &Arc<PolicyRecord>| it.digest == policy.digest;
                if !self.policies.iter().any(known) {
                    self.policies.push(Arc::new(policy));
                }
                return Ok(());
            }
            Record::Sessions(changes) => return self.note_users(changes),
            Record::Assignment(_) | Record::Watches(_) | Record::ReceiveMax { .. } => {
                return Ok(());
            }
        };
        (self.visit)(KeyEvent::RecordEnd { now_ms, clock });
        Ok(())
    }
}

fn visit_writes(
    key: &[u8],
    visit: &mut dyn FnMut(KeyEvent<'_>),
    writes: &[Write],
    origin: &Origin<'_>,
) {
    let of_key = |write: &&Write| !write.hidden && write.key() == key;
    for write in writes.iter().filter(of_key) {
        // Older versions of the program recorded a new deadline as a write of no client.
        let of_no_client = write.entry().filter(|_| origin.client.is_none());
        let now_ms = origin.now_ms;
        visit(match of_no_client.and_then(Entry::expires_ms) {
            Some(expires_ms) => KeyEvent::Deadline { now_ms, expires_ms },
            None => KeyEvent::Written(write, origin),
        });
    }
}

impl Sink for KeyReader<'_> {
    fn reset(&mut self) {
        self.policies.clear();
        self.users = SessionUsers::default();
        (self.visit)(KeyEvent::Reset);
    }

    fn block(&mut self, block: &[u8]) -> Result<(), String> {
        self.handle_block(block).map_err(|error| error.to_string())
    }

    fn record(&mut self, position: LogPosition, record: &[u8]) -> Result<(), String> {
        self.handle_record(position, record)
            .map_err(|error| error.to_string())
    }

    fn gap(&mut self, damage: &Damage) {
        (self.visit)(KeyEvent::Gap(damage));
    }
}

#[cfg(test)]
mod tests;
