//! Changes limits in the settings file while clients are connected. A changed limit must apply to
//! new requests at once, and must never remove existing data, sessions or connections.

use std::{path::PathBuf, time::Duration};

use statehouse_tests::{
    Client, Connect, Property, Publish, Server, Store, assert_contains,
    packet::kind,
    policies,
    reload::replace,
    wait::{eventually, until},
};

const QUOTA: &[u8] = b"-ERR the quota has been exceeded\r\n";
const QUOTA_EXCEEDED: u8 = 0x97;
const NO_SUBSCRIBERS: u8 = 0x10;
const RECEIVE_MAXIMUM_EXCEEDED: u8 = 0x93;

fn settings_file(server: &Server) -> PathBuf {
    server.directory().join("statehouse.toml")
}

fn limit(server: &Server, setting: &str) -> Option<u64> {
    server.metric_if_any(&format!("limit{{setting=\"{setting}\"}}"))
}

/// Replaces the settings file and waits until the store uses it.
fn change(server: &Server, settings: &str) {
    server.change_file(&settings_file(server), settings);
}

fn set(store: &mut Store, key: &str, value: &str) -> Vec<u8> {
    store.ask(&["SET", key, value]).payload().to_vec()
}

#[test]
fn changed_key_limits_apply_at_once_and_delete_nothing() {
    let server = Server::with_config("max_keys = 2\n");
    let mut store = server.store("client");
    store.set("1", "value");
    store.set("2", "value");
    assert_eq!(set(&mut store, "3", "value"), QUOTA);

    change(&server, "max_keys = 4\nmax_client_keys = 4\n");
    assert_eq!(limit(&server, "max_keys"), Some(4));
    server.wait_for_log("max_keys is 4 from now on");
    store.set("3", "value");
    store.set("4", "value");

    // The limit is below the number of keys: all keys stay, and no further one is accepted.
    change(&server, "max_keys = 1\nmax_value_bytes = 3\n");
    for key in ["1", "2", "3", "4"] {
        assert_eq!(store.get(key).as_deref(), Some(&b"value"[..]));
    }
    assert_eq!(set(&mut store, "5", "v"), QUOTA);
    assert_eq!(set(&mut store, "1", "val"), b"+OK\r\n");
    assert!(set(&mut store, "1", "value").starts_with(b"-ERR the value is longer than 3 bytes"));
    assert_eq!(store.ask(&["DEL", "2"]).payload(), b":1\r\n");

    // Settings that are removed from the file return to their defaults.
    change(&server, "\n");
    store.set("2", "value");
}

/// A client that has used up its quota leaves room for other clients. A crash does not reset
/// quotas.
#[test]
fn client_key_quota_leaves_room_and_survives_a_crash() {
    let mut server = Server::with_config(
        "max_keys = 8\nmax_bytes = 8000\nmax_key_bytes = 100\nmax_value_bytes = 100\n",
    );
    assert_eq!(limit(&server, "max_client_keys"), Some(6));
    assert_eq!(limit(&server, "max_client_bytes"), Some(6000));
    let mut greedy = server.store("greedy");
    for key in 1..=6 {
        greedy.set(key.to_string(), "value");
    }
    assert_eq!(set(&mut greedy, "7", "value"), QUOTA);
    let line = server.wait_for_log("it owns max_client_keys, which is 6");
    assert!(line.contains("statehouse::audit") && line.contains("greedy"));
    assert_eq!(server.refused("max_client_keys"), 1);
    let mut modest = server.store("modest");
    modest.set("7", "value");
    greedy.set("1", "another");
    assert_eq!(
        set(&mut greedy, "7", "value"),
        QUOTA,
        "another client owns it"
    );

    server.kill_and_restart();
    let (mut greedy, mut modest) = (server.store("greedy"), server.store("modest"));
    assert_eq!(set(&mut greedy, "8", "value"), QUOTA);
    // A write transfers a key to the writer's quota, and a deletion frees the quota of the key's
    // owner.
    modest.set("1", "taken");
    greedy.set("8", "value");
    assert_eq!(set(&mut greedy, "7", "value"), QUOTA);
    assert_eq!(modest.ask(&["DEL", "2"]).payload(), b":1\r\n");
    assert_eq!(greedy.ask(&["DEL", "7"]).payload(), b":1\r\n");
    greedy.set("7", "value");

    server.kill_and_restart();
    let (mut greedy, mut modest) = (server.store("greedy"), server.store("modest"));
    assert_eq!(set(&mut greedy, "9", "value"), QUOTA);
    change(&server, "max_client_keys = 7\nmax_client_bytes = 1000\n");
    greedy.set("9", "value");
    change(&server, "max_client_keys = 1\nmax_client_bytes = 1000\n");
    greedy.set("9", "other");
    assert_eq!(set(&mut modest, "9", "value"), QUOTA);
    change(&server, "max_client_bytes = 1000\n");
    assert_eq!(set(&mut greedy, "9", &"x".repeat(100)), QUOTA);
    server.wait_for_log("it would own more than max_client_bytes, which is 1000");
    assert_eq!(server.refused("max_client_bytes"), 1);
    modest.set("9", "x".repeat(100));
}

#[test]
fn changed_watch_limits_apply_at_once() {
    let server = Server::with_config("max_client_watches = 1\n");
    let mut store = server.store("client");
    let mut watch = |key: &str| store.ask(&["KEYNOTIFY", key]).payload().to_vec();
    assert_eq!(watch("1"), b"+OK\r\n");
    assert_eq!(watch("2"), QUOTA);
    change(&server, "max_client_watches = 2\n");
    assert_eq!(watch("2"), b"+OK\r\n");
    change(&server, "max_watches = 2\n");
    assert_eq!(watch("3"), QUOTA);
    change(&server, "max_watches = 1\n");
    assert_eq!(watch("3"), QUOTA);
    store.set("1", "value");
    let notified = store.notification();
    assert!(
        notified.topic.ends_with("/command/notify/31"),
        "{}",
        notified.topic
    );
}

/// The client gets an error; the operator gets a log line and a metric.
#[test]
fn refusal_by_a_limit_is_logged_and_counted() {
    let server = Server::with_config(
        "max_keys = 2\nmax_bytes = 600\nmax_key_bytes = 20\nmax_value_bytes = 400\nmax_client_watches = 1\n",
    );
    let mut store = server.store("greedy");
    store.set("1", "value");
    store.set("2", "value");
    store.watch("1");
    let long = |length: usize| "x".repeat(length);
    for (command, name, why) in [
        (vec!["SET", "3", "v"], "max_keys", "max_keys, which is 2"),
        (
            vec!["SET", "1", &long(400)],
            "max_bytes",
            "max_bytes, which is 600",
        ),
        (
            vec!["SET", &long(21), "v"],
            "max_key_bytes",
            "longer than max_key_bytes, which is 20",
        ),
        (
            vec!["SET", "1", &long(401)],
            "max_value_bytes",
            "max_value_bytes, which is 400",
        ),
        (
            vec!["KEYNOTIFY", "2"],
            "max_client_watches",
            "max_client_watches, which is 1",
        ),
    ] {
        assert_eq!(server.refused(name), 0);
        let answer = store.ask(&command);
        assert!(
            answer.payload().starts_with(b"-ERR "),
            "{name}: {}",
            answer.text()
        );
        let line = server.wait_for_log(why);
        assert_contains!(line, "statehouse::audit", "greedy");
        assert_eq!(server.refused(name), 1);
    }
}

#[test]
fn changed_client_rate_applies_at_once() {
    let server = Server::with_config("max_keys = 100\n");
    let mut client = server.connect("client");
    let mut publish = |count: usize| -> Vec<u8> {
        let ids: Vec<u16> = (0..count)
            .map(|_| client.start(Publish::new("a", "x").qos(1)))
            .collect();
        let reasons = ids
            .into_iter()
            .map(|id| client.take_ack(kind::PUBACK, id).reason);
        reasons.collect()
    };
    assert_eq!(publish(100), [NO_SUBSCRIBERS; 100]);
    change(&server, "max_client_rate = 5\n");
    let reasons = publish(100);
    assert_eq!(reasons[..5], [NO_SUBSCRIBERS; 5]);
    let count = |reason| reasons.iter().filter(|it| **it == reason).count();
    assert!(count(QUOTA_EXCEEDED) > 0, "{reasons:x?}");
    assert_eq!(count(QUOTA_EXCEEDED) + count(NO_SUBSCRIBERS), 100);
    assert!(server.metric("throttled_total") > 0);
    // Other clients are not delayed.
    server.store("quiet").set("key", "value");
    change(&server, "\n");
    assert_eq!(publish(100), [NO_SUBSCRIBERS; 100]);
    assert_eq!(limit(&server, "max_client_rate"), None);
}

#[test]
fn changed_total_rate_applies_to_all_clients() {
    let server = Server::with_config("max_client_rate = 100\n");
    let mut clients = ["one", "other"].map(|id| server.connect(id));
    let mut publish = || -> [Vec<u8>; 2] {
        clients.each_mut().map(|client| {
            let ids = [(); 50].map(|()| client.start(Publish::new("a", "x").qos(1)));
            let reasons = ids.map(|id| client.take_ack(kind::PUBACK, id).reason);
            reasons.to_vec()
        })
    };
    let free = [NO_SUBSCRIBERS; 50].to_vec();
    assert_eq!(publish(), [free.clone(), free.clone()]);
    change(&server, "max_client_rate = 100\nmax_rate = 5\n");
    let [one, other] = publish();
    assert_eq!(one[..5], free[..5]);
    for reasons in [one, other] {
        assert!(reasons.contains(&QUOTA_EXCEEDED), "{reasons:x?}");
    }
    change(&server, "\n");
    assert_eq!(publish(), [free.clone(), free]);
}

#[test]
fn changed_subscription_limit_applies_at_once() {
    let server = Server::with_config("max_client_subscriptions = 2\n");
    let mut client = server.connect("client");
    let mut other = server.connect("other");
    assert_eq!(client.subscribe("1", 1), 1);
    assert_eq!(client.subscribe("2", 1), 1);
    assert_eq!(client.subscribe("3", 1), QUOTA_EXCEEDED);
    change(&server, "max_client_subscriptions = 3\n");
    assert_eq!(client.subscribe("3", 1), 1);
    change(&server, "max_client_subscriptions = 1\n");
    assert_eq!(client.subscribe("4", 1), QUOTA_EXCEEDED);
    // Existing subscriptions stay, and a client may repeat them.
    assert_eq!(client.subscribe("3", 1), 1);
    for topic in ["1", "2", "3"] {
        other.publish(Publish::new(topic, "x").qos(1));
        assert_eq!(client.next().publish().topic, topic);
    }
}

#[test]
fn changed_connection_limits_apply_at_once() {
    let server = Server::with_config("max_connections = 2\n");
    let mut first = server.connect("first");
    let mut second = server.connect("second");
    let is_accepted = |id: &str| {
        let client = Client::attempt(server.address(), &Connect::resume(id, 100));
        // A subscription, since a new session may replace an empty one.
        let subscribed = client.map(|mut client| {
            client.subscribe("t", 1);
            client.disconnect();
        });
        subscribed.is_some()
    };
    assert!(!is_accepted("third"));
    change(&server, "max_connections = 3\n");
    assert!(is_accepted("third"));
    change(&server, "max_connections = 1\n");
    // Existing connections stay. No new one is accepted, not even to replace one of these.
    first.ping();
    second.ping();
    first.disconnect();
    until("the end of a connection is seen", || {
        server.metric_if_any("connections") == Some(1)
    });
    assert!(!is_accepted("third"));
    // The session of `third` is the second one, so no further session is created.
    change(&server, "max_sessions = 2\n");
    let (_, ack) = Client::try_connect(server.address(), &Connect::new("fourth"));
    assert_eq!(ack.reason, QUOTA_EXCEEDED);
    assert!(is_accepted("third"));
    second.ping();
}

/// A connection keeps the limit that its CONNACK announced. The next connection gets the changed
/// one.
#[test]
fn max_packet_bytes_of_the_connack_stays_in_effect() {
    let settings = |packet: u32| {
        format!("max_packet_bytes = {packet}\nmax_value_bytes = 1000\nmax_key_bytes = 100\n")
    };
    let server = Server::with_config(&settings(65_536));
    let mut old = server.connect("old");
    assert_announces(&old, &Property::MaximumPacketSize(65_536));
    change(&server, &settings(10_000));
    let mut new = server.connect("new");
    assert_announces(&new, &Property::MaximumPacketSize(10_000));
    old.publish(Publish::new("a", vec![0; 60_000]).qos(1));
    new.publish(Publish::new("a", vec![0; 9_000]).qos(1));
    let _ = new.try_send(&Publish::new("a", vec![0; 20_000]).bytes());
    new.expect_disconnect(0x95);
}

fn assert_announces(client: &Client, limit: &Property) {
    let connack = client.connack.as_ref().unwrap();
    assert!(connack.properties.contains(limit), "{connack:?}");
}

#[test]
fn receive_maximum_of_the_connack_stays_in_effect() {
    let server = Server::with_config("max_client_in_flight = 20\n");
    let mut old = server.connect("old");
    assert_announces(&old, &Property::ReceiveMaximum(20));
    change(&server, "max_client_in_flight = 2\n");
    let mut new = server.connect("new");
    assert_announces(&new, &Property::ReceiveMaximum(2));
    // QoS 2 exchanges that the client never releases, so they stay in flight.
    let start = |client: &mut Client, count: usize| {
        for _ in 0..count {
            client.start(Publish::new("a", "x").qos(2));
        }
    };
    start(&mut old, 20);
    old.ping();
    start(&mut new, 3);
    new.expect_disconnect(RECEIVE_MAXIMUM_EXCEEDED);
    start(&mut old, 1);
    old.expect_disconnect(RECEIVE_MAXIMUM_EXCEEDED);
}

/// A client sends a full window of requests again over its next connection, after the window was
/// made smaller and after a crash. If the store searched or remembered only as many requests as the
/// smaller window has, the others would run twice.
#[test]
fn redelivered_full_window_is_executed_once() {
    const RAISED: u16 = 2500;
    for (dup, crash) in [(false, false), (true, false), (false, true), (true, true)] {
        // The store remembers only the last requests of each session.
        let mut server = Server::with_config("max_duplicates = 1\n");
        let settings = |most: u16| format!("max_duplicates = 1\nmax_client_in_flight = {most}\n");
        change(&server, &settings(RAISED));
        let connect =
            |server: &Server| Client::connect(server.address(), &Connect::resume("client", 3600));
        let mut client = connect(&server);
        assert_announces(&client, &Property::ReceiveMaximum(RAISED));
        let mut sender = Store::on(client, "client");
        let requests: Vec<_> = (0..RAISED)
            .map(|number| {
                let key = number.to_string();
                let request = sender.command(&["SET", &key, "value", "NX"]).publish();
                (sender.client.start(request.clone()), request)
            })
            .collect();
        // The store answers all requests, but the client does not read the answers.
        let mut other = server.store("other");
        let last = (RAISED - 1).to_string();
        eventually("the last is handled", || other.get(&last).map(drop));
        sender.client.abort();
        change(&server, &settings(10));
        if crash {
            server.kill_and_restart();
        }

        client = connect(&server);
        assert_announces(&client, &Property::ReceiveMaximum(10));
        assert!(client.session_present());
        for (at, (packet_id, request)) in requests.into_iter().enumerate() {
            let redelivered = Publish {
                packet_id,
                dup,
                ..request
            };
            client.send(&redelivered.bytes());
            client.take_ack(kind::PUBACK, packet_id);
            if at % 100 == 0 {
                client.drain();
            }
        }
        client.ping();
        let repeated = server.metric_if_any("duplicates_total");
        assert_eq!(repeated, Some(RAISED.into()), "dup: {dup}, crash: {crash}");
    }
}

/// A redelivered request must have the fuel of its first execution: with less, the re-execution
/// could fail, and the first answer would be lost. With more, a request that had failed would take
/// effect after younger ones.
#[test]
fn redelivered_request_has_its_first_fuel_limit() {
    let settings = |fuel: u32| {
        let policy = policies::faulty();
        format!("policy = {policy:?}\npurity_sample = 1\nmax_fuel = {fuel}\n")
    };
    const FAILED: &[u8] = b"-ERR internal error\r\n";
    let mut server = Server::with_config(&settings(4_000_000));
    let connect = |server: &Server| {
        let client = Client::connect(server.address(), &Connect::resume("client", 3600));
        Store::new(client, "client")
    };
    let burn = |store: &mut Store, key: &str| {
        let request = store.command(&["SET", key, "burn"]);
        let id = store.client.start(request.publish());
        let answer = store.finish(&request, id).payload().to_vec();
        (request, id, answer)
    };
    let mut store = connect(&server);
    let (request, id, answer) = burn(&mut store, "1");
    // The answer is so large that the store keeps only its digest.
    assert_eq!(answer, [b'+'; 300]);

    change(&server, &settings(200_000));
    assert_eq!(limit(&server, "max_fuel"), Some(200_000));
    let (refused, refused_id, error) = burn(&mut store, "2");
    assert_eq!(error, FAILED);
    server.wait_for_log("it used up its fuel, which max_fuel bounds");
    assert_eq!(store.redeliver(&request, id, true).payload(), answer);
    assert_eq!(set(&mut store, "3", "fine"), b"+OK\r\n");

    server.kill_and_restart();
    let mut store = connect(&server);
    assert!(store.client.session_present());
    assert_eq!(store.redeliver(&request, id, true).payload(), answer);
    assert_eq!(
        store.redeliver(&refused, refused_id, true).payload(),
        FAILED
    );

    change(&server, &settings(4_000_000));
    assert_eq!(
        store.redeliver(&refused, refused_id, true).payload(),
        FAILED
    );
    assert_eq!(store.redeliver(&request, id, true).payload(), answer);
    let log = server.stderr();
    let differs =
        |line: &&String| line.contains("answered otherwise") || line.contains("a policy is impure");
    assert_eq!(log.iter().find(differs), None);
}

#[test]
fn invalid_settings_file_changes_nothing() {
    let server = Server::with_config("max_keys = 1\n");
    let mut store = server.store("client");
    store.set("1", "value");
    for (settings, says) in [
        ("max_keys = \"many\"\n", "max_keys"),
        ("max_kyes = 5\n", "max_kyes"),
        (
            "max_keys = 5\nmax_value_bytes = 100000000\n",
            "raise max_packet_bytes",
        ),
        ("max_keys = 5\ntls_cert = \"cert.pem\"\n", "is about TLS"),
    ] {
        let before = server.reloads("settings", "refused");
        change(&server, settings);
        server.wait_for_log(says);
        assert!(server.reloads("settings", "refused") > before);
        assert_eq!(limit(&server, "max_keys"), Some(1));
        assert_eq!(set(&mut store, "2", "value"), QUOTA);
    }
    // The server finds a changed file without a signal, too.
    replace(&settings_file(&server), "max_keys = 2\n");
    until("the file is found", || {
        limit(&server, "max_keys") == Some(2)
    });
    store.set("2", "value");
}

#[test]
fn settings_for_the_next_start_are_named_and_flags_win() {
    let server = Server::with("max_keys = 1\n", &["--max-watches", "7"]);
    change(
        &server,
        "max_keys = 2\nmax_watches = 9\nnode = \"Other\"\nmax_duplicates = 5\n",
    );
    let line = server.wait_for_log("counts from the next start on");
    assert!(line.contains(" max_duplicates, node counts"), "{line}");
    assert_eq!(limit(&server, "max_watches"), Some(7));
    let mut store = server.store("client");
    assert_eq!(store.set("1", "value").node, "StateStore");
    store.set("2", "value");
}

#[test]
fn sighup_reloads_an_unchanged_file() {
    let server = Server::with_config("max_keys = 1\n");
    let taken = server.reloads("settings", "taken");
    std::thread::sleep(Duration::from_millis(1500));
    assert_eq!(
        server.reloads("settings", "taken"),
        taken,
        "nothing has changed"
    );
    server.signal("HUP");
    until("the file is read again", || {
        server.reloads("settings", "taken") == taken + 1
    });
}
