//! The connection between store and broker is cut at each packet of an exchange. Nothing that was asked is lost or done
//! twice, and everybody is told.

use statehouse_tests::{Fate, Way, packet::kind};

use crate::{
    asker::Asker,
    points::Exchange,
    scene::{Scene, eventually},
};

/// What a SET with one watcher takes: the request, the answer and the notification, their PUBACKs, and its own last.
#[test]
fn the_request_is_acknowledged_behind_all_that_it_led_to() {
    let scene = Scene::start();
    let (mut writer, mut watcher) = (scene.asker("writer"), scene.asker("watcher"));
    watcher.watch("key");
    for n in 0..20 {
        let value = format!("value {n}");
        scene.settle();
        let exchange = Exchange::arm(&scene.proxy, &value, |_| Fate::Pass);
        let version = writer.set("key", &value);
        watcher.hear("key", &version);
        eventually("the request is acknowledged", || exchange.settled());
        let passed = exchange.came();
        let count = |what| passed.iter().filter(|it| **it == what).count();
        assert_eq!(passed.len(), 6, "{passed:?}");
        assert_eq!(passed[0], (Way::FromBroker, kind::PUBLISH));
        assert_eq!(count((Way::ToBroker, kind::PUBLISH)), 2, "{passed:?}");
        assert_eq!(count((Way::FromBroker, kind::PUBACK)), 2, "{passed:?}");
        assert_eq!(passed[5], (Way::ToBroker, kind::PUBACK), "{passed:?}");
    }
    assert_eq!(writer.repeated, 0);
    assert_eq!(watcher.notifications.len(), 20);
}

/// One SET, whatever happens to it: one effect, one answer, and the watcher hears of that and nothing else.
fn one_effect(writer: &mut Asker, watcher: &mut Asker, value: &str, exchange: &Exchange) {
    let version = writer.set("key", value);
    watcher.hear("key", &version);
    eventually("the request is acknowledged", || exchange.settled());
    // A second effect would have another version.
    writer.expect("key", value, &version);
    watcher.expect("key", value, &version);
    assert_eq!(watcher.versions("key").last(), Some(&version), "{value}");
}

#[test]
fn a_cut_at_any_packet_loses_and_doubles_nothing() {
    let scene = Scene::start();
    let (mut writer, mut watcher) = (scene.asker("writer"), scene.asker("watcher"));
    watcher.watch("key");
    let mut changes = 0;
    for fate in [Fate::CutBefore, Fate::CutWithin, Fate::CutAfter] {
        for number in 0.. {
            let value = format!("{fate:?} {number}");
            scene.settle();
            let exchange = Exchange::arm(&scene.proxy, &value, move |at| match at == number {
                true => fate,
                false => Fate::Pass,
            });
            one_effect(&mut writer, &mut watcher, &value, &exchange);
            changes += 1;
            if exchange.strikes() == 0 {
                // What was asked before may have left something behind that comes in between.
                assert!(number >= 6, "{:?}", exchange.came());
                break;
            }
        }
    }
    assert_eq!(watcher.versions("key").len(), changes);
}

/// The next connection breaks too, at each of its packets: while it is made, and while the request comes again.
#[test]
fn a_cut_at_any_packet_of_the_next_connection_loses_and_doubles_nothing() {
    let scene = Scene::start();
    let (mut writer, mut watcher) = (scene.asker("writer"), scene.asker("watcher"));
    watcher.watch("key");
    // The first cut is where the store has done it, and nobody was told.
    for number in 2.. {
        let value = format!("second {number}");
        scene.settle();
        let exchange = Exchange::arm(&scene.proxy, &value, move |at| {
            match at == 1 || at == number {
                true => Fate::CutBefore,
                false => Fate::Pass,
            }
        });
        one_effect(&mut writer, &mut watcher, &value, &exchange);
        if exchange.strikes() == 1 {
            // CONNECT, CONNACK, SUBSCRIBE and the exchange; the SUBACK may come after these.
            assert!(number >= 2 + 9, "{:?}", exchange.came());
            break;
        }
    }
}
