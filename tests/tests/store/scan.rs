//! SCAN over several pages, with the tokens of real answers. A scan must list every key that exists
//! throughout, exactly once.

use std::collections::BTreeSet;

use statehouse_tests::{Server, Store, resp};

use crate::order::pipeline;

fn pages(store: &mut Store, pattern: &str) -> Vec<Vec<Vec<u8>>> {
    let mut pages = Vec::new();
    let mut token: Option<Vec<u8>> = None;
    loop {
        let mut arguments = vec![b"SCAN".to_vec(), pattern.into()];
        arguments.extend(token);
        let answer = store.ask(&arguments);
        assert_eq!(answer.version(), None);
        let (keys, next) = resp::scan(answer.payload());
        pages.push(keys);
        assert!(pages.len() < 1000, "the scan does not end");
        token = next;
        if token.is_none() {
            return pages;
        }
    }
}

fn fill(store: &mut Store, keys: &BTreeSet<Vec<u8>>) {
    let requests: Vec<_> = keys
        .iter()
        .map(|key| store.command(&[b"SET", &key[..], b"v"]))
        .collect();
    for some in requests.chunks(200) {
        for answer in pipeline(store, some) {
            assert_eq!(answer.payload(), b"+OK\r\n");
        }
    }
}

#[test]
fn scan_over_pages_lists_every_key_once_in_order() {
    let server = Server::start();
    let mut store = server.store("client");
    let mut keys: BTreeSet<Vec<u8>> = (0..2500_u32)
        .map(|n| [b"key\0\r\n\xFF".as_slice(), &n.to_be_bytes()].concat())
        .collect();
    // Few long keys reach the byte limit of a page.
    keys.extend((0..30_u8).map(|n| [&[n], &[b'x'; 10_000][..]].concat()));
    fill(&mut store, &keys);
    let pages = pages(&mut store, "*");
    assert!(pages.len() > 2, "{} pages", pages.len());
    let found: Vec<Vec<u8>> = pages.concat();
    let expected: Vec<Vec<u8>> = keys.into_iter().collect();
    assert!(found == expected, "not every key once and in order");
}

/// If keys are added and deleted between two pages, every remaining key is still listed once.
#[test]
fn scan_during_changes_lists_remaining_keys_once() {
    let server = Server::start();
    let mut store = server.store("client");
    let keys: BTreeSet<Vec<u8>> = (0..3000).map(|n| format!("k{n:04}").into()).collect();
    fill(&mut store, &keys);
    let first = store.ask(&["SCAN", "k*"]);
    let (mut found, mut token) = resp::scan(first.payload());
    // The key at the cursor, one key before it, and one key after it.
    let last = found.last().unwrap().clone();
    for deleted in [&last, &b"k0000".to_vec(), &b"k2999".to_vec()] {
        assert_eq!(store.ask(&[b"DEL", &deleted[..]]).payload(), b":1\r\n");
    }
    store.set("k0000a", "new, and before");
    while let Some(next) = token {
        let answer = store.ask(&[b"SCAN".to_vec(), b"k*".to_vec(), next]);
        let (more, then) = resp::scan(answer.payload());
        found.extend(more);
        token = then;
    }
    let expected: Vec<Vec<u8>> = keys.into_iter().filter(|key| key != b"k2999").collect();
    assert!(
        found == expected,
        "a remaining key was skipped or listed twice"
    );
}

/// A token is valid for its own pattern only. An altered token is refused or harmless, and must
/// never make the policy fail.
#[test]
fn foreign_or_altered_scan_token_is_refused_or_harmless() {
    let server = Server::start();
    let mut store = server.store("client");
    let keys: BTreeSet<Vec<u8>> = (0..3000).map(|n| format!("k{n:04}").into()).collect();
    fill(&mut store, &keys);
    let answer = store.ask(&["SCAN", "k*"]);
    let token = resp::scan(answer.payload()).1.expect("more to come");
    let other = store.ask(&[b"SCAN".to_vec(), b"x*".to_vec(), token.clone()]);
    assert_eq!(other.payload(), b"-ERR syntax error\r\n");
    for at in 0..token.len() {
        for altered in [
            token[..at].to_vec(),
            [&token[..at], &[token[at] ^ 1], &token[at + 1..]].concat(),
        ] {
            let answer = store.ask(&[b"SCAN".to_vec(), b"k*".to_vec(), altered]);
            assert!(
                answer.payload() == b"-ERR syntax error\r\n" || answer.payload()[0] == b'*',
                "{}",
                answer.text()
            );
        }
    }
    // The original token is still valid.
    let answer = store.ask(&[b"SCAN".to_vec(), b"k*".to_vec(), token]);
    assert!(!resp::scan(answer.payload()).0.is_empty());
}
