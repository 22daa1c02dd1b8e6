//! Requests and watches when the connection is lost.
// A failed step fails the test.
#![allow(clippy::unwrap_used)]

mod common;

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use common::{Broker, GET, Greeting, Peer, VERSION, assert_served, connect, connected, expect_gap};
use statehouse_client::{Client, Error, SetOptions, Watch, WatchEvent, Watched};
use statehouse_tests::{Property, resp};

/// MQTT 5 reason codes.
const NOT_AUTHORIZED: u8 = 0x87;
const TOO_OFTEN: u8 = 0x9F;
const SERVER_UNAVAILABLE: u8 = 0x88;
const SERVER_BUSY: u8 = 0x89;
const SERVER_SHUTTING_DOWN: u8 = 0x8B;
const SESSION_TAKEN_OVER: u8 = 0x8E;
const NO_MATCHING_SUBSCRIBERS: u8 = 0x10;
const PACKET_TOO_LARGE: u8 = 0x95;
const QUOTA_EXCEEDED: u8 = 0x97;

async fn watch(peer: &mut Peer, client: &Client) -> Watch {
    watch_key(peer, client, "k", None).await
}

/// A watch of `k` that can be resumed from [`VERSION`].
async fn resumable_watch(peer: &mut Peer, client: &Client) -> Watch {
    watch_key(peer, client, "k", Some(VERSION)).await
}

async fn watch_key(peer: &mut Peer, client: &Client, key: &str, version: Option<&str>) -> Watch {
    let registered = keynotify(key);
    let store = peer.serve(&registered, b"+OK\r\n", version);
    let (watch, ()) = tokio::join!(client.watch(key), store);
    watch.unwrap()
}

/// The request that registers a key.
fn keynotify(key: &str) -> Vec<u8> {
    resp::array(&["KEYNOTIFY", key])
}

/// The request that resumes the watch of a key from [`VERSION`].
fn keynotify_from(key: &str) -> Vec<u8> {
    resp::array(&["KEYNOTIFY", key, "FROM", VERSION])
}

/// The request that ends the registration of a key.
fn stop(key: &str) -> Vec<u8> {
    resp::array(&["KEYNOTIFY", key, "STOP"])
}

/// A SET whose response is lost must not be executed twice. The store recognizes it by packet id or
/// DUP, and by its identity (the protocol, section 9).
#[tokio::test]
async fn resumed_session_resends_a_request_as_duplicate() {
    let (broker, mut peer, client) = connected().await;
    let store = async {
        let first = peer.request().await;
        drop(peer);
        let mut peer = broker.accept_unsubscribed(Greeting::resumed()).await;
        assert!(!peer.mqtt.clean_start);
        let again = peer.request().await;
        assert_eq!(again.payload, first.payload);
        assert_eq!(again.correlation(), first.correlation());
        assert_eq!(again.user("__ts"), first.user("__ts"));
        assert_eq!(again.packet_id, first.packet_id);
        assert!(!first.dup && again.dup);
        peer.grant().await;
        peer.answer(&again, b"+OK\r\n", Some(VERSION)).await;
        peer
    };
    let (set, _peer) = tokio::join!(client.set("k", "v", SetOptions::default()), store);
    assert!(set.unwrap().applied);
}

#[tokio::test]
async fn new_session_resends_a_request() {
    let (broker, mut peer, client) = connected().await;
    let store = async {
        let first = peer.request().await;
        // With a foreign broker, an acknowledgement does not imply a response.
        peer.acknowledge(&first, 0, None).await;
        drop(peer);
        let mut peer = broker.accept(Greeting::default()).await;
        let again = peer.request().await;
        assert_eq!(again.correlation(), first.correlation());
        assert!(!again.dup);
        peer.answer(&again, b"+OK\r\n", Some(VERSION)).await;
        peer
    };
    let (set, _peer) = tokio::join!(client.set("k", "v", SetOptions::default()), store);
    assert!(set.unwrap().applied);
}

/// rumqttc keeps what was queued without a connection, and the session resends requests without a
/// response. Together this would send the request twice.
#[tokio::test]
async fn request_made_without_a_connection_is_sent_once() {
    for greeting in [Greeting::resumed(), Greeting::default()] {
        let (broker, mut peer, client) = connected().await;
        peer.disconnect(SERVER_SHUTTING_DOWN).await;
        drop(peer);
        let mut peer = broker.accept_connect().await;
        let store = async {
            peer.mqtt.greet(&greeting).await;
            peer.grant().await;
            peer.serve(GET, b"$-1\r\n", None).await;
            peer.serve(GET, b"$1\r\n2\r\n", Some(VERSION)).await;
        };
        let caller = async {
            assert_eq!(client.get("k").await, Ok(None));
            assert_eq!(client.get("k").await.unwrap().unwrap().bytes.as_ref(), b"2");
        };
        tokio::join!(caller, store);
    }
}

/// A request that makes the broker close the connection must not do so for ever.
#[tokio::test]
async fn abandoned_request_is_not_resent() {
    let (broker, mut peer, client) = connected().await;
    let abandoned = async {
        let get = tokio::spawn({
            let client = client.clone();
            async move { client.get("poison").await }
        });
        peer.request().await;
        get.abort();
        assert!(get.await.unwrap_err().is_cancelled());
        drop(peer);
    };
    abandoned.await;
    let mut peer = broker.accept_connect().await;
    let store = async {
        peer.mqtt.greet(&Greeting::resumed()).await;
        peer.grant().await;
        peer.serve(GET, b"$-1\r\n", None).await;
    };
    let (get, ()) = tokio::join!(client.get("k"), store);
    assert_eq!(get, Ok(None));
}

/// Regression: the request was resent over each new connection until its timeout. rumqttc cannot
/// read a PUBACK with this reason code, which Mosquitto sends for a payload above its
/// `message_size_limit`.
#[tokio::test]
async fn request_refused_as_too_large_fails_at_once() {
    let (broker, mut peer, client) = connected().await;
    let store = async {
        let request = peer.request().await;
        peer.acknowledge(&request, PACKET_TOO_LARGE, None).await;
        let mut peer = broker.accept(Greeting::resumed()).await;
        // The client continues, and does not send a request of that size again.
        peer.serve(GET, b"$-1\r\n", None).await;
    };
    let caller = async {
        let long = client.set("k", [0_u8; 2000], SetOptions::default());
        let Err(Error::Rejected(why)) = long.await else {
            panic!("not rejected");
        };
        assert!(why.starts_with("reason 0x95"), "{why}");
        let again = client.set("k", [0_u8; 2000], SetOptions::default());
        let again = again.await.unwrap_err();
        assert!(matches!(again, Error::Invalid(_)), "{again:?}");
        assert_eq!(client.get("k").await, Ok(None));
    };
    tokio::join!(store, caller);
}

#[tokio::test]
async fn timeout_without_a_connection_names_the_reason() {
    let (broker, mut options) = Broker::start().await;
    options.timeout = Duration::from_millis(1500);
    let (peer, client) = connect(&broker, options).await;
    drop((peer, broker));
    let Err(Error::Transport(why)) = client.get("k").await else {
        panic!("not a transport error");
    };
    assert!(why.ends_with("connection refused"), "{why}");
}

#[tokio::test]
async fn silent_store_causes_a_timeout() {
    let (broker, mut options) = Broker::start().await;
    options.timeout = Duration::from_millis(200);
    let (_peer, client) = connect(&broker, options.clone()).await;
    assert_eq!(client.get("k").await, Err(Error::Timeout(options.timeout)));
}

#[tokio::test]
async fn unreachable_broker_fails_connect() {
    let (broker, options) = Broker::start().await;
    drop(broker);
    let error = Client::connect(options.clone()).await.unwrap_err();
    let why = format!(
        "cannot reach a state store at 127.0.0.1:{}: connection refused",
        options.port
    );
    assert_eq!(error, Error::Transport(why));
}

/// Refuses each connection with this reason code.
async fn refuse_each(broker: &Broker, reason: u8) {
    loop {
        let mut peer = broker.accept_connect().await;
        peer.mqtt.send(&[0x20, 3, 0, reason, 0]).await;
    }
}

/// Regression: `connect` failed at once while a cluster changed its leader.
#[tokio::test]
async fn connect_tries_again_while_the_broker_stops() {
    let (broker, mut options) = Broker::start().await;
    options.timeout = Duration::from_secs(60);
    let store = async {
        let mut peer = broker.accept_connect().await;
        peer.mqtt.send(&[0x20, 3, 0, SERVER_UNAVAILABLE, 0]).await;
        drop(peer);
        drop(broker.accept_connect().await);
        let mut peer = broker.accept_unsubscribed(Greeting::default()).await;
        peer.disconnect(SERVER_SHUTTING_DOWN).await;
        drop(peer);
        broker.accept(Greeting::default()).await
    };
    let (mut peer, client) = tokio::join!(store, Client::connect(options));
    assert_served(&mut peer, &client.unwrap()).await;
}

#[tokio::test]
async fn refused_connect_names_the_last_reason() {
    for (reason, name, timeout_s, is_final) in [
        (SERVER_UNAVAILABLE, "server unavailable", 2, false),
        (SERVER_BUSY, "server busy", 60, true),
    ] {
        let (broker, mut options) = Broker::start().await;
        options.timeout = Duration::from_secs(timeout_s);
        let begin = Instant::now();
        let error = tokio::select! {
            result = Client::connect(options.clone()) => result.unwrap_err(),
            () = refuse_each(&broker, reason) => panic!("{name}: not refused"),
        };
        let why = format!(
            "cannot reach a state store at 127.0.0.1:{}: the broker refused the connection ({name})",
            options.port
        );
        assert_eq!(error, Error::Transport(why));
        assert_eq!(begin.elapsed() < options.timeout, is_final, "{name}");
    }
}

#[tokio::test]
async fn reconnected_watch_reports_a_gap() {
    let (broker, mut peer, client) = connected().await;
    let mut watch = watch(&mut peer, &client).await;
    drop(peer);
    let mut peer = broker.accept(Greeting::resumed()).await;
    peer.serve(&keynotify("k"), b"+OK\r\n", None).await;
    expect_gap(&mut watch).await;
    let delete = b"*2\r\n$6\r\nNOTIFY\r\n$6\r\nDELETE\r\n";
    peer.notify(b"k", delete, VERSION).await;
    assert!(matches!(watch.next().await, Ok(WatchEvent::Deleted { .. })));
}

/// Eight watches are registered again at the same time. The ninth one is dropped before its turn.
#[tokio::test]
async fn watch_dropped_before_its_turn_is_not_registered_again() {
    let (broker, mut peer, client) = connected().await;
    let mut watches = HashMap::new();
    for key in ["1", "2", "3", "4", "5", "6", "7", "8", "9"] {
        let watch = watch_key(&mut peer, &client, key, None).await;
        watches.insert(keynotify(key), (key, watch));
    }
    drop(peer);
    let mut peer = broker.accept(Greeting::resumed()).await;
    let mut registering = Vec::new();
    for _ in 0..8 {
        let request = peer.request().await;
        let (_, watch) = watches.remove(&request.payload).unwrap();
        registering.push((request, watch));
    }
    for (key, watch) in watches.into_values() {
        drop(watch);
        peer.serve(&stop(key), b"+OK\r\n", None).await;
    }
    for (request, watch) in &mut registering {
        peer.answer(request, b"+OK\r\n", None).await;
        expect_gap(watch).await;
    }
    assert_served(&mut peer, &client).await;
}

/// Regression: a STOP was dropped if rumqttc's channel had no room for it, and the store kept the
/// watch.
#[tokio::test]
async fn watches_dropped_at_once_are_all_unregistered() {
    let (broker, mut options) = Broker::start().await;
    options.timeout = Duration::from_secs(60);
    options.keep_alive = Duration::from_secs(600);
    let (mut peer, client) = connect(&broker, options).await;
    // The channel has room for some 2000.
    let keys: Vec<String> = (0..3000).map(|key| key.to_string()).collect();
    let last = &keys[2999];
    let watched = keys.iter().map(|key| Watched::Key(key.clone().into()));
    let store = async {
        for key in &keys {
            peer.serve(&keynotify(key), b"+OK\r\n", None).await;
        }
    };
    let (watch, ()) = tokio::join!(client.watch_many(watched, None), store);
    drop(watch.unwrap());
    // The last key is watched again before there is room for its STOP.
    let store = async {
        let mut requests = HashSet::new();
        for _ in &keys {
            let request = peer.request().await;
            peer.answer(&request, b"+OK\r\n", None).await;
            requests.insert(request.payload);
        }
        requests
    };
    let (again, requests) = tokio::join!(client.watch(last), store);
    let mut expected: HashSet<Vec<u8>> = keys.iter().map(|key| stop(key)).collect();
    expected.remove(&stop(last));
    expected.insert(keynotify(last));
    assert!(requests == expected, "{} requests", requests.len());
    drop(again.unwrap());
    peer.serve(&stop(last), b"+OK\r\n", None).await;
}

/// The connection is lost while the request `pending` waits for its response. It is resent, and its
/// response with this version registers the watch. The watch was dropped meanwhile, so the client
/// must end the registration.
async fn drop_while_pending(
    broker: &Broker,
    mut peer: Peer,
    client: &Client,
    watch: Watch,
    (pending, version): (Vec<u8>, Option<&str>),
) {
    let first = peer.request().await;
    assert_eq!(first.payload, pending);
    drop(peer);
    let mut peer = broker.accept_connect().await;
    drop(watch);
    peer.mqtt.greet(&Greeting::resumed()).await;
    let again = peer.request().await;
    assert_eq!(again.correlation(), first.correlation());
    peer.grant().await;
    peer.answer(&again, b"+OK\r\n", version).await;
    peer.serve(&stop("k"), b"+OK\r\n", None).await;
    assert_served(&mut peer, client).await;
}

#[tokio::test]
async fn watch_dropped_while_disconnected_ends_its_new_registration() {
    let (broker, mut peer, client) = connected().await;
    let watch = watch(&mut peer, &client).await;
    drop(peer);
    let peer = broker.accept(Greeting::resumed()).await;
    let pending = (keynotify("k"), None);
    drop_while_pending(&broker, peer, &client, watch, pending).await;
}

/// The pending request is the periodic one of an idle watch.
#[tokio::test]
async fn watch_dropped_during_its_refresh_is_unregistered() {
    let (broker, mut options) = Broker::start().await;
    options.watch_refresh = Duration::from_millis(10);
    let (mut peer, client) = connect(&broker, options).await;
    let watch = resumable_watch(&mut peer, &client).await;
    let pending = (keynotify_from("k"), Some(VERSION));
    drop_while_pending(&broker, peer, &client, watch, pending).await;
}

/// The store has lost its state, or is another one: its versions begin below the earlier ones.
#[tokio::test]
async fn lower_versions_after_a_refused_resumption_are_events() {
    let (broker, mut peer, client) = connected().await;
    let mut watch = resumable_watch(&mut peer, &client).await;
    drop(peer);
    let mut peer = broker.accept(Greeting::default()).await;
    let unknown = b"-ERR the version is later than the last change\r\n";
    peer.serve(&keynotify_from("k"), unknown, None).await;
    peer.serve(&keynotify("k"), b"+OK\r\n", Some("1:0:n")).await;
    expect_gap(&mut watch).await;
    let delete = b"*2\r\n$6\r\nNOTIFY\r\n$6\r\nDELETE\r\n";
    peer.notify(b"k", delete, "2:0:n").await;
    let deleted = tokio::time::timeout(Duration::from_secs(30), watch.next()).await;
    let version = "2:0:n".parse().unwrap();
    let key = "k".into();
    assert_eq!(deleted.unwrap(), Ok(WatchEvent::Deleted { key, version }));
}

/// Behind a foreign broker that restarted, the client is connected before the store. Regression:
/// one PUBACK of a rate limit ended the watch.
#[tokio::test]
async fn watch_waits_for_a_store_and_for_room_after_reconnect() {
    for reason in [NO_MATCHING_SUBSCRIBERS, QUOTA_EXCEEDED] {
        let (broker, mut peer, client) = connected().await;
        let mut watch = watch(&mut peer, &client).await;
        drop(peer);
        let mut peer = broker.accept(Greeting::default()).await;
        for _ in 0..2 {
            let request = peer.request().await;
            assert_eq!(request.payload, keynotify("k"));
            peer.acknowledge(&request, reason, None).await;
        }
        peer.serve(&keynotify("k"), b"+OK\r\n", None).await;
        expect_gap(&mut watch).await;
    }
}

#[tokio::test]
async fn watch_refused_after_reconnect_ends() {
    let (broker, mut peer, client) = connected().await;
    let mut watch = watch(&mut peer, &client).await;
    drop(peer);
    let mut peer = broker.accept(Greeting::resumed()).await;
    let request = peer.request().await;
    peer.answer(&request, b"-ERR the quota has been exceeded\r\n", None)
        .await;
    let end = Err(Error::Refused("the quota has been exceeded".into()));
    assert_eq!(watch.next().await, end);
    assert_eq!(watch.next().await, end);
}

/// Regression: a watch whose login was revoked waited for ever without a word.
#[tokio::test]
async fn refused_reconnect_names_the_reason() {
    let (broker, peer, client) = connected().await;
    assert_eq!(client.disconnected(), None);
    drop(peer);
    // The second one passes by itself.
    for (reason, says) in [(NOT_AUTHORIZED, "not authorized"), (TOO_OFTEN, "too many")] {
        let mut peer = broker.accept_connect().await;
        peer.mqtt.send(&[0x20, 3, 0, reason, 0]).await;
        drop(peer);
        let error = loop {
            match client.disconnected() {
                Some(error) if error.to_string().contains(says) => break error,
                _ => tokio::time::sleep(Duration::from_millis(5)).await,
            }
        };
        let is_denied = matches!(error, Error::Denied(_));
        assert_eq!(is_denied, reason == NOT_AUTHORIZED, "{error}");
    }
    let mut peer = broker.accept(Greeting::resumed()).await;
    assert_served(&mut peer, &client).await;
    assert_eq!(client.disconnected(), None);
}

/// A reconnect would only take over the session again, and so on for ever.
#[tokio::test]
async fn session_taken_over_is_not_taken_back() {
    let (_broker, mut peer, client) = connected().await;
    let mut watch = watch(&mut peer, &client).await;
    peer.disconnect(SESSION_TAKEN_OVER).await;
    let ended = watch.next().await.unwrap_err();
    assert!(ended.to_string().contains("session taken over"), "{ended}");
    assert!(matches!(ended, Error::Closed(_)), "{ended:?}");
    assert_eq!(client.disconnected(), Some(ended.clone()));
    assert_eq!(client.get("k").await, Err(ended));
}

/// rumqttc counts packet ids up to the previous Receive Maximum, and thus beyond the smaller one.
#[tokio::test]
async fn smaller_receive_maximum_does_not_stop_the_client() {
    let (broker, mut peer, client) = connected().await;
    let store = async {
        for _ in 0..5 {
            peer.serve(GET, b"$-1\r\n", None).await;
        }
        let first = peer.request().await;
        drop(peer);
        let small = || Greeting::resumed().with(Property::ReceiveMaximum(3));
        drop(broker.accept_unsubscribed(small()).await);
        let mut peer = broker.accept_unsubscribed(small()).await;
        let again = peer.request().await;
        assert_eq!(again.correlation(), first.correlation());
        assert!(again.dup);
        peer.grant().await;
        peer.answer(&again, b"$-1\r\n", None).await;
        for _ in 0..10 {
            peer.serve(GET, b"$-1\r\n", None).await;
        }
        peer
    };
    let caller = async {
        for _ in 0..16 {
            assert_eq!(client.get("k").await, Ok(None));
        }
    };
    tokio::join!(caller, store);
}

#[tokio::test]
async fn requests_beyond_the_limit_wait() {
    let (_broker, mut peer, client) = connected().await;
    let store = async {
        for _ in 0..1000 {
            let request = peer.request().await;
            peer.answer(&request, b"$-1\r\n", None).await;
        }
        peer
    };
    let caller = async {
        let gets: Vec<_> = (0..1000)
            .map(|_| {
                let client = client.clone();
                tokio::spawn(async move { client.get("k").await })
            })
            .collect();
        for get in gets {
            assert_eq!(get.await.unwrap(), Ok(None));
        }
    };
    tokio::join!(caller, store);
}

#[tokio::test]
async fn close_sends_disconnect() {
    let (_broker, mut peer, client) = connected().await;
    let clone = client.clone();
    tokio::join!(client.close(), peer.expect_disconnect());
    let closed = Error::Closed("the client was closed".into());
    assert_eq!(clone.disconnected(), Some(closed.clone()));
    assert_eq!(clone.get("k").await, Err(closed));
}

#[tokio::test]
async fn drop_sends_disconnect() {
    let (_broker, mut peer, client) = connected().await;
    drop(client);
    peer.expect_disconnect().await;
}
