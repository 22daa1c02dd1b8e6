//! The order of keys, for listings.
//!
//! Only new and removed keys change it, not writes to existing keys.

use std::ops::Bound;

use super::arena::{Arena, Slot};
use super::index::Keyed;
use crate::limits::RUN_SLOTS_MAX;

/// Slots in the order of their keys, divided into runs that are short enough to insert into.
#[derive(Clone, Default)]
pub(super) struct Order {
    /// Runs are never empty.
    runs: Vec<Vec<Slot>>,
}

impl Order {
    /// Creates the order of entries that are sorted by key, in slots from 0 on.
    pub(super) fn of_sorted(arena: &Arena) -> Self {
        let all: Vec<Slot> = (0..).take(arena.len()).collect();
        Self {
            runs: all.chunks(RUN_SLOTS_MAX).map(<[_]>::to_vec).collect(),
        }
    }

    /// Inserts a slot whose key is new.
    pub(super) fn insert(&mut self, slot: Slot, arena: &Arena) {
        let key = arena.key(slot);
        let mut at = self.run(key, arena);
        let Some(run) = self.runs.get_mut(at) else {
            self.runs.push(vec![slot]);
            return;
        };
        let mut place = run.partition_point(|&it| arena.key(it) < key);
        if run.len() == RUN_SLOTS_MAX {
            if place < RUN_SLOTS_MAX {
                let upper = run.split_off(RUN_SLOTS_MAX / 2);
                self.runs.insert(at + 1, upper);
            } else if !self.has_room(at + 1) {
                // Ascending inserts must leave full runs behind.
                self.runs.insert(at + 1, Vec::new());
            }
            let kept = self.runs[at].len();
            if place >= kept {
                (at, place) = (at + 1, place - kept);
            }
        }
        self.runs[at].insert(place, slot);
    }

    fn has_room(&self, at: usize) -> bool {
        let run = self.runs.get(at);
        run.is_some_and(|run| run.len() < RUN_SLOTS_MAX)
    }

    /// Removes the slot of `key`. The arena must still hold the entry, because the search reads its
    /// key.
    pub(super) fn remove(&mut self, key: &[u8], arena: &Arena) {
        let at = self.run(key, arena);
        let Some(run) = self.runs.get_mut(at) else {
            return;
        };
        let Ok(place) = run.binary_search_by(|&it| arena.key(it).cmp(key)) else {
            return;
        };
        run.remove(place);
        let left = run.len();
        let next = self.runs.get(at + 1).map_or(0, Vec::len);
        if left == 0 {
            self.runs.remove(at);
        } else if next > 0 && left + next <= RUN_SLOTS_MAX / 2 {
            let next = self.runs.remove(at + 1);
            self.runs[at].extend(next);
        }
    }

    /// Slots in order, starting at a key.
    pub(super) fn from<'a>(
        &'a self,
        start: Bound<&[u8]>,
        arena: &Arena,
    ) -> impl Iterator<Item = Slot> + use<'a> {
        let (at, place) = self.place(start, arena);
        let runs = self.runs.get(at..).unwrap_or_default();
        runs.iter().flatten().skip(place).copied()
    }

    /// The number of slots from `start` on and before `end`, each the place of a key. Costs one
    /// addition per run between both.
    pub(super) fn count(&self, start: Bound<&[u8]>, end: Bound<&[u8]>, arena: &Arena) -> u64 {
        let (first, skipped) = self.place(start, arena);
        let (last, taken) = match end {
            Bound::Unbounded => (self.runs.len(), 0),
            end => self.place(end, arena),
        };
        let whole = self.runs.get(first..last).unwrap_or_default();
        let whole: usize = whole.iter().map(Vec::len).sum();
        (whole + taken).saturating_sub(skipped) as u64
    }

    /// The run and the place within it at which the slots from a key on start.
    fn place(&self, start: Bound<&[u8]>, arena: &Arena) -> (usize, usize) {
        match start {
            Bound::Unbounded => (0, 0),
            Bound::Included(key) | Bound::Excluded(key) => {
                let at = self.run(key, arena);
                let excluded = matches!(start, Bound::Excluded(_));
                let before = |it: &[u8]| it < key || (excluded && it == key);
                let run = self.runs.get(at).map_or(&[][..], Vec::as_slice);
                (at, run.partition_point(|&it| before(arena.key(it))))
            }
        }
    }

    /// The run that contains `key` or would: the last run that starts at or before it, otherwise
    /// the first.
    fn run(&self, key: &[u8], arena: &Arena) -> usize {
        let begins_before = |run: &Vec<Slot>| run.first().is_some_and(|&it| arena.key(it) <= key);
        self.runs.partition_point(begins_before).saturating_sub(1)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use crate::clock::Stamp;
    use crate::store::entry::Entry;
    use crate::store::owners::NO_OWNER;

    fn entry(key: &[u8]) -> Entry {
        Entry::new(key, b"", Stamp::default(), None, None)
    }

    fn key(number: u16) -> [u8; 2] {
        number.to_be_bytes()
    }

    /// The order under test, and a map with the same contents.
    #[derive(Default)]
    struct WithModel {
        arena: Arena,
        order: Order,
        map: BTreeMap<[u8; 2], Slot>,
    }

    impl WithModel {
        fn insert(&mut self, number: u16) {
            let key = key(number);
            if self.map.contains_key(&key) {
                return;
            }
            let slot = self.arena.add(entry(&key), NO_OWNER);
            self.order.insert(slot, &self.arena);
            self.map.insert(key, slot);
        }

        fn remove(&mut self, number: u16) {
            let key = key(number);
            self.order.remove(&key, &self.arena);
            if let Some(slot) = self.map.remove(&key) {
                self.arena.take(slot);
            }
        }

        fn check(&self, from: u16) {
            let from = key(from);
            for start in [
                Bound::Unbounded,
                Bound::Included(&from),
                Bound::Excluded(&from),
            ] {
                let range = self.map.range::<[u8; 2], _>((start, Bound::Unbounded));
                let expected: Vec<Slot> = range.map(|it| *it.1).collect();
                let start = start.map(|it| &it[..]);
                let found: Vec<Slot> = self.order.from(start, &self.arena).collect();
                assert_eq!(found, expected, "from {start:?}");
                let count = self.order.count(start, Bound::Unbounded, &self.arena);
                assert_eq!(count, expected.len() as u64, "from {start:?}");
                let before = self.order.count(Bound::Unbounded, start, &self.arena);
                let is_all = start == Bound::Unbounded;
                let behind = if is_all { 0 } else { expected.len() };
                let expected = (self.map.len() - behind) as u64;
                assert_eq!(before, expected, "before {start:?}");
            }
            let mut runs = self.order.runs.iter();
            assert!(runs.all(|it| (1..=RUN_SLOTS_MAX).contains(&it.len())));
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        /// Steps insert and remove ranges of keys, so that runs split and merge.
        #[test]
        fn order_matches_a_sorted_map(
            steps in prop::collection::vec(
                (any::<bool>(), 0..4000_u16, 1..1500_u16, prop::sample::select(vec![1_u16, 3, 7]), any::<bool>()),
                1..12,
            ),
            from in 0..4000_u16,
        ) {
            let mut model = WithModel::default();
            for (insert, first, count, stride, falling) in steps {
                let mut numbers: Vec<u16> = (0..count).map(|it| first + it * stride).collect();
                if falling {
                    numbers.reverse();
                }
                for number in numbers {
                    if insert { model.insert(number) } else { model.remove(number) }
                }
                model.check(from);
            }
        }
    }

    #[test]
    fn ascending_inserts_fill_runs() {
        let mut model = WithModel::default();
        let keys = 4 * RUN_SLOTS_MAX as u16;
        (0..keys).for_each(|it| model.insert(it));
        assert_eq!(model.order.runs.len(), 4);
        (0..keys).for_each(|it| model.remove(it));
        assert!(model.order.runs.is_empty(), "no runs are left");
    }

    /// Each key is inserted just behind a full run. A run for each of them would make every
    /// insertion slower than the last.
    #[test]
    fn descending_inserts_share_runs() {
        let mut model = WithModel::default();
        let full = RUN_SLOTS_MAX as u16;
        (0..full).for_each(|it| model.insert(it));
        (full..10 * full).rev().for_each(|it| model.insert(it));
        model.check(full);
        let runs = model.order.runs.len();
        assert!(runs <= 2 * 10, "{runs} runs, each at least half full");
    }

    #[test]
    fn of_sorted_keeps_the_order_of_its_entries() {
        let keys = 3 * RUN_SLOTS_MAX as u16 / 2;
        let arena = Arena::of((0..keys).map(|it| (entry(&key(it)), NO_OWNER)).collect());
        let order = Order::of_sorted(&arena);
        let all: Vec<Slot> = order.from(Bound::Unbounded, &arena).collect();
        assert_eq!(all, (0..u32::from(keys)).collect::<Vec<_>>());
    }
}
