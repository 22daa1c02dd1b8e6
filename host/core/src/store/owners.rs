//! Who owns how much: a key belongs to the client that wrote it last.
//!
//! What enters: names of clients, and the weights of keys that they take and lose. What leaves: a number for each owner, as
//! long as it has a key, and its sums. Which keys those are stands beside them, in their tables. Numbers are of this process
//! alone: records and snapshots say names.

use super::entry::Entry;
use super::index::{Index, Keyed};
use super::slots::Slot;
use super::table::Table;
use crate::limits::{OWNER_INDEX_PARTS, OWNER_OVERHEAD_BYTES};

/// The number of an owner: there are no more of them than keys.
pub(crate) type Owner = Slot;

/// The owner of what nobody owns: keys of a snapshot that names no owners, and what no request of a client wrote.
pub(crate) const NOBODY: Owner = Owner::MAX;

/// All owners.
#[derive(Clone, Default)]
pub struct Owners {
    /// By their numbers.
    rows: Vec<Option<Row>>,
    free: Vec<Owner>,
    index: Index<OWNER_INDEX_PARTS>,
    bytes: u64,
}

/// What one owns.
#[derive(Clone)]
struct Row {
    client: Box<str>,
    keys: u64,
    bytes: u64,
}

impl Owners {
    /// What being an owner counts against `max_bytes`, besides what it owns.
    pub(super) fn cost(client: &str) -> u64 {
        client.len() as u64 + OWNER_OVERHEAD_BYTES
    }

    /// What all of them count against it.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The number of a client that owns anything.
    pub(super) fn find(&self, client: &str) -> Option<Owner> {
        self.index.get(client.as_bytes(), &self.rows)
    }

    /// Keys and bytes that it owns.
    pub(super) fn load(&self, owner: Owner) -> (u64, u64) {
        let row = self.row(owner);
        row.map_or((0, 0), |it| (it.keys, it.bytes))
    }

    /// Who it is.
    pub(super) fn client(&self, owner: Owner) -> Option<&str> {
        Some(&*self.row(owner)?.client)
    }

    fn row(&self, owner: Owner) -> Option<&Row> {
        self.rows.get(owner as usize)?.as_ref()
    }

    fn row_mut(&mut self, owner: Owner) -> Option<&mut Row> {
        self.rows.get_mut(owner as usize)?.as_mut()
    }

    /// Clients that own anything, with their keys and bytes.
    pub fn all(&self) -> impl Iterator<Item = (&str, u64, u64)> {
        self.page(0, usize::MAX).1
    }

    /// Those of them in `rows` places from `from` on, and where the next ones are, if there are any.
    pub fn page(
        &self,
        from: usize,
        rows: usize,
    ) -> (Option<usize>, impl Iterator<Item = (&str, u64, u64)>) {
        let rest = self.rows.get(from..).unwrap_or_default();
        let next = (rest.len() > rows).then(|| from + rows);
        let rows = rest.iter().take(rows).flatten();
        (next, rows.map(|it| (&*it.client, it.keys, it.bytes)))
    }

    /// The number of a client that is about to own something. Whoever asks says [`Owners::leave`] when it may own something
    /// or not.
    pub(crate) fn enter(&mut self, client: &str) -> Owner {
        if let Some(owner) = self.find(client) {
            return owner;
        }
        let row = Row {
            client: client.into(),
            keys: 0,
            bytes: 0,
        };
        let owner = match self.free.pop() {
            Some(owner) => {
                self.rows[owner as usize] = Some(row);
                owner
            }
            None => {
                self.rows.push(Some(row));
                Owner::try_from(self.rows.len() - 1)
                    .expect("there are no more owners than slots of keys")
            }
        };
        self.index.insert(owner, &self.rows);
        self.bytes += Self::cost(client);
        owner
    }

    /// It owns this entry from now on.
    pub(super) fn give(&mut self, owner: Owner, entry: &Entry) {
        if let Some(row) = self.row_mut(owner) {
            row.keys += 1;
            row.bytes += entry.weight();
        }
    }

    /// It owns this entry no more.
    pub(super) fn take(&mut self, owner: Owner, entry: &Entry) {
        if let Some(row) = self.row_mut(owner) {
            row.keys -= 1;
            row.bytes -= entry.weight();
        }
    }

    /// Forgets who owns nothing any more.
    pub(super) fn leave(&mut self, owner: Owner) {
        let row = self.rows.get(owner as usize).and_then(Option::as_ref);
        if let Some(row) = row.filter(|it| it.keys == 0) {
            (self.index).remove(row.client.as_bytes(), &self.rows);
            self.bytes -= Self::cost(&row.client);
            self.rows[owner as usize] = None;
            self.free.push(owner);
        }
    }

    /// Counts anew what they own in these tables, and forgets who owns nothing there.
    pub(super) fn count(&mut self, tables: [&Table; 2]) {
        if self.rows.is_empty() {
            return;
        }
        for row in self.rows.iter_mut().flatten() {
            (row.keys, row.bytes) = (0, 0);
        }
        for table in tables {
            for loads in table.loads(self.rows.len()) {
                for (row, (keys, bytes)) in self.rows.iter_mut().zip(loads) {
                    if let Some(row) = row {
                        row.keys += keys;
                        row.bytes += bytes;
                    }
                }
            }
        }
        for owner in 0..self.rows.len() as Owner {
            self.leave(owner);
        }
    }
}

impl Keyed for Vec<Option<Row>> {
    fn key(&self, slot: Slot) -> &[u8] {
        let row = self[slot as usize].as_ref();
        row.expect("a number is forgotten with its row")
            .client
            .as_bytes()
    }
}
