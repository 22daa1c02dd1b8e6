//! A number for each different level of the filters with wildcards.
//!
//! A level that no filter has matches nothing but `+`, so a topic name needs no numbers of its own. A number must be given back as
//! often as it was taken, or the table grows with every filter that ever was.

use std::collections::HashMap;

use crate::topic;

/// A level of a filter or of a topic name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Level(u32);

/// `+`
pub(super) const PLUS: Level = Level(0);

impl Level {
    /// Of a topic name: one that no filter has.
    pub(super) const NONE: Self = Self(1);

    const FIRST: u32 = 2;
}

#[derive(Debug, Default)]
pub(super) struct Levels {
    /// With a keyed hash, since clients choose the levels. How many filters have each, a filter with two of them twice.
    known: HashMap<Box<[u8]>, (Level, usize)>,
    free: Vec<Level>,
}

impl Levels {
    /// The levels of a filter without its `#`, and whether it ends with one. A filter that is added takes its levels.
    pub(super) fn take(&mut self, filter: &[u8]) -> (Vec<Level>, bool) {
        let path = named(filter).map(|level| match level {
            b"+" => PLUS,
            _ => self.take_one(level),
        });
        (path.collect(), ends_with_hash(filter))
    }

    fn take_one(&mut self, level: &[u8]) -> Level {
        if let Some((number, count)) = self.known.get_mut(level) {
            *count += 1;
            return *number;
        }
        // As many as there are levels at once: bounded by the memory of subscriptions, far below 32 bits.
        let next = Level(Level::FIRST + self.known.len() as u32);
        let number = self.free.pop().unwrap_or(next);
        self.known.insert(level.into(), (number, 1));
        number
    }

    /// The levels of a filter; none if one of them is unknown.
    pub(super) fn find(&self, filter: &[u8]) -> Option<(Vec<Level>, bool)> {
        let path = named(filter).map(|level| match level {
            b"+" => Some(PLUS),
            _ => self.known.get(level).map(|(number, _)| *number),
        });
        Some((path.collect::<Option<_>>()?, ends_with_hash(filter)))
    }

    /// A level of a topic name.
    pub(super) fn get(&self, level: &[u8]) -> Level {
        self.known
            .get(level)
            .map_or(Level::NONE, |(number, _)| *number)
    }

    /// A filter that was added is removed.
    pub(super) fn give_back(&mut self, filter: &[u8]) {
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
