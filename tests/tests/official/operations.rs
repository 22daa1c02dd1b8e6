//! SET, GET, DEL and VDEL with every option. The client must return the store's versions, and map
//! its refusals to the documented errors.

use std::time::Duration;

use crate::{
    peer::{Peer, TIMEOUT, newer, within},
    place::Place,
};
use azure_iot_operations_protocol::common::hybrid_logical_clock::HybridLogicalClock;
use azure_iot_operations_services::state_store::{
    Error, ErrorKind, ServiceError, SetCondition, SetOptions,
};

fn condition(set_condition: SetCondition) -> SetOptions {
    SetOptions {
        set_condition,
        ..SetOptions::default()
    }
}

/// Asserts that the call failed with this service error.
macro_rules! refused {
    ($result:expr, $expected:pat) => {{
        let error: Error = $result.expect_err("a service error");
        assert!(
            matches!(error.kind(), ErrorKind::ServiceError($expected)),
            "instead of {}: {error:?}",
            stringify!($expected)
        );
    }};
}

pub(crate) async fn versions_rise_and_belong_to_the_value(place: Place) {
    let server = place.start(&[]);
    let peer = Peer::connect(&server, "versions");
    let first = peer.set("key", "one").await;
    let second = peer.set("key", "two").await;
    assert!(newer(&second, &first), "{second} after {first}");
    assert_eq!(second.node_id, "StateStore");

    let got = peer.store.get(b"key".to_vec(), TIMEOUT).await.unwrap();
    assert_eq!(got.response.as_deref(), Some(&b"two"[..]));
    assert_eq!(got.version.as_ref(), Some(&second));

    for expected in [(1, Some(second)), (0, None)] {
        let deleted = peer.store.del(b"key".to_vec(), None, TIMEOUT).await;
        let deleted = deleted.unwrap();
        assert_eq!((deleted.response, deleted.version), expected);
    }
    let got = peer.store.get(b"key".to_vec(), TIMEOUT).await.unwrap();
    assert_eq!((got.response, got.version), (None, None));
    peer.leave().await;
}

pub(crate) async fn set_conditions_are_applied(place: Place) {
    let server = place.start(&[]);
    let peer = Peer::connect(&server, "conditions");
    let set = async |value: &str, options: SetOptions| {
        let set = (peer.store).set(b"key".to_vec(), value.into(), TIMEOUT, None, options);
        let response = set.await.unwrap();
        (response.response, response.version)
    };
    let (done, first) = set("a", condition(SetCondition::OnlyIfDoesNotExist)).await;
    assert!(done);
    // A refusal returns the version of the stored value.
    let refused = set("b", condition(SetCondition::OnlyIfDoesNotExist)).await;
    assert_eq!(refused, (false, first));
    let (done, second) = set("a", condition(SetCondition::OnlyIfEqualOrDoesNotExist)).await;
    assert!(done);
    let refused = set("b", condition(SetCondition::OnlyIfEqualOrDoesNotExist)).await;
    assert_eq!(refused, (false, second.clone()));
    assert!(set("b", condition(SetCondition::Unconditional)).await.0);

    let vdel = async |value: &str| {
        let vdel = (peer.store).vdel(b"key".to_vec(), value.into(), None, TIMEOUT);
        let response = vdel.await.unwrap();
        (response.response, response.version)
    };
    let (mismatch, third) = vdel("a").await;
    assert_eq!(mismatch, -1);
    assert!(newer(&third.clone().unwrap(), &second.unwrap()));
    assert_eq!(vdel("b").await, (1, third));
    assert_eq!(vdel("b").await, (0, None));
    assert!(
        set("c", condition(SetCondition::OnlyIfEqualOrDoesNotExist))
            .await
            .0
    );
    peer.leave().await;
}

pub(crate) async fn key_expires_at_its_time(place: Place) {
    let server = place.start(&[]);
    let peer = Peer::connect(&server, "expiry");
    let mut expires = condition(SetCondition::OnlyIfDoesNotExist);
    expires.expires = Some(Duration::from_millis(300));
    peer.set_with("key", "a", None, expires.clone()).await;
    tokio::time::sleep(Duration::from_millis(320)).await;
    let got = peer.store.get(b"key".to_vec(), TIMEOUT).await.unwrap();
    assert_eq!(got.response, None);
    // The expired key can be set as a new one.
    peer.set_with("key", "b", None, expires).await;
    peer.leave().await;
}

pub(crate) async fn set_requesting_the_disk_succeeds(place: Place) {
    let server = place.start(&[]);
    let peer = Peer::connect(&server, "persist");
    let persist = SetOptions {
        persist: true,
        ..SetOptions::default()
    };
    peer.set_with("key", "a", None, persist).await;
    peer.leave().await;
}

pub(crate) async fn fenced_key_requires_a_current_token(place: Place) {
    let server = place.start(&[]);
    let peer = Peer::connect(&server, "fencing");
    let key = || b"key".to_vec();
    let plain = SetOptions::default;
    let mut token = HybridLogicalClock::default();
    // Any token fences the key. The version that a SET returns is a valid newer token.
    for value in ["v1", "v2"] {
        let version = peer
            .set_with("key", value, Some(token.clone()), plain())
            .await;
        let version = version.unwrap();
        assert!(newer(&version, &token));
        token = version;
    }
    peer.set_with("key", "v3", Some(token.clone()), plain())
        .await;

    let store = &peer.store;
    let set = |value: &str, token| store.set(key(), value.into(), TIMEOUT, token, plain());
    refused!(set("v4", None).await, ServiceError::MissingFencingToken);
    refused!(
        store.del(key(), None, TIMEOUT).await,
        ServiceError::MissingFencingToken
    );
    refused!(
        store.vdel(key(), b"v3".to_vec(), None, TIMEOUT).await,
        ServiceError::MissingFencingToken
    );

    let mut older = token.clone();
    older.timestamp -= Duration::from_millis(1);
    let older = || Some(older.clone());
    refused!(
        set("v4", older()).await,
        ServiceError::FencingTokenLowerVersion
    );
    refused!(
        store.del(key(), older(), TIMEOUT).await,
        ServiceError::FencingTokenLowerVersion
    );
    refused!(
        store.vdel(key(), b"v3".to_vec(), older(), TIMEOUT).await,
        ServiceError::FencingTokenLowerVersion
    );

    let mut ahead = token.clone();
    ahead.timestamp += Duration::from_secs(90);
    refused!(set("v4", Some(ahead)).await, ServiceError::FencingTokenSkew);

    // A read needs no token. A deletion with the current token removes the fence.
    let got = store.get(key(), TIMEOUT).await.unwrap();
    assert_eq!(got.response.as_deref(), Some(&b"v3"[..]));
    let other = store
        .vdel(key(), b"v9".to_vec(), Some(token.clone()), TIMEOUT)
        .await;
    assert_eq!(other.unwrap().response, -1);
    let deleted = store.del(key(), Some(token.clone()), TIMEOUT).await;
    assert_eq!(deleted.unwrap().response, 1);
    peer.set("key", "free").await;
    peer.set_with("key", "v5", Some(token.clone()), plain())
        .await;
    let deleted = store
        .vdel(key(), b"v5".to_vec(), Some(token), TIMEOUT)
        .await;
    assert_eq!(deleted.unwrap().response, 1);
    peer.leave().await;
}

pub(crate) async fn set_over_the_key_quota_is_a_service_error(place: Place) {
    let server = place.start(&[("max_keys", "1")]);
    let peer = Peer::connect(&server, "quota");
    peer.set("one", "v").await;
    let second = peer.try_set("two", "v", None).await;
    refused!(second, ServiceError::KeyQuotaExceeded);
    let deleted = peer.store.del(b"one".to_vec(), None, TIMEOUT).await;
    assert_eq!(deleted.unwrap().response, 1);
    peer.set("two", "v").await;
    peer.leave().await;
}

pub(crate) async fn request_forbidden_by_rules_is_a_service_error(place: Place) {
    let directory = tempfile::tempdir().unwrap();
    let rules = directory.path().join("rules.toml");
    let text = r#"
        [[rules]]
        principals.clientIds = ["bound"]
        brokerResources = [{ method = "Connect" }]
        stateStoreResources = [
            { method = "ReadWrite", keyType = "Pattern", keys = ["{principal.clientId}/*"] },
            { method = "Read", keyType = "String", keys = ["limits"] },
        ]
    "#;
    std::fs::write(&rules, text).unwrap();
    let server = place.start(&[("rules", rules.to_str().unwrap())]);
    let peer = Peer::connect(&server, "bound");
    peer.set("bound/a", "v").await;
    let (limits, others) = (b"limits".to_vec(), b"others".to_vec());
    let read = peer.store.get(limits.clone(), TIMEOUT).await;
    assert_eq!(read.unwrap().response, None);
    let set = peer.try_set(limits, "v", None).await;
    refused!(set, ServiceError::NotAuthorized);
    let read = peer.store.get(others.clone(), TIMEOUT).await;
    refused!(read, ServiceError::NotAuthorized);
    let deleted = peer.store.del(others.clone(), None, TIMEOUT).await;
    refused!(deleted, ServiceError::NotAuthorized);
    let observed = peer.store.observe(others, TIMEOUT).await;
    refused!(observed, ServiceError::NotAuthorized);
    peer.leave().await;
}

pub(crate) async fn keys_and_values_of_any_bytes_are_returned(place: Place) {
    let server = place.start(&[]);
    let peer = Peer::connect(&server, "bytes");
    let all: Vec<u8> = (0..=255).collect();
    for value in [Vec::new(), all.clone(), vec![0xFF; 200 * 1024]] {
        let set = peer.try_set(all.clone(), value.clone(), None).await;
        assert!(set.unwrap().response);
        let got = peer.store.get(all.clone(), TIMEOUT).await.unwrap();
        assert!(got.response == Some(value), "the returned value differs");
    }
    peer.leave().await;
}

pub(crate) async fn concurrent_requests_are_each_answered(place: Place) {
    let server = place.start(&[]);
    let peer = Peer::connect(&server, "many");
    let mut tasks = tokio::task::JoinSet::new();
    for n in 0..200 {
        let store = peer.store.clone();
        tasks.spawn(async move {
            let key = format!("key{n}").into_bytes();
            let options = SetOptions::default();
            let set = store.set(key.clone(), key.clone(), TIMEOUT, None, options);
            let set = set.await.unwrap();
            let got = store.get(key.clone(), TIMEOUT).await.unwrap();
            assert_eq!(got.response, Some(key));
            assert_eq!(got.version, set.version);
            set.version.unwrap().to_string()
        });
    }
    let versions: std::collections::BTreeSet<String> = tasks.join_all().await.into_iter().collect();
    assert_eq!(versions.len(), 200, "a version was assigned twice");
    peer.leave().await;
}

pub(crate) async fn client_leaving_at_once_ends_cleanly(place: Place) {
    let server = place.start(&[]);
    let peer = Peer::connect(&server, "leaving");
    within(peer.monitor.connected()).await;
    peer.leave().await;
}
