//! Watches that are resumed while connections are cut and the store is killed. The reader must get
//! every change exactly once and in order.
// A failed step fails the test.
#![allow(clippy::unwrap_used)]

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use statehouse_client::{
    Client, Error, GapCause, Options, SetOptions, Version, Watch, WatchEvent, Watched,
};
use statehouse_tests::dice::Dice;
use statehouse_tests::proxy::Proxy;
use statehouse_tests::server::Server;

/// A request must survive some restarts of the store on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// One of this many faults kills the store; the others cut the watcher's connection.
const FAULTS_PER_KILL: u64 = 10;

/// A change: the key, and its value unless it was deleted.
type Change = (String, Option<String>);

fn options(address: SocketAddr, id: &str) -> Options {
    Options {
        host: address.ip().to_string(),
        port: address.port(),
        client_id: Some(id.into()),
        timeout: PATIENCE,
        ..Options::default()
    }
}

async fn connect(address: SocketAddr, id: &str) -> Client {
    Client::connect(options(address, id)).await.unwrap()
}

/// Writes keys of both prefixes until it is stopped, and then a last key. Returns the changes under
/// `p/`.
async fn write(client: Client, stop: Arc<AtomicBool>, mut dice: Dice) -> Vec<Change> {
    let mut changes = Vec::new();
    for number in 0_u64.. {
        let last = stop.load(SeqCst);
        let draw = dice.next() % 20;
        let key = match draw % 4 {
            _ if last => "p/last".to_owned(),
            0 => format!("other/{}", draw % 3),
            _ => format!("p/{}", draw % 5),
        };
        let deleted = draw > 15 && !last && client.get(&key).await.unwrap().is_some();
        let value = (!deleted).then(|| format!("{number}"));
        match &value {
            Some(value) => {
                let set = client.set(&key, value, SetOptions::default()).await;
                assert!(set.unwrap().applied);
            }
            None => assert!(client.del(&key, None).await.unwrap().is_some()),
        }
        if key.starts_with("p/") {
            changes.push((key, value));
        }
        if last {
            break;
        }
    }
    changes
}

/// Reads events until the last key is set.
async fn read(mut watch: Watch) -> Vec<(Change, Version)> {
    let mut changes = Vec::new();
    loop {
        let event = tokio::time::timeout(PATIENCE, watch.next()).await;
        let (change, version) = match event.expect("a change does not arrive").unwrap() {
            WatchEvent::Set {
                key,
                value,
                version,
            } => ((text(&key), Some(text(&value))), version),
            WatchEvent::Deleted { key, version } => ((text(&key), None), version),
            other => panic!("{other:?} after {} changes", changes.len()),
        };
        let is_last = change.0 == "p/last";
        changes.push((change, version));
        if is_last {
            return changes;
        }
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn prefix() -> Vec<Watched> {
    vec![Watched::Prefix("p/".into())]
}

/// Cuts the watcher's connection or kills the store, this many times. The watch covers all keys
/// under `p/`.
async fn survive(faults: u64, watched: Vec<Watched>) {
    let mut dice = Dice::thrown();
    let mut server = Server::restartable(&[("durability", "always")]);
    let proxy = Proxy::start(server.address());
    let writer = connect(server.address(), "writer").await;
    let watcher = connect(proxy.address(), "watcher").await;
    let watch = watcher.watch_many(watched, None).await.unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let writing = tokio::spawn(write(writer, stop.clone(), dice.split()));
    let reading = tokio::spawn(read(watch));
    let faulting = tokio::task::spawn_blocking(move || {
        for fault in 1..=faults {
            std::thread::sleep(Duration::from_millis(dice.next() % 120));
            if fault % FAULTS_PER_KILL == 0 {
                server.kill();
                server.restart();
            } else {
                proxy.cut();
            }
        }
        stop.store(true, SeqCst);
        (server, proxy)
    });
    let _kept = faulting.await.unwrap();
    let (written, read) = (writing.await.unwrap(), reading.await.unwrap());
    assert!(read.is_sorted_by(|(_, a), (_, b)| a < b));
    let read: Vec<Change> = read.into_iter().map(|(change, _)| change).collect();
    assert!(written.len() as u64 > faults, "{} changes", written.len());
    assert_eq!(read, written);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn resumed_watch_reports_every_change_once() {
    survive(20, prefix()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn resumed_watch_of_many_keys_reports_changes_in_order() {
    // The response for the prefix has a version, so the watch can be resumed before a change.
    let keys = (0..5).map(|number| Watched::Key(format!("p/{number}").into()));
    let last = Watched::Prefix("p/l".into());
    survive(20, keys.chain([last]).collect()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
#[ignore = "a thousand faults take some minutes"]
async fn watch_resumed_a_thousand_times_reports_every_change_once() {
    survive(1000, prefix()).await;
}

/// Changes that one request is sent are limited, so the client asks several times.
#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn watch_from_a_version_reports_all_changes_since() {
    let server = Server::start();
    let client = connect(server.address(), "client").await;
    let mut versions = Vec::new();
    for number in 0..1000 {
        let key = format!("{}/{number}", ["p", "q"][number % 2]);
        let set = client.set(&key, "v", SetOptions::default()).await.unwrap();
        versions.push(set.version.unwrap());
    }
    let mut watch = client.watch_prefix_from("p/", &versions[9]).await.unwrap();
    let set = client.set("p/1", "w", SetOptions::default()).await.unwrap();
    let last = set.version.unwrap();
    let missed = versions[10..].iter().step_by(2).chain([&last]);
    for expected in missed {
        match watch.next().await.unwrap() {
            WatchEvent::Set { version, .. } => assert_eq!(version, *expected),
            other => panic!("{other:?}"),
        }
    }
    let mut watch = client.watch_from("q/1", &versions[0]).await.unwrap();
    assert!(matches!(watch.next().await, Ok(WatchEvent::Set { key, .. }) if key == "q/1"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn version_that_the_store_cannot_continue_is_refused() {
    let server = Server::start();
    let client = connect(server.address(), "client").await;
    let set = client.set("k", "v", SetOptions::default()).await.unwrap();
    let later_ms = set.version.unwrap().wall_ms() + 100_000_000;
    let later: Version = format!("{later_ms}:0:StateStore").parse().unwrap();
    let refused = client.watch_from("k", &later).await.unwrap_err();
    assert!(matches!(refused, Error::Refused(text) if text.contains("later than the last change")));
}

/// A store in memory forgets everything, which the reader must learn.
#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn watch_of_a_store_that_forgot_reports_a_gap() {
    let mut server = Server::restartable(&[("durability", "memory")]);
    let client = connect(server.address(), "client").await;
    let mut watch = client.watch_prefix("p/").await.unwrap();
    client.set("p/1", "v", SetOptions::default()).await.unwrap();
    assert!(matches!(watch.next().await, Ok(WatchEvent::Set { .. })));
    server.kill();
    server.restart();
    client.set("p/2", "v", SetOptions::default()).await.unwrap();
    let gap = Ok(WatchEvent::Gap(GapCause::Reconnected));
    assert_eq!(watch.next().await, gap);
}

/// Changes of other keys, until the store forgets that `p/` did not change.
async fn change_other_keys(address: SocketAddr) {
    let writer = connect(address, "writer").await;
    let value = vec![b'x'; 900_000];
    for _ in 0..20 {
        let set = writer.set("other", &value, SetOptions::default()).await;
        assert!(set.unwrap().applied);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn watch_without_changes_is_resumed_without_a_gap() {
    for (refresh, is_resumed) in [(Duration::from_millis(50), true), (PATIENCE, false)] {
        let server = Server::start();
        let proxy = Proxy::start(server.address());
        let mut options = options(proxy.address(), "watcher");
        options.watch_refresh = refresh;
        let watcher = Client::connect(options).await.unwrap();
        let mut watch = watcher.watch_prefix("p/").await.unwrap();
        change_other_keys(server.address()).await;
        tokio::time::sleep(Duration::from_millis(500)).await;
        proxy.cut();
        let writer = connect(server.address(), "writer").await;
        writer.set("p/1", "v", SetOptions::default()).await.unwrap();
        let first = tokio::time::timeout(PATIENCE, watch.next()).await.unwrap();
        match first.unwrap() {
            WatchEvent::Set { key, .. } => assert!(is_resumed && key == "p/1", "{key:?}"),
            event => assert!(!is_resumed, "{event:?}"),
        }
    }
}
