//! The clients that own keys, and the keys and bytes of each. A key belongs to the client that
//! wrote it last.
//!
//! An owner has a number while it owns a key. Tables store the owner of each key. Numbers are valid
//! in this process only; records and snapshots contain client ids.

use super::arena::Slot;
use super::entry::Entry;
use super::index::{Index, Keyed};
use super::table::Table;
use crate::limits::{OWNER_INDEX_PARTS, OWNER_OVERHEAD_BYTES};

/// The number of an owner. There are never more owners than keys.
pub(crate) type Owner = Slot;

/// The owner of keys that no client owns: keys of a snapshot without owners, and keys that no
/// client's request wrote.
pub(crate) const NO_OWNER: Owner = Owner::MAX;

/// All owners.
#[derive(Clone, Default)]
pub struct Owners {
    /// Indexed by owner number.
    rows: Vec<Option<Row>>,
    free: Vec<Owner>,
    index: Index<OWNER_INDEX_PARTS>,
    bytes: u64,
}

/// One owner and its sums.
#[derive(Clone)]
struct Row {
    client: Box<str>,
    keys: u64,
    bytes: u64,
}

impl Owners {
    /// What an owner itself counts against `max_bytes`, in addition to its keys.
    pub(super) fn cost(client: &str) -> u64 {
        client.len() as u64 + OWNER_OVERHEAD_BYTES
    }

    /// What all owners count against `max_bytes`.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The number of a client, if it owns anything.
    pub(super) fn find(&self, client: &str) -> Option<Owner> {
        self.index.get(client.as_bytes(), &self.rows)
    }

    /// The keys and bytes of an owner.
    pub(super) fn load(&self, owner: Owner) -> (u64, u64) {
        let row = self.row(owner);
        row.map_or((0, 0), |it| (it.keys, it.bytes))
    }

    /// The client id of an owner.
    pub(super) fn client(&self, owner: Owner) -> Option<&str> {
        Some(&*self.row(owner)?.client)
    }

    fn row(&self, owner: Owner) -> Option<&Row> {
        self.rows.get(owner as usize)?.as_ref()
    }

    fn row_mut(&mut self, owner: Owner) -> Option<&mut Row> {
        self.rows.get_mut(owner as usize)?.as_mut()
    }

    /// All owners: client id, keys and bytes.
    pub fn all(&self) -> impl Iterator<Item = (&str, u64, u64)> {
        self.page(0, usize::MAX).1
    }

    /// The owners in `rows` rows starting at `from`, and the start of the next page if there is
    /// one.
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

    /// Returns the number of a client, adding it if it is new. The caller must call
    /// [`Owners::leave`] if the client may own nothing in the end, or its row leaks.
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
                    .expect("every owner has a key, so there are at most as many owners as slots")
            }
        };
        self.index.insert(owner, &self.rows);
        self.bytes += Self::cost(client);
        owner
    }

    /// Adds an entry to the sums of an owner.
    pub(super) fn give(&mut self, owner: Owner, entry: &Entry) {
        if let Some(row) = self.row_mut(owner) {
            row.keys += 1;
            row.bytes += entry.weight();
        }
    }

    /// Subtracts an entry from the sums of an owner.
    pub(super) fn take(&mut self, owner: Owner, entry: &Entry) {
        if let Some(row) = self.row_mut(owner) {
            row.keys -= 1;
            row.bytes -= entry.weight();
        }
    }

    /// Removes an owner that has no keys left.
    pub(super) fn leave(&mut self, owner: Owner) {
        let row = self.rows.get(owner as usize).and_then(Option::as_ref);
        if let Some(row) = row.filter(|it| it.keys == 0) {
            (self.index).remove(row.client.as_bytes(), &self.rows);
            self.bytes -= Self::cost(&row.client);
            self.rows[owner as usize] = None;
            self.free.push(owner);
        }
    }

    /// Recomputes the sums from these tables, and removes owners without keys.
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
        row.expect("an owner's number is removed with its row")
            .client
            .as_bytes()
    }
}
