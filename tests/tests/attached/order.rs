//! Each client's requests run in the order in which it sent them, whatever breaks meanwhile, and each watcher hears the
//! changes in that order.

use std::time::Duration;

use statehouse_tests::{Dice, Fate, Request, Way, packet::kind};

use crate::scene::Scene;

#[test]
fn the_order_of_each_client_is_kept_over_broken_connections() {
    let scene = Scene::start();
    let mut dice = Dice::thrown();
    let mut watcher = scene.asker("watcher");
    let mut askers: Vec<_> = (0..3).map(|n| scene.asker(&format!("asker{n}"))).collect();
    for n in 0..askers.len() {
        watcher.watch(&format!("key{n}"));
    }
    // All that was not acknowledged comes again over each new connection, so not every one can break; and after some that
    // break at once the store waits for seconds.
    let mut cuts = 6;
    scene.proxy.script(move |_| match dice.below(200) {
        0 if cuts > 0 => {
            cuts -= 1;
            *dice.of_these(&[Fate::CutBefore, Fate::CutWithin, Fate::CutAfter])
        }
        _ => Fate::Pass,
    });
    let sent: Vec<Vec<Request>> = askers
        .iter_mut()
        .enumerate()
        .map(|(n, asker)| {
            let key = format!("key{n}");
            (0..100)
                .map(|value| asker.send(&["SET", &key, &value.to_string()]))
                .collect()
        })
        .collect();
    for (n, (asker, requests)) in askers.iter_mut().zip(&sent).enumerate() {
        let versions: Vec<_> = requests
            .iter()
            .map(|request| asker.answer(request).version.unwrap())
            .collect();
        assert!(versions.is_sorted(), "out of order: {versions:?}");
        let last = versions.last().unwrap();
        let key = format!("key{n}");
        watcher.hear(&key, last);
        assert_eq!(watcher.versions(&key), versions);
        asker.expect(&key, "99", last);
    }
    assert!(scene.proxy.connections() > 1, "nothing broke");
}

/// The broker never has more requests on their way to the store than the store said. (Mosquitto 2.0.11 sends as many
/// again behind an acknowledgement, so there must be none meanwhile.)
#[test]
fn the_window_bounds_what_is_on_its_way() {
    let scene = Scene::with(&["max_inflight_messages 100"], &[("broker_window", "4")]);
    scene.settle();
    let mut writer = scene.asker("writer");
    // Nothing that the store sends is acknowledged, so it acknowledges nothing either.
    scene
        .proxy
        .script(|seen| match (seen.way, seen.packet.kind()) {
            (Way::FromBroker, kind::PUBACK) => Fate::Hold,
            _ => Fate::Pass,
        });
    let requests: Vec<Request> = (0..40)
        .map(|n| writer.send(&["SET", &format!("key {n}"), "value"]))
        .collect();
    writer.listen(Duration::from_millis(500));
    let answered = |asker: &crate::asker::Asker| {
        let answered = requests
            .iter()
            .filter(|it| asker.answer_so_far(it).is_some());
        answered.count()
    };
    assert_eq!(answered(&writer), 4);
    scene.proxy.pass();
    scene.proxy.release(|_| ());
    for request in &requests {
        assert_eq!(writer.answer(request).text, "+OK\\r\\n");
    }
}
