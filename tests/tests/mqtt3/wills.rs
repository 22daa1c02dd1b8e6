//! Wills (section 3.1.2.5). Other checks show wills after a protocol violation
//! (`malformed`) and after the end of the Keep Alive (`connect`).

use statehouse_tests::{Connect, Publish};

use crate::scene::{Scene, checks};

checks! {
    disconnect_deletes_the_will,
    retained_will_is_retained,
    will_is_published_once_at_its_qos,
    will_is_published_when_a_clean_session_takes_over;
    not mosquitto:
    will_is_published_when_its_session_is_taken_over,
}

fn will_is_published_once_at_its_qos(scene: &Scene<'_>) {
    let mut subscriber = scene.subscriber("subscriber", 2);
    for qos in 0..=2 {
        let topic = scene.topic(&format!("will {qos}"));
        let will = Publish::new(&topic, [0, 0xFF, qos]).qos(qos);
        let client = scene.accept(&scene.lasting("client").will(will, 0));
        subscriber.expect_nothing();
        client.abort();
        let got = subscriber.next_publish();
        assert_eq!((&*got.topic, got.qos, got.retain), (&*topic, qos, false));
        assert_eq!(got.payload, [0, 0xFF, qos]);
        // The session continues without the will, which was not retained.
        scene.resume("client").abort();
        subscriber.expect_nothing();
    }
    let mut later = scene.subscriber("later", 2);
    later.expect_nothing();
}

fn retained_will_is_retained(scene: &Scene<'_>) {
    let topic = scene.topic("will");
    let mut subscriber = scene.subscriber("subscriber", 1);
    let will = Publish::new(&topic, "offline").qos(1).retained();
    scene.accept(&scene.clean("client").will(will, 0)).abort();
    let got = subscriber.next_publish();
    assert_eq!((&got.payload[..], got.retain), (&b"offline"[..], false));
    // The end of the session does not delete the retained message.
    let mut later = scene.subscriber("later", 1);
    let got = later.next_publish();
    assert_eq!((&got.payload[..], got.retain), (&b"offline"[..], true));
}

fn disconnect_deletes_the_will(scene: &Scene<'_>) {
    let mut subscriber = scene.subscriber("subscriber", 2);
    for connect in [scene.clean("client"), scene.lasting("client")] {
        let will = Publish::new(&scene.topic("will"), "x").qos(1).retained();
        scene.accept(&connect.clone().will(will, 0)).disconnect();
        subscriber.expect_nothing();
        // Nor does a later connection without a will have one.
        scene.accept(&connect).abort();
        subscriber.expect_nothing();
    }
    scene.subscriber("later", 2).expect_nothing();
}

/// The broker closes the existing connection, which has not sent a DISCONNECT.
fn takeover_publishes_will(scene: &Scene<'_>, old: &Connect, new: &Connect) {
    let mut subscriber = scene.subscriber("subscriber", 1);
    let will = Publish::new(&scene.topic("will"), "x").qos(1);
    let mut old = scene.accept(&old.clone().will(will, 0));
    let new = scene.accept(new);
    old.expect_closed();
    assert_eq!(subscriber.next_publish().payload, b"x");
    new.disconnect();
    subscriber.expect_nothing();
}

fn will_is_published_when_a_clean_session_takes_over(scene: &Scene<'_>) {
    let (clean, lasting) = (scene.clean("client"), scene.lasting("client"));
    takeover_publishes_will(scene, &clean, &clean);
    takeover_publishes_will(scene, &lasting, &clean);
    takeover_publishes_will(scene, &clean, &lasting);
}

fn will_is_published_when_its_session_is_taken_over(scene: &Scene<'_>) {
    let lasting = scene.lasting("client");
    takeover_publishes_will(scene, &lasting, &lasting);
}
