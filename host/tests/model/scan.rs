//! Compares SCAN over all its pages with the definition of globs: more than a thousand keys,
//! escapes, classes and open brackets.

use std::collections::BTreeSet;
use std::sync::{Mutex, OnceLock};

use proptest::prelude::*;
use statehouse_core::store::Mode;
use statehouse_tests::resp;

use crate::modes::RecordedStore;
use crate::pattern::matches;

/// Every byte with a meaning in a pattern, and two bytes without one.
const ALPHABET: &[u8] = b"a*?[]!\\-~";

/// The beginnings of keys. Each is followed by every one or two bytes of the alphabet.
const BEGINNINGS: [&[u8]; 3] = [b"", b"s", b"\xff\x80"];

/// The number of keys with one prefix: more than one request examines.
const PREFIXED_KEYS: usize = 1100;

fn keys() -> BTreeSet<Vec<u8>> {
    let ends = ALPHABET.iter().flat_map(|&first| {
        let two = ALPHABET.iter().map(move |&second| vec![first, second]);
        two.chain([vec![first]])
    });
    let mut keys: BTreeSet<Vec<u8>> = ends
        .flat_map(|end| BEGINNINGS.map(|beginning| [beginning, &end].concat()))
        .collect();
    keys.extend((0..PREFIXED_KEYS).map(|n| format!("s/{n:04}").into_bytes()));
    keys
}

/// Runs `work` on the store that all cases share. It holds all keys.
fn with_store<T>(work: impl FnOnce(&mut RecordedStore) -> T) -> T {
    static STORE: OnceLock<Mutex<RecordedStore>> = OnceLock::new();
    let store = STORE.get_or_init(|| {
        let mut store = RecordedStore::new(Mode::Embedded);
        let quota = store.core.store_mut().quota();
        (quota.keys_max, quota.client_keys_max) = (10_000, 10_000);
        for key in keys() {
            store.request(1, &[b"SET", &key[..], b"v"]);
        }
        Mutex::new(store)
    });
    work(&mut store.lock().expect("the lock is not poisoned"))
}

/// The keys of all pages for a pattern.
fn scan(store: &mut RecordedStore, pattern: &[u8]) -> Vec<Vec<u8>> {
    let mut listed = Vec::new();
    let mut token: Option<Vec<u8>> = None;
    loop {
        let mut words = vec![&b"SCAN"[..], pattern];
        words.extend(token.as_deref());
        let (effects, _) = store.request(1, &words);
        let answer = effects.answer.expect("every request has an answer");
        let (keys, next) = resp::scan(&answer.payload);
        listed.extend(keys);
        assert!(next.is_none() || next != token, "a page repeats");
        token = next;
        if token.is_none() {
            return listed;
        }
    }
}

/// Compares the keys that SCAN lists with the definition of the pattern.
fn check(pattern: &[u8]) {
    let expected = keys().into_iter().filter(|key| matches(pattern, key));
    let shown = |key: Vec<u8>| key.escape_ascii().to_string();
    let expected: Vec<_> = expected.map(shown).collect();
    let listed = with_store(|store| scan(store, pattern)).into_iter();
    let listed: Vec<_> = listed.map(shown).collect();
    assert_eq!(listed, expected, "{}", pattern.escape_ascii());
}

#[test]
fn scan_of_unusual_patterns_matches_the_definition() {
    for pattern in [
        &b"s\\[\\["[..],
        b"s\\[]",
        b"s[",
        b"s[a",
        b"s[]",
        b"s[]a]",
        b"s[!]",
        b"s[!]a]",
        b"s[!!]",
        b"s[z-a]",
        b"s[~-a]",
        b"s[a-]",
        b"s[-a]",
        b"s[a-\\]]",
        b"s[\\]",
        b"s[\\]]",
        b"s\\",
        b"s\\\\",
        b"\\s",
        b"\\",
        b"[",
        b"[[",
        b"[\\[]",
        b"\xff\x80[\x80-\xff]",
        b"\xff[\x80-\xff]?",
        b"\xff\\\x80~",
        b"[\x7f-\xff]*",
        b"[!\x00-\x7f]*\\~",
        b"s/*",
        b"s/1???",
        b"s/109\\9",
        b"\\s/0999",
        b"*",
        b"*[*]*",
    ] {
        check(pattern);
    }
}

/// A pattern that matches a key: each byte appears literally, escaped, as `?`, in a class or after
/// `*`.
fn pattern_of_key() -> impl Strategy<Value = Vec<u8>> {
    let keys: Vec<Vec<u8>> = keys().into_iter().collect();
    let ways = proptest::collection::vec(0..8u8, 6);
    (prop::sample::select(keys), ways).prop_map(|(key, ways)| {
        let mut pattern = Vec::new();
        for (byte, way) in key.into_iter().zip(ways) {
            match way {
                0..3 => pattern.push(byte),
                3 => pattern.extend([b'\\', byte]),
                4 => pattern.push(b'?'),
                5 => pattern.extend([b'[', b'\\', byte, b']']),
                6 => pattern.extend([b'[', byte, b'-', b'~', b']']),
                _ => pattern.extend([b'*', byte]),
            }
        }
        pattern
    })
}

fn pattern() -> impl Strategy<Value = Vec<u8>> {
    let byte = prop_oneof![
        8 => prop::sample::select(ALPHABET),
        2 => prop::sample::select(&b"s/01\xff\x80"[..]),
    ];
    let any = (
        prop::sample::select(&BEGINNINGS[..]),
        proptest::collection::vec(byte, 0..7),
    );
    let any = any.prop_map(|(beginning, end)| [beginning, &end].concat());
    // The store refuses an empty pattern.
    prop_oneof![any, pattern_of_key()].prop_filter("empty", |it| !it.is_empty())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn scan_of_random_patterns_matches_the_definition(pattern in pattern()) {
        check(&pattern);
    }
}
