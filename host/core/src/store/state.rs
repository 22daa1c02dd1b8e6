//! The complete state of a store.
//!
//! It applies writes and keeps the sums of owners consistent with the tables. It checks nothing:
//! the transaction decides which writes are allowed.

use super::arena::Slot;
use super::entry::Entry;
use super::expiry::NewDeadline;
use super::owners::{NO_OWNER, Owner, Owners};
use super::quota::{Exceeded, Quota};
use super::recent::Recent;
use super::table::Table;
use super::watch::Watches;
use super::write::{Change, Write};
use crate::clock::Hlc;
use crate::limits;
use crate::log::JournalRoom;

/// A place in the order in which keys expire.
#[derive(Clone, Copy)]
pub struct ExpiryPlace((u64, Slot));

/// Everything that a step may change.
#[derive(Clone, Default)]
pub struct State {
    /// Keys that clients see.
    pub table: Table,
    /// Hidden keys: bookkeeping of policies. No client can name them.
    pub hidden: Table,
    /// The owners of the keys in both tables.
    pub owners: Owners,
    /// All watches.
    pub watches: Watches,
    /// The recent changes of visible keys.
    pub recent: Recent,
    /// The clock.
    pub hlc: Hlc,
}

impl State {
    /// Checks the limits for a SET of `key` by `client`, with a value that is neither too long nor
    /// longer than the current one.
    pub fn check_write(&self, client: &str, key: &[u8], quota: &Quota) -> Result<(), Exceeded> {
        quota.check_key(key)?;
        if quota.journal != JournalRoom::Growth {
            return Err(Exceeded::Disk);
        }
        let (held, own) = (self.table.owned(key), self.owners.find(client));
        let weight = held.map_or(
            key.len() as u64 + limits::ENTRY_OVERHEAD_BYTES,
            |(it, _)| it.weight(),
        );
        let load = self.load();
        let mut grown = (load.0, load.1 + self.cost_of_entering(client, key, false));
        if held.is_none() {
            grown = (grown.0 + 1, grown.1 + weight);
        }
        quota.check(load, grown)?;
        let owned = own.map_or((0, 0), |own| self.owners.load(own));
        let is_its_own = own.is_some() && held.map(|(_, owner)| owner) == own;
        let grown = match is_its_own {
            true => owned,
            false => (owned.0 + 1, owned.1 + weight),
        };
        quota.check_client(owned, grown)
    }

    /// The hidden table, or the visible one.
    pub(crate) fn part(&self, hidden: bool) -> &Table {
        match hidden {
            true => &self.hidden,
            false => &self.table,
        }
    }

    /// The client that owns a key, visible or hidden.
    pub fn owner(&self, key: &[u8], hidden: bool) -> Option<&str> {
        self.owners.client(self.part(hidden).owned(key)?.1)
    }

    /// The keys that expire, the first ones first, behind a place in that order. Each with the
    /// client that owns it and its place.
    pub fn expiring(
        &self,
        after: Option<ExpiryPlace>,
    ) -> impl Iterator<Item = (&Entry, Option<&str>, ExpiryPlace)> {
        let entries = self.table.expiring(after.map(|it| it.0));
        entries.map(|(entry, owner, place)| (entry, self.owners.client(owner), ExpiryPlace(place)))
    }

    /// The entries of one table after a key, in order, each with its owner.
    pub(crate) fn entries<'a>(
        &'a self,
        hidden: bool,
        after: Option<&'a [u8]>,
    ) -> impl Iterator<Item = (&'a Entry, Option<&'a str>)> {
        let entries = self.part(hidden).range_owned(b"", after);
        entries.map(|(entry, owner)| (entry, self.owners.client(owner)))
    }

    /// Recomputes the sums of owners after whole tables were replaced.
    pub(crate) fn count_owners(&mut self) {
        self.owners.count([&self.table, &self.hidden]);
    }

    /// Keys and bytes of both tables, including the overhead of owners.
    pub fn load(&self) -> (u64, u64) {
        let Self { table, hidden, .. } = self;
        let bytes = table.bytes() + hidden.bytes() + self.owners.bytes();
        (table.keys() + hidden.keys(), bytes)
    }

    /// The bytes that a client without keys adds by owning this key. If this was the last key of
    /// another owner, that owner's bytes are subtracted.
    pub(super) fn cost_of_entering(&self, client: &str, key: &[u8], hidden: bool) -> u64 {
        if self.owners.find(client).is_some() {
            return 0;
        }
        let left = self.part(hidden).owned(key).and_then(|(_, owner)| {
            let is_last = self.owners.load(owner).0 == 1;
            self.owners.client(owner).filter(|_| is_last)
        });
        Owners::cost(client).saturating_sub(left.map_or(0, Owners::cost))
    }

    /// Applies one write. The key will have no owner.
    pub fn write(&mut self, write: &Write) {
        self.write_as(write, NO_OWNER);
    }

    /// Applies writes. Keys that are put belong to `client`, or keep their owner if there is none.
    pub fn write_by(&mut self, writes: &[Write], client: Option<&str>) {
        let Some(client) = client else {
            for write in writes {
                let held = self.part(write.hidden).owned(write.key());
                let owner = held.filter(|_| write.entry().is_some());
                self.write_as(write, owner.map_or(NO_OWNER, |(_, owner)| owner));
            }
            return;
        };
        let puts = writes.iter().any(|it| it.entry().is_some());
        let owner = if puts {
            self.owners.enter(client)
        } else {
            NO_OWNER
        };
        self.write_all(writes, owner);
    }

    /// Applies writes. Keys that are put belong to `owner`, which is removed if it has none in the
    /// end.
    pub(super) fn write_all(&mut self, writes: &[Write], owner: Owner) {
        for write in writes {
            self.write_as(write, owner);
        }
        self.owners.leave(owner);
    }

    /// Moves the deadline of a key that has one. The key keeps its version and its owner.
    pub fn set_deadline(&mut self, it: &NewDeadline) {
        if let Some((entry, owner)) = self.part(it.hidden).owned(&it.key)
            && entry.expires_ms().is_some()
        {
            let moved = Write {
                hidden: it.hidden,
                ..Write::of(Change::Set(entry.with_deadline(it.expires_ms)))
            };
            self.write_as(&moved, owner);
        }
    }

    fn write_as(&mut self, write: &Write, owner: Owner) {
        let table = if write.hidden {
            &mut self.hidden
        } else {
            &mut self.table
        };
        let old = match write.entry() {
            Some(entry) => {
                self.owners.give(owner, entry);
                table.put(entry.clone(), owner)
            }
            None => table.remove(write.key()),
        };
        if let Some((entry, before)) = old {
            self.owners.take(before, &entry);
            if before != owner {
                self.owners.leave(before);
            }
        }
    }
}
