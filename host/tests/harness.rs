//! Tests of the harness that policy authors use in a plain `#[test]`.

use statehouse_access::rules::{Principal, Rules};
use statehouse_core::policy::LoadError;
use statehouse_testkit::{
    Came, Change, Dialect, Harness, Key, NOW_MS, Publish, Quota, Reads, Scope, array, transcript,
};

#[test]
fn harness_has_a_clock_a_table_and_clients() {
    let mut it = Harness::standard().expect("the built-in policy");
    assert_eq!(it.now_ms(), NOW_MS);
    it.at(NOW_MS + 1);
    it.put("seeded", "value");
    let answer = it.client("a").send(&["GET", "seeded"]);
    assert_eq!(answer.payload, b"$5\r\nvalue\r\n");
    assert_eq!(answer.command.as_deref(), Some("GET"));
    assert!(matches!(&answer.reads, Reads::Keys(reads) if reads.len() == 1));
    assert!(!answer.same_for_duplicate && answer.fuel > 0);

    let answer = it.client("watcher").send(&["KEYNOTIFY", "k"]);
    assert_eq!(answer.watched, [(Scope::Key, Key::from_static(b"k"))]);
    let answer = it.client("a").send(&["SET", "k", "v", "PX", "500"]);
    assert_eq!(answer.payload, b"+OK\r\n");
    // The store's clock continues from the version of the seeded key.
    let version = answer.version.as_deref();
    assert_eq!(version, Some("001700000000001:00001:StateStore"));
    assert!(answer.same_for_duplicate && answer.writes.len() == 1);
    assert!(matches!(&answer.writes[0].change, Change::Set(entry) if entry.value() == b"v"));
    assert_eq!(answer.notifications.len(), 1);
    assert_eq!(answer.notifications[0].client, "watcher");
    assert_eq!(it.advance(499).notifications, []);
    assert!(it.get("k").is_some());
    let notifications = it.advance(1).notifications;
    assert_eq!(notifications.len(), 1, "the key expired");
    assert!(it.get("k").is_none());
    // The clock never runs backwards.
    it.at(0);
    assert_eq!(it.now_ms(), NOW_MS + 501);

    it.client("a").send(&["SET", "k", "v"]);
    it.disconnect("watcher");
    assert_eq!(it.client("a").send(&["DEL", "k"]).notifications, []);
}

#[test]
fn client_sends_the_given_properties() {
    let mut it = Harness::standard().expect("the built-in policy");
    let set = ["SET", "k", "v"];
    let answer = it.client("a").timestamp(None).send(&set);
    assert_eq!(answer.payload, b"-ERR missing timestamp\r\n");
    let client = it.client("a").fencing_token("001699999999999:00000:lock");
    assert_eq!(client.send(&set).payload, b"+OK\r\n");
    let answer = it.client("a").send(&set);
    let refused = b"-ERR a fencing token is required";
    assert!(answer.payload.starts_with(refused), "{answer:?}");
    assert!(answer.failure.is_none() && answer.writes.is_empty());
    let client = it.client("a").dialect(Dialect::Documents);
    let answer = client.send(&["SET", "k", "v", "NX"]);
    let names: Vec<&str> = answer.user.iter().map(|(name, _)| name.as_str()).collect();
    assert!(!names.contains(&"__protVer"), "{names:?}");
    let client = it.client("a").property("__protVer", "1.0");
    assert_eq!(client.send_bytes("PING").payload, b"-ERR syntax error\r\n");
    // An invalid response topic ends the connection and its watches.
    it.client("a").send(&["KEYNOTIFY", "k"]);
    let mut publish = Publish::new(Dialect::Sdk, "a", b"*1".to_vec(), it.now_ms());
    publish.response_topic = Some("a/+".into());
    match it.publish("a", publish) {
        Came::Disconnected { reason, .. } => assert_eq!(reason, 130),
        other => panic!("{other:?}"),
    }
    let answer = it.client("a").send(&["KEYNOTIFY", "k", "STOP"]);
    assert_eq!(answer.payload, b":0\r\n");
}

#[test]
fn quota_is_enforced_and_anew_clears_the_table() {
    let mut it = Harness::standard().expect("the built-in policy");
    it.set_quota(Quota {
        keys_max: 1,
        ..it.quota()
    });
    it.client("a").send(&["SET", "one", "v"]);
    let answer = it.client("a").send(&["SET", "two", "v"]);
    let refused = b"-ERR the quota has been exceeded";
    assert!(answer.payload.starts_with(refused), "{answer:?}");
    // `anew` returns a new store without these changes.
    let mut it = it.anew();
    assert!(it.get("one").is_none());
    let answer = it.client("a").send(&["SET", "two", "v"]);
    assert_eq!(answer.payload, b"+OK\r\n");
    let error = Harness::of(b"no policy").err();
    let error = error.expect("the bytes are no policy");
    assert_eq!(error.to_string(), LoadError::NotWasm.to_string());
    assert!(Harness::load("/no/such/file").is_err());
    let report = transcript::run(&it, "> SET k v\n").expect("a transcript");
    assert_eq!(report.corrected, "> SET k v\n< +OK\\r\\n __ts=$v1\n");
    assert_eq!(report.requests, 1);
}

#[test]
fn transcript_reports_messages_before_a_disconnection() {
    let it = Harness::standard().expect("the built-in policy");
    let lines = [
        "client a",
        "a> KEYNOTIFY k",
        r"a< +OK\r\n",
        "> SET k v",
        r"< +OK\r\n __ts=$v1",
        "a> GET k -- @response=clients/#",
        "a<disconnect 0x82",
    ];
    let report = transcript::run(&it, &lines.join("\n")).expect("a transcript");
    let different = report.different.iter();
    let different: Vec<_> = different.map(|it| (it.line, it.came.as_str())).collect();
    let [(4, came)] = different[..] else {
        panic!("{different:?}")
    };
    assert!(came.starts_with("and then a! k "), "{came}");
}

/// The server refuses these too: both call the same core.
#[test]
fn harness_checks_rights_to_keys_and_response_topics() {
    let rules = r#"
[[rules]]
principals.clientIds = ["reader"]
stateStoreResources = [{ method = "Read", keyType = "Pattern", keys = ["*"] }]
"#;
    let principal = Principal {
        client: "reader",
        user: None,
        attributes: &[],
    };
    let grants = Rules::parse(rules).unwrap().grants(principal);
    let mut it = Harness::standard().expect("the built-in policy");
    it.set_rights("reader", grants);
    assert_eq!(it.client("reader").send(&["GET", "k"]).payload, b"$-1\r\n");
    let answer = it.client("reader").send(&["SET", "k", "v"]);
    assert!(answer.payload.starts_with(b"-ERR"), "{answer:?}");
    assert!(it.get("k").is_none());

    let get = || Publish::new(Dialect::Sdk, "reader", array(&["GET", "k"]), NOW_MS);
    let elsewhere = Publish {
        response_topic: Some("somewhere/else".into()),
        ..get()
    };
    match it.publish("reader", elsewhere) {
        Came::Refused { reason, text } => {
            assert_eq!(reason, 0x87);
            assert!(text.contains("response topic"), "{text}");
        }
        other => panic!("{other:?}"),
    }
    assert!(matches!(it.publish("reader", get()), Came::Answer(_)));
}

#[test]
fn harness_does_not_execute_an_expired_request() {
    let mut it = Harness::standard().expect("the built-in policy");
    let set = |expires_ms| Publish {
        expires_ms: Some(expires_ms),
        ..Publish::new(Dialect::Sdk, "a", array(&["SET", "k", "v"]), NOW_MS)
    };
    it.at(NOW_MS + 1_000);
    let expired = it.publish("a", set(NOW_MS + 1_000));
    assert!(matches!(expired, Came::Dropped));
    assert!(it.get("k").is_none());
    let answered = it.publish("a", set(NOW_MS + 1_001));
    assert!(matches!(answered, Came::Answer(_)));
    assert!(it.get("k").is_some());
}
