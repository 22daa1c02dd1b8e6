//! What is asked, and what the right answer to it is.
//!
//! What enters: how many keys, how long values, a seed. What leaves: requests one after the other, and the bytes of keys
//! and values. The value of a key is the same whoever wrote it, so that any answer can be checked by itself; it is a piece
//! of one text, so that nothing is allocated or made up for a request.

/// What the names of all keys begin with.
pub const PREFIX: &str = "bench/";

/// Digits of a key's number.
const DIGITS: usize = 10;

/// How many values differ. A prime, so that no stride of keys meets the same one again soon.
const VALUES: usize = 1009;

/// What a request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// Reads a key.
    Get,
    /// Writes it.
    Set,
    /// Removes it.
    Del,
    /// Asks for notifications of its changes.
    Watch,
}

/// A request, before any protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// What it does.
    pub verb: Verb,
    /// To which key.
    pub key: u64,
}

/// An answer, after any protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reply<'a> {
    /// It is done.
    Done,
    /// This is the value.
    Value(&'a [u8]),
    /// There is no such key.
    Nothing,
    /// The store refused, with this text.
    Refused(&'a [u8]),
    /// Something else.
    Strange,
}

/// Names and values of the keys.
#[derive(Debug)]
pub struct Catalogue {
    prefix: Vec<u8>,
    text: Vec<u8>,
    value_bytes: usize,
}

impl Catalogue {
    /// Keys whose values have this length. Others have other names, so that what an earlier run left is still right.
    #[must_use]
    pub fn new(value_bytes: usize) -> Self {
        let mut dice = Dice::new(0);
        let letter = |_| b'a' + (dice.roll() % 26) as u8;
        Self {
            prefix: format!("{PREFIX}{value_bytes}/").into_bytes(),
            text: (0..value_bytes + VALUES).map(letter).collect(),
            value_bytes,
        }
    }

    /// Length of every key.
    #[must_use]
    pub fn key_bytes(&self) -> usize {
        self.prefix.len() + DIGITS
    }

    /// Length of every value.
    #[must_use]
    pub fn value_bytes(&self) -> usize {
        self.value_bytes
    }

    /// Writes the name of a key.
    pub fn push_key(&self, key: u64, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.prefix);
        let at = out.len();
        out.resize(at + DIGITS, b'0');
        write_digits(&mut out[at..], key);
    }

    /// The value of a key.
    #[must_use]
    pub fn value(&self, key: u64) -> &[u8] {
        let at = (key % VALUES as u64) as usize;
        &self.text[at..at + self.value_bytes]
    }

    /// Whether this is an answer to that. A key that nobody has set yet is no mistake of the store.
    #[must_use]
    pub fn is_right(&self, request: Request, reply: Reply<'_>) -> bool {
        match (request.verb, reply) {
            (Verb::Get, Reply::Value(value)) => value == self.value(request.key),
            (Verb::Get | Verb::Del, Reply::Nothing) => true,
            (Verb::Set | Verb::Del | Verb::Watch, Reply::Done) => true,
            _ => false,
        }
    }
}

/// Writes a number with leading zeros; digits that do not fit are left out.
pub fn write_digits(out: &mut [u8], mut number: u64) {
    for digit in out.iter_mut().rev() {
        *digit = b'0' + (number % 10) as u8;
        number /= 10;
    }
}

/// What one connection is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Job {
    /// Sets every key once.
    Fill,
    /// Reads and writes keys by chance, each as likely as the other; so many of a hundred requests read.
    Mix {
        /// Of a hundred.
        reads: u8,
    },
    /// Removes every key once.
    Clean,
}

/// The requests of one connection.
#[derive(Debug)]
pub(super) struct Source {
    job: Job,
    dice: Dice,
    keys: u64,
    /// The next key of those that are taken in turn, and how far it is to the one after it.
    next: u64,
    step: u64,
}

impl Source {
    /// Those of the connection `number` of `of`.
    pub(super) fn new(job: Job, keys: u64, seed: u64, number: usize, of: usize) -> Self {
        Self {
            job,
            dice: Dice::new(seed ^ (number as u64).wrapping_mul(0xd134_2543_de82_ef95)),
            keys,
            next: number as u64,
            step: of as u64,
        }
    }

    pub(super) fn next(&mut self) -> Option<Request> {
        let verb = match self.job {
            Job::Mix { reads } => {
                let verb = match self.dice.roll() % 100 < u64::from(reads) {
                    true => Verb::Get,
                    false => Verb::Set,
                };
                let key = self.dice.roll() % self.keys;
                return Some(Request { verb, key });
            }
            Job::Fill => Verb::Set,
            Job::Clean => Verb::Del,
        };
        let key = self.next;
        self.next += self.step;
        (key < self.keys).then_some(Request { verb, key })
    }
}

/// SplitMix64 (Steele, Lea and Flood 2014): small, and the same for a seed everywhere.
#[derive(Debug)]
struct Dice(u64);

impl Dice {
    fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(job: Job, keys: u64, of: usize) -> Vec<u64> {
        let sources = (0..of).map(|number| Source::new(job, keys, 1, number, of));
        let mut all: Vec<u64> = sources
            .flat_map(|mut source| std::iter::from_fn(move || Some(source.next()?.key)))
            .collect();
        all.sort_unstable();
        all
    }

    #[test]
    fn connections_share_the_keys_between_them() {
        let every: Vec<u64> = (0..10).collect();
        assert_eq!(all(Job::Fill, 10, 3), every);
        assert_eq!(all(Job::Clean, 10, 1), every);
        assert_eq!(all(Job::Fill, 2, 5), [0, 1]);
    }

    #[test]
    fn a_seed_is_an_order_of_requests() {
        let run = |seed, number| {
            let mut source = Source::new(Job::Mix { reads: 50 }, 1000, seed, number, 2);
            (0..100).map(|_| source.next()).collect::<Vec<_>>()
        };
        assert_eq!(run(1, 0), run(1, 0));
        assert_ne!(run(1, 0), run(2, 0));
        assert_ne!(run(1, 0), run(1, 1));
        assert!(run(1, 0).iter().flatten().all(|it| it.key < 1000));
    }

    #[test]
    fn the_share_of_reads_is_kept() {
        for (reads, expected) in [(0, 0..=0), (90, 8_800..=9_200), (100, 10_000..=10_000)] {
            let mut source = Source::new(Job::Mix { reads }, 10, 7, 0, 1);
            let found =
                (0..10_000).filter(|_| source.next().is_some_and(|it| it.verb == Verb::Get));
            let found = found.count();
            assert!(expected.contains(&found), "{found} of {reads} %");
        }
    }

    #[test]
    fn only_the_value_of_that_key_is_right() {
        let it = Catalogue::new(64);
        let mut key = Vec::new();
        it.push_key(17, &mut key);
        assert_eq!(key, b"bench/64/0000000017");
        assert_eq!(key.len(), it.key_bytes());
        let get = Request {
            verb: Verb::Get,
            key: 17,
        };
        assert!(it.is_right(get, Reply::Value(it.value(17))));
        assert!(it.is_right(get, Reply::Nothing));
        for wrong in [
            Reply::Value(it.value(18)),
            Reply::Value(b""),
            Reply::Value(&it.value(17)[1..]),
            Reply::Done,
            Reply::Refused(b"quota"),
            Reply::Strange,
        ] {
            assert!(!it.is_right(get, wrong), "{wrong:?}");
        }
        let set = Request {
            verb: Verb::Set,
            key: 17,
        };
        assert!(it.is_right(set, Reply::Done) && !it.is_right(set, Reply::Nothing));
    }

    #[test]
    fn empty_values_are_values() {
        let it = Catalogue::new(0);
        let get = Request {
            verb: Verb::Get,
            key: 3,
        };
        assert!(it.is_right(get, Reply::Value(b"")));
    }
}
