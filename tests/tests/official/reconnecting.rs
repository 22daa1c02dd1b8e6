//! Broken connections. The official client resumes its session, and gives up if the session is
//! lost. These tests check that the client continues.

use azure_iot_operations_services::state_store::Operation;
use statehouse_tests::Proxy;

use crate::{
    peer::{Peer, TIMEOUT, expect_notification, next_notification, within},
    place::Place,
};

pub(crate) async fn broken_connection_is_resumed(place: Place) {
    let server = place.start(&[]);
    let proxy = Proxy::start(server.address());
    let peer = Peer::connect_to(proxy.address(), "resuming");
    let version = peer.set("key", "before").await;
    for round in 0..3 {
        proxy.refuse(true);
        proxy.cut();
        within(peer.monitor.disconnected()).await;
        proxy.refuse(false);
        within(peer.monitor.connected()).await;
        let got = peer.store.get(b"key".to_vec(), TIMEOUT).await.unwrap();
        assert_eq!(got.response, Some(b"before".to_vec()), "round {round}");
        assert_eq!(got.version.as_ref(), Some(&version));
    }
    peer.leave().await;
}

/// A watch ends with its connection. The client ends the observation, and can begin another one.
pub(crate) async fn observation_ends_with_its_connection(place: Place) {
    let server = place.start(&[]);
    let proxy = Proxy::start(server.address());
    let peer = Peer::connect_to(proxy.address(), "observing");
    let writer = Peer::connect(&server, "writer");
    let key = || b"key".to_vec();
    let mut seen = peer.store.observe(key(), TIMEOUT).await.unwrap().response;
    writer.set("key", "one").await;
    let first = expect_notification(&mut seen, Operation::Set(b"one".to_vec())).await;

    proxy.cut();
    // The cut may lose its PUBACK, and the server then sends it again before the client ends the
    // observation.
    while let Some((again, _)) = within(seen.recv_notification()).await {
        assert_eq!(again.version, first, "the observation continues");
    }
    within(peer.monitor.connected()).await;
    writer.set("key", "not observed").await;

    let mut seen = peer.store.observe(key(), TIMEOUT).await.unwrap().response;
    writer.set("key", "two").await;
    let mut notification = next_notification(&mut seen).await;
    if notification.version == first {
        // The cut lost its PUBACK, so the server sent it again.
        notification = next_notification(&mut seen).await;
    }
    assert_eq!(notification.operation, Operation::Set(b"two".to_vec()));
    peer.leave().await;
    writer.leave().await;
}
