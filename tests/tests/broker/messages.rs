//! Tests how the server forwards a message: it must pass on payload and properties unchanged,
//! except for the expiry interval and the topic alias.

use std::{thread, time::Duration};

use statehouse_tests::{Client, Connect, Mosquitto, Property, Publish, Server, property::users};

#[test]
fn properties_are_forwarded_unchanged() {
    let server = Server::start();
    let mut client = server.connect("client");
    client.subscribe("#", 1);
    let mut publisher = server.connect("publisher");
    let sent = Publish::new("a", [0, 255, 13, 10])
        .qos(1)
        .with(Property::user("z", "last first"))
        .with(Property::ContentType("text/plain; ü".into()))
        .with(Property::user("a", "1"))
        .with(Property::PayloadFormat(0))
        .with(Property::user("a", "1"))
        .with(Property::user("a", "2"))
        .with(Property::CorrelationData(vec![0, 1, 255, 0]))
        .with(Property::user("", ""))
        .with(Property::ResponseTopic("answers/ü".into()))
        .with(Property::user("ключ", "値\u{1F512}\u{FEFF}"));
    publisher.publish(sent.clone());
    let got = client.next().publish();
    assert_eq!(got.payload, sent.payload);
    // User properties keep their order. Other properties may have any order.
    assert_eq!(users(&got.properties), users(&sent.properties));
    let sorted = |publish: &Publish| {
        let mut sorted: Vec<String> = publish
            .properties
            .iter()
            .filter(|property| !matches!(property, Property::User(..)))
            .map(|property| format!("{property:?}"))
            .collect();
        sorted.sort();
        sorted
    };
    assert_eq!(sorted(&got), sorted(&sent));
}

#[test]
fn expired_message_is_not_delivered() {
    let server = Server::start();
    let resume = Connect::resume("client", 60);
    let mut client = Client::connect(server.address(), &resume);
    client.subscribe("a", 1);
    client.disconnect();
    let mut publisher = server.connect("publisher");
    let expiring = |payload, s| {
        Publish::new("a", payload)
            .qos(1)
            .with(Property::MessageExpiry(s))
    };
    publisher.publish(expiring("short", 1));
    publisher.publish(expiring("long", 3600));
    publisher.publish(Publish::new("a", "for ever").qos(1));
    thread::sleep(Duration::from_millis(1500));
    let mut client = Client::connect(server.address(), &resume);
    let long = client.next().publish();
    assert_eq!(long.payload, b"long");
    // The server subtracts the time that the message was queued.
    let [Property::MessageExpiry(left_s)] = long.properties[..] else {
        panic!("{long:?}");
    };
    assert!((3000..3600).contains(&left_s), "{left_s} s left");
    let last = client.next().publish();
    assert_eq!(last.payload, b"for ever");
    assert_eq!(last.properties, []);
    client.expect_nothing();
}

#[test]
fn topic_alias_is_resolved_and_not_forwarded() {
    let server = Server::start();
    let mut client = server.connect("client");
    client.subscribe("#", 0);
    let mut publisher = server.connect("publisher");
    let connack = publisher.connack.clone().unwrap();
    let maximum = connack.properties.iter().find_map(|it| match it {
        Property::TopicAliasMaximum(n) => Some(*n),
        _ => None,
    });
    let maximum = maximum.expect("topic aliases are offered");
    for (topic, alias, expected) in [
        ("first", 1, "first"),
        ("", 1, "first"),
        ("last", maximum, "last"),
        ("", maximum, "last"),
        ("", 1, "first"),
        // A client may assign an alias to another topic.
        ("second", 1, "second"),
        ("", 1, "second"),
    ] {
        let message = Publish::new(topic, "x").qos(1);
        publisher.publish(message.with(Property::TopicAlias(alias)));
        let got = client.next().publish();
        assert_eq!(got.topic, expected);
        assert_eq!(got.properties, [], "the alias was forwarded");
    }
    // Aliases belong to a connection.
    let mut again = server.connect("publisher");
    again.send(&Publish::new("", "x").with(Property::TopicAlias(1)).bytes());
    let reason = again.expect_closed().unwrap().reason;
    assert!([0x81, 0x82].contains(&reason), "{reason:#04x}");
}

#[test]
fn request_by_topic_alias_is_answered() {
    let server = Server::start();
    let mut store = server.store("client");
    for key in ["one", "two"] {
        let request = store.command(&["SET", key, "v"]);
        let mut publish = request.publish().with(Property::TopicAlias(3));
        if key == "two" {
            publish.topic.clear();
        }
        let id = store.client.start(publish);
        assert_eq!(store.finish(&request, id).payload(), b"+OK\r\n");
        assert_eq!(store.get(key), Some(b"v".to_vec()));
    }
}

#[test]
fn message_of_a_mebibyte_is_forwarded_unchanged() {
    let server = Server::start();
    let mut client = server.connect("client");
    client.subscribe("a", 1);
    let payload: Vec<u8> = (0..1 << 20).map(|n: u32| n.to_le_bytes()[1]).collect();
    server
        .connect("publisher")
        .publish(Publish::new("a", &payload).qos(1));
    assert!(
        client.next().publish().payload == payload,
        "the payload was changed"
    );
}

/// By default a bridge sets a flag in the protocol level, and removes it after return code 1. It
/// publishes its state below `$SYS/`, also as its will.
#[test]
fn mosquitto_bridge_with_default_version_passes_messages() {
    let server = Server::start();
    let mut gateway = server.connect("gateway");
    gateway.subscribe("up/#", 1);
    gateway.subscribe("$SYS/#", 1);
    let bridge = Mosquitto::with(&[
        "connection bridge",
        &format!("address {}", server.address()),
        "topic up/# out 1",
        "topic down/# in 1",
        "restart_timeout 1",
    ]);
    bridge.wait_for_log("Received SUBACK from local.");
    let state = gateway.take_publish("$SYS/broker/connection/");
    assert_eq!(state.payload, b"1");
    let mut local = bridge.connect("local");
    local.subscribe("down/#", 1);
    local.publish(Publish::new("up/speed", "7").qos(1));
    assert_eq!(gateway.take_publish("up/").payload, b"7");
    gateway.publish(Publish::new("down/limit", "9").qos(1));
    assert_eq!(local.take_publish("down/").payload, b"9");
}
