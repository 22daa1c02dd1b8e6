//! What one request sees and stages: the key table as of this request, and the writes that commit
//! together or not at all.
//!
//! What enters: calls of the policy. What leaves, at [`Transaction::commit`]: the changed state.
//! It does no I/O and reads no clock: time is an argument.

use std::sync::Arc;

use bytes::Bytes;

use super::quota::Quota;
use super::table::{Entry, Key, Table, weight};
use super::watch::{Peer, Watches};
use crate::clock::{Hlc, Stamp};
use crate::limits;
use crate::policy::{self, Access, Denial, Fault, Host, Page, Put};
use crate::request::{self, Dialect, Request};

/// Everything a step may change.
#[derive(Default)]
pub struct State {
    /// What clients see.
    pub table: Table,
    /// Policies' own bookkeeping: no client can name these keys.
    pub hidden: Table,
    /// Who watches what.
    pub watches: Watches,
    /// The store's clock.
    pub hlc: Hlc,
}

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
    staged: Vec<Staged>,
    watches: Vec<(Key, bool)>,
    changes: Vec<Change>,
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

struct Staged {
    key: Key,
    hidden: bool,
    entry: Option<Arc<Entry>>,
}

/// A change that watchers hear of.
#[derive(Clone, Debug)]
pub struct Change {
    /// The key.
    pub key: Key,
    /// What happened to it.
    pub event: policy::Event,
    /// The new version, or for a removal a fresh stamp above it.
    pub version: Stamp,
    /// The new value; empty for a removal.
    pub value: Bytes,
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
        Self::new(state, quota, now_ms, Some(origin))
    }

    /// Begins a sweep: no client asked for it.
    pub fn sweep(state: Box<State>, quota: Quota, now_ms: u64) -> Self {
        Self::new(state, quota, now_ms, None)
    }

    fn new(state: Box<State>, quota: Quota, now_ms: u64, origin: Option<Origin>) -> Self {
        let hlc = state.hlc;
        Self {
            state,
            origin,
            quota,
            now_ms,
            hlc,
            hidden: Vec::new(),
            staged: Vec::new(),
            watches: Vec::new(),
            changes: Vec::new(),
        }
    }

    /// What watchers are to hear, in the order it happened.
    pub fn changes(&self) -> &[Change] {
        &self.changes
    }

    /// The state as it was before this request.
    pub fn state(&self) -> &State {
        &self.state
    }

    /// The value that a reply may carry: what this request sees under the key.
    pub fn value(&self, key: &[u8]) -> Option<Bytes> {
        self.view(key, false).map(|entry| entry.value.clone())
    }

    /// Removes a key that has expired, as a sweep does. False where another step was faster.
    pub fn expire(&mut self, key: &Key) -> bool {
        let expired = self
            .state
            .table
            .get(key)
            .is_some_and(|entry| entry.expired(self.now_ms));
        if expired {
            self.stage_removal(key.clone(), policy::Event::Expired);
        }
        expired
    }

    /// Makes everything staged real.
    pub fn commit(mut self) -> Box<State> {
        self.state.hlc = self.hlc;
        for Staged { key, hidden, entry } in self.staged {
            let table = if hidden {
                &mut self.state.hidden
            } else {
                &mut self.state.table
            };
            match entry {
                Some(entry) => drop(table.insert(key, entry)),
                None => drop(table.remove(&key)),
            }
        }
        if let Some(origin) = &self.origin {
            for (key, on) in self.watches {
                if on {
                    self.state.watches.add(key, &origin.peer, origin.dialect);
                } else {
                    self.state.watches.remove(&key, &origin.peer);
                }
            }
        }
        self.state
    }

    /// Forgets everything staged.
    pub fn roll_back(self) -> Box<State> {
        self.state
    }

    fn is_hidden(&self, key: &[u8]) -> bool {
        self.hidden.iter().any(|hidden| hidden == key)
    }

    fn table(&self, hidden: bool) -> &Table {
        if hidden {
            &self.state.hidden
        } else {
            &self.state.table
        }
    }

    /// The entry as this request sees it: its own writes first, expired ones absent.
    fn view(&self, key: &[u8], hidden: bool) -> Option<&Arc<Entry>> {
        let staged = self
            .staged
            .iter()
            .rev()
            .find(|it| it.hidden == hidden && it.key == key);
        match staged {
            Some(staged) => staged.entry.as_ref(),
            None => self
                .table(hidden)
                .get(key)
                .filter(|entry| !entry.expired(self.now_ms)),
        }
    }

    /// Keys and bytes with everything staged, of both tables.
    fn load_sum(&self) -> (u64, u64) {
        let mut keys = self.state.table.keys() + self.state.hidden.keys();
        let mut bytes = self.state.table.bytes() + self.state.hidden.bytes();
        for (i, staged) in self.staged.iter().enumerate() {
            let earlier = self.staged[..i]
                .iter()
                .rev()
                .find(|it| it.hidden == staged.hidden && it.key == staged.key);
            let before = match earlier {
                Some(earlier) => earlier.entry.as_ref(),
                None => self.table(staged.hidden).get(&staged.key),
            };
            if let Some(before) = before {
                keys -= 1;
                bytes -= weight(&staged.key, before);
            }
            if let Some(after) = &staged.entry {
                keys += 1;
                bytes += weight(&staged.key, after);
            }
        }
        (keys, bytes)
    }

    fn room_for_effects(&self) -> Result<(), Denial> {
        if self.staged.len() >= limits::STAGED_WRITES_MAX {
            return Err(Denial::Violation("more writes than one request may stage"));
        }
        Ok(())
    }

    /// Stages the end of a visible key, which watchers hear of with a version of its own.
    fn stage_removal(&mut self, key: Key, event: policy::Event) {
        let version = self.hlc.tick(self.now_ms);
        self.changes.push(Change {
            key: key.clone(),
            event,
            version,
            value: Bytes::new(),
        });
        self.staged.push(Staged {
            key,
            hidden: false,
            entry: None,
        });
    }

    /// A key that expired and that no sweep has removed yet goes before anything is written over it,
    /// so that its watchers hear of its end first, with a version below the new one's.
    fn expire_before_write(&mut self, key: &[u8]) {
        let staged = self.staged.iter().any(|it| !it.hidden && it.key == key);
        if !staged
            && self
                .state
                .table
                .get(key)
                .is_some_and(|entry| entry.expired(self.now_ms))
        {
            self.stage_removal(Bytes::copy_from_slice(key), policy::Event::Expired);
        }
    }
}

/// A key of a length that no table holds.
fn check_key(key: &[u8], quota: &Quota) -> Result<(), Denial> {
    if key.is_empty() {
        return Err(other("the key length is zero".into()));
    }
    if key.len() as u64 > quota.key_bytes_max {
        return Err(other(format!(
            "the key is longer than {} bytes",
            quota.key_bytes_max
        )));
    }
    Ok(())
}

fn other(text: String) -> Denial {
    Denial::Fault(Fault::Other(text))
}

impl Host for Transaction {
    fn head(&mut self, key: &[u8], access: Access) -> Result<Option<policy::Entry>, Denial> {
        let hidden = matches!(access, Access::Hidden);
        if hidden != self.is_hidden(key) {
            if hidden {
                if self.hidden.len() >= limits::STAGED_WRITES_MAX {
                    return Err(Denial::Violation(
                        "more hidden keys than one request may open",
                    ));
                }
                self.hidden.push(Bytes::copy_from_slice(key));
            } else {
                self.hidden.retain(|hidden| hidden != key);
            }
        }
        Ok(self.view(key, hidden).map(|entry| policy::Entry {
            // Values are bounded by MQTT's 256 MiB, far below 4 GiB.
            len: u32::try_from(entry.value.len()).unwrap_or(u32::MAX),
            version: entry.version.into(),
            fence: entry.fence.as_ref().map(Into::into),
            expires: entry.expires_ms,
        }))
    }

    fn load(&mut self, key: &[u8], at: u32, len: u32) -> Result<Option<Bytes>, Denial> {
        let entry = self.view(key, self.is_hidden(key));
        Ok(entry.map(|entry| {
            let at = (at as usize).min(entry.value.len());
            let end = at.saturating_add(len as usize).min(entry.value.len());
            entry.value.slice(at..end)
        }))
    }

    fn matches(&mut self, key: &[u8], value: &[u8]) -> Result<bool, Denial> {
        Ok(self
            .view(key, self.is_hidden(key))
            .is_some_and(|entry| entry.value == value))
    }

    fn put(&mut self, put: Put<'_>) -> Result<Stamp, Denial> {
        check_key(put.key, &self.quota)?;
        if put.value.len() as u64 > self.quota.value_bytes_max {
            let max = self.quota.value_bytes_max;
            return Err(other(format!("the value is longer than {max} bytes")));
        }
        self.room_for_effects()?;
        let hidden = self.is_hidden(put.key);
        if !hidden {
            self.expire_before_write(put.key);
        }
        let observed = put.observed.unwrap_or_default();
        let latest_ms = self.now_ms.saturating_add(limits::SKEW_MS_MAX);
        if observed.wall > latest_ms {
            return Err(Denial::Violation(
                "a put that observed a clock more than 60 s ahead",
            ));
        }
        let before = self.load_sum();
        let hlc = self.hlc;
        let version = self.hlc.receive(observed, self.now_ms);
        let key = Bytes::copy_from_slice(put.key);
        let value = Bytes::copy_from_slice(put.value);
        let entry = Entry {
            value: value.clone(),
            version,
            fence: put.fence,
            expires_ms: put.expires_ms,
        };
        self.staged.push(Staged {
            key: key.clone(),
            hidden,
            entry: Some(Arc::new(entry)),
        });
        if !self.quota.allows(before, self.load_sum()) {
            self.staged.pop();
            self.hlc = hlc;
            return Err(Denial::Fault(Fault::Quota));
        }
        if !hidden {
            self.changes.push(Change {
                key,
                event: policy::Event::Set,
                version,
                value,
            });
        }
        Ok(version)
    }

    fn delete(&mut self, key: &[u8]) -> Result<bool, Denial> {
        let hidden = self.is_hidden(key);
        if self.view(key, hidden).is_none() {
            return Ok(false);
        }
        self.room_for_effects()?;
        let key = Bytes::copy_from_slice(key);
        if hidden {
            let entry = None;
            self.staged.push(Staged { key, hidden, entry });
        } else {
            self.stage_removal(key, policy::Event::Deleted);
        }
        Ok(true)
    }

    fn keys(&mut self, prefix: &[u8], cursor: Option<&[u8]>, limit: u32) -> Result<Page, Denial> {
        // A cursor is the last key of the page before, so it lies within the prefix.
        if cursor.is_some_and(|cursor| {
            !cursor.starts_with(prefix) || cursor.len() as u64 > limits::KEY_BYTES_MAX_MAX
        }) {
            return Err(other("syntax error".into()));
        }
        let limit = limit.clamp(1, limits::PAGE_KEYS_MAX) as usize;
        let mut keys = Vec::new();
        let mut bytes = 0;
        let mut next = None;
        for (examined, (key, entry)) in self.state.table.range(prefix, cursor).enumerate() {
            if keys.len() == limit
                || examined == limits::PAGE_KEYS_EXAMINED_MAX
                || (bytes > 0 && bytes + key.len() > limits::PAGE_BYTES_MAX)
            {
                return Ok(Page { keys, next });
            }
            // Listed as of the beginning of this request; what it staged itself comes with the next.
            if !entry.expired(self.now_ms) {
                bytes += key.len();
                keys.push(key.to_vec());
            }
            next = Some(key.to_vec());
        }
        Ok(Page { keys, next: None })
    }

    fn watch(&mut self, key: &[u8]) -> Result<(), Denial> {
        check_key(key, &self.quota)?;
        let Some(origin) = &self.origin else {
            return Err(Denial::Violation("a watch without a connection"));
        };
        if self.watches.len() >= limits::STAGED_WATCHES_MAX {
            return Err(Denial::Violation("more watches than one request may stage"));
        }
        if !self.state.watches.has_room(&origin.peer, key) {
            return Err(Denial::Fault(Fault::Quota));
        }
        self.watches.push((Bytes::copy_from_slice(key), true));
        Ok(())
    }

    fn unwatch(&mut self, key: &[u8]) -> Result<bool, Denial> {
        let Some(origin) = &self.origin else {
            return Ok(false);
        };
        let staged = self.watches.iter().rev().find(|(staged, _)| staged == key);
        let watched = match staged {
            Some((_, on)) => *on,
            None => self.state.watches.contains(key, &origin.peer),
        };
        if watched {
            if self.watches.len() >= limits::STAGED_WATCHES_MAX {
                return Err(Denial::Violation("more watches than one request may stage"));
            }
            self.watches.push((Bytes::copy_from_slice(key), false));
        }
        Ok(watched)
    }

    fn property(&self, name: &str) -> Option<String> {
        let mut user = self.origin.as_ref()?.properties.user();
        user.find(|(found, _)| *found == name)
            .map(|(_, value)| value.to_owned())
    }

    fn random(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        if let Some(Origin {
            peer,
            properties,
            payload,
            random,
            dialect,
        }) = &mut self.origin
        {
            let stream = random.get_or_insert_with(|| {
                let identity = request::identity(&peer.client, payload, properties, *dialect);
                Box::new(identity.finalize_xof())
            });
            stream.fill(&mut bytes);
        }
        bytes
    }

    fn now_ms(&self) -> u64 {
        self.now_ms
    }
}
