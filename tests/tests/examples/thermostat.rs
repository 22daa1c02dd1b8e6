//! Tests the example client `thermostat`.

use std::{
    process::{Command, Stdio},
    time::Duration,
};

use statehouse_tests::{Lines, Server, binary, client::PATIENCE, server, store};

/// The thermostat follows the set point of other clients. Its readings expire after it ends.
#[test]
fn thermostat_follows_the_set_point() {
    let server = Server::start();
    let mut store = server.store("operator");
    store.watch("kitchen/temperature");
    store.set("kitchen/setPoint", "23.5");
    let mut child = Command::new(binary::example("thermostat"))
        .args([&server.address().to_string(), "kitchen", "--for", "3s"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = Lines::follow(child.stdout.take().unwrap());
    let mut read = 0..;
    let mut line = || {
        let number = read.next().unwrap();
        lines.at(number, PATIENCE).expect("a line is missing")
    };
    assert_eq!(line(), "set point 23.5");
    let first = store.notification();
    assert!(first.payload.ends_with(b"\r\n20.5\r\n"), "{first:?}");
    store.set("kitchen/setPoint", "18");
    assert_eq!(line(), "set point 18.0");
    assert_eq!(store.ask(&["DEL", "kitchen/setPoint"]).payload(), b":1\r\n");
    assert_eq!(line(), "set point none");
    let status =
        server::wait(&mut child, Duration::from_secs(30)).expect("the thermostat did not end");
    assert!(status.success());
    // The thermostat no longer renews its reading, so the key expires.
    loop {
        let notification = store.notification();
        assert_eq!(
            notification.topic,
            store::notification_topic("operator", b"kitchen/temperature")
        );
        if notification.payload.ends_with(b"DELETE\r\n") {
            break;
        }
    }
    assert_eq!(store.get("kitchen/temperature"), None);
}
