//! The watches that a request begins and ends. They are staged like writes.
//!
//! A watch begins and ends with the commit, after the changes of the request: the recipients of
//! these are the watchers before the request.

use bytes::Bytes;

use super::super::watch::Scope;
use super::imports::other;
use super::{StagedWatch, Transaction};
use crate::clock::Stamp;
use crate::limits;
use crate::policy::{Denial, Fault, Reached};
use statehouse_protocol::Peer;
use statehouse_protocol::rights::Right;

/// Checks the length of a prefix to watch. An empty one covers all keys.
fn check_prefix(prefix: &[u8]) -> Result<(), Denial> {
    let max = limits::WATCH_PREFIX_BYTES_MAX;
    match prefix.len() <= max {
        true => Ok(()),
        false => Err(other(format!("the prefix is longer than {max} bytes"))),
    }
}

impl Transaction {
    /// The client of the request, if it can be notified: without a client id, no notification has a
    /// topic.
    fn watcher(&self) -> Result<&Peer, Denial> {
        match &self.origin {
            Some(origin) if origin.peer.known().is_some() => Ok(&origin.peer),
            Some(_) => Err(Denial::Fault(Fault::Denied)),
            None => Err(Denial::Violation("a watch without a connection")),
        }
    }

    pub(super) fn stage_watch(&mut self, scope: Scope, key: &[u8]) -> Result<(), Denial> {
        match scope {
            Scope::Key => self.check_key(key)?,
            Scope::Prefix => check_prefix(key)?,
        }
        let peer = self.watcher()?;
        if self.watches.len() >= limits::STAGED_WATCHES_MAX {
            return Err(Denial::Violation("more watches than one request may stage"));
        }
        let checked = self.state.watches.check(peer, scope, key, &self.quota);
        checked.map_err(|bound| self.exceeds(bound))?;
        self.watch_rights = self.rights.granted().cloned();
        self.watches
            .push((scope, Bytes::copy_from_slice(key), true));
        Ok(())
    }

    /// Stages the changes that the client missed, as many as one request may be sent. If these are
    /// all, stages the watch. The changes that this request has staged are among them: the new
    /// watch does not report these.
    pub(super) fn catch_up(
        &mut self,
        scope: Scope,
        key: &[u8],
        since: Stamp,
    ) -> Result<Reached, Denial> {
        if self.missed.is_some() {
            return Err(Denial::Violation("more than one watch since a version"));
        }
        self.watcher()?;
        let last = self.hlc.last();
        let committed = self.state.hlc.last();
        // A later version is of a change of this request, or was revoked by a restore.
        if since > committed && !self.changes().any(|it| it.version() == since) {
            return Err(other(
                "the version is later than the last change of the store".into(),
            ));
        }
        let changes = self
            .state
            .recent
            .since(since.min(committed))
            .ok_or_else(|| other("the changes since this version are no longer known".into()))?;
        let staged = self.changes().filter(|it| it.version() > since);
        let cost = 1 + self.rights.tries(Right::Read);
        let examined_max = (limits::PAGE_KEYS_EXAMINED_MAX / cost).max(1);
        let compared_bytes_max = (limits::PAGE_BYTES_EXAMINED_MAX / cost).max(1);
        let (mut missed, mut bytes) = (Vec::new(), 0);
        let (mut examined, mut compared_bytes) = (0, 0);
        let mut reached = Reached {
            version: since,
            complete: false,
        };
        let mut more = false;
        for change in changes.chain(staged) {
            if missed.len() == limits::MISSED_CHANGES_PER_REQUEST_MAX
                || bytes >= limits::MISSED_BYTES_PER_REQUEST_MAX
                || examined == examined_max
                || compared_bytes >= compared_bytes_max
            {
                more = true;
                break;
            }
            examined += 1;
            reached.version = change.version();
            if !scope.covers(key, change.key()) {
                continue;
            }
            compared_bytes += change.key().len();
            if self.rights.granted_now(change.key()) {
                bytes += (change.key().len() + change.value().len()) as u64;
                missed.push(change.clone());
            }
        }
        self.examined += (examined * cost) as u64;
        if !more {
            self.stage_watch(scope, key)?;
            reached = Reached {
                version: last,
                complete: true,
            };
        }
        self.missed = Some(missed);
        Ok(reached)
    }

    /// Whether there is a watch whose end can be staged.
    pub(super) fn may_unwatch(&self, scope: Scope, key: &[u8]) -> Result<bool, Denial> {
        let Some(origin) = &self.origin else {
            return Ok(false);
        };
        let is_it = |(s, k, _): &&StagedWatch| *s == scope && k == key;
        let watched = match self.watches.iter().rev().find(is_it) {
            Some((.., on)) => *on,
            None => self.state.watches.contains(scope, key, &origin.peer),
        };
        if watched && self.watches.len() >= limits::STAGED_WATCHES_MAX {
            return Err(Denial::Violation("more watches than one request may stage"));
        }
        Ok(watched)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::policy::{self, Host};
    use crate::store::rights::Rights;
    use crate::store::rights::counted::CountedRights;
    use crate::store::{Quota, State};

    fn begin(state: Box<State>, client: &str) -> Box<Transaction> {
        Transaction::of_client(state, Quota::default(), client)
    }

    fn put(it: &mut Transaction, key: &[u8]) -> Stamp {
        it.put_plain(key, b"v").unwrap()
    }

    const PREFIX: policy::Scope = policy::Scope::Prefix;

    fn complete(version: Stamp) -> Reached {
        let complete = true;
        Reached { version, complete }
    }

    fn versions_of_missed(it: &mut Transaction) -> Vec<Stamp> {
        let missed = it.take_missed().into_iter();
        missed.map(|(change, _)| change.version()).collect()
    }

    /// The contract says so, and no notification could reach the client.
    #[test]
    fn watch_without_a_client_id_is_denied() {
        let scope = policy::Scope::Key;
        assert!(begin(Box::default(), "a").watch(b"k").is_ok());
        let mut unknown = begin(Box::default(), "");
        for refused in [
            unknown.watch(b"k").err(),
            unknown.follow(scope, b"k").err(),
            unknown.follow_since(scope, b"k", Stamp::default()).err(),
        ] {
            assert!(matches!(refused, Some(Denial::Fault(Fault::Denied))));
        }
    }

    /// Regression: the first of many missed changes were sent.
    #[test]
    fn client_without_an_id_is_sent_no_missed_changes() {
        let mut state = Box::<State>::default();
        for part in 0..3_u8 {
            let mut it = begin(state, "a");
            for number in 0..50_u8 {
                put(&mut it, &[part, number]);
            }
            (state, ..) = it.commit();
        }
        let mut unknown = begin(state, "");
        let refused = unknown.follow_since(PREFIX, b"", Stamp::default());
        assert!(matches!(refused, Err(Denial::Fault(Fault::Denied))));
        assert!(versions_of_missed(&mut unknown).is_empty());
    }

    /// Regression: the version was that of the request before, and "the watch reports all later
    /// changes" was false.
    #[test]
    fn watch_begins_after_the_staged_changes() {
        let mut it = begin(Box::default(), "a");
        let first = put(&mut it, b"k/1");
        assert_eq!(it.follow(PREFIX, b"k/").unwrap(), first);
        assert!(put(&mut it, b"k/2") > first);
        let watches = &it.state().watches;
        assert!(watches.is_empty(), "no recipient of the changes");
    }

    /// Regression: a change of the same request was neither sent nor reported later.
    #[test]
    fn missed_changes_include_the_staged_ones() {
        let mut it = begin(Box::default(), "a");
        let committed = put(&mut it, b"k/1");
        let (state, ..) = it.commit();
        let mut it = begin(state, "a");
        put(&mut it, b"other");
        let staged = put(&mut it, b"k/2");
        let reached = it.follow_since(PREFIX, b"k/", Stamp::default()).unwrap();
        assert_eq!(reached, complete(staged));
        assert_eq!(versions_of_missed(&mut it), [committed, staged]);
        // The version of a staged change is one of the store, too.
        let reached = it.follow_since(PREFIX, b"", staged).unwrap();
        assert_eq!(reached, complete(staged));
        assert!(versions_of_missed(&mut it).is_empty());
    }

    /// Regression: the version of the hidden key counted as one that an earlier run had lost.
    #[test]
    fn watch_after_a_hidden_write_can_be_resumed() {
        let mut state = Box::<State>::default();
        state.recent.note_start(Stamp::default());
        let mut it = begin(state, "a");
        it.head(b"hidden", policy::Access::Hidden).unwrap();
        put(&mut it, b"hidden");
        let version = it.follow(PREFIX, b"").unwrap();
        let (state, ..) = it.commit();
        let reached = begin(state, "a")
            .follow_since(PREFIX, b"", version)
            .unwrap();
        assert_eq!(reached, complete(version));
    }

    /// Regression: one request compared all changes of long keys with all patterns.
    #[test]
    fn missed_changes_are_compared_in_parts_of_bounded_bytes() {
        let keys: Vec<Vec<u8>> = (b'1'..=b'9').map(|it| vec![it; 2_000]).collect();
        let mut it = begin(Box::default(), "a");
        keys.iter().for_each(|key| _ = put(&mut it, key));
        let (state, ..) = it.commit();
        let mut it = begin(state, "a");
        let compared = Arc::new(AtomicUsize::new(0));
        it.rights = Rights::Granted(Arc::new(CountedRights {
            patterns: 99,
            compared: compared.clone(),
        }));
        let at_once = limits::PAGE_BYTES_EXAMINED_MAX.div_ceil(100 * 2_000);
        let mut reached = Reached {
            version: Stamp::default(),
            complete: false,
        };
        for part in keys.chunks(at_once) {
            assert!(!reached.complete, "{reached:?}");
            reached = it.follow_since(PREFIX, b"", reached.version).unwrap();
            assert!(versions_of_missed(&mut it).is_empty(), "it may read none");
            assert_eq!(compared.swap(0, Ordering::Relaxed), part.len());
        }
        assert!(reached.complete, "{reached:?}");
    }

    /// Regression: a write of the same request made a version that was revoked count as known.
    #[test]
    fn version_before_a_staged_change_that_the_store_never_had_is_refused() {
        let mut it = begin(Box::default(), "a");
        let staged = put(&mut it, b"k");
        let (wall, counter) = (staged.wall - 1, 0);
        let refused = it.follow_since(PREFIX, b"k", Stamp { wall, counter });
        assert!(refused.is_err(), "{refused:?}");
    }
}
