//! Tests how the store behind Mosquitto detects that a client has disconnected. No client may make
//! the store believe that another client has disconnected.

use std::{
    net::SocketAddr,
    thread,
    time::{Duration, Instant},
};

use statehouse_tests::{
    Client, Connect, Mosquitto, Publish, Server, Store, packet::disconnect, property::sized,
    store::notification_topic, wait::until,
};

/// The broker's configuration that lets the store read its connection log.
const LOG: &[&str] = &["log_dest topic"];

/// Starts a broker with these lines of configuration, and attaches a store with these settings.
fn attached(lines: &[&str], settings: &[(&str, &str)]) -> (Server, Mosquitto) {
    let broker = Mosquitto::with(lines);
    let host = Server::attached(&broker.url(), broker.address(), settings);
    (host, broker)
}

/// A client with a session and subscriptions that outlive its connection, so only the broker's log
/// shows that the client has disconnected.
fn persistent(broker: &Mosquitto, id: &str) -> Store {
    let client = Client::connect(broker.address(), &Connect::resume(id, 3600));
    Store::behind(client, id)
}

#[test]
fn presence_source_is_printed_at_the_start() {
    let (host, _broker) = attached(LOG, &[]);
    assert_eq!(
        host.wait_for_line("presence: "),
        "presence: mosquitto's connection log; a watch ends with its client's connection"
    );
    let (host, _broker) = attached(&["connection_messages false", "log_dest topic"], &[]);
    assert_eq!(
        host.wait_for_line("presence: "),
        "presence: none; a watch ends with the first notification without a subscriber"
    );
    let (host, _broker) = attached(LOG, &[("presence", "off"), ("watch_ttl", "1h")]);
    assert_eq!(
        host.wait_for_line("presence: "),
        "presence: none; a watch ends with the first notification without a subscriber, or after 3600s of silence"
    );
}

/// Mosquitto does not log a TCP connection to a listener for WebSocket.
#[test]
fn presence_over_websocket_is_known_with_the_next_client() {
    let mut listener = None;
    let broker = Mosquitto::set_up(|_, address| {
        // No other process uses this port, since the IP address belongs to this test.
        let second = SocketAddr::new(address.ip(), address.port() + 10_000);
        listener = Some(second);
        format!(
            "log_dest topic\nlistener {} {}\nprotocol websockets",
            second.port(),
            second.ip()
        )
    });
    let url = format!("ws://{}/mqtt", listener.unwrap());
    let host = Server::attached(&url, broker.address(), &[]);
    let line = host.wait_for_line("presence: ");
    assert!(line.starts_with("presence: none known yet"), "{line}");
    broker.connect("client").disconnect();
    host.wait_for_log("presence: mosquitto's connection log");
}

#[test]
fn watch_ends_when_the_connection_ends_in_any_way() {
    let (host, broker) = attached(LOG, &[]);
    type End = fn(Store);
    let ends: [(&str, End); 5] = [
        ("disconnects", |it| it.client.disconnect()),
        ("disconnects with its will", |mut it| {
            it.client.send(&disconnect(4, &[]));
            it.client.expect_closed();
        }),
        ("closes", |it| it.client.finish()),
        ("is cut off", |it| it.client.abort()),
        ("sends nonsense", |mut it| {
            it.client.send(&[0xF7, 0]);
            it.client.expect_closed();
        }),
    ];
    for (n, (how, end)) in ends.into_iter().enumerate() {
        let mut client = persistent(&broker, &format!("client {n}"));
        client.watch("key");
        client.watch("another");
        assert_eq!(host.metric("watches"), 2, "{how}");
        end(client);
        until(how, || host.metric("watches") == 0);
    }
}

#[test]
fn watch_ends_when_the_keep_alive_expires() {
    let (host, broker) = attached(LOG, &[]);
    let mut connect = Connect::resume("silent", 3600);
    connect.keep_alive_s = 1;
    let mut client = Store::behind(Client::connect(broker.address(), &connect), "silent");
    client.watch("key");
    until("its keep alive is over", || host.metric("watches") == 0);
}

#[test]
fn watch_ends_when_the_session_is_taken_over() {
    let (host, broker) = attached(LOG, &[]);
    let mut before = persistent(&broker, "client");
    before.watch("key");
    let mut after = persistent(&broker, "client");
    until("the session has another connection", || {
        host.metric("watches") == 0
    });
    after.watch("key");
    before.client.expect_closed();
    after.set("key", "value");
    assert_eq!(
        after.notification().topic,
        notification_topic("client", b"key")
    );
}

/// Each attacker connects with an id that imitates a log line, and disconnects. The victim's watch
/// must stay.
#[test]
fn client_cannot_end_the_watch_of_another_client() {
    let (host, broker) = attached(LOG, &[]);
    let mut victim = persistent(&broker, "victim");
    victim.watch("key");
    let cut = |line: &str| format!("victim disconnected.{}", "x".repeat(1000 - line.len()));
    let ids = [
        "victim disconnected.".to_owned(),
        "victim disconnected. closed its connection".to_owned(),
        "victim closed its connection.".to_owned(),
        "victim disconnected: Protocol error.".to_owned(),
        // The wording of Mosquitto 2.1.
        "victim [127.0.0.1:5]".to_owned(),
        "victim [127.0.0.1:5] disconnected: connection closed by client.".to_owned(),
        // Imitates a new connection.
        "x (p5, c1, k60).\nNew client connected from 1.2.3.4:5 as victim".to_owned(),
        "victim (p5, c1, k60)".to_owned(),
        "x: Client victim disconnected".to_owned(),
        "1795288899: Client victim disconnected.".to_owned(),
        // Imitates a truncated line.
        cut("1795288899: Client victim disconnected."),
        cut(""),
        "\u{2028}Client victim disconnected.".to_owned(),
        "Client victim disconnected.\r\n".to_owned(),
    ];
    for id in &ids {
        for how in [Client::finish, |it: &Client| it.try_finish().unwrap()] {
            let connect = Connect {
                user_name: Some("x', (p5, c1, k60, u'victim".into()),
                ..Connect::new(id)
            };
            // Mosquitto refuses some of these ids.
            if let Some(client) = Client::attempt(broker.address(), &connect) {
                how(&client);
            }
        }
    }
    // This CONNECT with the victim's id is refused, since extra bytes make it malformed.
    let mut bytes = Connect::new("victim").bytes();
    bytes[1] += 2;
    bytes.extend(sized(b""));
    let mut refused = Client::open(broker.address());
    refused.send(&bytes);
    refused.expect_closed();
    // A forged log line, published or sent as a will.
    let line = Publish::new("$SYS/broker/log/N", "1: Client victim disconnected.").qos(1);
    let mut forger = Client::connect(
        broker.address(),
        &Connect::new("forger").will(line.clone(), 0),
    );
    assert_eq!(forger.publish(line.clone()).reason, 0x87);
    assert_eq!(forger.publish(line.retained()).reason, 0x87);
    forger.abort();
    // The store has processed the end of the last client, so it has processed all log lines.
    let mut last = persistent(&broker, "last");
    last.watch("key");
    last.client.disconnect();
    until("the last client has disconnected", || {
        host.metric("watches") == 1
    });

    victim.set("key", "value");
    assert_eq!(
        victim.notification().topic,
        notification_topic("victim", b"key")
    );
}

#[test]
fn watch_without_a_source_ends_at_an_undelivered_notification() {
    let (host, broker) = attached(&[], &[]);
    let mut client = Store::behind(broker.connect("watcher"), "watcher");
    client.watch("key");
    client.client.disconnect();
    let mut writer = Store::behind(broker.connect("writer"), "writer");
    assert_eq!(host.metric("watches"), 1);
    writer.set("key", "value");
    until("the notification had no subscriber", || {
        host.metric("watches") == 0
    });
}

#[test]
fn restored_watch_ends_with_its_connection() {
    let broker = Mosquitto::with(LOG);
    let mut host = Server::attached(&broker.url(), broker.address(), &[]);
    let mut client = persistent(&broker, "client");
    client.watch("key");
    host.kill();
    host.restart();
    assert_eq!(host.metric("watches"), 1);
    client.client.disconnect();
    until("the client has disconnected", || {
        host.metric("watches") == 0
    });
}

#[test]
#[ignore = "the shortest watch_ttl is ten seconds"]
fn watch_expires_unless_its_client_is_active() {
    let (host, broker) = attached(&[], &[("watch_ttl", "10s")]);
    let mut silent = persistent(&broker, "silent");
    let mut asking = persistent(&broker, "asking");
    let mut notified = persistent(&broker, "notified");
    for client in [&mut silent, &mut asking, &mut notified] {
        client.watch("key");
    }
    notified.watch("news");
    silent.client.disconnect();
    let mut writer = persistent(&broker, "writer");
    let end = Instant::now() + Duration::from_secs(20);
    while host.metric("watches") == 4 {
        assert!(Instant::now() < end, "the watch did not expire");
        thread::sleep(Duration::from_secs(1));
        asking.get("key");
        writer.set("news", "value");
        notified.notification();
    }
    assert_eq!(host.metric("watches"), 3);
    assert!(
        Instant::now() > end - Duration::from_secs(11),
        "the watch expired too early"
    );
}
