//! Long scans: pages, tokens, rights, and the limits of patterns.

use statehouse_policy::testing::cases;
use statehouse_policy::testing::{Right, Table};

use crate::{answer, call, error};

/// The keys and the token of a SCAN reply.
fn page(bytes: &[u8]) -> (Vec<Vec<u8>>, Option<Vec<u8>>) {
    fn line<'a>(bytes: &mut &'a [u8]) -> &'a [u8] {
        let end = bytes
            .windows(2)
            .position(|pair| pair == b"\r\n")
            .expect("a whole line");
        let line = &bytes[..end];
        *bytes = &bytes[end + 2..];
        line
    }
    fn number(line: &[u8], kind: u8) -> usize {
        assert_eq!(line[0], kind);
        std::str::from_utf8(&line[1..])
            .expect("digits")
            .parse()
            .expect("a number")
    }
    fn bulk(bytes: &mut &[u8]) -> Vec<u8> {
        let len = number(line(bytes), b'$');
        let value = bytes[..len].to_vec();
        assert_eq!(&bytes[len..len + 2], b"\r\n");
        *bytes = &bytes[len + 2..];
        value
    }
    let mut rest = bytes;
    let parts = number(line(&mut rest), b'*');
    let count = number(line(&mut rest), b'*');
    let keys = (0..count).map(|_| bulk(&mut rest)).collect();
    let token = (parts == 2).then(|| bulk(&mut rest));
    assert!(rest.is_empty());
    (keys, token)
}

/// Scans to the end; returns the keys and the number of requests.
fn scan_all(table: &mut Table, pattern: &[u8]) -> (Vec<Vec<u8>>, usize) {
    let mut keys = Vec::new();
    let mut token: Option<Vec<u8>> = None;
    for requests in 1.. {
        let answer = match &token {
            None => answer(table, &[b"SCAN", pattern]),
            Some(token) => answer(table, &[b"SCAN", pattern, token]),
        };
        let (more, next) = page(&answer);
        keys.extend(more);
        token = next;
        if token.is_none() {
            return (keys, requests);
        }
        assert!(requests < 10_000, "a scan ends");
    }
    unreachable!("the loop has no end but its return")
}

/// So many keys: `key0000` and so on.
fn numbered(count: usize) -> Vec<Vec<u8>> {
    let keys = (0..count).map(|n| format!("key{n:04}").into_bytes());
    keys.collect()
}

fn table_with(keys: &[Vec<u8>]) -> Table {
    let mut table = Table::new(cases::NOW_MS);
    for key in keys {
        call(&mut table, &[b"SET", key, b"v"]);
    }
    table
}

#[test]
fn a_long_scan_lists_every_key_once() {
    let keys = numbered(2500);
    let mut table = table_with(&keys);
    let (listed, requests) = scan_all(&mut table, b"key*");
    assert_eq!(listed, keys);
    // At most 1024 keys are examined per request.
    assert_eq!(requests, 3);
    // So pages of a pattern that matches few keys are short, even empty, with a token.
    let (listed, requests) = scan_all(&mut table, b"*2400");
    assert_eq!(listed, [b"key2400"]);
    assert_eq!(requests, 3);
    // A pattern of one key examines only that key.
    let only = vec![b"key2400".to_vec()];
    assert_eq!(scan_all(&mut table, b"key2400"), (only, 1));
    assert_eq!(scan_all(&mut table, b"key"), (Vec::new(), 1));
    assert_eq!(scan_all(&mut table, b"key24"), (Vec::new(), 1));
}

/// Each pattern matches one key, and the keys with its literal prefix fill more than one page.
#[test]
fn scan_of_an_escaped_key_looks_beyond_the_first_page() {
    let mut table = Table::new(cases::NOW_MS);
    let odd: [&[u8]; 4] = [b"sensor[1]", b"sensor\\", b"sensor]", b"sensor{"];
    let plain = (0..40).map(|n| format!("sensor/{n:02}").into_bytes());
    for key in plain.chain(odd.map(<[u8]>::to_vec)) {
        call(&mut table, &[b"SET", &key, b"v"]);
    }
    for (pattern, key) in [
        (&br"sensor\[1]"[..], &b"sensor[1]"[..]),
        (br"sensor\[1\]", b"sensor[1]"),
        (br"sensor\\", b"sensor\\"),
        (br"sensor\", b"sensor\\"),
        (br"sensor\]", b"sensor]"),
        (br"sensor\{", b"sensor{"),
        (br"\sensor/39", b"sensor/39"),
    ] {
        let (listed, _) = scan_all(&mut table, pattern);
        assert_eq!(listed, [key], "{}", pattern.escape_ascii());
    }
    // An unclosed bracket is literal.
    call(&mut table, &[b"SET", b"sensor[x", b"v"]);
    assert_eq!(scan_all(&mut table, b"sensor[x").0, [b"sensor[x"]);
}

#[test]
fn a_scan_survives_changes_between_its_pages() {
    let mut expected = numbered(1500);
    let mut table = table_with(&expected);
    let (mut keys, token) = page(&answer(&mut table, &[b"SCAN", b"*"]));
    let token = token.expect("more to come");
    // Deletes the last listed key and one after it, and sets one before it.
    call(&mut table, &[b"DEL", keys.last().expect("a page has keys")]);
    call(&mut table, &[b"DEL", b"key1400"]);
    call(&mut table, &[b"SET", b"a", b"v"]);
    let (more, token) = page(&answer(&mut table, &[b"SCAN", b"*", &token]));
    assert_eq!(token, None);
    keys.extend(more);
    expected.remove(1400);
    assert_eq!(keys, expected);
}

#[test]
fn a_token_is_good_for_its_own_pattern_only() {
    let mut table = table_with(&numbered(1100));
    let (_, token) = page(&answer(&mut table, &[b"SCAN", b"key*"]));
    let token = token.expect("more to come");
    let refused = error("syntax error");
    assert_eq!(answer(&mut table, &[b"SCAN", b"ke*", &token]), refused);
    for damaged in 0..token.len() {
        let mut token = token.clone();
        token[damaged] ^= 1;
        assert_eq!(answer(&mut table, &[b"SCAN", b"key*", &token]), refused);
    }
    for len in 0..token.len() {
        let cut = &token[..len];
        assert_eq!(answer(&mut table, &[b"SCAN", b"key*", cut]), refused);
    }
    // A token is neither secret nor state, so it may be used again.
    let again = answer(&mut table, &[b"SCAN", b"key*", &token]);
    assert_eq!(answer(&mut table, &[b"SCAN", b"key*", &token]), again);
    assert_eq!(page(&again).0.len(), 1100 - 1024);
}

#[test]
fn a_scan_of_long_keys_is_bounded_in_bytes() {
    let keys = (0..40).map(|n| format!("{n:02}{}", "k".repeat(5000)).into_bytes());
    let keys: Vec<Vec<u8>> = keys.collect();
    let mut table = table_with(&keys);
    let (_, token) = page(&answer(&mut table, &[b"SCAN", b"*"]));
    assert!(token.is_some());
    let (listed, requests) = scan_all(&mut table, b"*");
    assert_eq!(listed, keys);
    assert!(requests > 2);
}

#[test]
fn a_scan_skips_keys_that_the_client_may_not_read() {
    let keys = numbered(1500);
    let mut table = table_with(&keys);
    for key in &keys[..1400] {
        table.deny(Right::Read, key);
    }
    // An empty page with a token is legal.
    let (listed, token) = page(&answer(&mut table, &[b"SCAN", b"*"]));
    assert!(listed.is_empty() && token.is_some());
    assert_eq!(scan_all(&mut table, b"*").0, keys[1400..]);
}

#[test]
fn the_size_of_a_pattern_is_limited() {
    let mut table = Table::new(cases::NOW_MS);
    // The literal prefix is not limited.
    let literal = vec![b'a'; 100_000];
    call(&mut table, &[b"SET", &literal, b"v"]);
    let stars = |len| [literal.as_slice(), &vec![b'*'; len]].concat();
    let floating = |len| [b"*".as_slice(), &vec![b'a'; len], b"*"].concat();
    for pattern in [literal.clone(), stars(4096), floating(63)] {
        let (keys, _) = page(&answer(&mut table, &[b"SCAN", &pattern]));
        assert_eq!(keys, std::slice::from_ref(&literal), "{}", pattern.len());
    }
    for pattern in [stars(4097), floating(64)] {
        let refused = answer(&mut table, &[b"SCAN", &pattern]);
        assert_eq!(refused, error("syntax error"), "{}", pattern.len());
    }
}
