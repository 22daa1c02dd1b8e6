//! A client: it follows the set point that others give.

use std::{
    process::{Command, Stdio},
    time::Duration,
};

use statehouse_tests::{Lines, Server, binary, client::PATIENCE, server, store};

/// It follows the set point that others give, and its readings disappear when it ends.
#[test]
fn thermostat() {
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
        lines.at(number, PATIENCE).expect("one more line")
    };
    assert_eq!(line(), "set point 23.5");
    let first = store.notification();
    assert!(first.payload.ends_with(b"\r\n20.5\r\n"), "{first:?}");
    store.set("kitchen/setPoint", "18");
    assert_eq!(line(), "set point 18.0");
    assert_eq!(store.ask(&["DEL", "kitchen/setPoint"]).payload(), b":1\r\n");
    assert_eq!(line(), "set point none");
    let status = server::wait(&mut child, Duration::from_secs(30)).expect("it ends");
    assert!(status.success());
    // Nobody writes it any more.
    loop {
        let heard = store.notification();
        assert_eq!(
            heard.topic,
            store::notification_topic("operator", b"kitchen/temperature")
        );
        if heard.payload.ends_with(b"DELETE\r\n") {
            break;
        }
    }
    assert_eq!(store.get("kitchen/temperature"), None);
}
