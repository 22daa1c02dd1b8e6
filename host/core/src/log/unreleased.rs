//! Keys whose last write is not released yet. An answer that depends on such a key must wait for
//! that write.

use std::collections::VecDeque;
use std::hash::BuildHasher;

use hashbrown::DefaultHashBuilder;
use rustc_hash::FxHashMap;

use super::LogPosition;
use crate::store::{Read, RestsOn};

/// Writes that are not released yet.
///
/// Keys are identified by their hash. After a collision, an answer may wait for a write of another
/// key, which is late but never wrong.
#[derive(Default)]
pub(super) struct Unreleased {
    hasher: DefaultHashBuilder,
    last: FxHashMap<u64, LogPosition>,
    order: VecDeque<(LogPosition, u64)>,
}

impl Unreleased {
    /// Notes the keys that a record changes, each with whether it is hidden.
    pub(super) fn note<'a>(
        &mut self,
        position: LogPosition,
        keys: impl Iterator<Item = (&'a [u8], bool)>,
    ) {
        for (key, hidden) in keys {
            let key = self.hash(key, hidden);
            self.last.insert(key, position);
            self.order.push_back((position, key));
        }
    }

    /// Removes writes that are released.
    pub(super) fn release(&mut self, released: LogPosition) {
        let is_released = |(position, _): &mut (LogPosition, u64)| *position <= released;
        while let Some((position, key)) = self.order.pop_front_if(is_released) {
            if self.last.get(&key) == Some(&position) {
                self.last.remove(&key);
            }
        }
    }

    /// The position that an answer depends on. `last` is the position of the last record.
    pub(super) fn of(&self, rests_on: &RestsOn, payload: &[u8], last: LogPosition) -> LogPosition {
        match rests_on {
            RestsOn::Nothing => LogPosition(0),
            RestsOn::Everything => last,
            RestsOn::Keys(reads) => {
                let of = |read: &Read| {
                    let key = read.key.resolve(payload)?;
                    self.last.get(&self.hash(key, read.hidden)).copied()
                };
                reads.iter().filter_map(of).max().unwrap_or_default()
            }
        }
    }

    fn hash(&self, key: &[u8], hidden: bool) -> u64 {
        self.hasher.hash_one((key, hidden))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{Key, KeyRef};

    fn note(on: &mut Unreleased, position: u64, keys: &[(&str, bool)]) {
        let keys = keys.iter().map(|(key, hidden)| (key.as_bytes(), *hidden));
        on.note(LogPosition(position), keys);
    }

    fn position(on: &Unreleased, key: &'static str, hidden: bool) -> u64 {
        let reads = vec![Read {
            key: KeyRef::Own(Key::from_static(key.as_bytes())),
            hidden,
            entry: None,
        }];
        on.of(&RestsOn::Keys(reads), b"", LogPosition(99)).0
    }

    #[test]
    fn read_depends_on_the_last_write_of_its_key() {
        let mut unreleased = Unreleased::default();
        note(&mut unreleased, 1, &[("a", false), ("b", false)]);
        note(&mut unreleased, 2, &[("a", false), ("c", true)]);
        assert_eq!(position(&unreleased, "a", false), 2);
        assert_eq!(position(&unreleased, "b", false), 1);
        assert_eq!(position(&unreleased, "c", false), 0);
        assert_eq!(position(&unreleased, "c", true), 2);
        unreleased.release(LogPosition(1));
        assert_eq!(position(&unreleased, "a", false), 2, "it was written again");
        assert_eq!(position(&unreleased, "b", false), 0);
        for (rests_on, expected) in [(RestsOn::Everything, 99), (RestsOn::Nothing, 0)] {
            assert_eq!(unreleased.of(&rests_on, b"", LogPosition(99)).0, expected);
        }
        unreleased.release(LogPosition(2));
        assert!(unreleased.last.is_empty() && unreleased.order.is_empty());
    }
}
