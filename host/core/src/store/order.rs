//! The order of keys, for whoever lists them.
//!
//! What enters: slots of keys that are new, and keys that are gone. What leaves: slots in the order of their keys. A write
//! to a key that is there does not come here.

use std::ops::Bound;

use super::index::Keyed;
use super::slots::{Slot, Slots};
use crate::limits::RUN_SLOTS_MAX;

/// Slots in the order of their keys, cut into runs that are short enough to put one in the middle.
#[derive(Clone, Default)]
pub(super) struct Order {
    /// None is empty.
    runs: Vec<Vec<Slot>>,
}

impl Order {
    /// The order of entries that are sorted by their keys, in slots from 0 on.
    pub(super) fn of_sorted(slots: &Slots) -> Self {
        let all: Vec<Slot> = (0..).take(slots.len()).collect();
        Self {
            runs: all.chunks(RUN_SLOTS_MAX).map(<[_]>::to_vec).collect(),
        }
    }

    /// Takes in a slot whose key is not there yet.
    pub(super) fn insert(&mut self, slot: Slot, slots: &Slots) {
        let key = slots.key(slot);
        let mut at = self.run(key, slots);
        let Some(run) = self.runs.get_mut(at) else {
            self.runs.push(vec![slot]);
            return;
        };
        let mut place = run.partition_point(|&it| slots.key(it) < key);
        if run.len() == RUN_SLOTS_MAX {
            if place < RUN_SLOTS_MAX {
                let upper = run.split_off(RUN_SLOTS_MAX / 2);
                self.runs.insert(at + 1, upper);
            } else if !self.has_room(at + 1) {
                // Keys that come in order leave full runs behind them.
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

    /// Forgets the slot of `key`, while the entry is still in it.
    pub(super) fn remove(&mut self, key: &[u8], slots: &Slots) {
        let at = self.run(key, slots);
        let Some(run) = self.runs.get_mut(at) else {
            return;
        };
        let Ok(place) = run.binary_search_by(|&it| slots.key(it).cmp(key)) else {
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

    /// Slots in order, from a key on.
    pub(super) fn from<'a>(
        &'a self,
        start: Bound<&[u8]>,
        slots: &Slots,
    ) -> impl Iterator<Item = Slot> + use<'a> {
        let (at, place) = match start {
            Bound::Unbounded => (0, 0),
            Bound::Included(key) | Bound::Excluded(key) => {
                let at = self.run(key, slots);
                let excluded = matches!(start, Bound::Excluded(_));
                let before = |it: &[u8]| it < key || (excluded && it == key);
                let run = self.runs.get(at).map_or(&[][..], Vec::as_slice);
                (at, run.partition_point(|&it| before(slots.key(it))))
            }
        };
        let runs = self.runs.get(at..).unwrap_or_default();
        runs.iter().flatten().skip(place).copied()
    }

    /// The run that a key is or would be in: the last one that does not begin behind it, or else the first.
    fn run(&self, key: &[u8], slots: &Slots) -> usize {
        let begins_before = |run: &Vec<Slot>| run.first().is_some_and(|&it| slots.key(it) <= key);
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
    use crate::store::owners::NOBODY;

    fn entry(key: &[u8]) -> Entry {
        Entry::new(key, b"", Stamp::default(), None, None)
    }

    fn key(number: u16) -> [u8; 2] {
        number.to_be_bytes()
    }

    /// Slots and their order, beside a map of the same.
    #[derive(Default)]
    struct Both {
        slots: Slots,
        order: Order,
        map: BTreeMap<[u8; 2], Slot>,
    }

    impl Both {
        fn insert(&mut self, number: u16) {
            let key = key(number);
            if self.map.contains_key(&key) {
                return;
            }
            let slot = self.slots.add(entry(&key), NOBODY);
            self.order.insert(slot, &self.slots);
            self.map.insert(key, slot);
        }

        fn remove(&mut self, number: u16) {
            let key = key(number);
            self.order.remove(&key, &self.slots);
            if let Some(slot) = self.map.remove(&key) {
                self.slots.take(slot);
            }
        }

        fn check(&self, from: u16) {
            let from = key(from);
            for start in [
                Bound::Unbounded,
                Bound::Included(&from),
                Bound::Excluded(&from),
            ] {
                let wanted: Vec<Slot> = self
                    .map
                    .range::<[u8; 2], _>((start, Bound::Unbounded))
                    .map(|it| *it.1)
                    .collect();
                let start = start.map(|it| &it[..]);
                let found: Vec<Slot> = self.order.from(start, &self.slots).collect();
                assert_eq!(found, wanted, "from {start:?}");
            }
            let runs = &self.order.runs;
            assert!(
                runs.iter()
                    .all(|it| (1..=RUN_SLOTS_MAX).contains(&it.len()))
            );
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        /// Steps take whole ranges of keys, so that runs split and come together.
        #[test]
        fn it_is_the_order_of_a_sorted_map(
            steps in prop::collection::vec(
                (any::<bool>(), 0..4000_u16, 1..1500_u16, prop::sample::select(vec![1_u16, 3, 7]), any::<bool>()),
                1..12,
            ),
            from in 0..4000_u16,
        ) {
            let mut both = Both::default();
            for (insert, first, count, stride, falling) in steps {
                let mut numbers: Vec<u16> = (0..count).map(|it| first + it * stride).collect();
                if falling {
                    numbers.reverse();
                }
                for number in numbers {
                    if insert { both.insert(number) } else { both.remove(number) }
                }
                both.check(from);
            }
        }
    }

    #[test]
    fn keys_that_come_in_order_fill_their_runs() {
        let mut both = Both::default();
        let keys = 4 * RUN_SLOTS_MAX as u16;
        (0..keys).for_each(|it| both.insert(it));
        assert_eq!(both.order.runs.len(), 4);
        (0..keys).for_each(|it| both.remove(it));
        assert!(both.order.runs.is_empty(), "nothing is left of them");
    }

    /// Each is the next one behind a full run. A run of its own for each would make every new key slower than the last one.
    #[test]
    fn keys_that_come_in_falling_order_share_runs() {
        let mut both = Both::default();
        let full = RUN_SLOTS_MAX as u16;
        (0..full).for_each(|it| both.insert(it));
        (full..10 * full).rev().for_each(|it| both.insert(it));
        both.check(full);
        let runs = both.order.runs.len();
        assert!(
            runs <= 2 * 10,
            "{runs} runs of half of their length at least"
        );
    }

    #[test]
    fn sorted_entries_have_their_order_at_once() {
        let keys = 3 * RUN_SLOTS_MAX as u16 / 2;
        let slots = Slots::of((0..keys).map(|it| (entry(&key(it)), NOBODY)).collect());
        let order = Order::of_sorted(&slots);
        let all: Vec<Slot> = order.from(Bound::Unbounded, &slots).collect();
        assert_eq!(all, (0..u32::from(keys)).collect::<Vec<_>>());
    }
}
