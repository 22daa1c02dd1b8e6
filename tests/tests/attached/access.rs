//! Tests the access rules that `host/docs/foreign-brokers.md` recommends. They must allow each
//! client exactly its own topics, and only the store may publish answers and notifications.

use std::{process::Command, time::Duration};

use statehouse_tests::{
    Client, Heard, Mosquitto, Publish,
    command::finish,
    example::{self, STORE},
    store::{NOTIFICATION_PREFIX, PREVIEW_TOPIC, REQUEST_TOPIC, notification_topic},
};

const ALLOWED: u8 = 0;
const NO_SUBSCRIBERS: u8 = 0x10;
const NOT_AUTHORIZED: u8 = 0x87;

fn response_topic(client: &str) -> String {
    format!("clients/{client}/services/statestore/_any_/command/invoke/response")
}

fn publish(client: &mut Client, topic: &str) -> u8 {
    client.publish(Publish::new(topic, topic).qos(1)).reason
}

/// The client `joe` subscribes to everything, and must receive only messages to its own topics. It
/// may send requests, but may not publish for the store.
fn assert_each_client_gets_its_own_topics(broker: &Mosquitto) {
    let mut store = example::client(broker, STORE);
    for topic in [
        REQUEST_TOPIC,
        PREVIEW_TOPIC,
        "$SYS/broker/log/N",
        "$SYS/broker/version",
    ] {
        assert_eq!(store.subscribe(topic, 1), 1, "{topic}");
    }
    let mut joe = example::client(broker, "joe");
    let notification = notification_topic("joe", b"key");
    let own = [
        response_topic("joe"),
        format!("{}+", notification_topic("joe", b"")),
    ];
    for filter in &own {
        assert_eq!(joe.subscribe(filter, 1), 1, "{filter}");
    }
    // With an access file Mosquitto accepts every subscription, and forwards only messages that the
    // client may read.
    for filter in ["#", "$SYS/#", "clients/+/services/#"] {
        joe.subscribe(filter, 1);
    }
    store.take_publish("$SYS/broker/log/N");
    store.take_publish("$SYS/broker/version");
    store.drain();

    for topic in [REQUEST_TOPIC, PREVIEW_TOPIC] {
        assert_eq!(publish(&mut joe, topic), ALLOWED, "{topic}");
        assert_eq!(store.take_publish(topic).topic, topic);
    }
    for topic in [
        &response_topic("ann"),
        &response_topic("joe"),
        &notification_topic("ann", b"key"),
        NOTIFICATION_PREFIX,
        "$SYS/broker/log/N",
        "$CONTROL/dynamic-security/v1",
        "statehouse/v1/attached/73746174",
        "anything",
    ] {
        assert_eq!(publish(&mut joe, topic), NOT_AUTHORIZED, "{topic}");
    }
    for topic in [&response_topic("joe"), &notification] {
        assert_eq!(publish(&mut store, topic), ALLOWED, "{topic}");
        assert_eq!(joe.take_publish(topic).topic, *topic);
    }
    let to_ann = publish(&mut store, &response_topic("ann"));
    assert!([ALLOWED, NO_SUBSCRIBERS].contains(&to_ann));
    assert_eq!(publish(&mut store, "anything"), NOT_AUTHORIZED);
    // The client `joe` receives duplicates of its own messages, one for each matching filter, but
    // no requests, no log lines and no messages to Ann.
    while let Heard::Packet(packet) = joe.poll(Duration::from_millis(200)) {
        let topic = packet.publish().topic;
        assert!(
            topic == response_topic("joe") || topic == notification,
            "{topic}"
        );
    }
}

#[test]
fn access_file_gives_each_client_its_own_topics() {
    let broker = example::mosquitto(&["joe", "ann"]);
    assert_each_client_gets_its_own_topics(&broker);
    // The broker replaces the client id by the user name.
    let mut connect = example::connect("joe");
    connect.client_id = "ann".into();
    let mut joe = Client::connect(broker.address(), &connect);
    for client in ["ann", "joe"] {
        joe.subscribe(&response_topic(client), 1);
    }
    let mut store = example::client(&broker, STORE);
    for client in ["ann", "joe"] {
        publish(&mut store, &response_topic(client));
    }
    assert_eq!(joe.take_publish("clients/").topic, response_topic("joe"));
}

#[test]
fn dynamic_security_gives_each_client_its_own_topics() {
    let broker = example::dynamic_security("joe");
    assert_each_client_gets_its_own_topics(&broker);
    let mut connect = example::connect("joe");
    connect.client_id = "ann".into();
    let (_, refused) = Client::try_connect(broker.address(), &connect);
    assert_eq!(refused.reason, NOT_AUTHORIZED);
}

#[test]
fn store_works_with_the_documented_access_rules() {
    for broker in [
        example::mosquitto(&["joe"]),
        example::dynamic_security("joe"),
    ] {
        let host = example::attached(&broker, &[]);
        let mut joe = example::store(&broker, "joe");
        joe.watch("key");
        joe.set("key", "value");
        assert_eq!(joe.notification().topic, notification_topic("joe", b"key"));
        assert_eq!(joe.get("key").unwrap(), b"value");
        let printed = host.stdout();
        assert!(
            printed
                .iter()
                .any(|it| it.starts_with("presence: mosquitto's connection log")),
            "{printed:?}"
        );
    }
}

/// Runs the last command of the page, with the address of the test's broker added.
#[test]
fn documented_request_is_answered() {
    let broker = example::mosquitto(&["thermostat"]);
    let _host = example::attached(&broker, &[]);
    let block = example::block("install");
    let (_, request) = block.split_once("\nmosquitto_rr ").unwrap();
    let address = broker.address();
    let script = format!(
        "mosquitto_rr -h {} -p {} {request}",
        address.ip(),
        address.port()
    );
    let mut command = Command::new("bash");
    command.args(["-c", &script]);
    assert_eq!(finish(command, b"").code(0).text(), "$-1\r\n\n");
}
