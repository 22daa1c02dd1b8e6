//! The imports of the policy, implemented on the transaction.
//!
//! A refusal is an error that the policy translates into a response. In a re-execution, results
//! come from the recording.

use bytes::Bytes;

use super::super::quota::Exceeded;
use super::super::read_set::{ImportKind, Imported, NextImport};
use super::super::rights::Rights;
use super::super::watch::Scope;
use super::{Change, DIVERGED, Transaction, Write};
use crate::clock::{COUNTER_END, Stamp};
use crate::limits;
use crate::log::JournalRoom;
use crate::policy::{self, Access, Denial, Fault, Host, Page, Put, Reached};
use statehouse_protocol::rights::Right;

/// Reading this many bytes of user properties takes as long as examining a key.
const PROPERTY_BYTES_PER_EXAMINED_KEY: u64 = 32;

pub(super) fn other(text: String) -> Denial {
    Denial::Fault(Fault::Other(text))
}

impl From<policy::Scope> for Scope {
    fn from(scope: policy::Scope) -> Self {
        match scope {
            policy::Scope::Key => Self::Key,
            policy::Scope::Prefix => Self::Prefix,
        }
    }
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
        match access {
            Access::Read => self.check_right(key, Right::Read)?,
            Access::Write => self.check_right(key, Right::Write)?,
            Access::Hidden => {}
        }
        self.note_read(key, hidden)?;
        Ok(self.view(key, hidden).map(|entry| policy::Entry {
            // Values are bounded by MQTT's 256 MiB, far below 4 GiB.
            len: u32::try_from(entry.value().len()).unwrap_or(u32::MAX),
            version: entry.version().into(),
            fence: entry.fence().map(Into::into),
            expires: entry.expires_ms(),
        }))
    }

    fn load(&mut self, key: &[u8], at: u32, len: u32) -> Result<Option<Bytes>, Denial> {
        let hidden = self.touch(key, Right::Read)?;
        self.note_read(key, hidden)?;
        let entry = self.view(key, hidden);
        Ok(entry.map(|entry| {
            let value = entry.value();
            let at = (at as usize).min(value.len());
            let end = at.saturating_add(len as usize).min(value.len());
            Bytes::copy_from_slice(&value[at..end])
        }))
    }

    fn matches(&mut self, key: &[u8], value: &[u8]) -> Result<bool, Denial> {
        let hidden = self.touch(key, Right::Write)?;
        self.note_read(key, hidden)?;
        Ok(self
            .view(key, hidden)
            .is_some_and(|entry| entry.value() == value))
    }

    fn put(&mut self, put: Put<'_>) -> Result<Stamp, Denial> {
        self.room_for_effects()?;
        let observed = put.observed.unwrap_or_default();
        let latest_ms = self.now_ms.saturating_add(limits::SKEW_MS_MAX);
        if observed.wall > latest_ms {
            return Err(Denial::Violation(
                "a put with an observed stamp more than 60 s ahead",
            ));
        }
        let hidden = self.touch(put.key, Right::Write)?;
        self.check_owner(put.key, hidden)?;
        self.note_read(put.key, hidden)?;
        let staged = match self.read_set.next_import(ImportKind::Put) {
            NextImport::Recorded(Imported::Refused(fault)) => Err(Denial::Fault(fault)),
            NextImport::Recorded(_) | NextImport::Unknown => Err(DIVERGED),
            NextImport::Live => self
                .check_put(&put)
                .and_then(|()| self.stage_put(put, hidden, observed)),
        };
        if let Err(Denial::Fault(fault)) = &staged {
            self.read_set.imported(|| Imported::Refused(fault.clone()));
        }
        staged
    }

    fn delete(&mut self, key: &[u8]) -> Result<bool, Denial> {
        let hidden = self.touch(key, Right::Write)?;
        self.check_owner(key, hidden)?;
        self.note_read(key, hidden)?;
        if self.view(key, hidden).is_none() {
            return Ok(false);
        }
        if self.quota.journal == JournalRoom::Nothing && !self.read_set.is_replaying() {
            return Err(self.exceeds(Exceeded::Disk));
        }
        self.room_for_effects()?;
        let key_at = self.place(key);
        if hidden {
            let key = Bytes::copy_from_slice(key);
            self.stage(Write {
                change: Change::Deleted(key, Stamp::default()),
                hidden,
                key_at,
                value_at: None,
            });
        } else {
            self.stage_removal(key, key_at, Change::Deleted);
        }
        Ok(true)
    }

    fn keys(&mut self, prefix: &[u8], cursor: Option<&[u8]>, limit: u32) -> Result<Page, Denial> {
        let recorded = |it: Imported| match it {
            Imported::Page(page) => Some(page),
            _ => None,
        };
        self.import(ImportKind::Keys, recorded, Imported::Page, |it| {
            let mut charged = 0;
            let page = it.page(prefix, cursor, limit, &mut charged);
            it.examined += charged;
            page
        })
    }

    fn watch(&mut self, key: &[u8]) -> Result<(), Denial> {
        self.check_right(key, Right::Read)?;
        let recorded = |it: Imported| matches!(it, Imported::Watched).then_some(());
        let record = |()| Imported::Watched;
        self.import(ImportKind::Watch, recorded, record, |it| {
            it.stage_watch(Scope::Key, key)
        })
    }

    fn unwatch(&mut self, key: &[u8]) -> Result<bool, Denial> {
        self.unfollow(policy::Scope::Key, key)
    }

    fn follow(&mut self, scope: policy::Scope, key: &[u8]) -> Result<Stamp, Denial> {
        let scope = Scope::from(scope);
        // The keys of a prefix are checked when they change.
        if scope == Scope::Key {
            self.check_right(key, Right::Read)?;
        }
        let recorded = |it: Imported| match it {
            Imported::Followed(version) => Some(version),
            _ => None,
        };
        self.import(ImportKind::Follow, recorded, Imported::Followed, |it| {
            let version = it.hlc.last();
            it.stage_watch(scope, key).map(|()| version)
        })
    }

    fn follow_since(
        &mut self,
        scope: policy::Scope,
        key: &[u8],
        since: Stamp,
    ) -> Result<Reached, Denial> {
        let scope = Scope::from(scope);
        if scope == Scope::Key {
            self.check_right(key, Right::Read)?;
        }
        let recorded = |it: Imported| match it {
            Imported::Reached(reached) => Some(reached),
            _ => None,
        };
        self.import(ImportKind::FollowSince, recorded, Imported::Reached, |it| {
            it.catch_up(scope, key, since)
        })
    }

    fn unfollow(&mut self, scope: policy::Scope, key: &[u8]) -> Result<bool, Denial> {
        let scope = Scope::from(scope);
        let recorded = |it: Imported| match it {
            Imported::Unwatched(watched) => Some(watched),
            _ => None,
        };
        let watched = self.import(ImportKind::Unwatch, recorded, Imported::Unwatched, |it| {
            it.may_unwatch(scope, key)
        })?;
        if watched {
            self.watches
                .push((scope, Bytes::copy_from_slice(key), false));
        }
        Ok(watched)
    }

    fn property(&mut self, name: &str) -> Option<String> {
        if let Some(recorded) = self.read_set.recorded_property(name) {
            return recorded;
        }
        let origin = self.origin.as_ref()?;
        // Each lookup scans all properties.
        self.examined += origin.properties.raw().len() as u64 / PROPERTY_BYTES_PER_EXAMINED_KEY;
        let value = origin.property(name);
        self.read_set.property(name, value);
        value.map(str::to_owned)
    }

    fn random(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        let recorded = self.read_set.recorded_seed();
        let Some(origin) = &mut self.origin else {
            return bytes;
        };
        if origin.random.is_none() {
            let seed = recorded.unwrap_or_else(|| origin.seed());
            self.read_set.seed(seed);
            let stream = blake3::Hasher::new_keyed(&seed).finalize_xof();
            origin.random = Some(Box::new(stream));
        }
        if let Some(stream) = &mut origin.random {
            stream.fill(&mut bytes);
        }
        bytes
    }

    /// A client's timestamp may be ahead of `now` by the allowed skew. If the clock was set back,
    /// an entry may be further ahead, but never ahead of the last version.
    fn may_have_assigned(&self, version: Stamp) -> bool {
        let latest_ms = self.now_ms.saturating_add(limits::SKEW_MS_MAX);
        version.wall <= latest_ms.max(self.hlc.last().wall)
            && u64::from(version.counter) < COUNTER_END
    }

    fn is_rerun(&self) -> bool {
        self.read_set.is_replaying()
    }

    fn now_ms(&self) -> u64 {
        self.now_ms
    }

    fn fuel_max(&self) -> u64 {
        self.quota.fuel_max
    }

    fn take_examined(&mut self) -> u64 {
        std::mem::take(&mut self.examined)
    }
}

impl Transaction {
    /// Answers an import from the recording, or else runs `call` and records its result. `recorded`
    /// takes the result out of a recording of this import, and `record` makes a recording of a
    /// result.
    fn import<T: Clone>(
        &mut self,
        kind: ImportKind,
        recorded: impl FnOnce(Imported) -> Option<T>,
        record: impl FnOnce(T) -> Imported,
        call: impl FnOnce(&mut Self) -> Result<T, Denial>,
    ) -> Result<T, Denial> {
        match self.read_set.next_import(kind) {
            NextImport::Recorded(Imported::Refused(fault)) => return Err(Denial::Fault(fault)),
            NextImport::Recorded(imported) => return recorded(imported).ok_or(DIVERGED),
            NextImport::Unknown => return Err(DIVERGED),
            NextImport::Live => {}
        }
        let result = call(self);
        match &result {
            Ok(it) => self.read_set.imported(|| record(it.clone())),
            Err(Denial::Fault(fault)) => {
                self.read_set.imported(|| Imported::Refused(fault.clone()));
            }
            Err(Denial::Violation(_)) => {}
        }
        result
    }

    /// Checks the client's right to a key, unless the key is hidden. Returns whether it is hidden.
    fn touch(&mut self, key: &[u8], right: Right) -> Result<bool, Denial> {
        let hidden = self.is_hidden(key);
        if !hidden {
            self.check_right(key, right)?;
        }
        Ok(hidden)
    }

    /// Checks the fence and the configured limits of a put. A re-execution is exempt: its refusals
    /// are recorded.
    fn check_put(&mut self, put: &Put<'_>) -> Result<(), Denial> {
        if self.read_set.is_replaying() {
            return Ok(());
        }
        self.check_key(put.key)?;
        if put.value.len() as u64 > self.quota.value_bytes_max {
            return Err(self.exceeds(Exceeded::ValueBytes(self.quota.value_bytes_max)));
        }
        self.check_fence(put)?;
        if self.quota.journal != JournalRoom::Growth {
            return Err(self.exceeds(Exceeded::Disk));
        }
        Ok(())
    }

    pub(super) fn check_key(&mut self, key: &[u8]) -> Result<(), Denial> {
        if key.is_empty() {
            return Err(other("the key length is zero".into()));
        }
        let checked = self.quota.check_key(key);
        checked.map_err(|bound| self.exceeds(bound))
    }

    /// Translates an exceeded limit for the policy. Notes the first one of a request for the
    /// operator.
    pub(super) fn exceeds(&mut self, bound: Exceeded) -> Denial {
        self.exceeded.get_or_insert(bound);
        match bound {
            Exceeded::KeyBytes(max) => other(format!("the key is longer than {max} bytes")),
            Exceeded::ValueBytes(max) => other(format!("the value is longer than {max} bytes")),
            _ => Denial::Fault(Fault::Quota),
        }
    }

    fn page(
        &self,
        prefix: &[u8],
        cursor: Option<&[u8]>,
        limit: u32,
        charged: &mut u64,
    ) -> Result<Page, Denial> {
        let grants = match &self.rights {
            Rights::All => None,
            Rights::Granted(grants) => Some(grants),
            Rights::Recorded(grants) => grants.as_ref(),
        };
        // The cursor is encrypted: the last key of a page may be one that the client may not know.
        let no_cursor = || other("syntax error".into());
        let opened = match (grants, cursor) {
            (Some(grants), Some(cursor)) => Some(grants.unseal(cursor).ok_or_else(no_cursor)?),
            _ => None,
        };
        let cursor = opened.as_deref().or(cursor);
        let seal = |key: Vec<u8>| match grants {
            Some(grants) => grants.seal(&key),
            None => key,
        };
        // A cursor is the last key of the previous page, so it must start with the prefix.
        if cursor.is_some_and(|cursor| {
            !cursor.starts_with(prefix) || cursor.len() as u64 > limits::KEY_BYTES_MAX_MAX
        }) {
            return Err(no_cursor());
        }
        let limit = limit.clamp(1, limits::PAGE_KEYS_MAX) as usize;
        // Examining a key means comparing it with every pattern that might allow it.
        let cost = 1 + grants.map_or(0, |it| it.patterns(Right::Read));
        let examined_max = (limits::PAGE_KEYS_EXAMINED_MAX / cost).max(1);
        let examined_bytes_max = (limits::PAGE_BYTES_EXAMINED_MAX / cost).max(1);
        let mut keys = Vec::new();
        let mut bytes = 0;
        let mut examined_bytes = 0;
        let mut next: Option<&[u8]> = None;
        for (examined, entry) in self.state.table.range(prefix, cursor).enumerate() {
            let key = entry.key();
            *charged += cost as u64;
            if keys.len() == limit
                || examined == examined_max
                || (bytes > 0 && bytes + key.len() > limits::PAGE_BYTES_MAX)
                || examined_bytes >= examined_bytes_max
            {
                let next = next.map(|key| seal(key.to_vec()));
                return Ok(Page { keys, next });
            }
            examined_bytes += key.len();
            // A page lists the state before this request, without its staged writes.
            if !entry.expired(self.now_ms) && grants.is_none_or(|it| it.allow(key, Right::Read)) {
                bytes += key.len();
                keys.push(key.to_vec());
            }
            next = Some(key);
        }
        Ok(Page { keys, next: None })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Hlc;
    use crate::store::{Quota, State};

    fn begin(client: &str) -> Box<Transaction> {
        Transaction::of_client(Box::<State>::default(), Quota::default(), client)
    }

    #[test]
    fn version_ahead_of_the_clock_is_one_of_the_store() {
        let version = |wall, counter| Stamp { wall, counter };
        let last = version(3_600_000, 7);
        let mut state = Box::<State>::default();
        state.hlc = Hlc::at(last);
        let it = Transaction::of_client(state, Quota::default(), "a");
        let counter_max = u32::try_from(COUNTER_END - 1).unwrap();
        for assigned in [last, version(0, 0), version(3_600_000, counter_max)] {
            assert!(it.may_have_assigned(assigned), "{assigned:?}");
        }
        let wide = version(10, counter_max + 1);
        for forged in [wide, version(3_600_001, 0), version(u64::MAX, 0)] {
            assert!(!it.may_have_assigned(forged), "{forged:?}");
        }
        // A client's timestamp may be ahead of the clock by the allowed skew.
        let it = begin("a");
        assert!(it.may_have_assigned(version(it.now_ms() + limits::SKEW_MS_MAX, 0)));
        assert!(!it.may_have_assigned(version(it.now_ms() + limits::SKEW_MS_MAX + 1, 0)));
    }

    /// The table for native tests of the SDK does the same.
    #[test]
    fn entry_of_this_request_is_present_and_not_listed() {
        let mut it = begin("a");
        let put = Put {
            key: b"k",
            value: b"v",
            observed: None,
            fence: None,
            expires_ms: Some(1),
        };
        assert!(it.put(put).is_ok());
        let head = it.head(b"k", Access::Read);
        assert!(head.is_ok_and(|it| it.is_some_and(|it| it.expires == Some(1))));
        assert!(it.keys(b"", None, 0).is_ok_and(|page| page.keys.is_empty()));
        assert!(it.head(b"k", Access::Hidden).is_ok_and(|it| it.is_none()));
        assert!(it.load(b"k", 0, 9).is_ok_and(|it| it.is_none()));
        assert!(it.head(b"k", Access::Write).is_ok_and(|it| it.is_some()));
        assert!(it.load(b"k", 0, 9).is_ok_and(|it| it.is_some()));
    }
}
