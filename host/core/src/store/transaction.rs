//! What one request sees and stages: the key table as of this request, and the writes that commit
//! together or not at all.
//!
//! What enters: calls of the policy. What leaves, at [`Transaction::commit`]: the changed state.
//! It does no I/O and reads no clock: time is an argument.

use std::sync::Arc;

use bytes::Bytes;

use super::capture::{Capture, Evidence, Script, within};
use super::entry::{Entry, Key};
use super::quota::{Exceeded, Quota};
use super::rights::Rights;
use super::state::State;
use super::table::Table;
use super::write::{Change, Write};
use crate::clock::{Hlc, Stamp};
use crate::limits;
use crate::policy::{self, Denial, Fault, Put, Routes};
use crate::request::{self, Dialect, Request};
use statehouse_protocol::Peer;
use statehouse_protocol::rights::Right;

mod imports;
mod own;

use own::Own;

/// One request's view of the state. It owns the state while the policy runs, so that no lock and no
/// unsafe code is needed to lend it to the guest.
pub struct Transaction {
    state: Box<State>,
    origin: Option<Origin>,
    quota: Quota,
    now_ms: u64,
    hlc: Hlc,
    /// Keys that were opened as hidden.
    hidden: Vec<Key>,
    staged: Vec<Write>,
    /// What the staged entries weigh.
    staged_bytes: u64,
    /// Keys and bytes with everything staged, of both tables.
    load: (u64, u64),
    /// What its client owns, from its first put on.
    own: Option<Own>,
    watches: Vec<(Key, bool)>,
    capture: Capture,
    /// Whose keys may be written, where that is not anybody's.
    confined: Option<(policy::Digest, Arc<Routes>)>,
    /// What the client may touch.
    rights: Rights,
    /// The first key that it had no right to.
    denied: Option<(Key, Right)>,
    /// The first bound that said no.
    exceeded: Option<Exceeded>,
    /// Keys and patterns that were examined, until the policy is charged for them.
    looks: u64,
}

/// Whose request it is. A sweep has none.
struct Origin {
    peer: Peer,
    dialect: Dialect,
    properties: statehouse_mqtt::Properties,
    payload: Bytes,
    /// Seeded at the first draw: most requests never draw, and hashing them all would cost more than
    /// the rest of a GET.
    random: Option<Box<blake3::OutputReader>>,
}

impl Origin {
    /// What the request's pseudo-random bytes come from: the same for a redelivery.
    fn seed(&self) -> [u8; 32] {
        let first = |name| self.properties.user().find(|(found, _)| *found == name);
        let timestamp = first(self.dialect.version_property()).map(|(_, value)| value);
        let token = first(self.dialect.fencing_property()).map(|(_, value)| value);
        let client = &self.peer.client;
        let identity = request::identity(client, &self.payload, &self.properties, timestamp, token);
        *blake3::hash(&identity).as_bytes()
    }
}

impl Transaction {
    /// Begins a request.
    pub fn begin(state: Box<State>, quota: Quota, now_ms: u64, request: &Request<'_>) -> Self {
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

    /// Begins a request that was handled before: what it asks is answered from the recording.
    pub(super) fn again(
        state: Box<State>,
        quota: Quota,
        now_ms: u64,
        request: &Request<'_>,
        script: Script,
    ) -> Self {
        let mut transaction = Self::begin(state, quota, now_ms, request);
        transaction.capture = Capture::playing(script);
        transaction.rights = transaction.rights.recorded();
        transaction
    }

    /// Begins a sweep: no client asked for it.
    pub fn sweep(state: Box<State>, quota: Quota, now_ms: u64) -> Self {
        Self::new(state, quota, now_ms, None, Rights::All)
    }

    fn new(
        state: Box<State>,
        quota: Quota,
        now_ms: u64,
        origin: Option<Origin>,
        rights: Rights,
    ) -> Self {
        let hlc = state.hlc;
        let load = state.load();
        Self {
            state,
            origin,
            quota,
            now_ms,
            hlc,
            hidden: Vec::new(),
            staged: Vec::new(),
            staged_bytes: 0,
            load,
            own: None,
            watches: Vec::new(),
            capture: Capture::default(),
            confined: None,
            rights,
            denied: None,
            exceeded: None,
            looks: 0,
        }
    }

    /// Lets nothing be written but keys that a policy owns by a route. Hidden ones are its own bookkeeping.
    pub(super) fn confine(&mut self, policy: policy::Digest, routes: &Arc<Routes>) {
        self.confined = Some((policy, routes.clone()));
    }

    /// What watchers are to hear, in the order it happened.
    pub fn changes(&self) -> impl Iterator<Item = &Change> {
        let visible = self.staged.iter().filter(|it| !it.hidden);
        visible.map(|it| &it.change)
    }

    /// The state as it was before this request.
    pub fn state(&self) -> &State {
        &self.state
    }

    /// The entry whose value a reply may carry: what this request sees under the key, where its client may read it.
    pub fn entry(&mut self, key: &[u8]) -> Option<&Entry> {
        self.check_right(key, Right::Read).ok()?;
        self.note_read(key, false).ok()?;
        self.view(key, false)
    }

    /// What was read so far; none where it is too much to keep. What is read later is not noted, and needs no right: it is for
    /// those who watch.
    pub(super) fn take_evidence(&mut self) -> Option<Evidence> {
        self.rights = Rights::All;
        self.capture.take()
    }

    /// The first key that the client had no right to, if there was one.
    pub(super) fn take_denied(&mut self) -> Option<(Key, Right)> {
        self.denied.take()
    }

    /// The first bound that said no, if one did.
    pub(super) fn exceeded(&self) -> Option<Exceeded> {
        self.exceeded
    }

    /// Whether a request that runs again asked what the recorded one did not, and may not.
    pub(super) fn strayed(&self) -> bool {
        self.capture.strayed && !self.capture.is_lenient()
    }

    /// Whether a request that runs again got answers that nobody recorded and the table does not hold.
    pub(super) fn guessed(&self) -> bool {
        self.capture.guessed()
    }

    /// Keys that a run over parts of the state read beyond them.
    pub(super) fn wanted(&self) -> &[(bool, Key)] {
        &self.capture.wanted
    }

    /// What is staged.
    pub fn staged(&self) -> &[Write] {
        &self.staged
    }

    /// Removes a key that has expired, as a sweep does. False where another step was faster.
    pub fn expire(&mut self, key: &[u8]) -> bool {
        let expired = self
            .state
            .table
            .get(key)
            .is_some_and(|entry| entry.expired(self.now_ms));
        if expired {
            self.stage_removal(key, None, Change::Expired);
        }
        expired
    }

    /// Makes everything staged real. Returns what was written, and which watches of the request's client began (true)
    /// or ended.
    pub fn commit(mut self) -> (Box<State>, Vec<Write>, Vec<(Key, bool)>) {
        self.state.hlc = self.hlc;
        let owner = self.owner();
        self.state.write_all(&self.staged, owner);
        if let Some(Origin { peer, dialect, .. }) = &self.origin {
            let watches = &mut self.state.watches;
            self.watches.retain(|(key, on)| match on {
                true => watches.add(key.clone(), peer, *dialect),
                false => watches.remove(key, peer),
            });
        }
        (self.state, self.staged, self.watches)
    }

    /// Forgets everything staged.
    pub fn roll_back(self) -> Box<State> {
        self.state
    }

    /// Notes what a key held before this request.
    fn note_read(&mut self, key: &[u8], hidden: bool) -> Result<(), Denial> {
        let Some(origin) = &self.origin else {
            return Ok(());
        };
        let table = self.state.part(hidden);
        let entry = || table.get(key).cloned();
        if self.capture.read(key, hidden, &origin.payload, entry) {
            Ok(())
        } else {
            Err(STRAYED)
        }
    }

    fn is_hidden(&self, key: &[u8]) -> bool {
        self.hidden.iter().any(|hidden| hidden == key)
    }

    fn table(&self, hidden: bool) -> &Table {
        self.state.part(hidden)
    }

    /// The entry as this request sees it: its own writes first, expired ones absent.
    fn view(&self, key: &[u8], hidden: bool) -> Option<&Entry> {
        match self.staged_of(key, hidden) {
            Some(staged) => staged.entry(),
            None => self
                .held(key, hidden)
                .filter(|entry| !entry.expired(self.now_ms)),
        }
    }

    /// The last write of a key that is staged.
    fn staged_of(&self, key: &[u8], hidden: bool) -> Option<&Write> {
        let mut last = self.staged.iter().rev();
        last.find(|it| it.hidden == hidden && it.key() == key)
    }

    /// What a key held before this request, expired or not: searched for once.
    fn held(&self, key: &[u8], hidden: bool) -> Option<&Entry> {
        let origin = self.origin.as_ref();
        let read = origin.and_then(|it| self.capture.known(key, hidden, &it.payload));
        match read {
            Some(read) => read.entry.as_ref(),
            None => self.table(hidden).get(key),
        }
    }

    /// Stages a write.
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

    /// Whether the client may do this to a key. Policies' own keys are not its business.
    fn check_right(&mut self, key: &[u8], right: Right) -> Result<(), Denial> {
        if let Rights::All = self.rights {
            return Ok(());
        }
        let payload = self.origin.as_ref().map(|it| &it.payload[..]);
        let payload = payload.unwrap_or_default();
        self.looks += self.rights.tries(right) as u64;
        if self.rights.include(key, right, &self.capture, payload) {
            return Ok(());
        }
        self.capture.denied(key, right, payload);
        self.denied
            .get_or_insert_with(|| (Key::copy_from_slice(key), right));
        Err(Denial::Fault(Fault::Denied))
    }

    fn check_owner(&self, key: &[u8], hidden: bool) -> Result<(), Denial> {
        match &self.confined {
            Some((policy, routes)) if !hidden && !routes.owns(policy, key) => Err(
                Denial::Violation("a write of a key beyond the prefixes that it is routed for"),
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

    /// Where bytes that the policy named stand in the payload.
    fn place(&self, part: &[u8]) -> Option<u32> {
        let origin = self.origin.as_ref()?;
        Some(within(part, &origin.payload)?.start)
    }

    /// Stages the end of a visible key, which watchers hear of with a version of its own.
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
        let (hlc, staged, load, own) = (self.hlc, self.staged.len(), self.load, self.own);
        if !hidden {
            self.expire_before_write(put.key);
        }
        let before = self.load;
        self.count_own(put.key, hidden);
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
        if !self.capture.is_playing()
            && let Err(bound) =
                (self.quota.check(before, self.load)).and_then(|()| self.check_own(bytes))
        {
            // With all that came with it: what is refused has no effect, and a request that runs again is refused
            // before it has any.
            self.staged.truncate(staged);
            (self.hlc, self.load, self.own) = (hlc, load, own);
            return Err(self.exceeds(bound));
        }
        self.staged_bytes += bytes;
        Ok(version)
    }

    /// A key that expired and that no sweep has removed yet goes before anything is written over it,
    /// so that its watchers hear of its end first, with a version below the new one's.
    fn expire_before_write(&mut self, key: &[u8]) {
        let expired = |entry: &Entry| entry.expired(self.now_ms);
        if self.staged_of(key, false).is_none() && self.held(key, false).is_some_and(expired) {
            let key_at = self.place(key);
            self.stage_removal(key, key_at, Change::Expired);
        }
    }
}

/// A request that runs again asked for something that the recorded one did not.
const STRAYED: Denial = Denial::Violation("a question that the recorded run did not ask");

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::Host;

    /// A request that runs again is refused before it stages anything, so the first run may keep nothing either.
    #[test]
    fn a_put_that_is_refused_has_no_effect_at_all() {
        let entry = Entry::new(b"k", b"old", Stamp::default(), None, Some(5));
        let mut state = Box::<State>::default();
        state.table.insert(entry);
        let quota = Quota {
            keys_max: 10,
            bytes_max: 100,
            key_bytes_max: 100,
            value_bytes_max: 1_000,
            ..Quota::default()
        };
        let mut transaction = Transaction::sweep(state, quota, 10);
        let put = Put {
            key: b"k",
            value: &[0; 500],
            observed: None,
            fence: None,
            expires_ms: None,
        };
        let refused = transaction.put(put);
        assert!(matches!(refused, Err(Denial::Fault(Fault::Quota))));
        assert!(transaction.staged().is_empty());
        let (state, ..) = transaction.commit();
        assert_eq!(state.hlc, Hlc::default());
        assert!(state.table.get(b"k").is_some(), "a sweep tells of its end");
    }

    /// A policy is charged for these, or a page of keys that the client may not read would cost
    /// nothing.
    #[test]
    fn every_key_that_a_page_examines_counts_as_a_look() {
        let mut state = Box::<State>::default();
        for (n, key) in [b"a", b"b", b"c", b"d"].into_iter().enumerate() {
            let expires_ms = (n % 2 == 0).then_some(5);
            let entry = Entry::new(key, b"", Stamp::default(), None, expires_ms);
            state.table.insert(entry);
        }
        let mut transaction = Transaction::sweep(state, Quota::default(), 10);
        let page = transaction.keys(b"", None, 10).unwrap();
        assert_eq!(page.keys, [b"b", b"d"]);
        assert_eq!(transaction.take_looks(), 4);
        assert_eq!(transaction.take_looks(), 0);
    }
}
