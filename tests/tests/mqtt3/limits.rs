//! Limits of the whole broker.

use std::path::Path;

use statehouse_tests::{Client3, Server};

use crate::scene::{Addresses, Broker, Scene, checks};

checks! {
    not mosquitto:
    full_broker_refuses_a_connect_with_code_3,
}

/// Starts Statehouse with room for two sessions.
pub(crate) fn start(_: &Path) -> (Broker, Addresses) {
    let server = Server::restartable(&[("max_sessions", "2")]);
    let at = Addresses::only(server.address());
    (Broker::Statehouse(Box::new(server)), at)
}

fn full_broker_refuses_a_connect_with_code_3(scene: &Scene<'_>) {
    const SERVER_UNAVAILABLE: u8 = 3;
    let _connected = scene.connect("1");
    // The broker evicts sessions without subscriptions and messages.
    let mut kept = scene.resume("2");
    assert_eq!(kept.subscribe(&scene.topic("a"), 1), 1);
    kept.disconnect();
    let (mut refused, code) = Client3::try_connect(scene.at.plain, &scene.clean("3"));
    assert_eq!(code, SERVER_UNAVAILABLE);
    refused.expect_closed();
    // An existing session is resumed, and its end makes room.
    assert!(scene.resume("2").session_present());
    scene.connect("2").disconnect();
    scene.connect("3").ping();
}
