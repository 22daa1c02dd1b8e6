//! Tests the access rules that `host/docs/foreign-brokers.md` recommends. They must allow each
//! client exactly its own topics, and only the store may publish answers and notifications.

use std::{fs, process::Command, time::Duration};

use statehouse_tests::{
    Client, Heard, Mosquitto, Publish, Server,
    command::finish,
    example::{self, STORE},
    property::Property,
    store::{NOTIFICATION_PREFIX, PREVIEW_TOPIC, REQUEST_TOPIC, notification_topic},
};

const ALLOWED: u8 = 0;
const NO_SUBSCRIBERS: u8 = 0x10;
const NOT_AUTHORIZED: u8 = 0x87;
const PACKET_TOO_LARGE: u8 = 0x95;

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
        host.wait_for_line("presence: mosquitto's connection log");
    }
}

/// Regression: Mosquitto dropped such a request without an answer, and crashed.
#[test]
fn documented_limits_refuse_what_the_store_does_not_take() {
    let broker = example::mosquitto(&["joe"]);
    let _host = example::attached(&broker, &[]);
    let mut joe = example::client(&broker, "joe");
    let request = |bytes: usize| Publish::new(REQUEST_TOPIC, vec![b'x'; bytes]).qos(1);
    assert_eq!(joe.publish(request(2_010_000)).reason, PACKET_TOO_LARGE);
    // Here only the properties are too long.
    let property = Property::user("name", &"x".repeat(60_000));
    let mut long = request(1_990_000).with(property.clone()).with(property);
    long.packet_id = joe.packet_id();
    // The broker may close the connection before it has read the whole packet.
    let _ = joe.try_send(&long.bytes());
    broker.wait_for_log("Client joe disconnected due to oversize packet");
    let mut joe = example::store(&broker, "joe");
    joe.set("key", "value");
    assert_eq!(joe.get("key").as_deref(), Some(&b"value"[..]));
}

/// With an access file Mosquitto accepts every subscription, so only its own mark shows the store
/// that it may not read.
#[test]
fn store_without_rights_to_its_mark_logs_the_consequence() {
    for (right, says) in [
        ("write", "does not deliver the store's own mark"),
        ("read", "does not take the store's own mark"),
    ] {
        let broker = Mosquitto::set_up(|directory, _| {
            let rules = format!(
                "topic readwrite statestore/#\ntopic readwrite clients/#\ntopic {right} statehouse/#\n"
            );
            fs::write(directory.join("acl"), rules).unwrap();
            "acl_file acl".into()
        });
        let settings = [("presence", "off"), ("broker_keep_alive", "5s")];
        let host = Server::attached(&broker.url(), broker.address(), &settings);
        let line = host.wait_for_log(says);
        assert!(line.contains("took its client id"), "{line}");
    }
}

#[test]
fn dynamic_security_refuses_names_that_read_the_topics_of_others() {
    for client in ["statestore", "statestore/v1", "+", "a/#"] {
        let mut command = Command::new("bash");
        command.arg(example::file("dynsec.sh"));
        command.args(["secret", "secret", client, "secret"]);
        finish(command, b"").fails(2, client);
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
