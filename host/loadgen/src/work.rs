//! The requests of a load and their correct answers.
//!
//! The value of a key depends only on the key, so every answer can be checked alone. A value is a
//! slice of one text, so a request allocates and generates nothing.

/// The prefix of all keys.
pub const PREFIX: &str = "bench/";

/// Digits of a key's number.
const DIGITS: usize = 10;

/// The number of different values. It is prime, so that keys with a common stride do not soon have
/// the same value.
const VALUES: usize = 1009;

/// The command of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// Reads a key.
    Get,
    /// Writes a key.
    Set,
    /// Removes a key.
    Del,
    /// Watches a key: requests notifications of its changes.
    Watch,
}

/// A request, independent of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// The command.
    pub verb: Verb,
    /// The number of the key.
    pub key: u64,
}

/// An answer, independent of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reply<'a> {
    /// The request succeeded.
    Done,
    /// The value of the key.
    Value(&'a [u8]),
    /// The key does not exist.
    Nothing,
    /// The store refused the request, with this text.
    Refused(&'a [u8]),
    /// Any other answer.
    Strange,
}

/// The names and values of the keys.
#[derive(Debug)]
pub struct Catalogue {
    prefix: Vec<u8>,
    text: Vec<u8>,
    value_bytes: usize,
}

impl Catalogue {
    /// Creates the catalogue for values of this length. The names of the keys contain the length,
    /// so keys that a run with another length left are no errors.
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

    /// The length of every key.
    #[must_use]
    pub fn key_bytes(&self) -> usize {
        self.prefix.len() + DIGITS
    }

    /// The length of every value.
    #[must_use]
    pub fn value_bytes(&self) -> usize {
        self.value_bytes
    }

    /// Appends the name of a key.
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

    /// Whether an answer to a request is correct. A missing key is correct, because it may not have
    /// been set yet.
    #[must_use]
    pub fn is_correct(&self, request: Request, reply: Reply<'_>) -> bool {
        match (request.verb, reply) {
            (Verb::Get, Reply::Value(value)) => value == self.value(request.key),
            (Verb::Get | Verb::Del, Reply::Nothing) => true,
            (Verb::Set | Verb::Del | Verb::Watch, Reply::Done) => true,
            _ => false,
        }
    }
}

/// Writes a number with leading zeros; digits that do not fit are dropped.
pub fn write_digits(out: &mut [u8], mut number: u64) {
    for digit in out.iter_mut().rev() {
        *digit = b'0' + (number % 10) as u8;
        number /= 10;
    }
}

/// The kind of requests that a connection sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Job {
    /// Sets every key once.
    Fill,
    /// Reads and writes random keys with a uniform distribution.
    Mix {
        /// The percentage of reads.
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
    /// The next key of a job that takes the keys in order.
    next: u64,
    /// The distance to the key after it.
    step: u64,
}

impl Source {
    /// The requests of connection `number` of `of`.
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

/// SplitMix64 (Steele, Lea and Flood 2014): small, and the same on every machine for one seed.
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
    fn connections_share_the_keys_without_overlap() {
        let every: Vec<u64> = (0..10).collect();
        assert_eq!(all(Job::Fill, 10, 3), every);
        assert_eq!(all(Job::Clean, 10, 1), every);
        assert_eq!(all(Job::Fill, 2, 5), [0, 1]);
    }

    #[test]
    fn seed_and_connection_determine_the_requests() {
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
    fn mix_has_the_requested_percentage_of_reads() {
        for (reads, expected) in [(0, 0..=0), (90, 8_800..=9_200), (100, 10_000..=10_000)] {
            let mut source = Source::new(Job::Mix { reads }, 10, 7, 0, 1);
            let found =
                (0..10_000).filter(|_| source.next().is_some_and(|it| it.verb == Verb::Get));
            let found = found.count();
            assert!(expected.contains(&found), "{found} of {reads} %");
        }
    }

    #[test]
    fn only_the_value_of_the_requested_key_is_correct() {
        let it = Catalogue::new(64);
        let mut key = Vec::new();
        it.push_key(17, &mut key);
        assert_eq!(key, b"bench/64/0000000017");
        assert_eq!(key.len(), it.key_bytes());
        let get = Request {
            verb: Verb::Get,
            key: 17,
        };
        assert!(it.is_correct(get, Reply::Value(it.value(17))));
        assert!(it.is_correct(get, Reply::Nothing));
        for wrong in [
            Reply::Value(it.value(18)),
            Reply::Value(b""),
            Reply::Value(&it.value(17)[1..]),
            Reply::Done,
            Reply::Refused(b"quota"),
            Reply::Strange,
        ] {
            assert!(!it.is_correct(get, wrong), "{wrong:?}");
        }
        let set = Request {
            verb: Verb::Set,
            key: 17,
        };
        assert!(it.is_correct(set, Reply::Done) && !it.is_correct(set, Reply::Nothing));
        let of_empty_values = Catalogue::new(0);
        assert!(of_empty_values.is_correct(get, Reply::Value(b"")));
    }
}
