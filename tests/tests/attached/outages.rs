//! Outages of the broker: restarts with and without persistence, pauses, slow and half-open
//! connections. The store must attach again without an operator, and execute every request once.

use std::{
    thread,
    time::{Duration, Instant},
};

use statehouse_tests::{
    Fate, Request, Way, client::PATIENCE, mosquitto::PERSISTENT, packet::kind, wait::until,
};

use crate::{
    recording_client::{RecordedAnswer, RecordingClient},
    scene::{Scene, attachments, hold_pubacks},
};

/// The broker persists its sessions and the messages queued in them.
#[test]
fn restart_of_a_persistent_broker_loses_no_request() {
    let mut scene = Scene::with(PERSISTENT, &[]);
    let (mut writer, mut watcher) = (scene.client("writer"), scene.client("watcher"));
    watcher.watch("key");
    for round in 0..3 {
        let requests: Vec<Request> = (0..10)
            .map(|n| writer.send(&["SET", "key", &format!("{round} {n}")]))
            .collect();
        // The PINGRESP shows that the broker has received the requests.
        writer.store.client.ping();
        scene.broker.stop();
        scene.broker.restart();
        assert!(writer.resume() && watcher.resume(), "round {round}");
        let versions = writer.versions(&requests);
        assert!(versions.is_sorted(), "{versions:?}");
        let last = versions.last().unwrap();
        watcher.wait_for_notification("key", last);
        writer.assert_value("key", &format!("{round} 9"), last);
    }
    assert_eq!(watcher.notified_versions("key").len(), 30);
}

/// The broker loses all sessions. Clients repeat unanswered requests, and each takes effect once.
#[test]
fn kill_of_a_broker_without_persistence_repeats_no_effect() {
    let mut scene = Scene::start();
    let (mut writer, mut watcher) = (scene.client("writer"), scene.client("watcher"));
    watcher.watch("key");
    for round in 0..3 {
        let requests: Vec<Request> = (0..10)
            .map(|n| writer.send(&["SET", "key", &format!("{round} {n}"), "NX"]))
            .collect();
        let attached = attachments(&scene.proxy);
        scene.broker.kill();
        scene.broker.restart();
        assert!(!writer.resume() && !watcher.resume(), "round {round}");
        until("the store attaches again", || {
            attachments(&scene.proxy) > attached
        });
        let answers: Vec<RecordedAnswer> = (requests.iter())
            .map(|it| ask_until_answered(&mut writer, it))
            .collect();
        // The first request sets the key, however often each request is repeated.
        let version = answers[0].version.clone();
        assert_eq!(answers[0].text, "+OK\\r\\n");
        for answer in &answers[1..] {
            assert_eq!(answer.text, ":-1\\r\\n");
            assert_eq!(answer.version, version);
        }
        // The watch may have ended, because no client was connected to receive a notification.
        watcher.watch("key");
        let deleted = writer.ask(&["DEL", "key"]);
        assert_eq!(deleted.text, ":1\\r\\n");
        assert_eq!(deleted.version, version);
        watcher.receive_until("the notification of the DEL", |client| {
            let last = client.notifications.last()?;
            last.payload.ends_with(b"DELETE\r\n").then_some(())
        });
        watcher.notifications.clear();
    }
}

/// Repeats a request until it is answered, as a client does after its broker has lost the session.
fn ask_until_answered(client: &mut RecordingClient, request: &Request) -> RecordedAnswer {
    let end = Instant::now() + PATIENCE;
    loop {
        if let Some(answer) = client.answer_so_far(request) {
            return answer.clone();
        }
        assert!(Instant::now() < end, "never answered: {request:?}");
        client.send_again(request);
        let next = Instant::now() + Duration::from_millis(500);
        while client.answer_so_far(request).is_none() && Instant::now() < next {
            client.receive_for(Duration::from_millis(5));
        }
    }
}

/// The pause is longer than the keep alive: the store drops the connection, and connects again when
/// the broker continues.
#[test]
fn store_reconnects_after_a_long_pause_of_the_broker() {
    let scene = Scene::with(&[], &[("broker_keep_alive", "5s")]);
    let mut writer = scene.client("writer");
    let before = writer.set("key", "before");
    scene.broker.freeze();
    let request = writer.send(&["SET", "key", "value", "NEX", "before"]);
    let connections = scene.proxy.connections();
    // The relay can connect, since the operating system accepts for a stopped process.
    until("the store tries again", || {
        scene.proxy.connections() > connections
    });
    scene.broker.thaw();
    let version = writer.answer(&request).version.unwrap();
    assert!(version > before);
    writer.assert_value("key", "value", &version);
}

/// The pause is shorter than the keep alive: answers are late, but nothing else happens.
#[test]
fn short_pause_of_the_broker_only_delays_answers() {
    let scene = Scene::start();
    let (mut writer, mut watcher) = (scene.client("writer"), scene.client("watcher"));
    watcher.watch("key");
    for n in 0..5 {
        scene.broker.freeze();
        let request = writer.send(&["SET", "key", &n.to_string()]);
        thread::sleep(Duration::from_millis(100));
        scene.broker.thaw();
        let version = writer.answer(&request).version.unwrap();
        watcher.wait_for_notification("key", &version);
    }
    assert_eq!((writer.repeated, watcher.notifications.len()), (0, 5));
    assert_eq!(scene.proxy.connections(), 1);
}

/// All answers and notifications arrive in order over the one connection.
#[test]
fn slow_connection_loses_nothing() {
    let scene = Scene::start();
    let (mut writer, mut watcher) = (scene.client("writer"), scene.client("watcher"));
    watcher.watch("key");
    scene.proxy.limit(Some(10_000));
    let requests: Vec<Request> = (0..60)
        .map(|n| writer.send(&["SET", "key", &n.to_string()]))
        .collect();
    let versions = writer.versions(&requests);
    assert!(versions.is_sorted());
    watcher.wait_for_notification("key", versions.last().unwrap());
    assert_eq!(watcher.notified_versions("key"), versions);
    assert_eq!((writer.repeated, watcher.notifications.len()), (0, 60));
    assert_eq!(scene.proxy.connections(), 1);
}

/// The relay drops all packets without closing the connection: the store detects this by its keep
/// alive.
#[test]
fn half_open_connection_is_detected_by_the_keep_alive() {
    let scene = Scene::with(&[], &[("broker_keep_alive", "5s")]);
    let (mut writer, mut watcher) = (scene.client("writer"), scene.client("watcher"));
    watcher.watch("key");
    scene.proxy.script(|seen| match seen.connection {
        0 => Fate::Vanish,
        _ => Fate::Pass,
    });
    let request = writer.send(&["SET", "key", "value"]);
    let version = writer.answer(&request).version.unwrap();
    watcher.wait_for_notification("key", &version);
    writer.assert_value("key", "value", &version);
    assert_eq!(watcher.notified_versions("key").len(), 1);
}

/// The broker acknowledges all but the first PUBLISH of a full window, so packet ids wrap around to
/// one that is in use. Then the broker loses the session. A client library was seen to wait for
/// that packet id forever.
#[test]
fn missing_puback_and_lost_session_do_not_block_the_store() {
    let mut scene = Scene::start();
    let mut writer = scene.client("writer");
    let mut first = None;
    scene.proxy.script(move |seen| {
        if (seen.way, seen.packet.kind()) != (Way::FromBroker, kind::PUBACK) {
            return Fate::Pass;
        }
        let id = seen.packet.ack().packet_id;
        match *first.get_or_insert(id) == id {
            true => Fate::Hold,
            false => Fate::Pass,
        }
    });
    let requests: Vec<Request> = (0..100)
        .map(|n| writer.send(&["SET", &format!("key {n}"), "value"]))
        .collect();
    // The packet ids wrap around. The store connects again, and has the same problem again.
    scene.host.wait_for_log("out of order");
    scene.proxy.pass();
    let attached = attachments(&scene.proxy);
    scene.broker.kill();
    scene.broker.restart();
    assert!(!writer.resume());
    until("the store attaches again", || {
        attachments(&scene.proxy) > attached
    });
    for request in &requests {
        assert_eq!(ask_until_answered(&mut writer, request).text, "+OK\\r\\n");
    }
}

/// The broker keeps the session. Requests must still be executed once and in order.
#[test]
fn acknowledgements_in_reverse_order_change_nothing() {
    let scene = Scene::start();
    let (mut writer, mut watcher) = (scene.client("writer"), scene.client("watcher"));
    watcher.watch("key");
    hold_pubacks(&scene.proxy);
    let requests: Vec<Request> = (0..50)
        .map(|n| writer.send(&["SET", "key", &n.to_string()]))
        .collect();
    let mut versions = Vec::new();
    for request in &requests {
        while writer.answer_so_far(request).is_none() {
            writer.receive_for(Duration::from_millis(20));
            scene.proxy.release(|held| held.reverse());
        }
        versions.push(writer.answer(request).version.unwrap());
    }
    scene.proxy.pass();
    scene.proxy.release(|_| ());
    assert!(versions.is_sorted());
    watcher.wait_for_notification("key", versions.last().unwrap());
    assert_eq!(watcher.notified_versions("key"), versions);
}
