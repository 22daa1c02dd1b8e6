//! Finds the keys with the most requests, in bounded memory: the algorithm Space-Saving (Metwally
//! and others, 2005) over a random sample of the requests.
//!
//! A key that is not tracked replaces the key with the lowest count. The count of that key is the
//! error of the new one. So a count is too high by at most its error, and a key with more than one
//! of `n` requests is always among `n` tracked ones. Counts decay, so that the keys are those of
//! the last seconds.

use std::hash::Hasher;

use rustc_hash::FxHasher;

use statehouse_config::limits;

pub(super) struct HotKeys {
    /// The hashes of the tracked keys, which identify them: keys with one hash count as one key.
    /// Hashes and counts have lists of their own, since each sample reads all of them.
    hashes: Vec<u64>,
    counts: Vec<u64>,
    tracked: Vec<Tracked>,
    /// The decayed number of all requests.
    requests: u64,
    /// Requests until the next sample, and the mean of it.
    skip: u32,
    one_of: u32,
    dice: fastrand::Rng,
}

struct Tracked {
    error: u64,
    /// The beginning of the key.
    key: Vec<u8>,
    /// The length of the whole key.
    length: usize,
}

/// A key with many requests.
#[derive(Clone, Debug, PartialEq)]
pub struct HotKey {
    /// The key, or its beginning.
    pub key: Vec<u8>,
    /// Whether it is only the beginning.
    pub is_cut: bool,
    /// Its share of all requests: at least this.
    pub share: f64,
}

impl Default for HotKeys {
    fn default() -> Self {
        Self {
            hashes: Vec::new(),
            counts: Vec::new(),
            tracked: Vec::new(),
            requests: 0,
            skip: 0,
            one_of: 1,
            dice: fastrand::Rng::with_seed(1),
        }
    }
}

impl HotKeys {
    /// Counts a request with this key, if it is one of the sample.
    pub(super) fn offer<'a>(&mut self, key: impl FnOnce() -> Option<&'a [u8]>) {
        if self.skip > 0 {
            self.skip -= 1;
            return;
        }
        // Makes one of `one_of` requests a sample. It must be random: clients repeat their requests
        // in patterns.
        self.skip = self.dice.u32(..2 * self.one_of - 1);
        let weight = u64::from(self.one_of);
        self.requests += weight;
        if let Some(key) = key() {
            self.count(key, weight);
        }
    }

    fn count(&mut self, key: &[u8], weight: u64) {
        let mut hasher = FxHasher::default();
        hasher.write(key);
        let hash = hasher.finish();
        if let Some(known) = self.hashes.iter().position(|it| *it == hash) {
            self.counts[known] += weight;
            return;
        }
        if self.tracked.len() < limits::HOT_KEYS_TRACKED_MAX {
            self.hashes.push(hash);
            self.counts.push(weight);
            self.tracked.push(Tracked {
                error: 0,
                key: start_of(key).to_vec(),
                length: key.len(),
            });
            return;
        }
        let least = self.counts.iter().min().copied();
        let least = self.counts.iter().position(|it| Some(*it) == least);
        if let Some(least) = least {
            let replaced = &mut self.tracked[least];
            replaced.error = self.counts[least];
            replaced.key.clear();
            replaced.key.extend_from_slice(start_of(key));
            replaced.length = key.len();
            self.counts[least] += weight;
            self.hashes[least] = hash;
        }
    }

    /// The hot keys, the hottest first.
    pub(super) fn hottest(&self) -> Vec<HotKey> {
        let least = self.requests * limits::HOT_KEY_PER_MILLE_MIN / 1000;
        let counted = self.tracked.iter().zip(&self.counts);
        // At least so many requests, since the error is in the count.
        let sure = counted.map(|(it, count)| (count - it.error, it));
        let mut hot: Vec<(u64, &Tracked)> = sure.filter(|(sure, _)| *sure > least).collect();
        hot.sort_by(|(a, of), (b, than)| b.cmp(a).then_with(|| of.key.cmp(&than.key)));
        let hot = hot.into_iter().take(limits::HOT_KEYS_SHOWN_MAX);
        let keys = hot.map(|(sure, it)| HotKey {
            key: it.key.clone(),
            is_cut: it.length > it.key.len(),
            share: sure as f64 / self.requests as f64,
        });
        keys.collect()
    }

    /// A second has passed, with this rate of requests: older requests count less, and the sample
    /// follows the rate.
    pub(super) fn age(&mut self, requests_per_second: f64) {
        let older = |count: u64| count * 3 / 4;
        self.requests = older(self.requests);
        for (it, count) in self.tracked.iter_mut().zip(&mut self.counts) {
            *count = older(*count);
            it.error = older(it.error);
        }
        let one_of = requests_per_second / limits::HOT_KEY_SAMPLES_PER_SECOND as f64;
        // Casts from a float saturate.
        self.one_of = (one_of as u32).max(1);
        self.skip = self.skip.min(2 * self.one_of);
    }
}

/// As much of a key as is kept, without a part of a character at its end.
fn start_of(key: &[u8]) -> &[u8] {
    if key.len() <= limits::HOT_KEY_BYTES_MAX {
        return key;
    }
    let start = &key[..limits::HOT_KEY_BYTES_MAX];
    match str::from_utf8(start) {
        // Further bytes could complete the character.
        Err(error) if error.error_len().is_none() => &start[..error.valid_up_to()],
        _ => start,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shares(hot: &HotKeys) -> Vec<(String, u32)> {
        let keys = hot.hottest().into_iter();
        keys.map(|it| {
            (
                String::from_utf8(it.key).unwrap(),
                (it.share * 100.0) as u32,
            )
        })
        .collect()
    }

    #[test]
    fn hot_keys_are_found_among_a_million_others() {
        let mut hot = HotKeys::default();
        hot.age(250_000.0);
        assert_eq!(hot.one_of, 250);
        let mut samples = 0;
        for number in 0..1_000_000_u32 {
            let key = match number % 10 {
                0..3 => "line/7/speed".to_owned(),
                3 => "line/7/state".to_owned(),
                _ => format!("other/{number}"),
            };
            hot.offer(|| {
                samples += 1;
                Some(key.leak().as_bytes())
            });
        }
        assert!((3_600..4_400).contains(&samples), "{samples}");
        let shares = shares(&hot);
        let names: Vec<&str> = shares.iter().map(|(key, _)| &**key).collect();
        assert_eq!(names, ["line/7/speed", "line/7/state"], "{shares:?}");
        assert!((24..34).contains(&shares[0].1), "{shares:?}");
        assert!((6..13).contains(&shares[1].1), "{shares:?}");
        assert_eq!(hot.tracked.len(), limits::HOT_KEYS_TRACKED_MAX);
    }

    #[test]
    fn a_key_that_was_hot_is_forgotten() {
        let mut hot = HotKeys::default();
        let ask = |hot: &mut HotKeys, key: &'static [u8]| {
            for _ in 0..1_000 {
                hot.offer(|| Some(key));
            }
            hot.age(1_000.0);
        };
        ask(&mut hot, b"old");
        assert_eq!(shares(&hot), [("old".to_owned(), 100)]);
        ask(&mut hot, b"new");
        assert_eq!(shares(&hot)[0].0, "new");
        for _ in 0..20 {
            ask(&mut hot, b"new");
        }
        // Rounding lost a request or two of the sum.
        assert_eq!(shares(&hot), [("new".to_owned(), 99)]);
    }

    #[test]
    fn long_keys_are_cut_and_stay_apart() {
        let mut hot = HotKeys::default();
        let long: &[u8] = "k".repeat(40_000).leak().as_bytes();
        for key in [long, &long[1..]] {
            (0..50).for_each(|_| hot.offer(|| Some(key)));
        }
        hot.offer(|| None);
        let hottest = hot.hottest();
        assert_eq!(hottest.len(), 2);
        for it in hottest {
            assert!(it.is_cut && it.key.len() == limits::HOT_KEY_BYTES_MAX);
            assert!((0.49..0.5).contains(&it.share), "{}", it.share);
        }
    }

    #[test]
    fn long_keys_are_cut_between_characters() {
        let max = limits::HOT_KEY_BYTES_MAX;
        let cut = |key: &[u8]| String::from_utf8(start_of(key).to_vec());
        for character in ["ä", "水", "🔥"] {
            for before in 0..character.len() {
                let key = "k".repeat(before) + &character.repeat(max);
                let start = cut(key.as_bytes()).unwrap();
                assert!(key.starts_with(&start) && start.len() > max - character.len());
            }
        }
        // Bytes of no character are not taken for the start of one, and a whole key stays.
        assert_eq!(start_of(&vec![0x80; max + 1]).len(), max);
        let whole = [&vec![b'k'; max - 1][..], b"\xc3"].concat();
        assert_eq!(start_of(&whole), whole);
    }
}
