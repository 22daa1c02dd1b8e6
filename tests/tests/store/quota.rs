//! Quotas on bytes. That on keys is in the transcripts.

use statehouse_tests::Server;

const QUOTA: &[u8] = b"-ERR the quota has been exceeded\r\n";

#[test]
fn the_quota_on_bytes() {
    let server = Server::with_config("max_bytes = 10000");
    let mut client = server.store("client");
    let large = "x".repeat(6000);
    client.set("one", &large);
    assert_eq!(client.ask(&["SET", "two", &large]).payload(), QUOTA);
    // Larger in place counts, smaller in place makes room.
    assert_eq!(
        client.ask(&["SET", "one", &"x".repeat(11_000)]).payload(),
        QUOTA
    );
    assert_eq!(client.get("one"), Some(large.clone().into()));
    client.set("one", "small");
    client.set("two", &large);
    assert_eq!(client.ask(&["SET", "one", &large]).payload(), QUOTA);
    assert_eq!(client.ask(&["DEL", "two"]).payload(), b":1\r\n");
    client.set("one", &large);
}

/// Keys and values over their own bounds are refused with words and stored nowhere.
#[test]
fn the_bounds_of_a_key_and_a_value() {
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

/// One connection may watch ten thousand keys; one more is refused, one less makes room.
#[test]
fn the_quota_on_watches() {
    const WATCHES_MAX: usize = 10_000;
    let server = Server::start();
    let mut client = server.store("client");
    let requests: Vec<_> = (0..WATCHES_MAX)
        .map(|n| client.command(&["KEYNOTIFY", &n.to_string()]))
        .collect();
    for some in requests.chunks(500) {
        let ids: Vec<u16> = some
            .iter()
            .map(|request| client.client.start(request.publish()))
            .collect();
        for (request, id) in some.iter().zip(ids) {
            assert_eq!(client.finish(request, id).payload(), b"+OK\r\n");
        }
    }
    let one_more = ["KEYNOTIFY", "one more"];
    assert_eq!(client.ask(&one_more).payload(), QUOTA);
    // The same key again is the same watch.
    assert_eq!(client.ask(&["KEYNOTIFY", "7"]).payload(), b"+OK\r\n");
    // Others have their own.
    let mut other = server.store("other");
    assert_eq!(other.ask(&one_more).payload(), b"+OK\r\n");
    assert_eq!(
        client.ask(&["KEYNOTIFY", "7", "STOP"]).payload(),
        b"+OK\r\n"
    );
    assert_eq!(client.ask(&one_more).payload(), b"+OK\r\n");
}
