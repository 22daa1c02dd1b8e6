//! The host that a policy uses during one request. Reads see staged writes, which commit together
//! or not at all. Pages of keys show the state before the request.

use std::collections::{BTreeMap, BTreeSet};

use super::limits::{
    CURSOR_BYTES_MAX, FENCE_NODE_BYTES_MAX, HIDDEN_KEYS_MAX, MISSED_CHANGES_MAX, PAGE_BYTES_MAX,
    PAGE_KEYS_MAX, RANDOM_BYTES_MAX, WATCH_CHANGES_MAX, WATCH_PREFIX_BYTES_MAX, WRITES_MAX,
};
use super::receive;
use super::table::{Name, Pending, Right, Stored, Table, Watched, resolve};
use crate::limits::SKEW_MS_MAX;
use crate::{
    Access, Bytes, Change, Dialect, Entry, Event, Fault, Hlc, Host, Level, Page, Reached, Request,
    Scope, Stamp,
};

/// The text for a fence that is too far in the future.
const FENCE_AHEAD: &str = "the request fencing token timestamp is too far in the future; ensure that the client and broker system clocks are synchronized";

/// The view that one request has of a [`Table`].
#[derive(Debug)]
pub struct Transaction<'a> {
    table: &'a mut Table,
    request: &'a Request,
    clock: Stamp,
    /// Staged entries; none for a deletion.
    staged: BTreeMap<Name, Option<Stored>>,
    /// The number of staged writes, with those that a later write replaced.
    writes: usize,
    watches: BTreeMap<Watched, Option<Dialect>>,
    /// The number of staged changes of watches, with those that a later one replaced.
    watch_changes: usize,
    /// The keys that were last accessed as hidden ones.
    hidden: BTreeSet<Vec<u8>>,
    pending: Vec<Pending>,
    /// Set by the watch since a version, of which a request may have one.
    missed: Option<Vec<Pending>>,
    seed: u64,
}

impl<'a> Transaction<'a> {
    pub(super) fn new(table: &'a mut Table, request: &'a Request) -> Self {
        Self {
            clock: table.clock,
            table,
            request,
            staged: BTreeMap::new(),
            writes: 0,
            watches: BTreeMap::new(),
            watch_changes: 0,
            hidden: BTreeSet::new(),
            pending: Vec::new(),
            missed: None,
            seed: 0,
        }
    }

    /// Applies the staged writes. Returns the changes that need notifications, and the watches that
    /// begin, each with its dialect, or end. The caller applies these after the notifications.
    pub(super) fn commit(self) -> (Vec<Pending>, BTreeMap<Watched, Option<Dialect>>) {
        let table = self.table;
        table.clock = self.clock;
        for (name, stored) in self.staged {
            match stored {
                Some(stored) => table.entries.insert(name, stored),
                None => table.entries.remove(&name),
            };
        }
        (self.pending, self.watches)
    }

    /// The changes that the client missed, each with the dialect of its request.
    pub(super) fn take_missed(&mut self) -> Vec<(Pending, Dialect)> {
        let missed = self.missed.take().into_iter();
        missed
            .flatten()
            .map(|change| (change, self.request.dialect))
            .collect()
    }

    /// The value that is spliced into a reply.
    pub(super) fn stored(&self, key: &[u8]) -> Vec<u8> {
        assert!(
            self.allow(key, Right::Read).is_ok(),
            "a reply carries the value of a key that the client may not read"
        );
        let stored = self.live(&(false, key.to_vec()));
        match stored {
            Some(stored) => stored.value.clone(),
            None => panic!("a reply carries the value of a key that is not there"),
        }
    }

    fn key(&self, key: &Bytes) -> Vec<u8> {
        resolve(key, &self.request.payload).to_vec()
    }

    fn name(&self, key: &Bytes) -> Name {
        let key = self.key(key);
        (self.hidden.contains(&key), key)
    }

    /// A staged entry is there until the commit, even if it has expired.
    fn live(&self, name: &Name) -> Option<&Stored> {
        match self.staged.get(name) {
            Some(staged) => staged.as_ref(),
            None => self.live_before(name),
        }
    }

    /// The entry before this request.
    fn live_before(&self, name: &Name) -> Option<&Stored> {
        let stored = self.table.entries.get(name);
        stored.filter(|stored| stored.is_live(self.table.now_ms))
    }

    /// Checks the client's right to a visible key.
    fn allow(&self, key: &[u8], right: Right) -> Result<(), Fault> {
        match self.table.denied.contains(&(right, key.to_vec())) {
            true => Err(Fault::Denied),
            false => Ok(()),
        }
    }

    /// The name of a key that is hidden, or that the client has the right to.
    fn allowed(&self, key: &Bytes, right: Right) -> Result<Name, Fault> {
        let name = self.name(key);
        if !name.0 {
            self.allow(&name.1, right)?;
        }
        Ok(name)
    }

    /// Refuses a fence that no client can send, unless the key has it already.
    fn check_fence(&self, name: &Name, fence: Option<&Hlc>) -> Result<(), Fault> {
        let Some(fence) = fence else {
            return Ok(());
        };
        let node = &fence.node;
        let fits = (1..=FENCE_NODE_BYTES_MAX).contains(&node.len());
        let text = match fits && !node.contains([':', '\0']) {
            true if fence.wall <= self.table.now_ms.saturating_add(SKEW_MS_MAX) => return Ok(()),
            true => FENCE_AHEAD,
            false => "malformed timestamp",
        };
        let before = self.live(name).and_then(|stored| stored.fence.as_ref());
        match before == Some(fence) {
            true => Ok(()),
            false => Err(Fault::Other(text.to_owned())),
        }
    }

    /// Fails the test if the request has staged as many writes as it may.
    fn check_writes(&self) {
        assert!(
            self.writes < WRITES_MAX,
            "more writes than one request may stage"
        );
    }

    /// Fails the test if the request has staged as many changes of watches as it may.
    fn check_watch_changes(&self) {
        assert!(
            self.watch_changes < WATCH_CHANGES_MAX,
            "more watches than one request may stage"
        );
    }

    /// Assigns the next version of the store.
    fn stamp(&mut self, observed: Option<Stamp>) -> Stamp {
        self.clock = receive(self.clock, observed, self.table.now_ms);
        self.clock
    }

    /// Records a change for notification, unless the key is hidden.
    fn record_change(&mut self, event: Event, name: &Name, version: Stamp, value: &[u8]) {
        let (hidden, key) = name;
        if !hidden {
            let len = u32::try_from(value.len()).unwrap_or(u32::MAX);
            let change = Change {
                event,
                key: key.clone(),
                version,
                len,
            };
            self.pending.push(Pending {
                change,
                value: value.to_vec(),
            });
        }
    }

    /// The number of entries after a commit.
    fn entry_count(&self) -> usize {
        let now = self.table.now_ms;
        let kept = self
            .table
            .entries
            .iter()
            .filter(|(name, stored)| stored.is_live(now) && !self.staged.contains_key(*name));
        let staged = self
            .staged
            .values()
            .flatten()
            .filter(|stored| stored.is_live(now));
        kept.count() + staged.count()
    }

    fn is_watched(&self, watched: &Watched) -> bool {
        let client = self.request.client.clone().unwrap_or_default();
        match self.watches.get(watched) {
            Some(staged) => staged.is_some(),
            None => self.table.watches.contains_key(&(watched.clone(), client)),
        }
    }

    fn begin_watch(&mut self, watched: Watched) -> Result<(), Fault> {
        match &watched {
            (true, prefix) if prefix.len() > WATCH_PREFIX_BYTES_MAX => {
                let text = format!("the prefix is longer than {WATCH_PREFIX_BYTES_MAX} bytes");
                return Err(Fault::Other(text));
            }
            (true, _) => {}
            (false, key) => check_key(key)?,
        }
        if self.request.client.is_none() {
            return Err(Fault::Denied);
        }
        self.check_watch_changes();
        let full = self
            .table
            .watches_max
            .is_some_and(|max| self.table.watches.len() >= max);
        if full && !self.is_watched(&watched) {
            return Err(Fault::Quota);
        }
        self.watches.insert(watched, Some(self.request.dialect));
        self.watch_changes += 1;
        Ok(())
    }

    fn end_watch(&mut self, watched: Watched) -> bool {
        let was_watched = self.is_watched(&watched);
        if was_watched {
            self.check_watch_changes();
            self.watches.insert(watched, None);
            self.watch_changes += 1;
        }
        was_watched
    }
}

fn check_key(key: &[u8]) -> Result<(), Fault> {
    match key.is_empty() {
        true => Err(Fault::Other("the key length is zero".to_owned())),
        false => Ok(()),
    }
}

impl Host for Transaction<'_> {
    fn head(&mut self, key: &Bytes, access: Access) -> Result<Option<Entry>, Fault> {
        let bytes = self.key(key);
        if access != Access::Hidden {
            self.hidden.remove(&bytes);
        }
        match access {
            Access::Read => self.allow(&bytes, Right::Read)?,
            Access::Write => self.allow(&bytes, Right::Write)?,
            Access::Hidden => {
                assert!(
                    self.hidden.len() < HIDDEN_KEYS_MAX || self.hidden.contains(&bytes),
                    "more hidden keys than one request may open"
                );
                self.hidden.insert(bytes);
            }
        }
        let name = self.name(key);
        Ok(self.live(&name).map(|stored| Entry {
            len: u32::try_from(stored.value.len()).unwrap_or(u32::MAX),
            version: stored.version,
            fence: stored.fence.clone(),
            expires: stored.expires,
        }))
    }

    fn load(&mut self, key: &Bytes, at: u32, len: u32) -> Result<Option<Vec<u8>>, Fault> {
        let name = self.allowed(key, Right::Read)?;
        Ok(self.live(&name).map(|stored| {
            stored
                .value
                .iter()
                .skip(at as usize)
                .take(len as usize)
                .copied()
                .collect()
        }))
    }

    fn matches(&mut self, key: &Bytes, value: &Bytes) -> Result<bool, Fault> {
        let name = self.allowed(key, Right::Write)?;
        let value = resolve(value, &self.request.payload);
        Ok(self.live(&name).is_some_and(|stored| stored.value == value))
    }

    fn put(
        &mut self,
        key: &Bytes,
        value: &Bytes,
        observed: Option<Stamp>,
        fence: Option<&Hlc>,
        expires: Option<u64>,
    ) -> Result<Stamp, Fault> {
        self.check_writes();
        let ahead =
            observed.is_some_and(|at| at.wall > self.table.now_ms.saturating_add(SKEW_MS_MAX));
        assert!(!ahead, "a put with an observed stamp more than 60 s ahead");
        let name = self.allowed(key, Right::Write)?;
        check_key(&name.1)?;
        self.check_fence(&name, fence)?;
        let value = resolve(value, &self.request.payload).to_vec();
        if self.live(&name).is_none()
            && self
                .table
                .keys_max
                .is_some_and(|max| self.entry_count() >= max)
        {
            return Err(Fault::Quota);
        }
        // An expired entry that no sweep has removed yet: its expiry is notified before the new
        // value.
        let expired = !name.0
            && !self.staged.contains_key(&name)
            && self.live(&name).is_none()
            && self.table.entries.contains_key(&name);
        if expired {
            let version = self.stamp(None);
            self.record_change(Event::Expired, &name, version, b"");
            self.writes += 1;
        }
        let version = self.stamp(observed);
        self.record_change(Event::Set, &name, version, &value);
        let stored = Stored {
            value,
            version,
            fence: fence.cloned(),
            expires,
        };
        self.staged.insert(name, Some(stored));
        self.writes += 1;
        Ok(version)
    }

    fn delete(&mut self, key: &Bytes) -> Result<bool, Fault> {
        let name = self.allowed(key, Right::Write)?;
        if self.live(&name).is_none() {
            return Ok(false);
        }
        self.check_writes();
        // The removal of a hidden key has no version.
        if !name.0 {
            let version = self.stamp(None);
            self.record_change(Event::Deleted, &name, version, b"");
        }
        self.staged.insert(name, None);
        self.writes += 1;
        Ok(true)
    }

    fn keys(&mut self, prefix: &Bytes, cursor: Option<&[u8]>, limit: u32) -> Result<Page, Fault> {
        let prefix = self.key(prefix);
        // A cursor is the last key of the page before.
        let is_foreign =
            |cursor: &[u8]| !cursor.starts_with(&prefix) || cursor.len() > CURSOR_BYTES_MAX;
        if cursor.is_some_and(is_foreign) {
            return Err(Fault::Other("syntax error".to_owned()));
        }
        let limit = limit.clamp(1, PAGE_KEYS_MAX) as usize;
        let mut keys = Vec::new();
        let mut bytes = 0;
        let mut last = None;
        let left = self.table.entries.keys().filter(|(hidden, key)| {
            !hidden && key.starts_with(&prefix) && cursor.is_none_or(|cursor| &key[..] > cursor)
        });
        for (examined, name) in left.enumerate() {
            let key = &name.1;
            let full = bytes > 0 && bytes + key.len() > PAGE_BYTES_MAX;
            if examined >= limit || full {
                return Ok(Page { keys, next: last });
            }
            last = Some(key.clone());
            if self.live_before(name).is_some() && self.allow(key, Right::Read).is_ok() {
                bytes += key.len();
                keys.push(key.clone());
            }
        }
        Ok(Page { keys, next: None })
    }

    fn watch(&mut self, key: &Bytes) -> Result<(), Fault> {
        self.follow(Scope::Key, key).map(drop)
    }

    fn unwatch(&mut self, key: &Bytes) -> Result<bool, Fault> {
        self.unfollow(Scope::Key, key)
    }

    fn follow(&mut self, scope: Scope, key: &Bytes) -> Result<Stamp, Fault> {
        let key = self.key(key);
        if scope == Scope::Key {
            self.allow(&key, Right::Read)?;
        }
        self.begin_watch((scope == Scope::Prefix, key))?;
        Ok(self.clock)
    }

    fn follow_since(&mut self, scope: Scope, key: &Bytes, since: Stamp) -> Result<Reached, Fault> {
        if scope == Scope::Key {
            self.allow(&self.key(key), Right::Read)?;
        }
        assert!(self.missed.is_none(), "more than one watch since a version");
        if self.request.client.is_none() {
            return Err(Fault::Denied);
        }
        let position = |it: Stamp| (it.wall, it.counter);
        let is_since = |it: &Pending| position(it.change.version) == position(since);
        // A later version is of a change of this request, or was revoked by a restore.
        if position(since) > position(self.table.clock) && !self.pending.iter().any(is_since) {
            let text = "the version is later than the last change of the store";
            return Err(Fault::Other(text.to_owned()));
        }
        if position(since) < position(self.table.changes.0) {
            let text = "the changes since this version are no longer known";
            return Err(Fault::Other(text.to_owned()));
        }
        let watched = (scope == Scope::Prefix, self.key(key));
        let changes = self.table.changes.1.iter().chain(&self.pending);
        let (mut missed, mut version, mut more) = (Vec::new(), since, false);
        for it in changes.filter(|it| position(it.change.version) > position(since)) {
            if missed.len() == MISSED_CHANGES_MAX {
                more = true;
                break;
            }
            version = it.change.version;
            if self.table.covers(&watched, &it.change.key) {
                missed.push(it.clone());
            }
        }
        if !more {
            version = self.follow(scope, key)?;
        }
        let reached = Reached {
            version,
            complete: !more,
        };
        self.missed = Some(missed);
        Ok(reached)
    }

    fn unfollow(&mut self, scope: Scope, key: &Bytes) -> Result<bool, Fault> {
        let key = self.key(key);
        Ok(self.end_watch((scope == Scope::Prefix, key)))
    }

    fn property(&mut self, name: &str) -> Option<String> {
        let first = self
            .table
            .properties
            .iter()
            .find(|(given, _)| given == name);
        first.map(|(_, value)| value.clone())
    }

    fn log_enabled(&mut self, _level: Level) -> bool {
        true
    }

    fn log(&mut self, level: Level, message: &str) {
        self.table.lines.push((level, message.to_owned()));
    }

    fn count(&mut self, name: &str, by: u64) {
        *self.table.counters.entry(name.to_owned()).or_default() += by;
    }

    fn random(&mut self, len: u32) -> Vec<u8> {
        assert!(
            len <= RANDOM_BYTES_MAX,
            "a request for too many random bytes"
        );
        // SplitMix64 of the request's bytes and the calls so far: the same in every re-execution.
        let payload = self.request.payload.iter();
        self.seed = payload.fold(self.seed.wrapping_add(1), |seed, &byte| {
            (seed ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
        let mut out = Vec::new();
        for block in 0..u64::from(len).div_ceil(8) {
            let mut word = self
                .seed
                .wrapping_add(block.wrapping_mul(0x9e37_79b9_7f4a_7c15));
            word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            out.extend_from_slice(&(word ^ (word >> 31)).to_le_bytes());
        }
        out.truncate(len as usize);
        out
    }
}
