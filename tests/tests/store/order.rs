//! Order of requests and versions. With any number of clients, versions must rise, and the requests
//! of one client must be executed in the order in which the client sent them.

use std::{collections::BTreeSet, thread};

use statehouse_tests::{Answer, Hlc, Request, Server, Store, store};

/// Sends all requests at once, then collects the answers.
pub(crate) fn pipeline(store: &mut Store, requests: &[Request]) -> Vec<Answer> {
    let mut bytes = Vec::new();
    let mut ids = Vec::new();
    for request in requests {
        let mut publish = request.publish();
        publish.packet_id = store.client.packet_id();
        ids.push(publish.packet_id);
        bytes.extend(publish.bytes());
    }
    store.client.send(&bytes);
    requests
        .iter()
        .zip(ids)
        .map(|(request, id)| store.finish(request, id))
        .collect()
}

#[test]
fn pipelined_requests_are_executed_in_order() {
    let server = Server::start();
    let mut client = server.store("client");
    let requests: Vec<Request> = (0..1000)
        .map(|n| match n % 2 {
            0 => client.command(&["SET", "key", &n.to_string()]),
            _ => client.command(&["GET", "key"]),
        })
        .collect();
    let answers = pipeline(&mut client, &requests);
    let mut last: Option<Hlc> = None;
    for (n, pair) in answers.chunks(2).enumerate() {
        let value = (2 * n).to_string();
        let expected = format!("${}\\r\\n{value}\\r\\n", value.len());
        assert_eq!(pair[1].text(), expected);
        let version = pair[0].version();
        assert_eq!(pair[1].version(), version);
        assert!(version > last, "{version:?} after {last:?}");
        last = version;
    }
    client.expect_nothing();
}

/// The client reads the answers as they arrive, instead of waiting for each in turn.
#[test]
fn pipelined_requests_are_answered_in_order() {
    let server = Server::start();
    let mut client = server.store("client");
    let requests: Vec<Request> = (0..500)
        .map(|n: u32| match n % 4 {
            0 => client.command(&["SET", "key", "v"]),
            1 => client.command(&["GET", "nothing"]),
            2 => client.request("rubbish"),
            _ => client.command(&["SCAN", "*"]),
        })
        .collect();
    for request in &requests {
        client.client.start(request.publish());
    }
    for request in &requests {
        let answer = client.client.take_publish("clients/client/");
        let correlation = request.correlation.clone().unwrap();
        assert!(
            answer
                .properties
                .contains(&statehouse_tests::Property::CorrelationData(correlation)),
            "out of order: {answer:?}"
        );
    }
}

/// Ten clients write one key. The store assigns no version twice, and notifies every watcher of the
/// same changes in the order of their versions.
#[test]
fn concurrent_writers_get_unique_rising_versions() {
    let server = Server::start();
    const WRITERS: usize = 10;
    const WRITES: usize = 50;
    let mut watchers: Vec<Store> = (0..3)
        .map(|n| server.store(&format!("watcher{n}")))
        .collect();
    for watcher in &mut watchers {
        watcher.watch("key");
    }
    let versions: Vec<Hlc> = thread::scope(|scope| {
        let writers: Vec<_> = (0..WRITERS)
            .map(|n| {
                let server = &server;
                scope.spawn(move || {
                    let mut writer = server.store(&format!("writer{n}"));
                    let mut versions = Vec::new();
                    for write in 0..WRITES {
                        versions.push(writer.set("key", format!("{n}/{write}")));
                    }
                    assert!(versions.is_sorted(), "one writer's versions fell");
                    versions
                })
            })
            .collect();
        writers
            .into_iter()
            .flat_map(|writer| writer.join().unwrap())
            .collect()
    });
    let expected: BTreeSet<Hlc> = versions.into_iter().collect();
    assert_eq!(
        expected.len(),
        WRITERS * WRITES,
        "a version was assigned twice"
    );
    let expected: Vec<Hlc> = expected.into_iter().collect();
    for watcher in &mut watchers {
        let received: Vec<Hlc> = (0..WRITERS * WRITES)
            .map(|_| store::version(&watcher.notification()).unwrap())
            .collect();
        assert!(received == expected, "another order at {}", watcher.id);
        watcher.expect_nothing();
    }
}

/// A client watches a key that it writes itself. It gets the answer to its KEYNOTIFY before any
/// notification, and the notifications in the order of its writes.
#[test]
fn watch_is_answered_before_its_first_notification() {
    let server = Server::start();
    let mut client = server.store("client");
    let mut requests = vec![client.command(&["SET", "key", "before"])];
    requests.push(client.command(&["KEYNOTIFY", "key"]));
    for n in 0..20 {
        requests.push(client.command(&["SET", "key", &n.to_string()]));
    }
    requests.push(client.command(&["KEYNOTIFY", "key", "STOP"]));
    requests.push(client.command(&["SET", "key", "after"]));
    for request in &requests {
        client.client.start(request.publish());
    }
    let mut answers = 0;
    let mut notifications = 0;
    while answers < requests.len() {
        let packet = client.client.next();
        if packet.kind() != statehouse_tests::packet::kind::PUBLISH {
            continue;
        }
        let publish = packet.publish();
        if publish.topic.starts_with(store::NOTIFICATION_PREFIX) {
            assert!(
                answers >= 2,
                "a notification before the answer to KEYNOTIFY"
            );
            let end = format!("\r\n{notifications}\r\n");
            assert!(publish.payload.ends_with(end.as_bytes()), "{publish:?}");
            notifications += 1;
        } else {
            answers += 1;
        }
    }
    assert_eq!(notifications, 20);
    // The last acknowledgements may still be in flight.
    client.client.ping();
    client.client.drain();
    client.expect_nothing();
}
