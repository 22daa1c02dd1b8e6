//! The view of one request on the state, and its staged writes, which commit together or not at
//! all.
//!
//! A transaction does no I/O and reads no clock: the time is an argument.

use std::sync::Arc;

use bytes::Bytes;

use super::entry::{Entry, Key};
use super::notification::Recipients;
use super::quota::{Exceeded, Quota};
use super::read_set::{CapturedReads, ReadSet, Recording, within};
use super::rights::Rights;
use super::state::State;
use super::watch::Scope;
use super::write::{Change, Write};
use crate::clock::{Hlc, Stamp};
use crate::limits;
use crate::policy::{self, Denial, Fault, Put, Routes};
use crate::request::{self, Dialect, Request};
use statehouse_protocol::Peer;
use statehouse_protocol::rights::{ClientRights, Right};

mod client_usage;
mod fence;
mod imports;
mod watches;

use client_usage::ClientUsage;

/// One request's view of the state. It owns the state while the policy runs, so the guest can
/// access it without a lock and without unsafe code.
pub struct Transaction {
    state: Box<State>,
    origin: Option<Origin>,
    quota: Quota,
    now_ms: u64,
    hlc: Hlc,
    /// Keys that the policy opened as hidden.
    hidden: Vec<Key>,
    staged: Vec<Write>,
    /// The weight of the staged entries.
    staged_bytes: u64,
    /// Keys and bytes of both tables, including everything staged.
    load: (u64, u64),
    /// What the client owns. Set by its first put.
    client_usage: Option<ClientUsage>,
    watches: Vec<StagedWatch>,
    /// The client's rights when it began a watch.
    watch_rights: Option<Arc<dyn ClientRights>>,
    /// Changes of earlier requests that the client missed. It is sent these before the answer.
    missed: Option<Vec<Change>>,
    read_set: ReadSet,
    /// Set for a routed policy: it may write only keys that the routes give to it.
    confined: Option<(policy::Digest, Arc<Routes>)>,
    rights: Rights,
    /// The first key that the client had no right to.
    denied: Option<(Key, Right)>,
    /// The first limit that refused something.
    exceeded: Option<Exceeded>,
    /// Keys and patterns that were examined and not charged to the policy yet.
    examined: u64,
}

/// A watch to begin (true) or to end.
type StagedWatch = (Scope, Key, bool);

/// The request of a transaction. A sweep has none.
struct Origin {
    peer: Peer,
    dialect: Dialect,
    properties: statehouse_mqtt::Properties,
    payload: Bytes,
    /// Seeded at the first draw: most requests never draw, and hashing each of them would cost more
    /// than the rest of a GET.
    random: Option<Box<blake3::OutputReader>>,
}

impl Origin {
    /// The first user property with this name.
    fn property(&self, name: &str) -> Option<&str> {
        let mut user = self.properties.user();
        let first = user.find(|(found, _)| *found == name);
        first.map(|(_, value)| value)
    }

    /// The seed of the request's pseudo-random bytes. It must be the same for a redelivery.
    fn seed(&self) -> [u8; 32] {
        let timestamp = self.property(self.dialect.version_property());
        let token = self.property(self.dialect.fencing_property());
        let client = &self.peer.client;
        let identity = request::identity(client, &self.payload, &self.properties, timestamp, token);
        *blake3::hash(&identity).as_bytes()
    }
}

impl Transaction {
    /// Begins a request.
    pub fn begin(state: Box<State>, quota: Quota, now_ms: u64, request: &Request<'_>) -> Box<Self> {
        let origin = Origin {
            peer: request.peer.clone(),
            dialect: request.dialect,
            properties: request.properties.clone(),
            payload: request.payload.clone(),
            random: None,
        };
        let rights = Rights::of(request.grants);
        Self::new(state, quota, now_ms, Some(origin), rights)
    }

    /// Begins a request of a client at 10 ms.
    #[cfg(test)]
    fn of_client(state: Box<State>, quota: Quota, client: &str) -> Box<Self> {
        let peer = Peer::numbered(client, 1);
        let request = Request {
            dialect: Dialect::Sdk,
            payload: &Bytes::new(),
            timestamp: None,
            fencing_token: None,
            peer: &peer,
            properties: &statehouse_mqtt::Properties::default(),
            delivery: crate::request::Delivery::new(&peer, 1, false),
            grants: None,
        };
        Self::begin(state, quota, 10, &request)
    }

    /// Puts a value without a fence or an expiry, as a policy does.
    #[cfg(test)]
    fn put_plain(&mut self, key: &[u8], value: &[u8]) -> Result<Stamp, Denial> {
        policy::Host::put(
            self,
            Put {
                key,
                value,
                observed: None,
                fence: None,
                expires_ms: None,
            },
        )
    }

    /// Begins a re-execution. Imports are answered from the recording.
    pub(super) fn reexecute(
        state: Box<State>,
        quota: Quota,
        now_ms: u64,
        request: &Request<'_>,
        recording: Recording,
    ) -> Box<Self> {
        let mut transaction = Self::begin(state, quota, now_ms, request);
        transaction.read_set = ReadSet::replaying(recording);
        transaction.rights = transaction.rights.recorded();
        transaction
    }

    /// Begins a sweep, which has no client.
    pub fn sweep(state: Box<State>, quota: Quota, now_ms: u64) -> Box<Self> {
        Self::new(state, quota, now_ms, None, Rights::All)
    }

    fn new(
        state: Box<State>,
        quota: Quota,
        now_ms: u64,
        origin: Option<Origin>,
        rights: Rights,
    ) -> Box<Self> {
        let hlc = state.hlc;
        let load = state.load();
        Box::new(Self {
            state,
            origin,
            quota,
            now_ms,
            hlc,
            hidden: Vec::new(),
            staged: Vec::new(),
            staged_bytes: 0,
            load,
            client_usage: None,
            watches: Vec::new(),
            watch_rights: None,
            missed: None,
            read_set: ReadSet::default(),
            confined: None,
            rights,
            denied: None,
            exceeded: None,
            examined: 0,
        })
    }

    /// Restricts writes of visible keys to those that a route gives to the policy.
    pub(super) fn confine(&mut self, policy: policy::Digest, routes: &Arc<Routes>) {
        self.confined = Some((policy, routes.clone()));
    }

    /// The visible changes, in order. Watchers are notified of these.
    pub fn changes(&self) -> impl Iterator<Item = &Change> {
        let visible = self.staged.iter().filter(|it| !it.hidden);
        visible.map(|it| &it.change)
    }

    pub(super) fn begins_watch(&self) -> bool {
        self.watches.iter().any(|(.., on)| *on)
    }

    /// The watches that the request ends.
    pub(super) fn ended_watches(&self) -> impl Iterator<Item = (Scope, Key)> {
        let ended = self.watches.iter().filter(|(.., on)| !on);
        ended.map(|(scope, key, _)| (*scope, key.clone()))
    }

    /// The changes that the client missed, and the client with the dialect of its request.
    pub(super) fn take_missed(&mut self) -> Vec<(Change, Recipients)> {
        let Some(Origin { peer, dialect, .. }) = &self.origin else {
            return Vec::new();
        };
        let missed = self.missed.take().into_iter().flatten();
        missed
            .map(|change| (change, Recipients::one(peer, *dialect)))
            .collect()
    }

    /// The state as it was before this request.
    pub fn state(&self) -> &State {
        &self.state
    }

    /// The entry whose value a response may include: as this request sees it, if the client may
    /// read it.
    pub fn entry(&mut self, key: &[u8]) -> Option<&Entry> {
        self.check_right(key, Right::Read).ok()?;
        self.note_read(key, false).ok()?;
        self.view(key, false)
    }

    /// Returns the captured reads, or `None` if they exceed the limits. Later reads are not
    /// captured and need no right: they serve notifications.
    pub(super) fn take_captured(&mut self) -> Option<CapturedReads> {
        self.rights = Rights::All;
        self.read_set.take()
    }

    /// The first key that the client had no right to.
    pub(super) fn take_denied(&mut self) -> Option<(Key, Right)> {
        self.denied.take()
    }

    /// The first limit that refused something.
    pub(super) fn exceeded(&self) -> Option<Exceeded> {
        self.exceeded
    }

    /// Whether a strict re-execution asked for something that the recording does not hold.
    pub(super) fn diverged(&self) -> bool {
        self.read_set.diverged && !self.read_set.is_lenient()
    }

    /// Whether a lenient re-execution got an answer that neither the recording nor the table holds.
    pub(super) fn guessed(&self) -> bool {
        self.read_set.guessed()
    }

    /// Keys that a re-execution on a partial state read and did not find there.
    pub(super) fn missing_reads(&self) -> &[(bool, Key)] {
        &self.read_set.missing_reads
    }

    /// The staged writes.
    pub fn staged(&self) -> &[Write] {
        &self.staged
    }

    /// Removes a key that has expired. Returns false if it is absent or has not expired.
    pub fn expire(&mut self, key: &[u8]) -> bool {
        let entry = self.state.table.get(key);
        let expired = entry.is_some_and(|entry| entry.expired(self.now_ms));
        if expired {
            self.stage_removal(key, None, Change::Expired);
        }
        expired
    }

    /// Applies everything staged. Returns the writes, and the watches of the client that began
    /// (true) or ended.
    pub fn commit(mut self: Box<Self>) -> (Box<State>, Vec<Write>, Vec<StagedWatch>) {
        self.state.hlc = self.hlc;
        let owner = self.owner();
        self.state.write_all(&self.staged, owner);
        (self.state.recent).note(&self.staged, self.quota.recent_bytes_max);
        if let Some(Origin { peer, dialect, .. }) = &self.origin {
            let watches = &mut self.state.watches;
            let began = self.watches.iter().any(|(.., on)| *on);
            self.watches.retain(|(scope, key, on)| match on {
                true => watches.add(*scope, key.clone(), peer, *dialect),
                false => watches.remove(*scope, key, peer),
            });
            if began {
                watches.set_rights(peer, self.watch_rights.take());
            }
        }
        (self.state, self.staged, self.watches)
    }

    /// Discards everything staged.
    pub fn roll_back(self: Box<Self>) -> Box<State> {
        self.state
    }

    /// Captures the entry of a key before this request.
    fn note_read(&mut self, key: &[u8], hidden: bool) -> Result<(), Denial> {
        let Some(origin) = &self.origin else {
            return Ok(());
        };
        let table = self.state.part(hidden);
        let entry = || table.get(key).cloned();
        if self.read_set.read(key, hidden, &origin.payload, entry) {
            Ok(())
        } else {
            Err(DIVERGED)
        }
    }

    fn is_hidden(&self, key: &[u8]) -> bool {
        self.hidden.iter().any(|hidden| hidden == key)
    }

    /// The entry as this request sees it: its own writes first, expired entries absent.
    fn view(&self, key: &[u8], hidden: bool) -> Option<&Entry> {
        match self.staged_of(key, hidden) {
            Some(staged) => staged.entry(),
            None => self
                .held(key, hidden)
                .filter(|entry| !entry.expired(self.now_ms)),
        }
    }

    /// The last staged write of a key.
    fn staged_of(&self, key: &[u8], hidden: bool) -> Option<&Write> {
        let mut last = self.staged.iter().rev();
        last.find(|it| it.hidden == hidden && it.key() == key)
    }

    /// The entry of a key before this request, expired or not. A captured read saves a second
    /// search.
    fn held(&self, key: &[u8], hidden: bool) -> Option<&Entry> {
        let origin = self.origin.as_ref();
        let read = origin.and_then(|it| self.read_set.known(key, hidden, &it.payload));
        match read {
            Some(read) => read.entry.as_ref(),
            None => self.state.part(hidden).get(key),
        }
    }

    fn stage(&mut self, write: Write) {
        let (key, hidden) = (write.key(), write.hidden);
        let (mut keys, mut bytes) = self.load;
        let before = match self.staged_of(key, hidden) {
            Some(staged) => staged.entry(),
            None => self.held(key, hidden),
        };
        if let Some(before) = before {
            keys -= 1;
            bytes -= before.weight();
        }
        if let Some(after) = write.entry() {
            keys += 1;
            bytes += after.weight();
        }
        self.load = (keys, bytes);
        self.staged.push(write);
    }

    /// Checks the client's right to a visible key.
    fn check_right(&mut self, key: &[u8], right: Right) -> Result<(), Denial> {
        if let Rights::All = self.rights {
            return Ok(());
        }
        let payload = self.origin.as_ref().map(|it| &it.payload[..]);
        let payload = payload.unwrap_or_default();
        self.examined += self.rights.tries(right) as u64;
        if self.rights.include(key, right, &self.read_set, payload) {
            return Ok(());
        }
        self.read_set.denied(key, right, payload);
        self.denied
            .get_or_insert_with(|| (Key::copy_from_slice(key), right));
        Err(Denial::Fault(Fault::Denied))
    }

    fn check_owner(&self, key: &[u8], hidden: bool) -> Result<(), Denial> {
        match &self.confined {
            Some((policy, routes)) if !hidden && !routes.owns(policy, key) => Err(
                Denial::Violation("a write of a key beyond the prefixes that are routed to it"),
            ),
            _ => Ok(()),
        }
    }

    fn room_for_effects(&self) -> Result<(), Denial> {
        if self.staged.len() >= limits::STAGED_WRITES_MAX {
            return Err(Denial::Violation("more writes than one request may stage"));
        }
        Ok(())
    }

    /// The position in the payload of bytes that the policy passed.
    fn place(&self, part: &[u8]) -> Option<u32> {
        let origin = self.origin.as_ref()?;
        Some(within(part, &origin.payload)?.start)
    }

    /// Stages the removal of a visible key, with a version of its own.
    fn stage_removal(
        &mut self,
        key: &[u8],
        key_at: Option<u32>,
        how: impl FnOnce(Key, Stamp) -> Change,
    ) {
        let version = self.hlc.tick(self.now_ms);
        self.stage(Write {
            change: how(Key::copy_from_slice(key), version),
            hidden: false,
            key_at,
            value_at: None,
        });
    }

    fn stage_put(&mut self, put: Put<'_>, hidden: bool, observed: Stamp) -> Result<Stamp, Denial> {
        let (hlc, staged, load, usage) =
            (self.hlc, self.staged.len(), self.load, self.client_usage);
        if !hidden {
            self.expire_before_write(put.key);
        }
        let before = self.load;
        self.count_client_usage(put.key, hidden);
        let version = self.hlc.receive(observed, self.now_ms);
        let (key_at, value_at) = (self.place(put.key), self.place(put.value));
        let fence = put.fence.as_ref();
        let entry = Entry::new(put.key, put.value, version, fence, put.expires_ms);
        let bytes = entry.weight();
        if bytes > limits::STAGED_BYTES_MAX - self.staged_bytes {
            return Err(Denial::Violation(
                "more bytes of writes than one request may stage",
            ));
        }
        self.stage(Write {
            change: Change::Set(entry),
            hidden,
            key_at,
            value_at,
        });
        if !self.read_set.is_replaying()
            && let Err(bound) =
                (self.quota.check(before, self.load)).and_then(|()| self.check_client_usage(bytes))
        {
            // A refused put has no effect at all, not even the removal of an expired entry: a
            // re-execution is refused before it has any.
            self.staged.truncate(staged);
            (self.hlc, self.load, self.client_usage) = (hlc, load, usage);
            return Err(self.exceeds(bound));
        }
        self.staged_bytes += bytes;
        Ok(version)
    }

    /// Removes an expired key before it is written again, so that watchers are notified of the
    /// expiry first, with a lower version.
    fn expire_before_write(&mut self, key: &[u8]) {
        let expired = |entry: &Entry| entry.expired(self.now_ms);
        if self.staged_of(key, false).is_none() && self.held(key, false).is_some_and(expired) {
            let key_at = self.place(key);
            self.stage_removal(key, key_at, Change::Expired);
        }
    }
}

/// A re-execution asked for something that the recording does not hold.
const DIVERGED: Denial = Denial::Violation("an import that the recorded run did not call");

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::Host;

    /// A re-execution is refused before it stages anything, so the first execution must not stage
    /// anything either.
    #[test]
    fn refused_put_has_no_effect() {
        let entry = Entry::new(b"k", b"old", Stamp::default(), None, Some(5));
        let mut state = Box::<State>::default();
        state.table.insert(entry);
        let quota = Quota {
            bytes_max: 100,
            ..Quota::default()
        };
        let mut transaction = Transaction::sweep(state, quota, 10);
        let refused = transaction.put_plain(b"k", &[0; 500]);
        assert!(matches!(refused, Err(Denial::Fault(Fault::Quota))));
        assert!(transaction.staged().is_empty());
        let (state, ..) = transaction.commit();
        assert_eq!(state.hlc, Hlc::default());
        let kept = state.table.get(b"k").is_some();
        assert!(kept, "only a sweep removes it, with a notification");
    }

    /// Policies are charged for these. Otherwise a page of keys that the client may not read would
    /// cost nothing.
    #[test]
    fn page_charges_for_every_examined_key() {
        let mut state = Box::<State>::default();
        for (n, key) in [b"a", b"b", b"c", b"d"].into_iter().enumerate() {
            let expires_ms = (n % 2 == 0).then_some(5);
            let entry = Entry::new(key, b"", Stamp::default(), None, expires_ms);
            state.table.insert(entry);
        }
        let mut transaction = Transaction::sweep(state, Quota::default(), 10);
        let page = transaction.keys(b"", None, 10).unwrap();
        assert_eq!(page.keys, [b"b", b"d"]);
        assert_eq!(transaction.take_examined(), 4);
        assert_eq!(transaction.take_examined(), 0);
    }
}
