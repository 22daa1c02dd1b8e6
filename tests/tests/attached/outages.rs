//! The broker goes away and comes back: killed with and without what it keeps, frozen, slow, half open. The store
//! attaches again by itself, and goes on.

use std::{
    thread,
    time::{Duration, Instant},
};

use statehouse_tests::{Fate, Request, Way, client::PATIENCE, mosquitto::PERSISTENT, packet::kind};

use crate::{
    asker::{Asker, Told},
    scene::{Scene, eventually},
};

/// What is on disk of the broker is there again: sessions, and what waited in them.
#[test]
fn a_broker_that_keeps_sessions_may_be_restarted_at_any_time() {
    let mut scene = Scene::with(PERSISTENT, &[]);
    let (mut writer, mut watcher) = (scene.asker("writer"), scene.asker("watcher"));
    watcher.watch("key");
    for round in 0..3 {
        let requests: Vec<Request> = (0..10)
            .map(|n| writer.send(&["SET", "key", &format!("{round} {n}")]))
            .collect();
        // The broker has them.
        writer.store.client.ping();
        scene.broker.stop();
        scene.broker.restart();
        assert!(writer.resume() && watcher.resume(), "round {round}");
        let versions: Vec<_> = requests
            .iter()
            .map(|request| writer.answer(request).version.unwrap())
            .collect();
        assert!(versions.is_sorted(), "{versions:?}");
        let last = versions.last().unwrap();
        watcher.hear("key", last);
        writer.expect("key", &format!("{round} 9"), last);
    }
    assert_eq!(watcher.versions("key").len(), 30);
}

/// Nothing of the broker is left: clients ask again what was not answered, and that is done once.
#[test]
fn a_broker_that_forgets_everything_may_be_killed_at_any_time() {
    let mut scene = Scene::start();
    let (mut writer, mut watcher) = (scene.asker("writer"), scene.asker("watcher"));
    watcher.watch("key");
    for round in 0..3 {
        let requests: Vec<Request> = (0..10)
            .map(|n| writer.send(&["SET", "key", &format!("{round} {n}"), "NX"]))
            .collect();
        let attached = attachments(&scene);
        scene.broker.kill();
        scene.broker.restart();
        assert!(!writer.resume() && !watcher.resume(), "round {round}");
        eventually("the store attaches again", || {
            attachments(&scene) > attached
        });
        let told: Vec<Told> = requests.iter().map(|it| insist(&mut writer, it)).collect();
        // The first of all wins, however often it is asked.
        let version = told[0].version.clone();
        assert_eq!(told[0].text, "+OK\\r\\n");
        for told in &told[1..] {
            assert_eq!((told.text.as_str(), &told.version), (":-1\\r\\n", &version));
        }
        // A watch may have ended while nobody was there to take a notification.
        watcher.watch("key");
        let deleted = writer.ask(&["DEL", "key"]);
        assert_eq!(
            (deleted.text.as_str(), deleted.version),
            (":1\\r\\n", version)
        );
        watcher.until("the notification of the DEL", |asker| {
            let last = asker.notifications.last()?;
            last.payload.ends_with(b"DELETE\r\n").then_some(())
        });
        watcher.notifications.clear();
    }
}

/// How often the store has subscribed.
fn attachments(scene: &Scene) -> usize {
    let seen = scene.proxy.seen();
    let subacks = seen.iter().filter(|it| it.packet.kind() == kind::SUBACK);
    subacks.count()
}

/// Asks until there is an answer, as a client does whose broker has forgotten it.
fn insist(asker: &mut Asker, request: &Request) -> Told {
    let end = Instant::now() + PATIENCE;
    loop {
        if let Some(told) = asker.answer_so_far(request) {
            return told.clone();
        }
        assert!(Instant::now() < end, "never answered: {request:?}");
        asker.send_again(request);
        let next = Instant::now() + Duration::from_millis(500);
        while asker.answer_so_far(request).is_none() && Instant::now() < next {
            asker.listen(Duration::from_millis(5));
        }
    }
}

/// Nothing moves for longer than the keep alive: the store lets go, tries again, and goes on when the broker does.
#[test]
fn a_frozen_broker_is_waited_for() {
    let scene = Scene::with(&[], &[("broker_keep_alive", "5s")]);
    let mut writer = scene.asker("writer");
    let before = writer.set("key", "before");
    scene.broker.freeze();
    let request = writer.send(&["SET", "key", "value", "NEX", "before"]);
    let connections = scene.proxy.connections();
    // A proxy connects: the system accepts for a frozen process.
    eventually("the store tries again", || {
        scene.proxy.connections() > connections
    });
    scene.broker.thaw();
    let version = writer.answer(&request).version.unwrap();
    assert!(version > before);
    writer.expect("key", "value", &version);
}

/// Frozen for less than that: nothing happens but that it takes longer.
#[test]
fn a_pause_of_the_broker_is_not_noticed() {
    let scene = Scene::start();
    let (mut writer, mut watcher) = (scene.asker("writer"), scene.asker("watcher"));
    watcher.watch("key");
    for n in 0..5 {
        scene.broker.freeze();
        let request = writer.send(&["SET", "key", &n.to_string()]);
        thread::sleep(Duration::from_millis(100));
        scene.broker.thaw();
        let version = writer.answer(&request).version.unwrap();
        watcher.hear("key", &version);
    }
    assert_eq!((writer.repeated, watcher.notifications.len()), (0, 5));
    assert_eq!(scene.proxy.connections(), 1);
}

/// Bytes trickle: everything comes, in its order, over the one connection.
#[test]
fn a_slow_connection_loses_nothing() {
    let scene = Scene::start();
    let (mut writer, mut watcher) = (scene.asker("writer"), scene.asker("watcher"));
    watcher.watch("key");
    scene.proxy.limit(Some(10_000));
    let requests: Vec<Request> = (0..60)
        .map(|n| writer.send(&["SET", "key", &n.to_string()]))
        .collect();
    let versions: Vec<_> = requests
        .iter()
        .map(|request| writer.answer(request).version.unwrap())
        .collect();
    assert!(versions.is_sorted());
    watcher.hear("key", versions.last().unwrap());
    assert_eq!(watcher.versions("key"), versions);
    assert_eq!((writer.repeated, watcher.notifications.len()), (0, 60));
    assert_eq!(scene.proxy.connections(), 1);
}

/// Neither side hears of the other any more, and no packet says so: the store finds out by its keep alive.
#[test]
fn a_half_open_connection_is_found_out() {
    let scene = Scene::with(&[], &[("broker_keep_alive", "5s")]);
    let (mut writer, mut watcher) = (scene.asker("writer"), scene.asker("watcher"));
    watcher.watch("key");
    scene.proxy.script(|seen| match seen.connection {
        0 => Fate::Vanish,
        _ => Fate::Pass,
    });
    let request = writer.send(&["SET", "key", "value"]);
    let version = writer.answer(&request).version.unwrap();
    watcher.hear("key", &version);
    writer.expect("key", "value", &version);
    assert_eq!(watcher.versions("key").len(), 1);
}

/// The broker acknowledges all but the first of a full window, so that packet ids come round to one that is taken. Then
/// it forgets the session. A client library was seen to wait for that packet id for ever.
#[test]
fn acknowledgements_out_of_order_and_a_lost_session_do_not_stop_the_store() {
    let mut scene = Scene::start();
    let mut writer = scene.asker("writer");
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
    // The packet ids come round. It connects again, and meets the same again.
    scene.host.wait_for_log("out of order");
    scene.proxy.pass();
    let attached = attachments(&scene);
    scene.broker.kill();
    scene.broker.restart();
    assert!(!writer.resume());
    eventually("the store attaches again", || {
        attachments(&scene) > attached
    });
    for request in &requests {
        assert_eq!(insist(&mut writer, request).text, "+OK\\r\\n");
    }
}

/// Acknowledgements in any order, the session kept: everything is done once and in order all the same.
#[test]
fn acknowledgements_in_reverse_order_change_nothing() {
    let scene = Scene::start();
    let (mut writer, mut watcher) = (scene.asker("writer"), scene.asker("watcher"));
    watcher.watch("key");
    scene
        .proxy
        .script(|seen| match (seen.way, seen.packet.kind()) {
            (Way::FromBroker, kind::PUBACK) => Fate::Hold,
            _ => Fate::Pass,
        });
    let requests: Vec<Request> = (0..50)
        .map(|n| writer.send(&["SET", "key", &n.to_string()]))
        .collect();
    let mut versions = Vec::new();
    for request in &requests {
        while writer.answer_so_far(request).is_none() {
            writer.listen(Duration::from_millis(20));
            scene.proxy.release(|held| held.reverse());
        }
        versions.push(writer.answer(request).version.unwrap());
    }
    scene.proxy.pass();
    scene.proxy.release(|_| ());
    assert!(versions.is_sorted());
    watcher.hear("key", versions.last().unwrap());
    assert_eq!(watcher.versions("key"), versions);
}
