//! Entries in a snapshot, with their owners.
//!
//! Every block is self-contained, because pieces of different times would not agree on owner
//! numbers. A block contains each client id once, and nothing for an entry with the same owner as
//! the one before.
//!
//! ```text
//! kind ─ entry ─ [owner] ─ entry ─ [owner] ─ …
//!
//! owner: 0 for none, otherwise the number of a client id in this block.
//!        The first use of a number is followed by the client id.
//! ```

use std::collections::HashMap;

use super::codec::{Malformed, Reader, bytes, number};
use super::record::{self, OTHER_OWNER};
use super::snapshot::{ENTRIES, OWNED_ENTRIES};
use crate::limits;
use crate::store::{Change, Key, State, Write};

/// Encodes entries after a key. Returns the last key if there may be more.
pub(super) fn block(state: &State, hidden: bool, after: Option<&[u8]>) -> (Vec<u8>, Option<Key>) {
    let mut out = vec![ENTRIES];
    let (mut names, mut last) = (HashMap::new(), None);
    for (count, (entry, owner)) in state.entries(hidden, after).enumerate() {
        let write = Write {
            hidden,
            ..Write::of(Change::Set(entry.clone()))
        };
        let start = out.len();
        record::write(&mut out, &write);
        if owner != last {
            out[0] = OWNED_ENTRIES;
            out[start] |= OTHER_OWNER;
            let next = names.len() + 1;
            let named = owner.map_or(0, |owner| *names.entry(owner).or_insert(next));
            number(&mut out, named as u64);
            if let Some(owner) = owner.filter(|_| named == next) {
                bytes(&mut out, owner.as_bytes());
            }
            last = owner;
        }
        if out.len() >= limits::SNAPSHOT_PIECE_BYTES || count + 1 == limits::SNAPSHOT_PIECE_ENTRIES
        {
            return (out, Some(Key::copy_from_slice(entry.key())));
        }
    }
    (out, None)
}

/// The entries of one block with their owners, in order.
pub struct Entries<'a> {
    reader: Reader<'a>,
    names: Vec<&'a str>,
    last: Option<&'a str>,
}

impl<'a> Entries<'a> {
    /// Reads a block after its kind.
    pub(super) fn new(reader: Reader<'a>) -> Self {
        Self {
            reader,
            names: Vec::new(),
            last: None,
        }
    }

    fn read(&mut self) -> Result<(Write, Option<&'a str>), Malformed> {
        let flags = self.reader.0.first().copied().unwrap_or_default();
        let write = record::read_write(&mut self.reader, b"")?;
        if flags & OTHER_OWNER != 0 {
            let named: usize = self.reader.small()?;
            if named == self.names.len() + 1 {
                self.names.push(self.reader.text()?);
            }
            self.last = match named.checked_sub(1) {
                None => None,
                Some(at) => Some(*self.names.get(at).ok_or(UNNAMED)?),
            };
        }
        Ok((write, self.last))
    }
}

impl<'a> Iterator for Entries<'a> {
    type Item = Result<(Write, Option<&'a str>), Malformed>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.reader.is_empty() {
            return None;
        }
        let read = self.read();
        if read.is_err() {
            // The end of a malformed entry is unknown.
            self.reader = Reader(b"");
        }
        Some(read)
    }
}

const UNNAMED: Malformed = Malformed("an owner number without a client id in this block");

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Stamp;
    use crate::log::{Image, Meta, Progress};
    use crate::store::{Duplicates, Entry, Retention};

    fn set(key: &str, hidden: bool) -> Write {
        let (wall, counter) = (3, 4);
        let entry = Entry::new(key.as_bytes(), b"v", Stamp { wall, counter }, None, None);
        Write {
            hidden,
            ..Write::of(Change::Set(entry))
        }
    }

    /// Creates keys with their owners. Keys that start with a dot are hidden.
    fn state(keys: &[(String, Option<&str>)]) -> State {
        let mut state = State::default();
        for (key, client) in keys {
            state.write_by(&[set(key, key.starts_with('.'))], *client);
        }
        state
    }

    fn blocks(state: &State) -> Vec<Vec<u8>> {
        let duplicates = Duplicates::new(Retention::default());
        let mut progress = Progress::default();
        std::iter::from_fn(|| progress.next(state, &duplicates, Meta::default)).collect()
    }

    fn read(blocks: &[Vec<u8>]) -> Result<State, Malformed> {
        let mut image = Image::new(Retention::default());
        for block in blocks {
            image.block(block)?;
        }
        image.finish();
        Ok(*image.state)
    }

    fn owners(state: &State) -> Vec<(String, u64, u64)> {
        let owned = |(it, keys, bytes): (&str, _, _)| (it.to_owned(), keys, bytes);
        let mut all: Vec<_> = state.owners.all().map(owned).collect();
        all.sort();
        all
    }

    #[test]
    fn owners_survive_a_snapshot_of_several_blocks() {
        let clients = [Some("one"), Some("one"), None, Some(""), Some("two")];
        let key = |at: usize| match at % 7 {
            0 => format!(".{at:04}"),
            _ => format!("{at:04}"),
        };
        let owned = |at| (key(at), clients[at / 3 % 5]);
        let keys: Vec<_> = (0..2_000).map(owned).collect();
        let before = state(&keys);
        let after = read(&blocks(&before)).unwrap();
        for (key, client) in &keys {
            let hidden = key.starts_with('.');
            assert_eq!(after.owner(key.as_bytes(), hidden), *client, "{key}");
        }
        assert_eq!(owners(&after), owners(&before));
        assert_eq!(owners(&after).len(), 3);
    }

    #[test]
    fn client_id_is_written_once_per_block() {
        let keys: Vec<_> = (0..500).map(|at| format!("{at:03}")).collect();
        let of = |client: fn(usize) -> Option<&'static str>| {
            let keys = keys.iter().enumerate();
            let keys: Vec<_> = keys.map(|(at, key)| (key.clone(), client(at))).collect();
            blocks(&state(&keys))[0].len()
        };
        let unowned = of(|_| None);
        assert_eq!(of(|_| Some("client")), unowned + 1 + 1 + 6);
        let in_turns = of(|at| Some(if at % 2 == 0 { "client" } else { "other" }));
        assert_eq!(in_turns, unowned + 500 + 1 + 6 + 1 + 5);
    }

    /// Written by versions without owners.
    #[test]
    fn entries_without_owners_are_read_without_owner() {
        let (entry, hidden) = (b"\x04\x03k\0\x01v\x03\x04", b"\x05\x03k\0\x01v\x03\x04");
        // An odd length: the key is stored here and not in a payload.
        let block = [&[ENTRIES][..], entry].concat();
        let mut image = Image::new(Retention::default());
        image.block(&block).unwrap();
        image.block(&[&[ENTRIES][..], hidden].concat()).unwrap();
        image.finish();
        assert_eq!(image.state.table.keys() + image.state.hidden.keys(), 2);
        assert_eq!(image.state.owner(b"k", false), None);
        assert!(owners(&image.state).is_empty());
        let written = &blocks(&image.state)[0];
        assert_eq!(*written, block, "they are written in the old form");
        // The next writer becomes the owner, and no sum is reduced.
        image.state.write_by(&[set("k", false)], Some("client"));
        assert_eq!(owners(&image.state)[0].1, 1);
    }

    #[test]
    fn block_with_undefined_owner_or_partial_entry_is_refused() {
        let entry = b"\x0c\x03k\0\x01v\x03\x04";
        for owner in [&b"\x01\x01c"[..], b"\0"] {
            let block = [&[OWNED_ENTRIES][..], entry, owner].concat();
            assert!(read(&[block]).is_ok());
        }
        for owner in [&b""[..], b"\x02\x01c", b"\x01\x02c", b"\x01\x01\xff"] {
            let block = [&[OWNED_ENTRIES][..], entry, owner].concat();
            assert!(read(&[block]).is_err(), "{owner:?}");
        }
    }
}
