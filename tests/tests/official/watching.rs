//! Observe and unobserve. An observer must get each change in between once, in order, with its
//! version.

use std::time::Duration;

use crate::{
    peer::{Peer, TIMEOUT, expect_notification, newer, within},
    place::Place,
};
use azure_iot_operations_services::state_store::{ErrorKind, Operation, SetOptions};

const KEY: &str = "key";

fn key() -> Vec<u8> {
    KEY.into()
}

/// Changes before and after an observation are not notified. Changes during it are notified once,
/// in order, with the versions that the writer got.
pub(crate) async fn changes_notify_only_during_an_observation(place: Place) {
    let server = place.start(&[]);
    let peer = Peer::connect(&server, "observer");
    let writer = Peer::connect(&server, "writer");
    writer.set(KEY, "before").await;
    let mut seen = peer.store.observe(key(), TIMEOUT).await.unwrap().response;

    let set = writer.set(KEY, "v2").await;
    writer.store.del(key(), None, TIMEOUT).await.unwrap();
    let own = peer.set(KEY, "v3").await;
    assert!(peer.store.unobserve(key(), TIMEOUT).await.unwrap().response);
    writer.set(KEY, "after").await;
    writer.store.del(key(), None, TIMEOUT).await.unwrap();

    let version = expect_notification(&mut seen, Operation::Set(b"v2".to_vec())).await;
    assert_eq!(version, set);
    let deleted = expect_notification(&mut seen, Operation::Del).await;
    assert!(newer(&deleted, &set));
    let version = expect_notification(&mut seen, Operation::Set(b"v3".to_vec())).await;
    assert_eq!(version, own);
    assert!(newer(&own, &deleted));
    assert!(
        within(seen.recv_notification()).await.is_none(),
        "one too many"
    );
    peer.leave().await;
    writer.leave().await;
}

pub(crate) async fn duplicate_observe_is_refused_and_unobserve_answers(place: Place) {
    let server = place.start(&[]);
    let peer = Peer::connect(&server, "observer");
    let store = &peer.store;
    let unobserve = async || store.unobserve(key(), TIMEOUT).await.unwrap().response;
    assert!(!unobserve().await);
    let first = store.observe(key(), TIMEOUT).await.unwrap();
    let twice = store.observe(key(), TIMEOUT).await.unwrap_err();
    assert!(matches!(twice.kind(), ErrorKind::DuplicateObserve));
    drop(first);
    let twice = store.observe(key(), TIMEOUT).await.unwrap_err();
    assert!(matches!(twice.kind(), ErrorKind::DuplicateObserve));
    assert!(unobserve().await);
    assert!(!unobserve().await);
    let mut again = store.observe(key(), TIMEOUT).await.unwrap().response;
    peer.set(KEY, "v").await;
    expect_notification(&mut again, Operation::Set(b"v".to_vec())).await;
    assert!(unobserve().await);
    peer.leave().await;
}

pub(crate) async fn expiry_notifies_as_a_deletion(place: Place) {
    let server = place.start(&[]);
    let peer = Peer::connect(&server, "observer");
    let mut seen = peer.store.observe(key(), TIMEOUT).await.unwrap().response;
    let expires = SetOptions {
        expires: Some(Duration::from_millis(300)),
        ..SetOptions::default()
    };
    let set = peer.set_with(KEY, "v", None, expires).await.unwrap();
    expect_notification(&mut seen, Operation::Set(b"v".to_vec())).await;
    let expired = expect_notification(&mut seen, Operation::Del).await;
    assert!(newer(&expired, &set));
    peer.leave().await;
}

pub(crate) async fn shutdown_of_a_client_ends_its_observation(place: Place) {
    let server = place.start(&[]);
    let peer = Peer::connect(&server, "observer");
    let mut seen = peer.store.observe(key(), TIMEOUT).await.unwrap().response;
    let waiting = tokio::spawn(async move { seen.recv_notification().await.is_none() });
    peer.leave().await;
    assert!(within(waiting).await.unwrap());
}

pub(crate) async fn several_observers_get_the_same_changes(place: Place) {
    let server = place.start(&[]);
    let mut observers = Vec::new();
    for n in 0..5 {
        let peer = Peer::connect(&server, &format!("observer{n}"));
        let seen = peer.store.observe(key(), TIMEOUT).await.unwrap().response;
        observers.push((peer, seen));
    }
    let writer = Peer::connect(&server, "writer");
    for n in 0..20 {
        writer.set(KEY, &n.to_string()).await;
    }
    for (peer, mut seen) in observers {
        for n in 0..20 {
            expect_notification(&mut seen, Operation::Set(n.to_string().into())).await;
        }
        assert!(peer.store.unobserve(key(), TIMEOUT).await.unwrap().response);
        assert!(
            within(seen.recv_notification()).await.is_none(),
            "one too many"
        );
        peer.leave().await;
    }
    writer.leave().await;
}

/// A client that sends a trace context gets one in the response, and so do all watchers.
pub(crate) async fn trace_contexts_of_others_change_nothing(place: Place) {
    // Nothing listens on this port.
    let server = place.start(&[("traces", "http://127.0.0.1:9"), ("traces_sample", "1")]);
    let peer = Peer::connect(&server, "observer");
    let mut seen = peer.store.observe(key(), TIMEOUT).await.unwrap().response;
    let mut writer = server.store("writer");
    let context = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    let set = writer.command(&["SET", KEY, "v"]);
    let answer = writer.call(&set.with("traceparent", context));
    assert!(answer.publish.user("traceparent").is_some());
    expect_notification(&mut seen, Operation::Set(b"v".to_vec())).await;
    let own = peer.set(KEY, "w").await;
    let version = expect_notification(&mut seen, Operation::Set(b"w".to_vec())).await;
    assert_eq!(version, own);
    peer.leave().await;
}
