//! Kills the store with `kill -9` at each packet of an exchange, and restarts it. Acknowledged
//! requests must be durable, and unacknowledged ones must take effect once. Watches that an earlier
//! process registered must still get their notifications.

use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
};

use statehouse_tests::{Fate, server::signal, wait::until};

use crate::{exchange::Exchange, scene::Scene};

#[test]
fn kill_at_any_packet_executes_a_request_once() {
    let mut scene = Scene::start();
    let (mut writer, mut watcher) = (scene.client("writer"), scene.client("watcher"));
    watcher.watch("key");
    let mut changes = 0;
    for number in 0.. {
        let value = format!("value {number}");
        let pid = scene.host.pid();
        scene.wait_until_acknowledged();
        let exchange = Exchange::script(&scene.proxy, &value, move |at| {
            if at != number {
                return Fate::Pass;
            }
            signal(pid, "KILL");
            Fate::CutBefore
        });
        let request = writer.send(&["SET", "key", &value]);
        until("the store is killed or done", || {
            exchange.faults() > 0 || exchange.is_acknowledged()
        });
        let killed = exchange.faults() > 0;
        if killed {
            scene.kill_host();
        }
        let version = writer.answer(&request).version.unwrap();
        watcher.wait_for_notification("key", &version);
        until("the request is acknowledged", || exchange.is_acknowledged());
        writer.assert_value("key", &value, &version);
        changes += 1;
        if !killed {
            assert!(number >= 6, "{:?}", exchange.packets());
            break;
        }
    }
    assert_eq!(watcher.notified_versions("key").len(), changes);
}

/// Kills the store at each of the first packets of its connection: CONNECT, CONNACK, SUBSCRIBE,
/// SUBACK, and the request that the broker had queued.
#[test]
fn kill_while_attaching_executes_a_request_once() {
    let mut scene = Scene::start();
    let (mut writer, mut watcher) = (scene.client("writer"), scene.client("watcher"));
    watcher.watch("key");
    for number in 0..5 {
        let value = format!("value {number}");
        scene.host.kill();
        let request = writer.send(&["SET", "key", &value]);
        scene.host.start_again(&[]);
        let killed = kill_at(&scene, number);
        until("the store is killed while it attaches", || {
            killed.load(SeqCst)
        });
        let exchange = Exchange::script(&scene.proxy, &value, |_| Fate::Pass);
        scene.kill_host();
        let version = writer.answer(&request).version.unwrap();
        watcher.wait_for_notification("key", &version);
        until("the request is acknowledged", || exchange.is_acknowledged());
        writer.assert_value("key", &value, &version);
    }
    assert_eq!(watcher.notified_versions("key").len(), 5);
}

/// Kills the store at packet `number` of its next connection.
fn kill_at(scene: &Scene, number: usize) -> Arc<AtomicBool> {
    let killed = Arc::new(AtomicBool::new(false));
    let (done, pid, next) = (killed.clone(), scene.host.pid(), scene.proxy.connections());
    let mut count = 0;
    scene.proxy.script(move |seen| {
        if seen.connection != next {
            return Fate::Pass;
        }
        count += 1;
        if count <= number {
            return Fate::Pass;
        }
        if !done.swap(true, SeqCst) {
            signal(pid, "KILL");
        }
        Fate::CutBefore
    });
    killed
}

/// Twenty clients have requests in flight at each kill.
#[test]
fn kill_with_many_requests_in_flight_executes_each_once() {
    let mut scene = Scene::start();
    let mut watcher = scene.client("watcher");
    let mut clients: Vec<_> = (0..20)
        .map(|n| scene.client(&format!("client{n}")))
        .collect();
    watcher.watch("key");
    let mut versions = BTreeSet::new();
    for round in 0..3 {
        let sent: Vec<_> = clients
            .iter_mut()
            .enumerate()
            .map(|(n, client)| {
                let free = format!("free {round} {n}");
                [
                    // A second execution would be refused or have another version.
                    client.send(&["SET", &free, "value", "NX"]),
                    client.send(&["SET", "key", &format!("{round} {n}")]),
                    client.send(&["VDEL", &free, "value"]),
                ]
            })
            .collect();
        scene.kill_host();
        for (client, [set_new, set, remove]) in clients.iter_mut().zip(&sent) {
            assert_eq!(client.answer(set_new).text, "+OK\\r\\n");
            assert_eq!(client.answer(remove).text, ":1\\r\\n");
            let version = client.answer(set).version.unwrap();
            assert!(versions.insert(version.clone()), "{version} twice");
        }
        let last = versions.last().unwrap();
        watcher.wait_for_notification("key", last);
    }
    let versions: Vec<_> = versions.into_iter().collect();
    assert_eq!(watcher.notified_versions("key"), versions);
}

#[test]
fn kill_preserves_watches_of_prefixes() {
    let mut scene = Scene::start();
    let (mut writer, mut watcher) = (scene.client("writer"), scene.client("watcher"));
    for prefix in ["k", "gone"] {
        let answer = watcher.ask(&["KEYNOTIFY", prefix, "PREFIX"]);
        assert_eq!(answer.text, "+OK\\r\\n");
    }
    let stop = watcher.ask(&["KEYNOTIFY", "gone", "PREFIX", "STOP"]);
    assert_eq!(stop.text, "+OK\\r\\n");
    scene.kill_host();
    writer.set("gone", "v");
    let version = writer.set("key", "v");
    watcher.wait_for_notification("key", &version);
    assert!(watcher.notified_versions("gone").is_empty());
}
