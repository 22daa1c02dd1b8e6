//! Cuts the connection between store and broker at each packet of an exchange. Every request must
//! take effect exactly once, and every watcher must be notified.

use statehouse_tests::{Fate, Way, packet::kind, wait::until};

use crate::{exchange::Exchange, recording_client::RecordingClient, scene::Scene};

/// A SET with one watcher takes six packets: the request, the answer and the notification, the
/// PUBACKs of these two, and last the PUBACK of the request.
#[test]
fn request_is_acknowledged_after_its_answer_and_notification() {
    let scene = Scene::start();
    let (mut writer, mut watcher) = (scene.client("writer"), scene.client("watcher"));
    watcher.watch("key");
    for n in 0..20 {
        let value = format!("value {n}");
        scene.wait_until_acknowledged();
        let exchange = Exchange::script(&scene.proxy, &value, |_| Fate::Pass);
        let version = writer.set("key", &value);
        watcher.wait_for_notification("key", &version);
        until("the request is acknowledged", || exchange.is_acknowledged());
        let passed = exchange.packets();
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

/// Sends one SET, and asserts that it has one effect and one answer, and that the watcher is
/// notified of this effect only.
fn assert_one_effect(
    writer: &mut RecordingClient,
    watcher: &mut RecordingClient,
    value: &str,
    exchange: &Exchange,
) {
    let version = writer.set("key", value);
    watcher.wait_for_notification("key", &version);
    until("the request is acknowledged", || exchange.is_acknowledged());
    // A second effect would have another version.
    writer.assert_value("key", value, &version);
    watcher.assert_value("key", value, &version);
    let notified = watcher.notified_versions("key");
    assert_eq!(notified.last(), Some(&version), "{value}");
}

#[test]
fn cut_at_any_packet_executes_a_request_once() {
    let scene = Scene::start();
    let (mut writer, mut watcher) = (scene.client("writer"), scene.client("watcher"));
    watcher.watch("key");
    let mut changes = 0;
    for fate in [Fate::CutBefore, Fate::CutWithin, Fate::CutAfter] {
        for number in 0.. {
            let value = format!("{fate:?} {number}");
            scene.wait_until_acknowledged();
            let exchange = Exchange::script(&scene.proxy, &value, move |at| match at == number {
                true => fate,
                false => Fate::Pass,
            });
            assert_one_effect(&mut writer, &mut watcher, &value, &exchange);
            changes += 1;
            if exchange.faults() == 0 {
                // Late packets of the exchange before may be among these.
                assert!(number >= 6, "{:?}", exchange.packets());
                break;
            }
        }
    }
    assert_eq!(watcher.notified_versions("key").len(), changes);
}

/// The next connection breaks too, at each of its packets: during its setup and during the
/// redelivery of the request.
#[test]
fn cut_during_reconnection_executes_a_request_once() {
    let scene = Scene::start();
    let (mut writer, mut watcher) = (scene.client("writer"), scene.client("watcher"));
    watcher.watch("key");
    // At the first cut the store has executed the request, but has sent neither its answer nor its
    // notification.
    for number in 2.. {
        let value = format!("second {number}");
        scene.wait_until_acknowledged();
        let exchange = Exchange::script(&scene.proxy, &value, move |at| {
            match at == 1 || at == number {
                true => Fate::CutBefore,
                false => Fate::Pass,
            }
        });
        assert_one_effect(&mut writer, &mut watcher, &value, &exchange);
        if exchange.faults() == 1 {
            // CONNECT, CONNACK, SUBSCRIBE and the exchange; the SUBACK may come after these.
            assert!(number >= 2 + 9, "{:?}", exchange.packets());
            break;
        }
    }
}
