//! A hash table of small values whose keys are stored elsewhere.
//!
//! Each bucket holds a value and a part of its hash, so a lookup usually reads one cache line of
//! the table, and compares keys only if 32 bits of their hashes agree. In a table that is larger
//! than the caches, every further line would cost as much as all other work of a lookup.

/// Values by the hashes of their keys: open addressing with linear probing.
#[derive(Clone)]
pub(super) struct CompactTable<V> {
    buckets: Vec<Bucket<V>>,
    len: usize,
}

#[derive(Clone, Copy, Default)]
struct Bucket<V> {
    /// A part of the hash; zero if the bucket is empty.
    hash: u32,
    value: V,
}

/// The smallest table that is not empty.
const BUCKETS_MIN: usize = 8;

impl<V> Default for CompactTable<V> {
    fn default() -> Self {
        Self {
            buckets: Vec::new(),
            len: 0,
        }
    }
}

impl<V: Copy + Default> CompactTable<V> {
    /// The value with this hash that `is_it` accepts.
    pub(super) fn find(&self, hash: u32, is_it: impl FnMut(V) -> bool) -> Option<V> {
        Some(self.buckets[self.place(used(hash), is_it)?].value)
    }

    /// Whether the bucket is used at which a search for this hash begins.
    pub(super) fn is_home_used(&self, hash: u32) -> bool {
        let home = self.buckets.get(self.home(used(hash)));
        home.is_some_and(|it| it.hash != 0)
    }

    /// Like [`find`](Self::find), to change the value.
    pub(super) fn find_mut(&mut self, hash: u32, is_it: impl FnMut(V) -> bool) -> Option<&mut V> {
        let place = self.place(used(hash), is_it)?;
        Some(&mut self.buckets[place].value)
    }

    /// Adds a value whose key is new.
    pub(super) fn insert(&mut self, hash: u32, value: V) {
        self.reserve(1);
        let hash = used(hash);
        self.put(Bucket { hash, value });
        self.len += 1;
    }

    /// Removes the value with this hash that `is_it` accepts.
    pub(super) fn remove(&mut self, hash: u32, is_it: impl FnMut(V) -> bool) -> Option<V> {
        let mut hole = self.place(used(hash), is_it)?;
        let removed = self.buckets[hole].value;
        let mut next = hole;
        // Values behind the hole move back, so that every search still ends at the first empty
        // bucket.
        loop {
            next = self.after(next);
            let bucket = self.buckets[next];
            if bucket.hash == 0 {
                break;
            }
            let home = self.home(bucket.hash);
            let stays = match hole < next {
                true => hole < home && home <= next,
                false => hole < home || home <= next,
            };
            if !stays {
                self.buckets[hole] = bucket;
                hole = next;
            }
        }
        self.buckets[hole] = Bucket::default();
        self.len -= 1;
        Some(removed)
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn reserve(&mut self, more: usize) {
        let needed = (self.len + more) * 5 / 4 + 1;
        if needed <= self.buckets.len() {
            return;
        }
        // Doubling the table could waste megabytes.
        let grown = self.buckets.len() + self.buckets.len() / 2;
        let buckets = vec![Bucket::default(); grown.max(needed).max(BUCKETS_MIN)];
        let old = std::mem::replace(&mut self.buckets, buckets);
        let used = old.into_iter().filter(|it| it.hash != 0);
        used.for_each(|it| self.put(it));
    }

    fn put(&mut self, bucket: Bucket<V>) {
        let mut place = self.home(bucket.hash);
        while self.buckets[place].hash != 0 {
            place = self.after(place);
        }
        self.buckets[place] = bucket;
    }

    fn place(&self, hash: u32, mut is_it: impl FnMut(V) -> bool) -> Option<usize> {
        if self.buckets.is_empty() {
            return None;
        }
        let mut place = self.home(hash);
        loop {
            let bucket = &self.buckets[place];
            if bucket.hash == hash && is_it(bucket.value) {
                return Some(place);
            }
            if bucket.hash == 0 {
                return None;
            }
            place = self.after(place);
        }
    }

    /// The bucket at which the search for a hash begins. Its highest bits decide.
    fn home(&self, hash: u32) -> usize {
        ((u64::from(hash) * self.buckets.len() as u64) >> u32::BITS) as usize
    }

    fn after(&self, place: usize) -> usize {
        match place + 1 {
            end if end == self.buckets.len() => 0,
            next => next,
        }
    }
}

/// A hash as it is stored: zero marks an empty bucket.
fn used(hash: u32) -> u32 {
    hash.max(1)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Hashes at both ends of the range, so that searches wrap around.
        #[test]
        fn behaves_like_a_list_of_pairs(
            operations in prop::collection::vec(
                (any::<bool>(), prop_oneof![0..4_u32, u32::MAX - 3..=u32::MAX, any::<u32>()], 0..8_u8),
                0..400,
            )
        ) {
            let mut table = CompactTable::default();
            let mut model: Vec<(u32, u8)> = Vec::new();
            for (adds, hash, value) in operations {
                let is_it = |it: u8| it == value;
                let known = model.iter().position(|it| *it == (hash.max(1), value));
                prop_assert_eq!(table.find(hash, is_it), known.map(|_| value));
                match (adds, known) {
                    (true, None) => {
                        table.insert(hash, value);
                        model.push((hash.max(1), value));
                    }
                    (true, Some(_)) => {
                        let found = table.find_mut(hash, is_it);
                        prop_assert_eq!(found.map(|it| *it), Some(value));
                    }
                    (false, known) => {
                        let removed = known.map(|at| model.swap_remove(at).1);
                        prop_assert_eq!(table.remove(hash, is_it), removed);
                    }
                }
            }
            for (hash, value) in &model {
                prop_assert_eq!(table.find(*hash, |it| it == *value), Some(*value));
            }
            prop_assert_eq!(table.len, model.len());
        }
    }

    #[test]
    fn load_stays_below_four_fifths() {
        let mut table = CompactTable::default();
        for number in 0..10_000_u32 {
            table.insert(number.wrapping_mul(0x9E37_79B9), number);
            assert!(table.len * 5 < table.buckets.len() * 4 + 5);
        }
        assert!(table.buckets.len() < 10_000 * 2);
    }
}
