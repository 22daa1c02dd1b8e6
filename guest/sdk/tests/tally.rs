//! The example `tally` on keys that other policies have written: their values, expiries, fences and
//! watchers must stay.

mod common;
#[path = "../examples/tally.rs"]
mod tally;

use common::{Function, NOTHING, request};
use statehouse_policy::testing::Table;
use statehouse_policy::{Bytes, Hlc, Host, Outcome, Repeat, Request, resp};
use tally::Tally;

const NOW_MS: u64 = 1_700_000_000_000;

/// How long a key of [`other`] lives.
const LIFE_MS: u64 = 1000;

/// The payload of its requests is a key. The key gets no value, an expiry and a watcher, and if the
/// request has a token, a fence.
fn other(host: &mut dyn Host, request: &Request) -> Outcome {
    let key = Bytes::Owned(request.payload.clone());
    let fence = request.fencing_token.as_ref().map(|node| Hlc {
        wall: NOW_MS,
        counter: 0,
        node: node.clone(),
    });
    let (nothing, expires) = (Bytes::Owned(Vec::new()), Some(request.now + LIFE_MS));
    host.put(&key, &nothing, None, fence.as_ref(), expires)
        .expect("no quota");
    host.watch(&key).expect("a client with a name");
    Outcome {
        reply: NOTHING,
        version: None,
        repeat: Repeat::Same,
        command: None,
    }
}

/// A table in which the other policy has written a key.
fn table_with(key: &[u8], token: Option<&str>) -> Table {
    let mut table = Table::new(NOW_MS);
    let request = Request {
        fencing_token: token.map(str::to_owned),
        ..request(key, NOW_MS)
    };
    table.call(&Function(other), &request);
    table.take_deliveries();
    table
}

/// Regression: it read a thousand bytes of the value, and its write removed the expiry.
#[test]
fn tally_keeps_long_values_and_expiries() {
    let mut table = table_with(b"beers", None);
    let payload = resp::request(&[b"TALLY", b"beers"]);
    for count in 1..=1002 {
        let answer = table.call(&Tally, &request(&payload, NOW_MS));
        assert_eq!(answer.bytes, format!(":{count}\r\n").as_bytes());
    }
    let deliveries = table.take_deliveries();
    assert_eq!(deliveries.len(), 1002);
    let last = deliveries.last().expect("1002 deliveries");
    let value = resp::request(&[b"NOTIFY", b"SET", b"VALUE", &[b'|'; 1002]]);
    assert_eq!(last.payload, value);
    assert!(last.topic.starts_with("clients/statestore/v1/"));
    // The key in Base 16.
    assert!(last.topic.ends_with("/command/notify/6265657273"));

    table.advance(&Tally, NOW_MS + LIFE_MS);
    let expired = table.take_deliveries();
    let expired: Vec<_> = expired.iter().map(|it| &it.payload[..]).collect();
    assert_eq!(expired, [resp::request(&[b"NOTIFY", b"DELETE"])]);
    let answer = table.call(&Tally, &request(&payload, NOW_MS + LIFE_MS));
    assert_eq!(answer.bytes, b":1\r\n");
}

/// Regression: its write removed the fence, so any client could change what a lock protects.
#[test]
fn tally_refuses_a_fenced_key() {
    let mut table = table_with(b"beers", Some("lock"));
    let payload = resp::request(&[b"TALLY", b"beers"]);
    let answer = table.call(&Tally, &request(&payload, NOW_MS));
    let refusal = b"-ERR a fencing token is required for this request\r\n";
    assert_eq!(answer.bytes, refusal);
    assert!(table.take_deliveries().is_empty());
}
