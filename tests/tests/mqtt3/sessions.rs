//! Sessions (sections 3.1.2.4, 3.2.2.2 and 4.1).

use statehouse_tests::{
    Publish,
    packet::{acknowledge, kind},
};

use crate::scene::{Scene, checks};

checks! {
    clean_session_discards_the_stored_one,
    client_id_identifies_the_session,
    session_keeps_subscriptions_and_messages,
    state_of_a_clean_session_is_never_resumed,
}

fn session_keeps_subscriptions_and_messages(scene: &Scene<'_>) {
    let (one, two) = (scene.topic("1"), scene.topic("2"));
    let mut client = scene.resume("client");
    assert!(!client.session_present(), "a new session");
    assert_eq!(client.subscribe_all(&[(&one, 1), (&two, 2)]), [1, 2]);
    // One end without and one with a DISCONNECT.
    for round in 0..2_u8 {
        match round {
            0 => client.abort(),
            _ => client.disconnect(),
        }
        let mut publisher = scene.connect("publisher");
        for n in 0..5 {
            publisher.publish(Publish::new(&one, [round, n]).qos(1));
            publisher.publish(Publish::new(&two, [round, n]).qos(2));
        }
        client = scene.resume("client");
        assert!(client.session_present());
        for n in 0..5 {
            for (topic, qos) in [(&one, 1), (&two, 2)] {
                let got = client.take_publish(topic);
                assert_eq!(got.payload, [round, n]);
                assert_eq!((got.qos, got.dup), (qos, false));
            }
        }
        // The subscriptions continue.
        publisher.publish(Publish::new(&one, "live").qos(1));
        assert_eq!(client.take_publish(&one).payload, b"live");
        client.expect_nothing();
    }
}

fn clean_session_discards_the_stored_one(scene: &Scene<'_>) {
    let topic = scene.topic("a");
    let mut client = scene.resume("client");
    assert_eq!(client.subscribe(&topic, 1), 1);
    client.disconnect();
    scene.publish(&topic, "queued");
    let mut client = scene.connect("client");
    assert!(!client.session_present());
    scene.publish(&topic, "live");
    client.expect_nothing();
    client.disconnect();
    let mut client = scene.resume("client");
    assert!(!client.session_present(), "the old session is discarded");
    scene.publish(&topic, "later");
    client.expect_nothing();
}

/// Neither subscriptions nor messages nor packet ids of unfinished exchanges.
fn state_of_a_clean_session_is_never_resumed(scene: &Scene<'_>) {
    let topic = scene.topic("a");
    let mut subscriber = scene.subscriber("subscriber", 2);
    let mut client = scene.connect("client");
    client.acknowledges = false;
    assert_eq!(client.subscribe(&topic, 2), 2);
    let mut message = Publish::new(&topic, "first").qos(2);
    message.packet_id = 9;
    client.start(message.clone());
    client.take_ack(kind::PUBREC, 9);
    client.abort();
    subscriber.drain();
    let mut client = scene.resume("client");
    assert!(!client.session_present());
    scene.publish(&topic, "later");
    client.expect_nothing();
    // The packet id belongs to a new message.
    message.payload = b"second".to_vec();
    client.start(message);
    client.take_ack(kind::PUBREC, 9);
    client.send(&acknowledge(kind::PUBREL, 9));
    client.take_ack(kind::PUBCOMP, 9);
    loop {
        if subscriber.take_publish(&topic).payload == b"second" {
            break;
        }
    }
}

fn client_id_identifies_the_session(scene: &Scene<'_>) {
    let topic = scene.topic("a");
    let mut client = scene.resume("client");
    assert_eq!(client.subscribe(&topic, 1), 1);
    client.disconnect();
    scene.publish(&topic, "x");
    for other in ["Client", "clien", "client2"] {
        let mut client = scene.resume(other);
        assert!(!client.session_present(), "{other}");
        client.expect_nothing();
    }
    let mut client = scene.resume("client");
    assert!(client.session_present());
    assert_eq!(client.next_publish().payload, b"x");
}
