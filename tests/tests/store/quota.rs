//! Quotas on bytes and watches, and limits of a key and a value. The transcripts test the quota on
//! keys.

use statehouse_tests::Server;

use crate::order::pipeline;

const QUOTA: &[u8] = b"-ERR the quota has been exceeded\r\n";

#[test]
fn write_over_the_byte_quota_is_refused() {
    let server = Server::with_config("max_bytes = 10000");
    let mut client = server.store("client");
    let large = "x".repeat(6000);
    client.set("one", &large);
    assert_eq!(client.ask(&["SET", "two", &large]).payload(), QUOTA);
    // The quota counts growth by an overwrite, and a smaller value frees room.
    let refused = client.ask(&["SET", "one", &"x".repeat(11_000)]);
    assert_eq!(refused.payload(), QUOTA);
    assert_eq!(client.get("one"), Some(large.clone().into()));
    client.set("one", "small");
    client.set("two", &large);
    assert_eq!(client.ask(&["SET", "one", &large]).payload(), QUOTA);
    assert_eq!(client.ask(&["DEL", "two"]).payload(), b":1\r\n");
    client.set("one", &large);
}

/// A key or value over its limit is refused with an error text and not stored.
#[test]
fn oversized_key_or_value_is_refused_and_not_stored() {
    let server = Server::with_config("max_key_bytes = 100\nmax_value_bytes = 1000");
    let mut client = server.store("client");
    client.set("k".repeat(100), "v".repeat(1000));
    for (key, value) in [
        ("k".repeat(101), "v".into()),
        ("k".into(), "v".repeat(1001)),
    ] {
        let answer = client.ask(&["SET", &key, &value]);
        assert!(answer.payload().starts_with(b"-ERR "), "{}", answer.text());
        assert_eq!(answer.version(), None);
        assert_eq!(client.get(&key), None);
    }
    assert_eq!(client.get("k".repeat(100)), Some(vec![b'v'; 1000]));
}

/// One connection may watch ten thousand keys. One more watch is refused until one is stopped.
#[test]
fn watch_over_the_quota_is_refused_until_one_stops() {
    const WATCHES_MAX: usize = 10_000;
    let server = Server::start();
    let mut client = server.store("client");
    let requests: Vec<_> = (0..WATCHES_MAX)
        .map(|n| client.command(&["KEYNOTIFY", &n.to_string()]))
        .collect();
    for some in requests.chunks(500) {
        for answer in pipeline(&mut client, some) {
            assert_eq!(answer.payload(), b"+OK\r\n");
        }
    }
    let one_more = ["KEYNOTIFY", "one more"];
    assert_eq!(client.ask(&one_more).payload(), QUOTA);
    // A second KEYNOTIFY on the same key is the same watch.
    assert_eq!(client.ask(&["KEYNOTIFY", "7"]).payload(), b"+OK\r\n");
    // Each connection has its own quota.
    let mut other = server.store("other");
    assert_eq!(other.ask(&one_more).payload(), b"+OK\r\n");
    let stopped = client.ask(&["KEYNOTIFY", "7", "STOP"]);
    assert_eq!(stopped.payload(), b"+OK\r\n");
    assert_eq!(client.ask(&one_more).payload(), b"+OK\r\n");
}
