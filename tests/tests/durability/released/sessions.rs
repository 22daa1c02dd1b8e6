//! Sessions with everything that the broker keeps of them, and retained messages.

use statehouse_tests::{
    Client, Connect, Property, Publish, Server,
    packet::{self, acknowledge, kind},
};

/// As long as the broker allows, which is a week.
const EXPIRY_S: u32 = u32::MAX;

/// The subscription identifier of a session.
const IDENTIFIER: u32 = 7;

const RETAIN_AS_PUBLISHED: u8 = 8;

/// The packet id of the message that a client has sent and not released.
const UNRELEASED: u16 = 4711;

fn connect(id: &str) -> Connect {
    Connect::resume(id, EXPIRY_S)
}

fn message(topic: &str, payload: &str) -> Publish {
    let property = Property::user("origin", "press-4");
    Publish::new(topic, payload).with(property)
}

/// A session with subscriptions, queued messages and a will; one in the middle of exchanges at
/// QoS 2; one of a user; retained messages.
pub(super) fn make(server: &Server) {
    let address = server.address();
    let will = message("will/departed", "lost").qos(1);
    Client::connect(address, &connect("departed").will(will, EXPIRY_S)).abort();

    let mut sleeper = Client::connect(address, &connect("sleeper"));
    let identifier = [Property::SubscriptionId(IDENTIFIER)];
    assert_eq!(sleeper.subscribe_with("alarm/#", 1, &identifier), 1);
    assert_eq!(sleeper.subscribe("raw/+", 2 | RETAIN_AS_PUBLISHED), 2);
    assert_eq!(sleeper.subscribe("$share/workers/job/#", 1), 1);
    sleeper.abort();

    let anna = connect("tablet").login("anna", "secret");
    let mut anna = Client::connect(address, &anna);
    assert_eq!(anna.subscribe("news/#", 1), 1);
    anna.disconnect();

    let mut halfway = Client::connect(address, &connect("halfway"));
    assert_eq!(halfway.subscribe("exact/#", 2), 2);
    halfway.acknowledges = false;
    let mut received = message("raw/counted", "once").qos(2);
    received.packet_id = UNRELEASED;
    halfway.start(received);
    halfway.take_ack(kind::PUBREC, UNRELEASED);

    let mut publisher = server.connect("publisher");
    for (topic, qos) in [
        ("alarm/1", 1),
        ("alarm/2", 1),
        ("raw/1", 2),
        ("job/1", 1),
        ("news/1", 1),
        ("exact/1", 2),
        ("exact/2", 2),
    ] {
        publisher.publish(message(topic, "queued").qos(qos));
    }
    let first = halfway.take_publish("exact/1");
    halfway.take_publish("exact/2");
    halfway.send(&acknowledge(kind::PUBREC, first.packet_id));
    halfway.take_ack(kind::PUBREL, first.packet_id);
    halfway.abort();

    let format = [
        Property::PayloadFormat(1),
        Property::ContentType("text/plain".into()),
    ];
    let mut retained = message("shop/open", "yes").qos(1).retained();
    retained.properties.splice(0..0, format);
    publisher.publish(retained);
    publisher.publish(message("shop/closed", "").qos(1).retained());
    let mut expiring = message("shop/offer", "today").retained();
    expiring
        .properties
        .insert(0, Property::MessageExpiry(86_400));
    publisher.publish(expiring);
}

/// Everything of [`make`] is there.
pub(super) fn check(server: &Server) {
    check_retained(server);
    check_will(server);
    let address = server.address();
    let resume = |connect: &Connect| {
        let client = Client::connect(address, connect);
        assert!(client.session_present(), "the session of {connect:?}");
        client
    };
    let mut sleeper = resume(&connect("sleeper"));
    for (topic, qos) in [("alarm/1", 1), ("alarm/2", 1), ("raw/1", 2), ("job/1", 1)] {
        let queued = sleeper.take_publish(topic);
        assert_eq!((queued.qos, &queued.payload[..]), (qos, &b"queued"[..]));
        assert_eq!(queued.user("origin"), Some("press-4"));
        let identifier = Property::SubscriptionId(IDENTIFIER);
        let has_identifier = queued.properties.contains(&identifier);
        assert_eq!(has_identifier, topic.starts_with("alarm"), "{queued:?}");
    }
    let counted = sleeper.take_publish("raw/counted");
    assert_eq!(counted.payload, b"once");
    for _ in 0..2 {
        sleeper.take("a PUBREL", |it| it.kind() == kind::PUBREL);
    }

    let mut halfway = resume(&connect("halfway"));
    let released = halfway.take("a PUBREL", |it| it.kind() == kind::PUBREL);
    halfway.send(&acknowledge(kind::PUBCOMP, released.ack().packet_id));
    let sent = halfway.take_publish("exact/2");
    assert!(
        sent.dup && sent.packet_id != released.ack().packet_id,
        "{sent:?}"
    );
    // The broker knows that it has passed this message on.
    let mut received = message("raw/counted", "once").qos(2);
    (received.packet_id, received.dup) = (UNRELEASED, true);
    halfway.start(received);
    halfway.take_ack(kind::PUBREC, UNRELEASED);
    halfway.send(&acknowledge(kind::PUBREL, UNRELEASED));
    halfway.take_ack(kind::PUBCOMP, UNRELEASED);
    sleeper.expect_nothing();

    let mut anna = resume(&connect("tablet").login("anna", "secret"));
    assert_eq!(anna.take_publish("news/1").payload, b"queued");
    anna.disconnect();
    // The session belongs to a user, so another client with this id does not get it.
    let stranger = Client::connect(address, &connect("tablet"));
    assert!(
        !stranger.session_present(),
        "the session has lost its owner"
    );
}

/// The will of a session is published when the session ends.
fn check_will(server: &Server) {
    let mut witness = server.connect("witness");
    assert_eq!(witness.subscribe("will/#", 1), 1);
    server.connect("departed").disconnect();
    let will = witness.take_publish("will/departed");
    assert_eq!((will.qos, &will.payload[..]), (1, &b"lost"[..]));
    assert_eq!(will.user("origin"), Some("press-4"));
}

fn check_retained(server: &Server) {
    let mut reader = server.connect("reader");
    assert_eq!(reader.subscribe("shop/#", 1), 1);
    let mut found = [reader.take_publish("shop/"), reader.take_publish("shop/")];
    found.sort_by(|a, b| a.topic.cmp(&b.topic));
    let [offer, open] = found;
    assert_eq!(
        (&*offer.topic, &*offer.payload),
        ("shop/offer", &b"today"[..])
    );
    assert_eq!((&*open.topic, &*open.payload), ("shop/open", &b"yes"[..]));
    let property = Property::ContentType("text/plain".into());
    assert!(open.properties.contains(&property), "{open:?}");
    reader.expect_nothing();
    reader.send(&packet::disconnect(0, &[]));
}
