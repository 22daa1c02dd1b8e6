//! Assigns a number to each distinct level of the filters with wildcards.
//!
//! A level that no filter has can only match a wildcard, so topic names get no numbers of their
//! own. A level must be released as often as it was acquired, or the table grows with every filter
//! that ever existed.

use std::collections::HashMap;

use crate::topic;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Level(u32);

/// The wildcard `+`.
pub(super) const PLUS: Level = Level(0);

impl Level {
    /// A level of a topic name that no filter has.
    pub(super) const NONE: Self = Self(1);

    const FIRST: u32 = 2;
}

#[derive(Debug, Default)]
pub(super) struct Levels {
    /// The number of each level, and how many filter levels use it. The hash is keyed, since
    /// clients choose the levels.
    known: HashMap<Box<[u8]>, (Level, usize)>,
    free: Vec<Level>,
}

impl Levels {
    /// The levels of a new filter without its `#`, and whether it ends with one. Counts their use.
    pub(super) fn acquire(&mut self, filter: &[u8]) -> (Vec<Level>, bool) {
        let path = named(filter).map(|level| match level {
            b"+" => PLUS,
            _ => self.acquire_one(level),
        });
        (path.collect(), ends_with_hash(filter))
    }

    fn acquire_one(&mut self, level: &[u8]) -> Level {
        if let Some((number, count)) = self.known.get_mut(level) {
            *count += 1;
            return *number;
        }
        // There are only as many numbers as levels in use. The memory limit of subscriptions keeps
        // that far below 32 bits.
        let next = Level(Level::FIRST + self.known.len() as u32);
        let number = self.free.pop().unwrap_or(next);
        self.known.insert(level.into(), (number, 1));
        number
    }

    /// The levels of a filter. `None` if one of them is unknown.
    pub(super) fn find(&self, filter: &[u8]) -> Option<(Vec<Level>, bool)> {
        let path = named(filter).map(|level| match level {
            b"+" => Some(PLUS),
            _ => self.known.get(level).map(|(number, _)| *number),
        });
        Some((path.collect::<Option<_>>()?, ends_with_hash(filter)))
    }

    pub(super) fn get(&self, level: &[u8]) -> Level {
        self.known
            .get(level)
            .map_or(Level::NONE, |(number, _)| *number)
    }

    /// Releases the levels of a removed filter.
    pub(super) fn release(&mut self, filter: &[u8]) {
        for level in named(filter).filter(|level| *level != b"+") {
            if let Some((number, count)) = self.known.get_mut(level) {
                *count -= 1;
                if *count == 0 {
                    self.free.push(*number);
                    self.known.remove(level);
                }
            }
        }
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.known.is_empty()
    }
}

fn named(filter: &[u8]) -> impl Iterator<Item = &[u8]> {
    topic::levels(filter).filter(|level| *level != b"#")
}

fn ends_with_hash(filter: &[u8]) -> bool {
    topic::levels(filter).next_back() == Some(b"#")
}
