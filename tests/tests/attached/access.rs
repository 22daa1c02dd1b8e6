//! What the access rules allow that the page for operators shows, and what they forbid.

use std::{process::Command, time::Duration};

use statehouse_tests::{
    Client, Heard, Mosquitto, Publish,
    command::finish,
    example::{self, STORE},
    store::{NOTIFICATION_PREFIX, PREVIEW_TOPIC, REQUEST_TOPIC, notification_topic},
};

const ALLOWED: u8 = 0;
const NOBODY_SUBSCRIBED: u8 = 0x10;
const NOT_AUTHORIZED: u8 = 0x87;

fn response_topic(client: &str) -> String {
    format!("clients/{client}/services/statestore/_any_/command/invoke/response")
}

fn publish(client: &mut Client, topic: &str) -> u8 {
    client.publish(Publish::new(topic, topic).qos(1)).reason
}

/// Joe asks for all that there is and hears what is his; the store answers; nobody speaks for the store.
fn each_has_what_is_theirs(broker: &Mosquitto) {
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
    let his_change = notification_topic("joe", b"key");
    let mine = [
        response_topic("joe"),
        format!("{}+", notification_topic("joe", b"")),
    ];
    for filter in &mine {
        assert_eq!(joe.subscribe(filter, 1), 1, "{filter}");
    }
    // A file of rules lets everybody subscribe to everything, and then forwards what may be read.
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
    for topic in [&response_topic("joe"), &his_change] {
        assert_eq!(publish(&mut store, topic), ALLOWED, "{topic}");
        assert_eq!(joe.take_publish(topic).topic, *topic);
    }
    let of_ann = publish(&mut store, &response_topic("ann"));
    assert!([ALLOWED, NOBODY_SUBSCRIBED].contains(&of_ann));
    assert_eq!(publish(&mut store, "anything"), NOT_AUTHORIZED);
    // Neither the requests nor the log nor what is Ann's: only, once more for each further filter, what is his.
    while let Heard::Packet(packet) = joe.poll(Duration::from_millis(200)) {
        let topic = packet.publish().topic;
        assert!(
            topic == response_topic("joe") || topic == his_change,
            "{topic}"
        );
    }
}

#[test]
fn the_file_of_rules_gives_each_what_is_theirs() {
    let broker = example::mosquitto(&["joe", "ann"]);
    each_has_what_is_theirs(&broker);
    // The name is the client id, whatever a client says.
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
fn the_roles_of_dynamic_security_give_each_what_is_theirs() {
    let broker = example::dynamic_security("joe");
    each_has_what_is_theirs(&broker);
    let mut connect = example::connect("joe");
    connect.client_id = "ann".into();
    let (_, refused) = Client::try_connect(broker.address(), &connect);
    assert_eq!(refused.reason, NOT_AUTHORIZED);
}

#[test]
fn a_store_works_under_the_rules_of_the_page() {
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
        let shown = host.stdout();
        assert!(
            shown
                .iter()
                .any(|it| it.starts_with("presence: mosquitto's connection log")),
            "{shown:?}"
        );
    }
}

/// The last command of the page's, as it stands there but for the broker's address.
#[test]
fn the_request_of_the_page_is_answered() {
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
