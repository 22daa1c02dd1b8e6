//! How the store learns behind Mosquitto that a client has gone, and that nobody can tell it so of somebody else.

use std::{
    thread,
    time::{Duration, Instant},
};

use statehouse_tests::{
    Client, Connect, Mosquitto, Publish, Server, Store, packet::disconnect, property::sized,
    store::notification_topic,
};

use crate::scene::{eventually, figure};

/// What the store needs to hear.
const LOG: &[&str] = &["log_dest topic"];

/// A broker with these lines, and a store with these settings.
fn attached(lines: &[&str], settings: &[(&str, &str)]) -> (Server, Mosquitto) {
    let broker = Mosquitto::with(lines);
    let host = Server::attached(&broker.url(), broker.address(), settings);
    (host, broker)
}

/// A client whose session and subscriptions outlive its connection: nothing but the broker's log tells of its end.
fn lasting(broker: &Mosquitto, id: &str) -> Store {
    let client = Client::connect(broker.address(), &Connect::resume(id, 3600));
    Store::behind(client, id)
}

fn shown(host: &Server) -> String {
    let lines = host.stdout();
    let line = lines.iter().find(|it| it.starts_with("presence: "));
    line.unwrap_or_else(|| panic!("{lines:?}")).clone()
}

fn watches(host: &Server) -> u64 {
    figure(host, "watches")
}

#[test]
fn what_works_is_shown_at_the_start() {
    let (host, _broker) = attached(LOG, &[]);
    assert_eq!(
        shown(&host),
        "presence: mosquitto's connection log; a watch ends with its client's connection"
    );
    let (host, _broker) = attached(&["connection_messages false", "log_dest topic"], &[]);
    assert_eq!(
        shown(&host),
        "presence: none; a watch ends with the first notification without a subscriber"
    );
    let (host, _broker) = attached(LOG, &[("presence", "off"), ("watch_ttl", "1h")]);
    assert_eq!(
        shown(&host),
        "presence: none; a watch ends with the first notification without a subscriber, or after 3600s of silence"
    );
}

#[test]
fn a_watch_ends_with_its_connection_however_that_ends() {
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
        let mut client = lasting(&broker, &format!("client {n}"));
        client.watch("key");
        client.watch("another");
        assert_eq!(watches(&host), 2, "{how}");
        end(client);
        eventually(how, || watches(&host) == 0);
    }
}

#[test]
fn a_watch_ends_where_a_client_falls_silent() {
    let (host, broker) = attached(LOG, &[]);
    let mut connect = Connect::resume("silent", 3600);
    connect.keep_alive_s = 1;
    let mut client = Store::behind(Client::connect(broker.address(), &connect), "silent");
    client.watch("key");
    eventually("its keep alive is over", || watches(&host) == 0);
}

#[test]
fn a_watch_ends_where_its_session_is_taken_over() {
    let (host, broker) = attached(LOG, &[]);
    let mut before = lasting(&broker, "client");
    before.watch("key");
    let mut after = lasting(&broker, "client");
    eventually("the session has another connection", || watches(&host) == 0);
    after.watch("key");
    before.client.expect_closed();
    after.set("key", "value");
    assert_eq!(
        after.notification().topic,
        notification_topic("client", b"key")
    );
}

/// Each of these connects, does what it can, and goes; the victim's watch lives on.
#[test]
fn nobody_ends_the_watch_of_another() {
    let (host, broker) = attached(LOG, &[]);
    let mut victim = lasting(&broker, "victim");
    victim.watch("key");
    let cut = |line: &str| format!("victim disconnected.{}", "x".repeat(1000 - line.len()));
    let ids = [
        "victim disconnected.".to_owned(),
        "victim disconnected. closed its connection".to_owned(),
        "victim closed its connection.".to_owned(),
        "victim disconnected: Protocol error.".to_owned(),
        // As 2.1 words it.
        "victim [127.0.0.1:5]".to_owned(),
        "victim [127.0.0.1:5] disconnected: connection closed by client.".to_owned(),
        // As if it had connected anew.
        "x (p5, c1, k60).\nNew client connected from 1.2.3.4:5 as victim".to_owned(),
        "victim (p5, c1, k60)".to_owned(),
        "x: Client victim disconnected".to_owned(),
        "1795288899: Client victim disconnected.".to_owned(),
        // As if the line were cut.
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
            // Some of these Mosquitto does not let in.
            if let Some(client) = Client::attempt(broker.address(), &connect) {
                how(&client);
            }
        }
    }
    // A connection that asks for the victim's id and is refused: with a protocol error behind it.
    let mut bytes = Connect::new("victim").bytes();
    bytes[1] += 2;
    bytes.extend(sized(b""));
    let mut refused = Client::open(broker.address());
    refused.send(&bytes);
    refused.expect_closed();
    // A line of its own, published or as a will.
    let line = Publish::new("$SYS/broker/log/N", "1: Client victim disconnected.").qos(1);
    let mut forger = Client::connect(
        broker.address(),
        &Connect::new("forger").will(line.clone(), 0),
    );
    assert_eq!(forger.publish(line.clone()).reason, 0x87);
    assert_eq!(forger.publish(line.retained()).reason, 0x87);
    forger.abort();
    // The last of them is heard, so all are.
    let mut last = lasting(&broker, "last");
    last.watch("key");
    last.client.disconnect();
    eventually("the last has gone", || watches(&host) == 1);

    victim.set("key", "value");
    assert_eq!(
        victim.notification().topic,
        notification_topic("victim", b"key")
    );
}

#[test]
fn without_a_source_a_watch_ends_with_the_first_notification_that_nobody_takes() {
    let (host, broker) = attached(&[], &[]);
    let mut client = Store::behind(broker.connect("watcher"), "watcher");
    client.watch("key");
    client.client.disconnect();
    let mut writer = Store::behind(broker.connect("writer"), "writer");
    assert_eq!(watches(&host), 1);
    writer.set("key", "value");
    eventually("nobody took it", || watches(&host) == 0);
}

#[test]
fn a_watch_outlives_a_restart_of_the_store_and_still_ends_with_its_connection() {
    let broker = Mosquitto::with(LOG);
    let mut host = Server::attached(&broker.url(), broker.address(), &[]);
    let mut client = lasting(&broker, "client");
    client.watch("key");
    host.kill();
    host.restart();
    assert_eq!(watches(&host), 1);
    client.client.disconnect();
    eventually("it has gone", || watches(&host) == 0);
}

#[test]
#[ignore = "a watch lives ten seconds at least"]
fn a_watch_grows_old_unless_its_client_is_heard_of() {
    let (host, broker) = attached(&[], &[("watch_ttl", "10s")]);
    let mut silent = lasting(&broker, "silent");
    let mut asking = lasting(&broker, "asking");
    let mut told = lasting(&broker, "told");
    for client in [&mut silent, &mut asking, &mut told] {
        client.watch("key");
    }
    told.watch("news");
    silent.client.disconnect();
    let mut writer = lasting(&broker, "writer");
    let end = Instant::now() + Duration::from_secs(20);
    while watches(&host) == 4 {
        assert!(Instant::now() < end, "it lives on");
        thread::sleep(Duration::from_secs(1));
        asking.get("key");
        writer.set("news", "value");
        told.notification();
    }
    assert_eq!(watches(&host), 3);
    assert!(
        Instant::now() > end - Duration::from_secs(11),
        "it ended before its time"
    );
}
