//! Loads the entries that the next requests need into the caches of the CPU.
//!
//! A lookup in a large table waits three times for memory, each time for an address that the access
//! before gives: the bucket, the slot, the entry. If requests are decided one after the other,
//! these waits add up. Here each access is made for all requests of a read before the next access,
//! so that the waits overlap.

use std::hint::black_box;

use super::Table;

/// Below this number of keys the table is in the caches anyway.
const KEYS_MIN: u64 = 4096;

/// Keys whose accesses overlap: a CPU waits for some ten to twenty cache lines at a time.
const AT_ONCE: usize = 32;

/// Longer keys are not loaded: to hash one takes longer than to wait for memory.
const KEY_BYTES_MAX: usize = 256;

/// Digits of a length in a request.
const LENGTH_DIGITS_MAX: usize = 7;

impl Table {
    /// Loads the entries that requests with these payloads may need. Returns how many of them are
    /// likely writes.
    pub(crate) fn prefetch(&self, payloads: &mut dyn Iterator<Item = &[u8]>) -> usize {
        let mut requests = payloads.filter_map(likely_request);
        if self.keys() < KEYS_MIN {
            return requests.filter(|it| it.is_write).count();
        }
        let mut writes = 0;
        loop {
            let mut hashes = [(0, 0); AT_ONCE];
            let mut count = 0;
            for (hash, request) in hashes.iter_mut().zip(&mut requests) {
                *hash = self.index.hash(request.key);
                writes += usize::from(request.is_write);
                count += 1;
            }
            self.load(&hashes[..count]);
            if count < AT_ONCE {
                return writes;
            }
        }
    }

    /// Reads the memory that lookups of keys with these hashes need.
    fn load(&self, hashes: &[(usize, u32)]) {
        for (part, hash) in hashes {
            black_box(self.index.is_bucket_used(*part, *hash));
        }
        let mut slots = [None; AT_ONCE];
        for (slot, (part, hash)) in slots.iter_mut().zip(hashes) {
            *slot = self.index.likely_slot(*part, *hash);
        }
        let entries = slots.map(|slot| self.arena.find(slot?));
        for entry in entries.iter().flatten() {
            black_box(entry.version());
        }
        for entry in entries.iter().flatten() {
            black_box(entry.last_byte());
        }
    }
}

/// What a payload probably asks for. A wrong guess only costs time.
#[derive(Debug, PartialEq, Eq)]
struct LikelyRequest<'a> {
    /// The second string of an array in RESP3.
    key: &'a [u8],
    /// Whether more follows the key, as a value does.
    is_write: bool,
}

fn likely_request(payload: &[u8]) -> Option<LikelyRequest<'_>> {
    let rest = payload.strip_prefix(b"*")?;
    let (_, rest) = number(rest)?;
    let (_, rest) = bulk(rest)?;
    let (key, rest) = bulk(rest)?;
    let is_write = !rest.is_empty();
    (key.len() <= KEY_BYTES_MAX).then_some(LikelyRequest { key, is_write })
}

/// A bulk string, and what follows it.
fn bulk(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (length, rest) = number(bytes.strip_prefix(b"$")?)?;
    let (string, rest) = rest.split_at_checked(length)?;
    Some((string, rest.get(2..)?))
}

/// A number and the end of its line, and what follows them.
fn number(bytes: &[u8]) -> Option<(usize, &[u8])> {
    let mut number = 0;
    for (at, byte) in bytes.iter().take(LENGTH_DIGITS_MAX + 1).enumerate() {
        match byte {
            b'0'..=b'9' => number = number * 10 + usize::from(byte - b'0'),
            _ => return Some((number, bytes.get(at + 2..)?)),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::super::super::entry::Entry;
    use super::*;
    use crate::clock::Stamp;

    #[test]
    fn key_of_usual_requests_is_found() {
        let likely = |key, is_write| Some(LikelyRequest { key, is_write });
        let get = b"*2\r\n$3\r\nGET\r\n$5\r\na key\r\n";
        assert_eq!(likely_request(get), likely(&b"a key"[..], false));
        let set = b"*3\r\n$3\r\nSET\r\n$3\r\nk\r\n\r\n$1\r\nv\r\n";
        assert_eq!(likely_request(set), likely(&b"k\r\n"[..], true));
    }

    #[test]
    fn long_keys_are_not_hashed() {
        let get = |bytes: usize| {
            let key = "k".repeat(bytes);
            format!("*2\r\n$3\r\nGET\r\n${bytes}\r\n{key}\r\n")
        };
        assert!(likely_request(get(KEY_BYTES_MAX).as_bytes()).is_some());
        assert_eq!(likely_request(get(KEY_BYTES_MAX + 1).as_bytes()), None);
    }

    #[test]
    fn other_payloads_have_no_likely_key() {
        let get = b"*2\r\n$3\r\nGET\r\n$5\r\na key\r\n";
        for end in 0..get.len() {
            assert_eq!(likely_request(&get[..end]), None, "{end}");
        }
        let others: [&[u8]; 5] = [
            b"PING\r\n",
            b"*2\r\n:3\r\n:4\r\n",
            b"*1\r\n$99999999999999999999\r\n",
            b"*2\r\n$9\r\nGET\r\n$1\r\na\r\n",
            b"*1\r\n$4\r\nKEYS\r\n",
        ];
        for payload in others {
            assert_eq!(likely_request(payload), None, "{}", payload.escape_ascii());
        }
    }

    #[test]
    fn any_payloads_may_be_announced() {
        let mut table = Table::default();
        let key = |number: u64| format!("key {number:08}");
        for number in 0..KEYS_MIN {
            let key = key(number);
            let entry = Entry::new(key.as_bytes(), b"", Stamp::default(), None, None);
            table.insert(entry);
        }
        let get = |key: &str| format!("*2\r\n$3\r\nGET\r\n${}\r\n{key}\r\n", key.len());
        let set = |number: u64| {
            let key = key(number);
            format!("*3\r\n$3\r\nSET\r\n${}\r\n{key}\r\n$1\r\nv\r\n", key.len())
        };
        let payloads: Vec<String> = (0..200)
            .flat_map(|number| [get(&key(number * 100)), "PING".into(), get(""), set(number)])
            .collect();
        let writes = table.prefetch(&mut payloads.iter().map(String::as_bytes));
        assert_eq!(writes, 200);
        let few = Table::default();
        let writes = few.prefetch(&mut payloads.iter().map(String::as_bytes));
        assert_eq!(writes, 200);
    }
}
