//! Two stores on one data directory: the standby must wait, and must take over when the active
//! store ends.

use std::{path::Path, thread, time::Duration};

use statehouse_tests::{Mosquitto, Server, client::PATIENCE, command};

use crate::recording_client::RecordingClient;

const SHARED_DIRECTORY: &str = "shared";

/// Starts a store on a data directory that another store may use.
fn standby(broker: &Mosquitto, directory: &Path) -> Server {
    let data = directory.to_str().unwrap();
    let settings = [("data", data), ("standby", "true"), ("presence", "off")];
    Server::attaching(&broker.url(), broker.address(), &settings)
}

#[test]
fn standby_takes_over_when_the_active_store_is_killed() {
    let directory = tempfile::tempdir().unwrap();
    let data = directory.path().join(SHARED_DIRECTORY);
    let broker = Mosquitto::start();
    let mut active = standby(&broker, &data);
    active.wait_until_ready();
    let (mut writer, mut watcher) = (
        RecordingClient::begin(broker.address(), "writer"),
        RecordingClient::begin(broker.address(), "watcher"),
    );
    watcher.watch("key");
    for round in 0..3 {
        let mut waiting = standby(&broker, &data);
        waiting.wait_for_line("standby: ");
        // The kill must hit the active store while it handles requests.
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
        watcher.wait_for_notification("key", last);
        writer.assert_value("key", &format!("{round} 99"), last);
        assert_eq!(watcher.notified_versions("key").len(), 100 * (round + 1));
        active = waiting;
    }
}

#[test]
fn waiting_standby_ignores_sighup_and_stops_on_sigterm() {
    let directory = tempfile::tempdir().unwrap();
    let data = directory.path().join(SHARED_DIRECTORY);
    let broker = Mosquitto::start();
    let mut active = standby(&broker, &data);
    active.wait_until_ready();
    let mut waiting = standby(&broker, &data);
    waiting.wait_for_line("standby: ");
    waiting.signal("HUP");
    thread::sleep(Duration::from_millis(500));
    assert!(waiting.runs());
    waiting.stop();
    assert!(active.runs());
}

/// A store must end if another connection takes over its session, since two stores would take the
/// session from each other forever. The broker is another store here, since Mosquitto 2.0 closes
/// such a connection without a reason code.
#[test]
fn store_ends_when_its_session_is_taken_over() {
    let broker = Server::start();
    let url = format!("mqtt://{}", broker.address());
    let settings = [("broker_client_id", "store"), ("presence", "off")];
    let mut first = Server::attached(&url, broker.address(), &settings);
    let mut second = Server::attached(&url, broker.address(), &settings);
    assert_eq!(first.wait(PATIENCE).code(), Some(76));
    first.wait_for_log("was taken over");
    // The second store keeps the session.
    thread::sleep(Duration::from_millis(500));
    assert!(second.runs());
}

#[test]
fn standby_needs_a_data_directory_and_a_broker() {
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
