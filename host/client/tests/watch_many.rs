//! Watches of several keys and prefixes. The reader must get every change once, and in the order of
//! the versions, also after a reconnect.
// A failed step fails the test.
#![allow(clippy::unwrap_used)]

mod common;

use std::time::Duration;

use common::{Broker, Greeting, Peer, connect, connected, expect_gap};
use statehouse_client::{Client, Error, GapCause, Version, Watch, WatchEvent, Watched};
use statehouse_tests::resp;
use tokio::runtime::Handle;
use tokio::sync::oneshot;

const OK: &[u8] = b"+OK\r\n";
const MORE: &[u8] = b"+MORE\r\n";

/// Bytes of a value. A watch that buffers 500 of them has room for a page, and with 600 none.
const VALUE_BYTES: usize = 7 << 10;

fn version(counter: u32) -> String {
    format!("000000000000001:{counter:05}:n")
}

/// The request that watches a prefix from the version with this counter.
fn from(prefix: &str, counter: u32) -> Vec<u8> {
    let version = version(counter);
    resp::array(&["KEYNOTIFY", prefix, "PREFIX", "FROM", version.as_str()])
}

fn prefixes() -> [Watched; 2] {
    [Watched::Prefix("a".into()), Watched::Prefix("b".into())]
}

fn zero() -> Version {
    version(0).parse().unwrap()
}

/// Watches both prefixes from the version with the counter 0.
async fn watch(client: &Client) -> Watch {
    client.watch_many(prefixes(), Some(&zero())).await.unwrap()
}

/// Watches a prefix from the version with the counter 0. The store sends changes, and then the
/// response.
async fn watch_prefix(
    client: &Client,
    peer: &mut Peer,
    prefix: &str,
    changes: &[(&str, u32)],
    answer: (&[u8], u32),
) -> Watch {
    let zero = zero();
    let store = serve(peer, (prefix, 0), changes, answer);
    let (watch, ()) = tokio::join!(client.watch_prefix_from(prefix, &zero), store);
    watch.unwrap()
}

/// Watches the key `k`, without a version.
async fn watch_plainly(client: &Client, peer: &mut Peer) -> Watch {
    let plain = resp::array(&["KEYNOTIFY", "k"]);
    let (watch, ()) = tokio::join!(client.watch("k"), peer.serve(&plain, OK, None));
    watch.unwrap()
}

/// The payload of a change, with a value of this size.
fn set(value_bytes: usize) -> Vec<u8> {
    let value = "x".repeat(value_bytes);
    resp::array(&["NOTIFY", "SET", "VALUE", value.as_str()])
}

async fn notify(peer: &mut Peer, key: &str, counter: u32) {
    let version = version(counter);
    peer.notify(key.as_bytes(), &set(VALUE_BYTES), &version)
        .await;
}

/// Reads the request that watches a prefix from the version with this counter. Sends changes, and
/// then the response.
async fn serve(
    peer: &mut Peer,
    (prefix, since): (&str, u32),
    changes: &[(&str, u32)],
    (answer, counter): (&[u8], u32),
) {
    let request = peer.request().await;
    assert_eq!(
        request.payload.escape_ascii().to_string(),
        from(prefix, since).escape_ascii().to_string()
    );
    for (key, counter) in changes {
        notify(peer, key, *counter).await;
    }
    peer.answer(&request, answer, Some(&version(counter))).await;
}

/// Reads changes, which must have these counters.
async fn expect(watch: &mut Watch, counters: impl IntoIterator<Item = u32>) {
    for counter in counters {
        let event = tokio::time::timeout(Duration::from_secs(60), watch.next()).await;
        let event = event.expect("a change does not arrive").unwrap();
        match event {
            WatchEvent::Set { version: at, .. } | WatchEvent::Deleted { version: at, .. } => {
                assert_eq!(at.to_string(), version(counter));
            }
            other => panic!("{other:?} instead of {counter}"),
        }
    }
}

/// A store with a change of each version up to that with the counter `last`. They are of as many
/// keys as `keys` says in turn, with values of this size. Answers requests for the changes of the
/// prefixes `00`, `01` and so on, at most four at a time, until it is dropped.
async fn serve_changes(peer: &mut Peer, keys: u32, last: u32, value_bytes: usize) {
    let set = set(value_bytes);
    loop {
        let request = peer.request().await;
        let text = String::from_utf8(request.payload.clone()).unwrap();
        let words: Vec<&str> = text.split("\r\n").skip(2).step_by(2).collect();
        let ["KEYNOTIFY", prefix, "PREFIX", "FROM", since] = words[..] else {
            panic!("{words:?}");
        };
        let key: u32 = prefix.parse().unwrap();
        let since: Version = since.parse().unwrap();
        let mut missed = (since.counter() + 1..=last).filter(|counter| counter % keys == key);
        let page: Vec<u32> = missed.by_ref().take(4).collect();
        for counter in &page {
            let version = version(*counter);
            peer.notify(prefix.as_bytes(), &set, &version).await;
        }
        let (answer, reached) = match (page.last(), missed.next()) {
            (Some(reached), Some(_)) => (MORE, *reached),
            _ => (OK, last),
        };
        let reached = version(reached);
        peer.answer(&request, answer, Some(&reached)).await;
    }
}

#[tokio::test]
async fn missed_changes_of_all_prefixes_arrive_in_order() {
    let (_broker, mut peer, client) = connected().await;
    let store = async {
        // The prefix that is furthest behind is asked for next.
        serve(&mut peer, ("a", 0), &[("a", 1), ("a", 3)], (MORE, 4)).await;
        serve(&mut peer, ("b", 0), &[("b", 2)], (MORE, 2)).await;
        serve(&mut peer, ("b", 2), &[("b", 4), ("b", 6)], (MORE, 6)).await;
        serve(&mut peer, ("a", 4), &[("a", 5)], (OK, 7)).await;
        // A change of a registered prefix is held while the other one is behind.
        serve(&mut peer, ("b", 6), &[("a", 8), ("b", 7)], (OK, 8)).await;
        notify(&mut peer, "a", 9).await;
    };
    let reader = async {
        let mut watch = watch(&client).await;
        expect(&mut watch, 1..=9).await;
        watch
    };
    let (_watch, ()) = tokio::join!(reader, store);
}

#[tokio::test]
async fn changes_missed_by_a_reconnect_arrive_in_order() {
    let (broker, mut peer, client) = connected().await;
    let store = async {
        serve(&mut peer, ("a", 0), &[], (OK, 0)).await;
        serve(&mut peer, ("b", 0), &[], (OK, 0)).await;
        peer
    };
    let (mut watch, mut peer) = tokio::join!(watch(&client), store);
    notify(&mut peer, "b", 1).await;
    expect(&mut watch, [1]).await;
    drop(peer);
    let mut peer = broker.accept(Greeting::resumed()).await;
    serve(&mut peer, ("a", 1), &[("a", 2), ("a", 4)], (OK, 5)).await;
    let changes = [("a", 6), ("b", 3), ("b", 5)];
    serve(&mut peer, ("b", 1), &changes, (OK, 6)).await;
    expect(&mut watch, 2..=6).await;
}

/// The store remembers missed changes, so that they need not fit the buffer of the watch.
#[tokio::test]
async fn missed_changes_beyond_the_buffer_wait_for_the_reader() {
    let (_broker, mut peer, client) = connected().await;
    let page = |number: u32| -> Vec<(&'static str, u32)> {
        let counters = number * 100 + 1..=number * 100 + 100;
        counters.map(|counter| ("a", counter)).collect()
    };
    let mut watch = watch_prefix(&client, &mut peer, "a", &page(0), (MORE, 100)).await;
    let (full, is_full) = oneshot::channel();
    let store = async {
        let mut full = Some(full);
        for number in 1..30 {
            let answer = if number == 29 { OK } else { MORE };
            let (since, last) = (number * 100, number * 100 + 100);
            serve(&mut peer, ("a", since), &page(number), (answer, last)).await;
            if number == 5 {
                let early = tokio::time::timeout(Duration::from_millis(300), peer.request());
                assert!(early.await.is_err(), "a request without room for its page");
                full.take().unwrap().send(()).unwrap();
            }
        }
    };
    let reader = async {
        is_full.await.unwrap();
        expect(&mut watch, 1..=3000).await;
    };
    tokio::join!(store, reader);
}

/// The pages of one watch also arrive at the other one, whose own request comes later.
#[tokio::test]
async fn two_watches_of_a_prefix_are_resumed_without_a_gap() {
    let (broker, mut peer, client) = connected().await;
    let mut one = watch_prefix(&client, &mut peer, "00", &[], (OK, 0)).await;
    let mut other = watch_prefix(&client, &mut peer, "00", &[], (OK, 0)).await;
    drop(peer);
    let mut peer = broker.accept(Greeting::resumed()).await;
    let readers = async { tokio::join!(expect(&mut one, 1..=24), expect(&mut other, 1..=24)) };
    tokio::select! {
        () = serve_changes(&mut peer, 1, 24, 1 << 20) => {}
        ((), ()) = readers => {}
    }
}

/// A change may arrive at a watch before it is registered, since another one is or was.
#[tokio::test]
async fn two_watches_of_a_key_without_a_version_report_a_gap() {
    let (broker, mut peer, client) = connected().await;
    let plain = resp::array(&["KEYNOTIFY", "k"]);
    let mut watches = Vec::new();
    for _ in 0..2 {
        watches.push(watch_plainly(&client, &mut peer).await);
    }
    drop(peer);
    let mut peer = broker.accept(Greeting::resumed()).await;
    let first = peer.request().await;
    assert_eq!(first.payload, plain);
    notify(&mut peer, "k", 20).await;
    peer.answer(&first, OK, None).await;
    peer.serve(&plain, OK, None).await;
    for watch in &mut watches {
        expect_gap(watch).await;
        expect(watch, [20]).await;
    }
}

/// Another store ignores FROM or answers it with nonsense.
#[tokio::test]
async fn watch_that_another_store_does_not_resume_reports_a_gap() {
    let (broker, mut peer, client) = connected().await;
    let mut watch = watch_prefix(&client, &mut peer, "a", &[], (OK, 1)).await;
    let plain = resp::array(&["KEYNOTIFY", "a", "PREFIX"]);
    let mut since = 1;
    for (answer, next) in [(OK, 0), (b":1\r\n", 3)] {
        drop(peer);
        peer = broker.accept(Greeting::resumed()).await;
        peer.serve(&from("a", since), answer, None).await;
        peer.serve(&plain, OK, Some(&version(next))).await;
        expect_gap(&mut watch).await;
        since = next;
    }
}

/// An error of this kind would mean that the watch continues, and a reader would read it for ever.
#[tokio::test]
async fn watch_that_no_store_understands_ends() {
    let (broker, mut peer, client) = connected().await;
    let plain = resp::array(&["KEYNOTIFY", "k"]);
    let mut watch = watch_plainly(&client, &mut peer).await;
    drop(peer);
    let mut peer = broker.accept(Greeting::resumed()).await;
    peer.serve(&plain, b":1\r\n", None).await;
    let end = watch.next().await;
    assert!(matches!(end, Err(Error::Refused(_))), "{end:?}");
}

/// Otherwise a watch would wait in silence, and later resume after changes that it never got.
#[tokio::test]
async fn refused_notifications_end_all_watches() {
    let (broker, mut peer, client) = connected().await;
    let mut watch = watch_plainly(&client, &mut peer).await;
    drop(peer);
    let mut peer = broker.accept_unsubscribed(Greeting::default()).await;
    peer.answer_subscribe([1, 0x87]).await;
    let end = watch.next().await;
    assert!(matches!(end, Err(Error::Rejected(_))), "{end:?}");
}

/// Each response follows more changes than a watch can hold.
#[tokio::test]
async fn watch_that_always_misses_changes_reports_a_gap() {
    let (_broker, mut peer, client) = connected().await;
    let plain = resp::array(&["KEYNOTIFY", "a", "PREFIX"]);
    let set = set(3 << 20);
    let store = async {
        for round in 0..20 {
            let request = peer.request().await;
            if request.payload != plain {
                for counter in round * 3 + 1..=round * 3 + 3 {
                    peer.notify(b"a", &set, &version(counter)).await;
                }
            }
            let reached = version(round * 3 + 3);
            peer.answer(&request, OK, Some(&reached)).await;
            if request.payload == plain {
                return;
            }
        }
        panic!("the missed changes are requested again and again");
    };
    let reader = async {
        let mut watch = client.watch_prefix_from("a", &zero()).await.unwrap();
        while watch.next().await.unwrap() != WatchEvent::Gap(GapCause::Overflow) {}
        watch
    };
    let (_watch, ()) = tokio::join!(reader, store);
}

/// The first pages of all prefixes together exceed the buffer.
#[tokio::test]
async fn watch_of_many_prefixes_from_a_version_reports_no_gap() {
    const PREFIXES: u32 = 70;
    let (_broker, mut peer, client) = connected().await;
    let watched = (0..PREFIXES).map(|number| Watched::Prefix(format!("{number:02}").into()));
    let reader = async {
        let mut watch = client.watch_many(watched, Some(&zero())).await.unwrap();
        expect(&mut watch, 1..=PREFIXES).await;
    };
    tokio::select! {
        () = serve_changes(&mut peer, PREFIXES, PREFIXES, 256 << 10) => {}
        () = reader => {}
    }
}

#[tokio::test]
async fn watch_of_a_key_and_a_prefix_is_resumed_before_a_change() {
    let (broker, mut peer, client) = connected().await;
    let watched = [Watched::Prefix("a".into()), Watched::Key("b".into())];
    let five = version(5);
    let store = async {
        // This response has no version, so it must not be the last one.
        let key = resp::array(&["KEYNOTIFY", "b"]);
        peer.serve(&key, OK, None).await;
        let prefix = resp::array(&["KEYNOTIFY", "a", "PREFIX"]);
        peer.serve(&prefix, OK, Some(&five)).await;
    };
    let (watch, ()) = tokio::join!(client.watch_many(watched, None), store);
    let mut watch = watch.unwrap();
    drop(peer);
    let mut peer = broker.accept(Greeting::resumed()).await;
    let key = resp::array(&["KEYNOTIFY", "b", "FROM", five.as_str()]);
    peer.serve(&key, OK, Some(&five)).await;
    serve(&mut peer, ("a", 5), &[("a", 6)], (OK, 6)).await;
    expect(&mut watch, [6]).await;
}

/// A registration that waits for the reader ends when the next connection begins one. Regression:
/// the task that refreshes watches waited for its next refresh.
#[tokio::test]
async fn reconnects_leave_no_tasks_while_the_reader_is_slow() {
    let (broker, mut options) = Broker::start().await;
    options.watch_refresh = Duration::MAX;
    let (mut peer, client) = connect(&broker, options).await;
    let changes: Vec<(&str, u32)> = (1..=600).map(|counter| ("a", counter)).collect();
    let mut watch = watch_prefix(&client, &mut peer, "a", &changes, (MORE, 600)).await;
    let tasks = || Handle::current().metrics().num_alive_tasks();
    let before = tasks();
    for _ in 0..5 {
        drop(peer);
        peer = broker.accept(Greeting::resumed()).await;
    }
    let end = async {
        while tasks() > before {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let end = tokio::time::timeout(Duration::from_secs(60), end).await;
    end.expect("tasks of earlier connections do not end");
    let last = serve(&mut peer, ("a", 600), &[("a", 601)], (OK, 601));
    tokio::join!(expect(&mut watch, 1..=601), last);
}

/// A store without FROM, as after a change of the store.
#[tokio::test]
async fn refused_resumption_of_several_prefixes_is_one_gap() {
    let (broker, mut peer, client) = connected().await;
    let store = async {
        serve(&mut peer, ("a", 0), &[], (OK, 0)).await;
        serve(&mut peer, ("b", 0), &[], (OK, 0)).await;
        peer
    };
    let (mut watch, peer) = tokio::join!(watch(&client), store);
    drop(peer);
    let mut peer = broker.accept(Greeting::default()).await;
    peer.serve(&from("a", 0), b"-ERR syntax error\r\n", None)
        .await;
    for (prefix, counter) in [("a", 3), ("b", 4)] {
        let plain = resp::array(&["KEYNOTIFY", prefix, "PREFIX"]);
        peer.serve(&plain, OK, None).await;
        notify(&mut peer, prefix, counter).await;
    }
    expect_gap(&mut watch).await;
    expect(&mut watch, [3, 4]).await;
}

#[tokio::test]
async fn covered_keys_are_registered_and_notified_once() {
    let (_broker, mut peer, client) = connected().await;
    let key = |key: &'static str| Watched::Key(key.into());
    let all = [key("ab"), key("b"), Watched::Prefix("a".into()), key("b")];
    let store = async {
        let plain = resp::array(&["KEYNOTIFY", "b"]);
        peer.serve(&plain, OK, None).await;
        let plain = resp::array(&["KEYNOTIFY", "a", "PREFIX"]);
        peer.serve(&plain, OK, None).await;
    };
    let (watch, ()) = tokio::join!(client.watch_many(all, None), store);
    let mut watch = watch.unwrap();
    notify(&mut peer, "ab", 1).await;
    notify(&mut peer, "b", 2).await;
    expect(&mut watch, [1, 2]).await;
    drop(watch);
    for stop in [&["b", "STOP"][..], &["a", "PREFIX", "STOP"]] {
        let words = [&["KEYNOTIFY"][..], stop].concat();
        peer.serve(&resp::array(&words[..]), OK, None).await;
    }
}

#[tokio::test]
async fn watch_of_nothing_or_of_a_long_key_is_invalid() {
    let (_broker, _peer, client) = connected().await;
    let invalid = async |watched: Vec<Watched>| {
        let result = client.watch_many(watched, None).await;
        match result {
            Err(Error::Invalid(text)) => text,
            other => panic!("{other:?}"),
        }
    };
    invalid(Vec::new()).await;
    let text = invalid(vec![Watched::Key(vec![b'k'; 40_000].into())]).await;
    assert!(text.contains("it has 40000 bytes"), "{text}");
}
