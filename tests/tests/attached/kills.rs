//! The store is killed with `kill -9` at each packet of an exchange, and started again. What it had acknowledged is
//! there, what it had not is done once, and its watchers are told although they asked an earlier process.

use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
};

use statehouse_tests::{Fate, server::signal};

use crate::{
    points::Exchange,
    scene::{Scene, eventually},
};

#[test]
fn a_kill_at_any_packet_loses_and_doubles_nothing() {
    let mut scene = Scene::start();
    let (mut writer, mut watcher) = (scene.asker("writer"), scene.asker("watcher"));
    watcher.watch("key");
    let mut changes = 0;
    for number in 0.. {
        let value = format!("value {number}");
        let pid = scene.host.pid();
        scene.settle();
        let exchange = Exchange::arm(&scene.proxy, &value, move |at| {
            if at != number {
                return Fate::Pass;
            }
            signal(pid, "KILL");
            Fate::CutBefore
        });
        let request = writer.send(&["SET", "key", &value]);
        eventually("the store is killed or done", || {
            exchange.strikes() > 0 || exchange.settled()
        });
        let killed = exchange.strikes() > 0;
        if killed {
            scene.kill_host();
        }
        let told = writer.answer(&request);
        let version = told.version.unwrap();
        watcher.hear("key", &version);
        eventually("the request is acknowledged", || exchange.settled());
        writer.expect("key", &value, &version);
        changes += 1;
        if !killed {
            assert!(number >= 6, "{:?}", exchange.came());
            break;
        }
    }
    assert_eq!(watcher.versions("key").len(), changes);
}

/// The same while it attaches: CONNECT, CONNACK, SUBSCRIBE, SUBACK, and the request that waited at the broker.
#[test]
fn a_kill_while_it_attaches_loses_and_doubles_nothing() {
    let mut scene = Scene::start();
    let (mut writer, mut watcher) = (scene.asker("writer"), scene.asker("watcher"));
    watcher.watch("key");
    for number in 0..5 {
        let value = format!("value {number}");
        scene.host.kill();
        let request = writer.send(&["SET", "key", &value]);
        scene.host.start_again(&[]);
        let killed = kill_at(&scene, number);
        eventually("it is killed while it attaches", || killed.load(SeqCst));
        let exchange = Exchange::arm(&scene.proxy, &value, |_| Fate::Pass);
        scene.kill_host();
        let version = writer.answer(&request).version.unwrap();
        watcher.hear("key", &version);
        eventually("the request is acknowledged", || exchange.settled());
        writer.expect("key", &value, &version);
    }
    assert_eq!(watcher.versions("key").len(), 5);
}

/// Kills the store at the packet of this number of its next connection.
fn kill_at(scene: &Scene, number: usize) -> Arc<AtomicBool> {
    let killed = Arc::new(AtomicBool::new(false));
    let (told, pid, next) = (killed.clone(), scene.host.pid(), scene.proxy.connections());
    let mut count = 0;
    scene.proxy.script(move |seen| {
        if seen.connection != next {
            return Fate::Pass;
        }
        count += 1;
        if count <= number {
            return Fate::Pass;
        }
        if !told.swap(true, SeqCst) {
            signal(pid, "KILL");
        }
        Fate::CutBefore
    });
    killed
}

/// Twenty clients are in the middle of it, again and again: what each was told is so.
#[test]
fn kills_in_the_middle_of_many_requests_lose_and_double_nothing() {
    let mut scene = Scene::start();
    let mut watcher = scene.asker("watcher");
    let mut askers: Vec<_> = (0..20).map(|n| scene.asker(&format!("asker{n}"))).collect();
    watcher.watch("key");
    let mut versions = BTreeSet::new();
    for round in 0..3 {
        let sent: Vec<_> = askers
            .iter_mut()
            .enumerate()
            .map(|(n, asker)| {
                let free = format!("free {round} {n}");
                [
                    // Done twice, it is refused, or has another version.
                    asker.send(&["SET", &free, "value", "NX"]),
                    asker.send(&["SET", "key", &format!("{round} {n}")]),
                    asker.send(&["VDEL", &free, "value"]),
                ]
            })
            .collect();
        scene.kill_host();
        for (asker, [set_new, set, remove]) in askers.iter_mut().zip(&sent) {
            assert_eq!(asker.answer(set_new).text, "+OK\\r\\n");
            assert_eq!(asker.answer(remove).text, ":1\\r\\n");
            let told = asker.answer(set);
            assert!(
                versions.insert(told.version.clone().unwrap()),
                "{told:?} twice"
            );
        }
        let last = versions.last().unwrap();
        watcher.hear("key", last);
    }
    let versions: Vec<_> = versions.into_iter().collect();
    assert_eq!(watcher.versions("key"), versions);
}
