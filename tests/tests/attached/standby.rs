//! Two stores on one data directory: the standby must wait, and must take over when the active
//! store ends.

use std::{fs, path::Path, thread, time::Duration};

use statehouse_tests::{
    Mosquitto, Proxy, Publish, Server, Way,
    client::PATIENCE,
    command,
    packet::kind,
    wait::{eventually, until},
};

use crate::{
    recording_client::RecordingClient,
    scene::{attachments, hold_pubacks},
};

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
        let requests: Vec<_> = (0..100)
            .map(|n| writer.send(&["SET", "key", &format!("{round} {n}")]))
            .collect();
        writer.answer(&requests[20]);
        assert!(!waiting.stdout().contains(&"ready".to_owned()));
        active.kill();
        waiting.wait_until_ready();
        let versions = writer.versions(&requests);
        assert!(versions.is_sorted(), "{versions:?}");
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

/// Regression: for a second, the rules from before the wait decided, also requests that the broker
/// had queued.
#[test]
fn standby_decides_by_rules_that_changed_during_its_wait() {
    let directory = tempfile::tempdir().unwrap();
    let place = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    let (data, rules) = (place(SHARED_DIRECTORY), place("rules.toml"));
    let allow = |client: &str| {
        let text = format!(
            r#"
[[rules]]
principals.clientIds = ["{client}"]
stateStoreResources = [{{ method = "ReadWrite", keyType = "Pattern", keys = ["*"] }}]
"#
        );
        fs::write(&rules, text).unwrap();
    };
    allow("writer");
    let broker = Mosquitto::start();
    let start = || {
        let settings = [
            ("data", &*data),
            ("rules", &*rules),
            ("standby", "true"),
            ("presence", "off"),
        ];
        Server::attaching(&broker.url(), broker.address(), &settings)
    };
    let mut active = start();
    active.wait_until_ready();
    let mut waiting = start();
    waiting.wait_for_line("standby: ");
    let mut writer = RecordingClient::begin(broker.address(), "writer");
    writer.set("key", "before");
    allow("another");
    // The server leaves a file that was just written to its next look.
    thread::sleep(Duration::from_millis(1_200));
    active.kill();
    let request = writer.send(&["SET", "key", "after"]);
    waiting.wait_until_ready();
    assert_eq!(writer.answer(&request).text, "-ERR not authorized\\r\\n");
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

/// The messages to the topic of the store's marks that the broker has sent through this relay.
fn marks(proxy: &Proxy) -> Vec<Publish> {
    let seen = proxy.seen();
    let published = seen
        .iter()
        .filter(|it| (it.way, it.packet.kind()) == (Way::FromBroker, kind::PUBLISH))
        .map(|it| it.packet.publish());
    published
        .filter(|it| it.topic.starts_with("statehouse/v1/attached/"))
        .collect()
}

/// A store whose network was broken takes its session back when it returns. It must not end the
/// store that took the session meanwhile. The broker is another store here, since Mosquitto 2.0
/// closes such a connection without a reason code.
#[test]
fn returning_store_ends_and_the_later_one_continues() {
    let broker = Server::start();
    let (network, other_network) = (
        Proxy::start(broker.address()),
        Proxy::start(broker.address()),
    );
    let settings = [("broker_client_id", "store"), ("presence", "off")];
    let mut first = Server::attached(&network.url(), broker.address(), &settings);
    let topic = eventually("the mark of the first store returns", || {
        marks(&network).pop().map(|it| it.topic)
    });
    // The relay has passed on the mark when it sees the next message.
    let mut writer = broker.connect("writer");
    writer.publish(Publish::new(&topic, "no mark").qos(1));
    until("another message follows the mark", || {
        marks(&network).len() == 2
    });
    network.refuse(true);
    network.cut();

    let mut second = Server::attached(&other_network.url(), broker.address(), &settings);
    until("the broker has the mark of the second store", || {
        marks(&other_network).iter().any(|it| !it.retain)
    });
    // Regression: the first store waited for PUBACKs over a connection that it had ended.
    hold_pubacks(&network);
    network.refuse(false);
    assert_eq!(first.wait(PATIENCE).code(), Some(76));
    first.wait_for_log("another store attached with it later");
    let log = first.stderr();
    let waited = "the broker did not take everything";
    assert!(!log.iter().any(|line| line.contains(waited)), "{log:?}");
    until("the second store attaches again", || {
        attachments(&other_network) >= 2
    });
    // The second store keeps the session.
    thread::sleep(Duration::from_millis(500));
    assert!(second.runs());
}

#[test]
fn standby_needs_a_data_directory_and_a_broker() {
    command::run(&["serve", "--standby"], b"").fails(2, "broker");
    let url = "mqtt://127.0.0.1:1";
    let memory = ["serve", "--broker", url, "--durability", "memory"];
    command::run(&[&memory[..], &["--standby"]].concat(), b"").fails(2, "data directory");
}
