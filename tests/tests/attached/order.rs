//! Tests order: the store must execute each client's requests in the order in which the client sent
//! them, despite broken connections, and must send notifications in the same order.

use std::time::Duration;

use statehouse_tests::{Dice, Fate, Request, wait::until};

use crate::{
    recording_client::RecordingClient,
    scene::{Scene, hold_pubacks},
};

#[test]
fn requests_keep_their_order_over_broken_connections() {
    let scene = Scene::start();
    let mut dice = Dice::thrown();
    let mut watcher = scene.client("watcher");
    let mut clients: Vec<_> = (0..3)
        .map(|n| scene.client(&format!("client{n}")))
        .collect();
    for n in 0..clients.len() {
        watcher.watch(&format!("key{n}"));
    }
    // The broker redelivers all unacknowledged requests over each new connection, so the number of
    // cuts must be limited. After several connections that break at once, the store also waits for
    // seconds.
    let mut cuts = 6;
    scene.proxy.script(move |_| match dice.below(200) {
        0 if cuts > 0 => {
            cuts -= 1;
            *dice.of_these(&[Fate::CutBefore, Fate::CutWithin, Fate::CutAfter])
        }
        _ => Fate::Pass,
    });
    let sent: Vec<Vec<Request>> = clients
        .iter_mut()
        .enumerate()
        .map(|(n, client)| {
            let key = format!("key{n}");
            (0..100)
                .map(|value| client.send(&["SET", &key, &value.to_string()]))
                .collect()
        })
        .collect();
    for (n, (client, requests)) in clients.iter_mut().zip(&sent).enumerate() {
        let versions = client.versions(requests);
        assert!(versions.is_sorted(), "out of order: {versions:?}");
        let last = versions.last().unwrap();
        let key = format!("key{n}");
        watcher.wait_for_notification(&key, last);
        assert_eq!(watcher.notified_versions(&key), versions);
        client.assert_value(&key, "99", last);
    }
    assert!(scene.proxy.connections() > 1, "nothing broke");
}

/// The broker never has more requests in flight than `broker_window`, the Receive Maximum of the
/// store. Mosquitto 2.0.11 sends a full window again after an acknowledgement, so the relay holds
/// all of them.
#[test]
fn broker_window_limits_requests_in_flight() {
    let scene = Scene::with(&["max_inflight_messages 100"], &[("broker_window", "4")]);
    scene.wait_until_acknowledged();
    let mut writer = scene.client("writer");
    // Without acknowledgements of its answers, the store acknowledges no requests.
    hold_pubacks(&scene.proxy);
    let requests: Vec<Request> = (0..40)
        .map(|n| writer.send(&["SET", &format!("key {n}"), "value"]))
        .collect();
    let answered = |client: &RecordingClient| {
        let answered = requests
            .iter()
            .filter(|it| client.answer_so_far(it).is_some());
        answered.count()
    };
    until("the window is answered", || {
        writer.receive_for(Duration::from_millis(5));
        answered(&writer) >= 4
    });
    writer.receive_for(Duration::from_millis(300));
    assert_eq!(answered(&writer), 4);
    scene.proxy.pass();
    scene.proxy.release(|_| ());
    for request in &requests {
        assert_eq!(writer.answer(request).text, "+OK\\r\\n");
    }
}
