//! Random sequences of requests: the policy keeps the contract (otherwise the table panics), every
//! reply is one complete line or value, and the store behaves like a map.

use std::collections::BTreeMap;

use proptest::prelude::*;
use statehouse_guest::Standard;
use statehouse_policy::testing::{Table, cases};
use statehouse_policy::{Dialect, Policy, Repeat, Request, resp};

const WORDS: [&str; 15] = [
    "SET",
    "GET",
    "DEL",
    "VDEL",
    "KEYNOTIFY",
    "SCAN",
    "NX",
    "NEX",
    "PX",
    "STOP",
    "10",
    "a",
    "b",
    "*",
    "",
];

fn word() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        9 => prop::sample::select(&WORDS[..]).prop_map(|word| word.as_bytes().to_vec()),
        1 => proptest::collection::vec(any::<u8>(), 0..5),
    ]
}

fn payload() -> impl Strategy<Value = Vec<u8>> {
    let words = proptest::collection::vec(word(), 1..8)
        .prop_map(|words| resp::request(&words.iter().map(Vec::as_slice).collect::<Vec<_>>()));
    prop_oneof![
        9 => words,
        1 => proptest::collection::vec(any::<u8>(), 0..50),
    ]
}

fn reading() -> impl Strategy<Value = Option<String>> {
    let now = cases::NOW_MS;
    prop_oneof![
        4 => Just(Some(format!("{now}:0:client"))),
        1 => Just(Some(format!("{}:0:client", now - 1))),
        1 => Just(Some(format!("{}:0:client", now + 60_001))),
        1 => Just(Some("x".to_owned())),
        1 => Just(None),
    ]
}

fn request() -> impl Strategy<Value = Request> {
    let dialect = prop::sample::select(&[Dialect::Sdk, Dialect::Documents, Dialect::Preview][..]);
    let client = prop::sample::select(&[None, Some("client"), Some("other")][..]);
    (payload(), dialect, reading(), reading(), client, 0u64..50).prop_map(
        |(payload, dialect, timestamp, fencing_token, client, later)| Request {
            payload,
            dialect,
            timestamp,
            fencing_token,
            client: client.map(str::to_owned),
            now: cases::NOW_MS + later,
        },
    )
}

proptest! {
    #[test]
    fn every_request_is_answered_once(
        requests in proptest::collection::vec(request(), 1..60),
        keys_max in 0usize..3,
    ) {
        let policy = Standard::configure(&[]).expect("it takes no options");
        let mut table = Table::new(cases::NOW_MS);
        table.limit_keys(keys_max);
        let mut now = cases::NOW_MS;
        for mut request in requests {
            // The store's time never decreases.
            now = now.max(request.now);
            request.now = now;
            let answer = table.call(&policy, &request);
            let bytes = &answer.bytes;
            prop_assert!(bytes.ends_with(b"\r\n"));
            let kind = bytes[0];
            let one_line = bytes.windows(2).filter(|pair| pair == b"\r\n").count() == 1;
            prop_assert!(one_line || kind == b'$' || kind == b'*', "{bytes:?}");
            if bytes.starts_with(b"-ERR") || bytes == b"$-1\r\n" || bytes == b":0\r\n" {
                let mismatch = request.dialect == Dialect::Preview && bytes == b":0\r\n";
                prop_assert!(answer.version.is_none() || mismatch);
            }
            if answer.command.is_none() {
                prop_assert!(bytes.starts_with(b"-ERR"));
                prop_assert_eq!(answer.repeat, Repeat::Free);
            }
            // Notifications are framed too.
            for notification in table.take_deliveries() {
                prop_assert!(notification.payload.starts_with(b"*") && notification.payload.ends_with(b"\r\n"));
            }
        }
    }

    #[test]
    fn without_options_the_store_is_a_map(
        steps in proptest::collection::vec((0u8..3, 0u8..4, 0u8..4), 1..60),
    ) {
        let policy = Standard::configure(&[]).expect("it takes no options");
        let mut table = Table::new(cases::NOW_MS);
        let mut map = BTreeMap::new();
        for (command, key, value) in steps {
            let (key, value) = (vec![key; 1 + usize::from(key)], vec![value; usize::from(value)]);
            let words: Vec<&[u8]> = match command {
                0 => vec![b"SET", &key, &value],
                1 => vec![b"GET", &key],
                _ => vec![b"DEL", &key],
            };
            let request = Request {
                client: None,
                ..cases::request(&words)
            };
            let expected = match command {
                0 => {
                    map.insert(key, value);
                    b"+OK\r\n".to_vec()
                }
                1 => match map.get(&key) {
                    Some(value) => {
                        let mut bytes = Vec::new();
                        resp::push_bulk(&mut bytes, value);
                        bytes
                    }
                    None => b"$-1\r\n".to_vec(),
                },
                _ => format!(":{}\r\n", u8::from(map.remove(&key).is_some())).into_bytes(),
            };
            prop_assert_eq!(table.call(&policy, &request).bytes, expected);
        }
    }
}
