//! What operators see of the keys: lists, one key, and changes.
//!
//! A list of many keys must not delay requests, so the lock is released between turns, and parts of
//! a list are from slightly different times. Nothing that was read may be shown before
//! [`Server::reach`] has waited for its position: a crash could revoke it.

use std::ops::Bound;
use std::sync::atomic::Ordering::Relaxed;

use super::Server;
use super::usage::start_of;
use statehouse_config::limits;
use statehouse_core::clock::Stamp;
use statehouse_core::log::LogPosition;
use statehouse_core::store::{self, Change, Entry, Listed};

/// Something that was read, and the log position that it depends on.
pub struct Read<T> {
    /// What was read.
    pub found: T,
    /// The position that must be durable before it is shown.
    pub position: LogPosition,
}

/// A key, as an operator sees it.
pub struct KeyView {
    /// The key, its value and its metadata.
    pub entry: Entry,
    /// The client that wrote it last, if the store knows it.
    pub writer: Option<Box<str>>,
    /// The watches that cover it.
    pub watches: usize,
}

/// Some changes of keys.
pub struct Changes {
    /// The changes in the order of their versions, each with its client if it wrote the present
    /// value. A long client id is cut and ends with `…`.
    pub found: Vec<(Change, Option<Box<str>>)>,
    /// The version up to which changes were examined.
    pub reached: Stamp,
    /// Whether there are no later ones.
    pub are_all: bool,
}

impl Server {
    /// The name of this store in versions.
    pub fn node(&self) -> String {
        self.lock().core.settings().node.clone()
    }

    /// At most `count` entries from `start` on, of the keys that start with `prefix`. Keys that
    /// agree up to the delimiter are one entry.
    pub fn list_keys(
        &self,
        prefix: &[u8],
        delimiter: &[u8],
        mut start: Bound<Vec<u8>>,
        count: usize,
    ) -> Read<Vec<Listed>> {
        let mut found = Vec::new();
        loop {
            let turn = limits::KEYS_PER_TURN.min(count - found.len());
            let (listed, position) = {
                let locked = self.lock();
                let table = &locked.core.store().state().table;
                let listed = table.list(prefix, delimiter, start, turn);
                (listed, locked.core.position())
            };
            let is_last = listed.len() < turn;
            start = match listed.last() {
                Some(last) => store::after(prefix, delimiter, last.name()),
                None => Bound::Unbounded,
            };
            found.extend(listed);
            if is_last || found.len() == count {
                return Read { found, position };
            }
        }
    }

    /// One key, if it exists.
    pub fn key(&self, key: &[u8]) -> Read<Option<KeyView>> {
        let mut locked = self.lock();
        let now_ms = locked.now_ms();
        let state = locked.core.store().state();
        let entry = state.table.get(key).filter(|it| !it.expired(now_ms));
        let found = entry.map(|entry| KeyView {
            entry: entry.clone(),
            writer: state.owner(key, false).map(Into::into),
            watches: state.watches.count_of(key),
        });
        Read {
            found,
            position: locked.core.position(),
        }
    }

    /// The version of the last change.
    pub fn last_change(&self) -> Stamp {
        self.inspect(|store| store.state().recent.last())
    }

    /// Changes after a version, of keys that start with `prefix`. `None` if the store does not
    /// remember all changes since then.
    pub fn changes_after(&self, version: Stamp, prefix: &[u8]) -> Read<Option<Changes>> {
        let locked = self.lock();
        let state = locked.core.store().state();
        let found = state.recent.since(version).map(|changes| {
            let mut reached = version;
            let mut examined = 0;
            let mut found = Vec::new();
            for change in changes.take(limits::CHANGES_PER_TURN) {
                (examined, reached) = (examined + 1, change.version());
                if change.key().starts_with(prefix) {
                    let is_current = |it: &Entry| it.version() == change.version();
                    let held = state.table.get(change.key()).filter(|it| is_current(it));
                    let writer = held.and_then(|it| state.owner(it.key(), false));
                    found.push((change.clone(), writer.map(start_of)));
                }
            }
            Changes {
                found,
                reached,
                are_all: examined < limits::CHANGES_PER_TURN,
            }
        });
        Read {
            found,
            position: locked.core.position(),
        }
    }

    /// Waits until this position is durable. False if the store stops, or its disk is too slow.
    pub async fn reach(&self, position: LogPosition) -> bool {
        let reached = async {
            while !self.stopped.load(Relaxed) {
                if self.journal.released() >= position {
                    return true;
                }
                tokio::time::sleep(limits::ADMIN_DURABLE_POLL).await;
            }
            false
        };
        let within = tokio::time::timeout(limits::ADMIN_DURABLE_WAIT, reached);
        within.await.unwrap_or(false)
    }
}
