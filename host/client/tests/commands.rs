//! The requests of the typed commands, and the results of responses.
// A failed step fails the test.
#![allow(clippy::unwrap_used)]

mod common;

use std::time::Duration;

use common::{Broker, GET, Greeting, Peer, VERSION, assert_served, connect, connected};
use statehouse_client::{
    Client, Condition, Error, LockOptions, SetOptions, SetResult, VdelResult, Version, WatchEvent,
};
use statehouse_tests::Property;

/// MQTT 5 reason codes.
const NO_MATCHING_SUBSCRIBERS: u8 = 0x10;
const IMPLEMENTATION_SPECIFIC_ERROR: u8 = 0x83;
const NOT_AUTHORIZED: u8 = 0x87;
const QUOTA_EXCEEDED: u8 = 0x97;

fn version() -> Version {
    VERSION.parse().unwrap()
}

#[tokio::test]
async fn request_has_all_properties_of_the_protocol() {
    let (_broker, mut peer, client) = connected().await;
    assert!(peer.mqtt.clean_start);
    let options = SetOptions {
        condition: Condition::IfAbsentOrEqual,
        expiry: Some(Duration::from_secs(10)),
        fencing_token: Some("5:0:other".parse().unwrap()),
    };
    let (request, set) = tokio::join!(
        async {
            let request = peer.request().await;
            peer.answer(&request, b"+OK\r\n", Some(VERSION)).await;
            request
        },
        client.set("key", b"\r\n\0\xff", options)
    );
    assert_eq!(
        set,
        Ok(SetResult {
            applied: true,
            version: Some(version())
        })
    );
    assert_eq!(
        request.payload,
        b"*6\r\n$3\r\nSET\r\n$3\r\nkey\r\n$4\r\n\r\n\0\xff\r\n$3\r\nNEX\r\n$2\r\nPX\r\n$5\r\n10000\r\n"
    );
    assert_eq!(request.user("__protVer"), Some("1.0"));
    assert_eq!(request.user("__srcId"), Some("tester"));
    assert_eq!(request.user("__ft"), Some("000000000000005:00000:other"));
    let timestamp: Version = request.user("__ts").unwrap().parse().unwrap();
    assert_eq!(timestamp.node(), "tester");
    assert_eq!(request.correlation().unwrap().len(), 16);
    assert!(request.properties.contains(&Property::MessageExpiry(5)));
}

#[tokio::test]
async fn responses_are_converted_to_results() {
    let (_broker, mut peer, client) = connected().await;
    let store = async {
        peer.serve(GET, b"$2\r\nab\r\n", Some(VERSION)).await;
        peer.serve(GET, b"$-1\r\n", None).await;
        let set = b"*4\r\n$3\r\nSET\r\n$1\r\nk\r\n$1\r\nv\r\n$2\r\nNX\r\n";
        peer.serve(set, b":-1\r\n", Some(VERSION)).await;
        let del = b"*2\r\n$3\r\nDEL\r\n$1\r\nk\r\n";
        peer.serve(del, b":1\r\n", Some(VERSION)).await;
        peer.serve(del, b":0\r\n", None).await;
        let vdel = b"*3\r\n$4\r\nVDEL\r\n$1\r\nk\r\n$1\r\nv\r\n";
        peer.serve(vdel, b":1\r\n", Some(VERSION)).await;
        peer.serve(vdel, b":-1\r\n", Some(VERSION)).await;
        peer.serve(vdel, b":0\r\n", None).await;
    };
    let caller = async {
        let value = client.get("k").await.unwrap().unwrap();
        assert_eq!(
            (value.bytes.as_ref(), value.version),
            (&b"ab"[..], version())
        );
        assert_eq!(client.get("k").await, Ok(None));
        let if_absent = SetOptions {
            condition: Condition::IfAbsent,
            ..SetOptions::default()
        };
        assert!(!client.set("k", "v", if_absent).await.unwrap().applied);
        assert_eq!(client.del("k", None).await, Ok(Some(version())));
        assert_eq!(client.del("k", None).await, Ok(None));
        let vdel = || client.vdel("k", "v", None);
        assert_eq!(vdel().await, Ok(VdelResult::Deleted(version())));
        assert_eq!(vdel().await, Ok(VdelResult::Different(version())));
        assert_eq!(vdel().await, Ok(VdelResult::Missing));
    };
    tokio::join!(store, caller);
}

#[tokio::test]
async fn scan_follows_the_token() {
    let (_broker, mut peer, client) = connected().await;
    let store = async {
        let first = b"*2\r\n$4\r\nSCAN\r\n$1\r\n*\r\n";
        peer.serve(first, b"*2\r\n*1\r\n$1\r\na\r\n$2\r\n\0\xff\r\n", None)
            .await;
        let second = b"*3\r\n$4\r\nSCAN\r\n$1\r\n*\r\n$2\r\n\0\xff\r\n";
        peer.serve(second, b"*1\r\n*1\r\n$1\r\nb\r\n", None).await;
    };
    let caller = async {
        let mut scan = client.scan("*");
        assert_eq!(scan.next_page().await, Ok(Some(vec!["a".into()])));
        assert_eq!(scan.next_page().await, Ok(Some(vec!["b".into()])));
        assert_eq!(scan.next_page().await, Ok(None));
    };
    tokio::join!(store, caller);
}

#[tokio::test]
async fn repeated_scan_token_is_an_error() {
    let (_broker, mut peer, client) = connected().await;
    let store = async {
        for _ in 0..2 {
            let request = peer.request().await;
            peer.answer(&request, b"*2\r\n*0\r\n$1\r\nt\r\n", None)
                .await;
        }
    };
    let caller = async {
        let mut scan = client.scan("*");
        assert_eq!(scan.next_page().await, Ok(Some(vec![])));
        assert!(matches!(scan.next_page().await, Err(Error::Protocol(_))));
    };
    tokio::join!(store, caller);
}

#[tokio::test]
async fn invalid_responses_are_errors() {
    let (_broker, mut peer, client) = connected().await;
    let ok = [("__stat", "200")];
    type Answer<'a> = (&'a [u8], &'a [(&'a str, &'a str)]);
    let answers: [Answer<'_>; 6] = [
        (b"-ERR syntax error\r\n", &ok),
        (b"$1\r\na\r\n", &[("__ts", VERSION)]),
        (b"", &[("__stat", "505")]),
        (b"$1\r\na\r\n", &ok),
        (b"$1\r\na\r\n", &[("__stat", "200"), ("__ts", "tomorrow")]),
        (b"+OK\r\n", &ok),
    ];
    let store = async {
        for (payload, properties) in answers {
            let request = peer.request().await;
            peer.answer_with(&request, payload, properties).await;
            peer.acknowledge(&request, 0, None).await;
        }
    };
    let caller = async {
        assert_eq!(
            client.get("k").await,
            Err(Error::Refused("syntax error".into()))
        );
        for _ in 1..answers.len() {
            assert!(matches!(client.get("k").await, Err(Error::Protocol(_))));
        }
    };
    tokio::join!(store, caller);
}

#[tokio::test]
async fn puback_with_an_error_code_fails_the_request() {
    let (_broker, mut peer, client) = connected().await;
    let store = async {
        let request = peer.request().await;
        let text = Some("no\ncorrelation\x1b[2J data");
        peer.acknowledge(&request, IMPLEMENTATION_SPECIFIC_ERROR, text)
            .await;
        let request = peer.request().await;
        peer.acknowledge(&request, NO_MATCHING_SUBSCRIBERS, None)
            .await;
        let request = peer.request().await;
        peer.acknowledge(&request, QUOTA_EXCEEDED, Some("too fast"))
            .await;
    };
    let caller = async {
        // Control characters are replaced.
        let text = "no\u{fffd}correlation\u{fffd}[2J data";
        assert_eq!(client.get("k").await, Err(Error::Rejected(text.into())));
        assert!(matches!(client.get("k").await, Err(Error::Rejected(_))));
        let exceeded = Error::QuotaExceeded("too fast".into());
        assert_eq!(client.get("k").await, Err(exceeded));
    };
    tokio::join!(store, caller);
}

/// Regression: the sum of this timeout and the keep alive overflowed.
#[tokio::test]
async fn longest_timeout_is_accepted() {
    let (broker, mut options) = Broker::start().await;
    options.timeout = Duration::MAX;
    let (mut peer, client) = connect(&broker, options).await;
    assert_served(&mut peer, &client).await;
}

#[tokio::test]
async fn long_fencing_token_is_sent_without_padding() {
    let (_broker, mut peer, client) = connected().await;
    let fence = |node_bytes| {
        let text = format!("5:0:{}", "n".repeat(node_bytes));
        Some(text.parse::<Version>().unwrap())
    };
    let longest = 65_535 - "5:0:".len();
    let token = fence(longest);
    let (request, del) = tokio::join!(
        async {
            let request = peer.request().await;
            peer.answer(&request, b":0\r\n", None).await;
            request
        },
        client.del("key", token.as_ref())
    );
    assert_eq!(del, Ok(None));
    let sent = request.user("__ft").unwrap();
    assert_eq!((sent.len(), &sent[..6]), (65_535, "5:0:nn"));
    // A longer token would be cut, and so be another token.
    let del = client.del("key", fence(longest + 1).as_ref()).await;
    assert!(matches!(del, Err(Error::Invalid(_))), "{del:?}");
}

#[tokio::test]
async fn oversized_request_is_not_sent() {
    let (broker, options) = Broker::start().await;
    let greeting = Greeting::default().with(Property::MaximumPacketSize(1000));
    let (peer, client) = tokio::join!(broker.accept(greeting), Client::connect(options));
    let (mut peer, client) = (peer, client.unwrap());
    let set = client
        .set("k", vec![b'x'; 1000], SetOptions::default())
        .await;
    assert!(matches!(set, Err(Error::Invalid(_))));
    assert_served(&mut peer, &client).await;
}

#[tokio::test]
async fn refused_response_subscription_fails_connect() {
    let (broker, options) = Broker::start().await;
    let store = async {
        let mut peer = broker.accept_unsubscribed(Greeting::default()).await;
        peer.answer_subscribe([NOT_AUTHORIZED, 1]).await;
    };
    let (client, ()) = tokio::join!(Client::connect(options), store);
    let is_named =
        matches!(&client, Err(Error::Rejected(why)) if why.ends_with("(not authorized)"));
    assert!(is_named, "{:?}", client.err());
}

#[tokio::test]
async fn refused_notification_subscription_fails_watch() {
    let (broker, options) = Broker::start().await;
    let store = async {
        let mut peer = broker.accept_unsubscribed(Greeting::default()).await;
        peer.answer_subscribe([1, NOT_AUTHORIZED]).await;
        peer
    };
    let (client, mut peer) = tokio::join!(Client::connect(options), store);
    let client = client.unwrap();
    assert!(matches!(client.watch("k").await, Err(Error::Rejected(_))));
    assert_served(&mut peer, &client).await;
}

#[tokio::test]
async fn watch_is_registered_notified_and_ended() {
    let (_broker, mut peer, client) = connected().await;
    let store = async {
        let request = peer.request().await;
        assert_eq!(request.payload, b"*2\r\n$9\r\nKEYNOTIFY\r\n$1\r\nk\r\n");
        peer.answer(&request, b"+OK\r\n", None).await;
        let set = b"*4\r\n$6\r\nNOTIFY\r\n$3\r\nSET\r\n$5\r\nVALUE\r\n$1\r\nv\r\n";
        peer.notify(b"k", set, "8:0:n").await;
        peer.notify(b"\0", set, "8:1:n").await; // a key that is not watched
        peer.notify(b"k", b"what?", "8:2:n").await;
        peer.notify(b"k", b"*2\r\n$6\r\nNOTIFY\r\n$6\r\nDELETE\r\n", "9:0:n")
            .await;
        let request = peer.request().await;
        assert_eq!(
            request.payload,
            b"*3\r\n$9\r\nKEYNOTIFY\r\n$1\r\nk\r\n$4\r\nSTOP\r\n"
        );
    };
    let caller = async {
        let mut watch = client.watch("k").await.unwrap();
        assert_eq!(
            watch.next().await,
            Ok(WatchEvent::Set {
                key: "k".into(),
                value: "v".into(),
                version: "8:0:n".parse().unwrap()
            })
        );
        assert!(matches!(watch.next().await, Err(Error::Protocol(_))));
        assert_eq!(
            watch.next().await,
            Ok(WatchEvent::Deleted {
                key: "k".into(),
                version: "9:0:n".parse().unwrap()
            })
        );
    };
    tokio::join!(store, caller);
}

#[tokio::test]
async fn lock_waits_for_its_holder() {
    let (_broker, mut peer, client) = connected().await;
    let set =
        b"*6\r\n$3\r\nSET\r\n$4\r\nlock\r\n$2\r\nme\r\n$3\r\nNEX\r\n$2\r\nPX\r\n$5\r\n60000\r\n";
    let store = async {
        let watch = b"*2\r\n$9\r\nKEYNOTIFY\r\n$4\r\nlock\r\n";
        peer.serve(watch, b"+OK\r\n", None).await;
        peer.serve(set, b":-1\r\n", Some("1:0:n")).await;
        let delete = b"*2\r\n$6\r\nNOTIFY\r\n$6\r\nDELETE\r\n";
        peer.notify(b"lock", delete, "2:0:n").await;
        peer.serve(set, b"+OK\r\n", Some(VERSION)).await;
        let stop = b"*3\r\n$9\r\nKEYNOTIFY\r\n$4\r\nlock\r\n$4\r\nSTOP\r\n";
        peer.serve(stop, b"+OK\r\n", None).await;
        peer.serve(set, b"+OK\r\n", Some("9:0:n")).await;
        let vdel = b"*3\r\n$4\r\nVDEL\r\n$4\r\nlock\r\n$2\r\nme\r\n";
        peer.serve(vdel, b":1\r\n", Some("9:0:n")).await;
    };
    let caller = async {
        let options = LockOptions {
            holder: Some("me".into()),
            lease: Duration::from_secs(60),
            wait: None,
        };
        let mut lock = client.lock("lock", options).await.unwrap().unwrap();
        assert_eq!(lock.renew().await, Ok(true));
        assert_eq!(lock.fencing_token(), &version());
        assert_eq!(lock.release().await, Ok(true));
    };
    tokio::join!(store, caller);
}

/// A store that answers each SET with this response after this delay, and all else with OK.
async fn serve_locks(peer: &mut Peer, answer: &[u8], delay: Duration) {
    loop {
        let request = peer.request().await;
        let is_set = request.payload.starts_with(b"*6\r\n$3\r\nSET");
        if is_set {
            tokio::time::sleep(delay).await;
        }
        let answer = if is_set { answer } else { b"+OK\r\n" };
        peer.answer(&request, answer, Some(VERSION)).await;
    }
}

#[tokio::test]
async fn lock_wait_times_out() {
    let (_broker, mut peer, client) = connected().await;
    let options = LockOptions {
        wait: Some(Duration::from_millis(300)),
        ..LockOptions::default()
    };
    tokio::select! {
        lock = client.lock("lock", options) => assert!(lock.unwrap().is_none()),
        () = serve_locks(&mut peer, b":-1\r\n", Duration::ZERO) => {}
    }
}

#[tokio::test]
async fn late_renewal_loses_the_lock() {
    let (_broker, mut peer, client) = connected().await;
    let caller = async {
        let options = LockOptions {
            lease: Duration::from_millis(50),
            ..LockOptions::default()
        };
        let mut lock = client.lock("lock", options).await.unwrap().unwrap();
        tokio::time::sleep_until(lock.held_until()).await;
        assert_eq!(lock.renew().await, Ok(false));
    };
    tokio::select! {
        () = caller => {}
        () = serve_locks(&mut peer, b"+OK\r\n", Duration::ZERO) => {}
    }
}

/// Responses that take most of a lease or more leave no time to hold the lock.
#[tokio::test]
async fn lock_with_a_late_response_is_retried() {
    let (_broker, mut peer, client) = connected().await;
    let lease = Duration::from_millis(600);
    let store = async {
        peer.serve(b"*2\r\n$9\r\nKEYNOTIFY\r\n$4\r\nlock\r\n", b"+OK\r\n", None)
            .await;
        for (delay, version) in [
            (2 * lease, "1:0:n"),
            (lease * 3 / 4, "2:0:n"),
            (Duration::ZERO, "3:0:n"),
        ] {
            let request = peer.request().await;
            assert!(request.payload.starts_with(b"*6\r\n$3\r\nSET"));
            tokio::time::sleep(delay).await;
            peer.answer(&request, b"+OK\r\n", Some(version)).await;
        }
    };
    let options = LockOptions {
        lease,
        ..LockOptions::default()
    };
    let (lock, ()) = tokio::join!(client.lock("lock", options), store);
    let lock = lock.unwrap().unwrap();
    assert_eq!(lock.fencing_token(), &"3:0:n".parse().unwrap());
    assert!(lock.held_until() > tokio::time::Instant::now());
}

#[tokio::test]
async fn lock_with_only_late_responses_is_not_acquired() {
    let (_broker, mut peer, client) = connected().await;
    let lease = Duration::from_millis(100);
    let options = LockOptions {
        lease,
        wait: Some(5 * lease),
        ..LockOptions::default()
    };
    tokio::select! {
        lock = client.lock("lock", options) => assert!(lock.unwrap().is_none()),
        () = serve_locks(&mut peer, b"+OK\r\n", lease) => {}
    }
}
