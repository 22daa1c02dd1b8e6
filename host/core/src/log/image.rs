//! The image of a store at one log position, as recovery and the offline commands rebuild it.
//!
//! An image is read from the blocks of a snapshot and all records since the snapshot began. No
//! policy is run.
//!
//! A snapshot is taken in pieces while the store continues, so its pieces are of different times.
//! Records contain absolute values, so applying all records since the first piece gives the state
//! of the last. Only captured reads are not absolute. The snapshot contains them for remembered
//! requests, which must therefore be its last piece. For later requests, recovery finds them in the
//! table.

use std::collections::VecDeque;

use super::codec::{Malformed, Reader};
use super::entries::Entries;
use super::record::{self, Handled, PolicyRecord, Record};
use super::skipped_to_ms;
use super::snapshot::{
    self, ENTRIES, META, MODULE, Meta, OWNED_ENTRIES, REMEMBERED, SESSIONS, UNKNOWN, WATCHES,
};
use crate::clock::{Hlc, Stamp};
use crate::limits;
use crate::policy::Assignment;
use crate::store::{
    Change, Duplicates, Entry, Key, Mode, NO_OWNER, Owner, Remembered, Retention, State, Table,
    Write,
};
use statehouse_protocol::SessionId;

/// The image of a store.
pub struct Image {
    /// The tables, the clock, and durable watches.
    pub state: Box<State>,
    /// Requests that may be redelivered.
    pub duplicates: Duplicates,
    /// The sessions of the embedded broker.
    pub sessions: statehouse_mqtt::Recovery,
    /// Policies by their number in records. The last one is active if there is no assignment.
    pub policies: Vec<PolicyRecord>,
    /// The number of the active policy.
    pub active: Option<u32>,
    /// The assignment of policies; `None` if it was never changed.
    pub assignment: Option<Assignment>,
    /// The largest Receive Maximum that a client may have been sent, if it is recorded.
    receive_max: u16,
    /// The latest recorded time.
    pub now_ms: u64,
    /// The latest recorded run.
    pub run: u32,
    /// Watched keys that expired, according to the records. Only the last ones.
    expired: VecDeque<Expired>,
    /// Requests below this number are in the snapshot, or were evicted before it.
    remembered_below: u64,
    /// Whether a request was handled after the snapshot.
    has_later_requests: bool,
    /// Entries of the snapshot with their owners, visible and hidden, while it is read.
    loading: [Vec<(Entry, Owner)>; 2],
    /// Whether to read sessions and requests. Offline commands need only keys.
    whole: bool,
}

/// A watched key that expired.
struct Expired {
    key: Key,
    version: Stamp,
    /// When it expired, as the clock was set later.
    at_ms: u64,
}

/// What a start in another mode discards.
#[derive(Debug, PartialEq, Eq)]
pub struct Forgotten {
    /// Sessions of the embedded broker.
    pub sessions: usize,
    /// Retained messages of the embedded broker.
    pub retained: usize,
    /// Watches of a foreign broker's clients.
    pub watches: usize,
    /// Remembered requests of either mode.
    pub requests: usize,
}

impl Image {
    /// Creates an empty image.
    pub fn new(retention: Retention) -> Self {
        Self {
            state: Box::default(),
            duplicates: Duplicates::new(retention),
            sessions: statehouse_mqtt::Recovery::default(),
            policies: Vec::new(),
            active: None,
            assignment: None,
            receive_max: 0,
            now_ms: 0,
            run: 0,
            expired: VecDeque::new(),
            remembered_below: 0,
            has_later_requests: false,
            loading: [Vec::new(), Vec::new()],
            whole: true,
        }
    }

    /// Creates an empty image that reads only keys.
    pub fn of_keys() -> Self {
        Self {
            whole: false,
            ..Self::new(Retention::default())
        }
    }

    /// Reads a block of a snapshot.
    pub fn block(&mut self, block: &[u8]) -> Result<(), Malformed> {
        let mut reader = Reader(block);
        match reader.u8()? {
            ENTRIES | OWNED_ENTRIES => self.entries(Entries::new(reader))?,
            REMEMBERED if !self.whole => {}
            REMEMBERED => {
                let mut policies = Vec::new();
                for _ in 0..reader.count()? {
                    policies.push(blake3::Hash::from_bytes(reader.array()?));
                }
                while !reader.is_empty() {
                    let policy: usize = reader.small()?;
                    let mut remembered = record::read_remembered(&mut reader, true)?;
                    remembered.context.policy = *policies.get(policy).ok_or(UNNAMED)?;
                    self.duplicates.insert(&remembered, true);
                }
            }
            SESSIONS => self.sessions(reader.0)?,
            WATCHES => {
                self.state.watches.set_durable(true);
                while !reader.is_empty() {
                    let watches = record::read_watches(&mut reader)?;
                    self.state.watches.apply(watches);
                }
            }
            META => {
                let (meta, next_number) = snapshot::read_meta(&mut reader)?;
                self.build_tables();
                self.tick(meta.clock, meta.now_ms);
                // Without it, the versions between the beginning and the first record are unknown.
                self.state
                    .recent
                    .begin_after(meta.begun.unwrap_or(meta.clock));
                self.run = meta.run;
                self.remembered_below = next_number;
                self.duplicates.continue_from(next_number);
                self.policies = meta.policies;
                self.active = meta.active;
                self.assignment = meta.assignment;
                self.raise_receive_max(meta.receive_max);
            }
            // A policy module is a file of its own and not part of the state.
            MODULE => {}
            _ => return Err(UNKNOWN),
        }
        Ok(())
    }

    fn entries(&mut self, entries: Entries<'_>) -> Result<(), Malformed> {
        let (mut last, mut owner) = (None, NO_OWNER);
        for entry in entries {
            let (write, client) = entry?;
            let Change::Set(entry) = write.change else {
                return Err(Malformed("an entry block that contains a removal"));
            };
            if client != last {
                let owners = &mut self.state.owners;
                owner = client.map_or(NO_OWNER, |client| owners.enter(client));
                last = client;
            }
            self.loading[usize::from(write.hidden)].push((entry, owner));
        }
        Ok(())
    }

    /// Reads a record.
    pub fn record(&mut self, record: &[u8]) -> Result<(), Malformed> {
        self.apply(record::read(record)?)
    }

    /// Applies a record.
    pub fn apply(&mut self, record: Record<'_>) -> Result<(), Malformed> {
        self.build_tables();
        match record {
            Record::Handled(handled) => self.handled(*handled)?,
            Record::Swept {
                now_ms,
                clock,
                writes,
            } => {
                self.note_expiries(&writes);
                // Older versions of the program recorded new deadlines as entries. They are no
                // changes.
                let expired: Vec<Write> =
                    writes.iter().filter(|it| it.expired()).cloned().collect();
                self.note_changes(&expired);
                self.state.write_by(&writes, None);
                self.tick(clock, now_ms);
            }
            Record::Policy(policy) => {
                let number = self.number_of(policy);
                if self.assignment.is_none() {
                    self.active = Some(number);
                }
            }
            Record::Assignment(assignment) => {
                let active = |it: &PolicyRecord| it.digest == assignment.active.0;
                let active = self.policies.iter().position(active).ok_or(UNNAMED)?;
                self.active = u32::try_from(active).ok();
                self.assignment = Some(*assignment);
            }
            Record::Started { run, now_ms, mode } => {
                self.begin(mode);
                self.run = self.run.max(run);
                self.now_ms = self.now_ms.max(now_ms);
            }
            Record::Stopped { now_ms } => self.now_ms = self.now_ms.max(now_ms),
            Record::Sessions(changes) => self.sessions(changes)?,
            Record::Watches(watches) => {
                self.state.watches.set_durable(true);
                self.state.watches.apply(watches);
            }
            Record::ReceiveMax { receive_max } => self.raise_receive_max(receive_max),
            Record::Postponed { now_ms, by_ms } => {
                self.duplicates.postpone(by_ms);
                for expired in &mut self.expired {
                    expired.at_ms = expired.at_ms.saturating_add(by_ms);
                }
                self.now_ms = self.now_ms.max(now_ms);
            }
            Record::Deadlines { now_ms, deadlines } => {
                for deadline in &deadlines {
                    self.state.set_deadline(deadline);
                }
                self.now_ms = self.now_ms.max(now_ms);
            }
        }
        Ok(())
    }

    /// Sessions may belong to clients that were sent this Receive Maximum. So their requests are
    /// remembered, even if a lower maximum is sent from now on.
    fn raise_receive_max(&mut self, receive_max: u16) {
        self.receive_max = self.receive_max.max(receive_max);
        self.duplicates.raise_per_session(receive_max);
    }

    /// The last block of a snapshot of this store.
    pub fn meta(&self) -> Meta {
        Meta {
            clock: self.state.hlc.last(),
            now_ms: self.now_ms,
            run: self.run,
            policies: self.policies.clone(),
            active: self.active,
            assignment: self.assignment.clone(),
            // Not the retention: reading a log evicts nothing.
            receive_max: self.receive_max,
            begun: None,
        }
    }

    /// Prepares for a start in `mode`: discards the sessions, requests and watches that only the
    /// other mode can use.
    pub fn begin(&mut self, mode: Mode) -> Forgotten {
        if mode == Mode::Embedded {
            self.expired.clear();
        }
        self.state.recent.note_start(self.state.hlc.last());
        let watches = &mut self.state.watches;
        let (watched, remembered) = (watches.len(), self.duplicates.len());
        watches.set_durable(mode == Mode::Foreign);
        let is_live = |session| Mode::of_session(session) == mode;
        self.duplicates.retain(is_live);
        let (sessions, retained) = match mode {
            Mode::Embedded => (0, 0),
            Mode::Foreign => std::mem::take(&mut self.sessions).counts(),
        };
        Forgotten {
            sessions,
            retained,
            watches: watched - self.state.watches.len(),
            requests: remembered - self.duplicates.len(),
        }
    }

    fn handled(&mut self, handled: Handled<'_>) -> Result<(), Malformed> {
        let Handled {
            client,
            payload,
            policy,
            repeatable,
            clock,
            mut remembered,
            writes,
            ..
        } = handled;
        let now_ms = remembered.context.now_ms;
        if repeatable && self.whole && remembered.number >= self.remembered_below {
            let policy = self.policies.get(policy as usize).ok_or(UNNAMED)?;
            remembered.context.policy = policy.digest;
            // The table still holds the entries that the request read, because its own writes are
            // applied below.
            for read in remembered.captured.iter_mut().flat_map(|it| &mut it.reads) {
                let table = self.state.part(read.hidden);
                let key = read.key.resolve(payload);
                read.entry = key.and_then(|key| table.get(key)).cloned();
            }
            self.remember(remembered);
        }
        self.note_changes(&writes);
        self.state.write_by(&writes, Some(client));
        self.tick(clock, now_ms);
        Ok(())
    }

    /// Remembers a request as the store did, unless its session has ended: requests of ended
    /// sessions must not evict others.
    fn remember(&mut self, remembered: Remembered) {
        if !self.has_later_requests {
            // The begin of a session is recorded before its first request. So all sessions in the
            // snapshot have begun by now, or were not meant to outlive the process.
            self.has_later_requests = true;
            self.retain_sessions();
        }
        let (session, now_ms) = (remembered.delivery.session, remembered.context.now_ms);
        if is_live(&self.sessions, session) {
            self.duplicates.insert(&remembered, true);
            self.duplicates.evict(session, now_ms);
        }
    }

    fn retain_sessions(&mut self) {
        let sessions = &self.sessions;
        self.duplicates.retain(|number| is_live(sessions, number));
    }

    fn note_changes(&mut self, writes: &[Write]) {
        if self.whole {
            self.state.recent.note(writes, limits::RECENT_BYTES_MAX);
        }
    }

    fn note_expiries(&mut self, writes: &[Write]) {
        let watches = &self.state.watches;
        if !watches.are_durable() {
            return;
        }
        for write in writes.iter().filter(|it| !it.hidden) {
            if watches.count_of(write.key()) > 0 {
                let version = write.version();
                self.expired.push_back(Expired {
                    key: Key::copy_from_slice(write.key()),
                    version,
                    at_ms: version.wall,
                });
            }
        }
        let kept = limits::EXPIRIES_RENOTIFIED_MAX;
        let over = self.expired.len().saturating_sub(kept);
        self.expired.drain(..over);
    }

    /// Recently expired keys that were watched, if watches are durable: the earlier run may have
    /// ended before it notified their watchers. Expiries that happened before the snapshot are not
    /// known.
    pub fn ends(&self) -> Vec<(Key, Stamp)> {
        let recent_ms = limits::EXPIRIES_RENOTIFIED_MS_MAX;
        let since_ms = self.now_ms.saturating_sub(recent_ms);
        let expired = self.expired.iter().filter(|it| {
            let recent = it.at_ms >= since_ms;
            recent && self.state.table.get(&it.key).is_none()
        });
        expired.map(|it| (it.key.clone(), it.version)).collect()
    }

    /// Must be called at the end: discards everything that a continuing store would not remember.
    pub fn finish(&mut self) {
        self.build_tables();
        self.retain_sessions();
        // The retention limits may be lower than before. Time 0 leaves expired requests to the next
        // request, and no session is preferred for eviction.
        self.duplicates.evict(SessionId::NONE, 0);
    }

    /// Skips the versions that may have been answered but are not on the disk. Must be called at a
    /// start after a crash if answers left before their records were durable. `wall_ms` is the wall
    /// clock, in milliseconds since 1970. If it was set back since the last flush before the crash,
    /// a version may be assigned twice.
    pub fn skip_unrecorded_versions(&mut self, wall_ms: u64) {
        let last = self.state.hlc.last();
        // A client that has a lost version must learn that it was revoked.
        self.state.recent.note_start(last);
        let wall = skipped_to_ms(last.wall, self.now_ms.max(wall_ms));
        let skipped = Stamp { wall, counter: 0 };
        self.state.hlc = Hlc::at(last.max(skipped));
    }

    /// Builds the tables from the entries of the snapshot. They are sorted, so this is much faster
    /// than single insertions.
    fn build_tables(&mut self) {
        if self.loading.iter().all(Vec::is_empty) {
            return;
        }
        let [visible, hidden] = &mut self.loading;
        if !visible.is_empty() {
            self.state.table = Table::of(std::mem::take(visible));
        }
        if !hidden.is_empty() {
            self.state.hidden = Table::of(std::mem::take(hidden));
        }
        self.state.count_owners();
    }

    fn sessions(&mut self, changes: &[u8]) -> Result<(), Malformed> {
        if !self.whole {
            return Ok(());
        }
        let ended = self.sessions.apply(changes);
        let ended =
            ended.map_err(|_| Malformed("session changes that the broker cannot decode"))?;
        self.duplicates.ended(&ended);
        Ok(())
    }

    fn tick(&mut self, clock: Stamp, now_ms: u64) {
        self.state.hlc = Hlc::at(self.state.hlc.last().max(clock));
        self.now_ms = self.now_ms.max(now_ms);
    }

    /// The number of a policy in records. A new policy gets the next number.
    pub fn number_of(&mut self, policy: PolicyRecord) -> u32 {
        let is_it = |it: &PolicyRecord| it.digest == policy.digest;
        let number = self.policies.iter().position(is_it).unwrap_or_else(|| {
            self.policies.push(policy);
            self.policies.len() - 1
        });
        u32::try_from(number).unwrap_or(u32::MAX)
    }

    /// Discards everything, to read another snapshot.
    pub fn reset(&mut self) {
        let whole = self.whole;
        *self = Self {
            whole,
            ..Self::new(self.duplicates.retention())
        };
    }
}

/// Whether requests of a session may be redelivered. Ends of sessions of a foreign broker are
/// unknown.
fn is_live(sessions: &statehouse_mqtt::Recovery, session: SessionId) -> bool {
    Mode::of_session(session) == Mode::Foreign || sessions.has_session(session)
}

const UNNAMED: Malformed = Malformed("a policy number that no record defines");
