//! Two stores on one data directory: the second waits, and goes on as the first where that one ends.

use std::{path::Path, thread, time::Duration};

use statehouse_tests::{Mosquitto, Server, client::PATIENCE, command};

use crate::asker::Asker;

const ON_ONE_DIRECTORY: &str = "shared";

/// A store on a directory that another one may use.
fn standby(broker: &Mosquitto, directory: &Path) -> Server {
    let data = directory.to_str().unwrap();
    let settings = [("data", data), ("standby", "true"), ("presence", "off")];
    Server::attaching(&broker.url(), broker.address(), &settings)
}

#[test]
fn a_standby_takes_over_where_the_first_is_killed() {
    let directory = tempfile::tempdir().unwrap();
    let data = directory.path().join(ON_ONE_DIRECTORY);
    let broker = Mosquitto::start();
    let mut active = standby(&broker, &data);
    active.wait_until_ready();
    let (mut writer, mut watcher) = (
        Asker::begin(broker.address(), "writer"),
        Asker::begin(broker.address(), "watcher"),
    );
    watcher.watch("key");
    for round in 0..3 {
        let mut waiting = standby(&broker, &data);
        waiting.wait_for_line("standby: ");
        // The one before has to be in the middle of something.
        let mut versions = Vec::new();
        let requests: Vec<_> = (0..100)
            .map(|n| writer.send(&["SET", "key", &format!("{round} {n}")]))
            .collect();
        versions.push(writer.answer(&requests[20]).version.unwrap());
        assert!(!waiting.stdout().contains(&"ready".to_owned()));
        active.kill();
        waiting.wait_until_ready();
        for request in &requests {
            let version = writer.answer(request).version.unwrap();
            versions.push(version);
        }
        assert!(versions[1..].is_sorted(), "{versions:?}");
        let last = versions.last().unwrap();
        watcher.hear("key", last);
        writer.expect("key", &format!("{round} 99"), last);
        assert_eq!(watcher.versions("key").len(), 100 * (round + 1));
        active = waiting;
    }
}

#[test]
fn a_standby_that_is_told_to_stop_stops() {
    let directory = tempfile::tempdir().unwrap();
    let data = directory.path().join(ON_ONE_DIRECTORY);
    let broker = Mosquitto::start();
    let mut active = standby(&broker, &data);
    active.wait_until_ready();
    let mut waiting = standby(&broker, &data);
    waiting.wait_for_line("standby: ");
    waiting.signal("TERM");
    assert_eq!(waiting.wait(PATIENCE).code(), Some(0));
    assert!(active.runs());
}

/// The client id is the session: who loses it ends instead of taking it back. The broker is another store here, since
/// Mosquitto 2.0 says nothing when it closes a connection for this.
#[test]
fn a_store_whose_client_id_is_taken_over_ends() {
    let broker = Server::start();
    let url = format!("mqtt://{}", broker.address());
    let settings = [("broker_client_id", "store"), ("presence", "off")];
    let mut first = Server::attached(&url, broker.address(), &settings);
    let mut second = Server::attached(&url, broker.address(), &settings);
    assert_eq!(first.wait(PATIENCE).code(), Some(76));
    first.wait_for_log("was taken over");
    // The one that has it does not lose it again.
    thread::sleep(Duration::from_millis(500));
    assert!(second.runs());
}

#[test]
fn a_standby_needs_a_directory_and_a_broker() {
    let refused = |arguments: &[&str], why: &str| {
        command::run(arguments, b"").code(2).says(why);
    };
    refused(&["serve", "--standby"], "broker");
    let url = "mqtt://127.0.0.1:1";
    let memory = [
        "serve",
        "--broker",
        url,
        "--durability",
        "memory",
        "--standby",
    ];
    refused(&memory, "data directory");
}
