//! Lists keys for an operator, as a directory: keys that agree up to a delimiter are one entry.
//!
//! A group of keys costs two searches, however many keys it has, so the time of a list is bounded
//! by the number of its entries.

use std::ops::Bound;

use super::entry::{Entry, Key};
use super::table::Table;

/// An entry of a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Listed {
    /// A key.
    Key(Entry),
    /// All keys that start with these bytes, which end with the delimiter.
    Group {
        /// What the keys start with.
        name: Key,
        /// Their number, including expired ones that no sweep has removed yet.
        keys: u64,
    },
}

impl Listed {
    /// The bytes that order the entry.
    pub fn name(&self) -> &[u8] {
        match self {
            Self::Key(entry) => entry.key(),
            Self::Group { name, .. } => name,
        }
    }
}

/// Where a list continues behind the entry that this name belongs to. `prefix` and `delimiter` are
/// those of the list.
pub fn after(prefix: &[u8], delimiter: &[u8], name: &[u8]) -> Bound<Vec<u8>> {
    match group(prefix, delimiter, name) {
        Some(group) => behind(group),
        None => Bound::Excluded(name.to_vec()),
    }
}

/// Where a list continues behind all keys that start with these bytes.
pub fn behind(name: &[u8]) -> Bound<Vec<u8>> {
    successor(name).map_or(Bound::Unbounded, Bound::Included)
}

/// The part of a key that ends with the first delimiter after the prefix.
fn group<'a>(prefix: &[u8], delimiter: &[u8], key: &'a [u8]) -> Option<&'a [u8]> {
    let rest = key.strip_prefix(prefix)?;
    if delimiter.is_empty() {
        return None;
    }
    let at = (rest.windows(delimiter.len())).position(|part| part == delimiter)?;
    key.get(..prefix.len() + at + delimiter.len())
}

/// The least key above all keys that start with these bytes.
fn successor(name: &[u8]) -> Option<Vec<u8>> {
    let end = name.iter().rposition(|byte| *byte != u8::MAX)?;
    let mut successor = name[..=end].to_vec();
    successor[end] += 1;
    Some(successor)
}

impl Table {
    /// At most `max` entries from `start` on, of the keys that start with `prefix`. Without a
    /// delimiter every key is an entry. Nothing is behind [`Bound::Unbounded`].
    pub fn list(
        &self,
        prefix: &[u8],
        delimiter: &[u8],
        start: Bound<Vec<u8>>,
        max: usize,
    ) -> Vec<Listed> {
        let mut listed = Vec::new();
        let mut start = match start {
            Bound::Included(key) | Bound::Excluded(key) if *key < *prefix => {
                Bound::Included(prefix.to_vec())
            }
            Bound::Unbounded => return listed,
            start => start,
        };
        'groups: while listed.len() < max {
            let from = start.as_ref().map(Vec::as_slice);
            let entries = self.from(from);
            for entry in entries.take_while(|it| it.key().starts_with(prefix)) {
                let Some(name) = group(prefix, delimiter, entry.key()) else {
                    listed.push(Listed::Key(entry.clone()));
                    if listed.len() == max {
                        return listed;
                    }
                    continue;
                };
                let end = successor(name);
                let behind = end.as_deref().map_or(Bound::Unbounded, Bound::Included);
                listed.push(Listed::Group {
                    name: Key::copy_from_slice(name),
                    keys: self.count(Bound::Included(name), behind),
                });
                match end {
                    Some(end) => start = Bound::Included(end),
                    None => return listed,
                }
                continue 'groups;
            }
            break;
        }
        listed
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use proptest::prelude::*;

    use super::*;
    use crate::clock::Stamp;

    fn table<'a>(keys: impl IntoIterator<Item = &'a [u8]>) -> Table {
        let mut table = Table::default();
        for key in keys {
            table.insert(Entry::new(key, b"v", Stamp::default(), None, None));
        }
        table
    }

    /// Lists everything in pages of `max` entries: names, with the number of keys of a group.
    fn pages(table: &Table, prefix: &[u8], delimiter: &[u8], max: usize) -> Vec<(Vec<u8>, u64)> {
        let mut start = Bound::Included(prefix.to_vec());
        let mut all = Vec::new();
        loop {
            let page = table.list(prefix, delimiter, start, max);
            assert!(page.len() <= max);
            let Some(last) = page.last() else {
                return all;
            };
            start = after(prefix, delimiter, last.name());
            all.extend(page.into_iter().map(|it| match it {
                Listed::Key(entry) => (entry.key().to_vec(), 0),
                Listed::Group { name, keys } => (name.to_vec(), keys),
            }));
        }
    }

    #[test]
    fn keys_up_to_a_delimiter_are_one_entry() {
        let table = table([&b"a"[..], b"a/1", b"a/2/x", b"a/2/y", b"a0", b"b/", b"b//c"]);
        let list = |prefix: &str, delimiter: &str| -> Vec<(String, u64)> {
            let all = pages(&table, prefix.as_bytes(), delimiter.as_bytes(), 2);
            let text = |(name, keys)| (String::from_utf8(name).unwrap(), keys);
            all.into_iter().map(text).collect()
        };
        let named = |all: &[(&str, u64)]| -> Vec<(String, u64)> {
            let named = all.iter().map(|(name, keys)| ((*name).to_owned(), *keys));
            named.collect()
        };
        let top = [("a", 0), ("a/", 3), ("a0", 0), ("b/", 2)];
        assert_eq!(list("", "/"), named(&top));
        assert_eq!(list("a/", "/"), named(&[("a/1", 0), ("a/2/", 2)]));
        assert_eq!(list("b/", "/"), named(&[("b/", 0), ("b//", 1)]));
        assert_eq!(list("a/2", ""), named(&[("a/2/x", 0), ("a/2/y", 0)]));
        assert_eq!(list("", "//").last(), named(&[("b//", 1)]).last());
        assert!(list("c", "/").is_empty());
    }

    #[test]
    fn a_group_without_a_successor_is_the_last() {
        let table = table([&b"\xff\xffx"[..], b"\xff\xffy", b"a"]);
        let expected = [(b"a".to_vec(), 0), (b"\xff\xff".to_vec(), 2)];
        assert_eq!(pages(&table, b"", b"\xff\xff", 1), expected);
        assert_eq!(after(b"", b"\xff", b"\xff"), Bound::Unbounded);
    }

    proptest! {
        #[test]
        fn pages_match_a_list_of_all_keys(
            keys in prop::collection::btree_set(prop::collection::vec(
                prop::sample::select(vec![b'/', b'a', 0xFF]), 0..6), 0..40),
            prefix in prop::collection::vec(prop::sample::select(vec![b'/', b'a', 0xFF]), 0..3),
            delimiter in prop::sample::select(vec![&b"/"[..], b"", b"a/", b"\xff"]),
            max in 1..5_usize,
        ) {
            let keys: BTreeSet<Vec<u8>> = keys.into_iter().filter(|it| !it.is_empty()).collect();
            let table = table(keys.iter().map(Vec::as_slice));
            let mut expected: BTreeMap<(Vec<u8>, bool), u64> = BTreeMap::new();
            for key in keys.iter().filter(|it| it.starts_with(&prefix)) {
                match group(&prefix, delimiter, key) {
                    Some(name) => *expected.entry((name.to_vec(), true)).or_default() += 1,
                    None => _ = expected.insert((key.clone(), false), 0),
                }
            }
            let expected: Vec<_> = expected.into_iter().map(|((name, _), keys)| (name, keys)).collect();
            prop_assert_eq!(pages(&table, &prefix, delimiter, max), expected);
        }
    }
}
