//! Kicking through Mosquitto's dynamic security: who breaks the rule on response topics is out for some seconds.

use std::time::Duration;

use statehouse_tests::{
    Mosquitto, Server,
    example::{self, STORE},
    store::REQUEST_TOPIC,
};

use crate::scene::{eventually, figure};

/// MQTT 5 section 3.14.2.1.
const ADMINISTRATIVE_ACTION: u8 = 0x98;
const NOT_AUTHORIZED: u8 = 0x87;

fn attached(broker: &Mosquitto) -> Server {
    let host = example::attached(broker, &[("kick", "dynsec")]);
    host.wait_for_log("dynamic security");
    host
}

/// Joe, who asks for an answer where requests go.
fn offend(broker: &Mosquitto) {
    let mut joe = example::store(broker, "joe");
    let mut request = joe.command(&["GET", "key"]);
    request.response_topic = Some(REQUEST_TOPIC.into());
    joe.client.start(request.publish());
    joe.client.expect_disconnect(ADMINISTRATIVE_ACTION);
}

fn is_let_in(broker: &Mosquitto) -> bool {
    match example::attempt(broker, "joe").reason {
        0 => true,
        NOT_AUTHORIZED => false,
        other => panic!("CONNACK {other:#04x}"),
    }
}

#[test]
fn who_breaks_the_rule_is_out_for_some_seconds() {
    let broker = example::dynamic_security("joe");
    let host = attached(&broker);
    offend(&broker);
    assert!(!is_let_in(&broker));
    assert!(
        host.directory()
            .join("statehouse-data/kicked-users")
            .exists()
    );
    eventually("he is let in again", || is_let_in(&broker));
    host.wait_for_log("a user is enabled again");
    eventually("nobody is disabled", || {
        !host
            .directory()
            .join("statehouse-data/kicked-users")
            .exists()
    });
    let mut joe = example::store(&broker, "joe");
    joe.set("key", "value");
    assert_eq!(figure(&host, "kicked_total"), 1);
}

#[test]
fn a_crash_of_the_store_leaves_nobody_locked_out() {
    let broker = example::dynamic_security("joe");
    let mut host = attached(&broker);
    offend(&broker);
    host.kill();
    assert!(!is_let_in(&broker));
    host.restart();
    eventually("the next run lets him in", || is_let_in(&broker));
}

#[test]
fn a_store_that_stops_leaves_nobody_locked_out() {
    let broker = example::dynamic_security("joe");
    let mut host = attached(&broker);
    offend(&broker);
    host.signal("TERM");
    assert!(host.wait(Duration::from_secs(10)).success());
    assert!(is_let_in(&broker));
    assert!(
        !host
            .directory()
            .join("statehouse-data/kicked-users")
            .exists()
    );
}

#[test]
fn the_store_does_not_kick_itself() {
    let broker = example::dynamic_security("joe");
    let host = attached(&broker);
    let mut shared = example::connect(STORE);
    shared.client_id = "console".into();
    let mut console = statehouse_tests::Client::connect(broker.address(), &shared);
    let mut joe = example::store(&broker, "joe");
    let mut request = joe
        .command(&["GET", "key"])
        .without("__srcId")
        .with("__srcId", "console");
    request.response_topic = Some(REQUEST_TOPIC.into());
    joe.client.start(request.publish());
    host.wait_for_log("the user name of the store itself");
    console.ping();
    joe.set("key", "value");
}
