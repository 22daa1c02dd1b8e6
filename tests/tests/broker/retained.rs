//! Tests retained messages (MQTT 5, section 3.3.1.3).

use statehouse_tests::{Property, Publish, Server, wait::until};

const RETAIN_AS_PUBLISHED: u8 = 8;

/// Subscription options with this Retain Handling: 0 sends retained messages at every subscribe, 1
/// only for a new subscription, 2 never.
fn handling(how: u8) -> u8 {
    how << 4
}

#[test]
fn last_message_is_retained_until_an_empty_one() {
    let server = Server::start();
    let mut publisher = server.connect("publisher");
    for payload in ["first", "second"] {
        let message = Publish::new("a/b", payload).qos(1).retained();
        publisher.publish(message.with(Property::user("k", payload)));
    }
    publisher.publish(Publish::new("a/c", "not retained").qos(1));
    let mut client = server.connect("client");
    client.subscribe("a/#", 1);
    let got = client.next().publish();
    assert_eq!(got.topic, "a/b");
    assert_eq!(got.payload, b"second");
    assert!(got.retain);
    assert_eq!(got.properties, [Property::user("k", "second")]);
    client.expect_nothing();

    publisher.publish(Publish::new("a/b", "").qos(1).retained());
    // Existing subscribers get the empty message like any other.
    let got = client.next().publish();
    assert_eq!((got.payload.len(), got.retain), (0, false));
    let mut later = server.connect("later");
    later.subscribe("a/#", 1);
    later.expect_nothing();
}

#[test]
fn retain_handling_and_retain_as_published_apply() {
    let server = Server::start();
    let mut publisher = server.connect("publisher");
    publisher.publish(Publish::new("a", "kept").qos(1).retained());
    let mut client = server.connect("client");
    client.subscribe("a", handling(2));
    client.expect_nothing();
    // The subscription exists, so 1 sends nothing; 0 does.
    client.subscribe("a", handling(1));
    client.expect_nothing();
    client.subscribe("a", handling(0));
    assert!(client.next().publish().retain);
    client.expect_nothing();
    let mut new = server.connect("new");
    new.subscribe("a", handling(1));
    assert!(new.next().publish().retain);

    // The server clears the RETAIN flag of a forwarded message, unless Retain As Published is set.
    let mut as_published = server.connect("as published");
    as_published.subscribe("a", handling(2) | RETAIN_AS_PUBLISHED);
    publisher.publish(Publish::new("a", "again").qos(1).retained());
    assert!(as_published.next().publish().retain);
    assert!(!client.next().publish().retain);
}

#[test]
fn retained_message_expires() {
    let server = Server::start();
    let mut publisher = server.connect("publisher");
    for (topic, s) in [("a/short", 1), ("a/long", 1000)] {
        let message = Publish::new(topic, "x").qos(1).retained();
        publisher.publish(message.with(Property::MessageExpiry(s)));
    }
    let retained = || {
        let mut client = server.connect("client");
        client.subscribe("a/#", 0);
        client.ping();
        let mut topics: Vec<_> = client.drain().iter().map(|it| it.publish().topic).collect();
        topics.sort();
        topics
    };
    assert_eq!(retained(), ["a/long", "a/short"]);
    until("the short one expires", || retained() == ["a/long"]);
}

/// The server executes a request with the RETAIN flag, and ignores the flag.
#[test]
fn request_is_not_retained() {
    let server = Server::start();
    let mut store = server.store("client");
    let request = store.command(&["SET", "k", "v"]);
    let id = store.client.start(request.publish().retained());
    store.finish(&request, id);
    let mut other = server.connect("other");
    other.subscribe("#", 0);
    other.subscribe("$services/#", 0);
    other.expect_nothing();
}
