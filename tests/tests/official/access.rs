//! Authenticated clients under each documented configuration: the official Rust client, and the
//! topics of the other official clients.

use std::fs;

use azure_iot_operations_services::state_store::Operation;
use statehouse_tests::{
    Client, Mosquitto, Server, Store,
    command::add_user,
    example::{self, PASSWORD},
    store::{NOTIFICATION_PREFIX, REQUEST_TOPIC, hex},
};

use crate::{
    peer::{Peer, TIMEOUT, expect_notification},
    place::Site,
};

/// The user name and client id in the example files.
const CLIENT: &str = "thermostat";

const RULES: &str = r#"
[[rules]]
principals.usernames = ["thermostat"]
brokerResources = [{ method = "Connect", clientIds = ["{principal.username}"] }]
stateStoreResources = [{ method = "ReadWrite", keyType = "Pattern", keys = ["*"] }]
"#;

/// The embedded broker with users, and with rules if there are any.
fn embedded(rules: Option<&str>) -> Site {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    let users = path("users");
    add_user(&users, CLIENT, PASSWORD).code(0);
    let mut settings = vec![("users", users)];
    if let Some(rules) = rules {
        settings.push(("rules", path("rules.toml")));
        fs::write(path("rules.toml"), rules).unwrap();
    }
    let settings: Vec<_> = settings.iter().map(|(name, it)| (*name, &**it)).collect();
    let server = Server::restartable(&settings);
    Site::embedded(server, Some(directory))
}

/// The subscriptions of one official client, and its response topics.
struct Topics {
    client: &'static str,
    response: String,
    /// Subscription options; 4 is No Local.
    options: u8,
    notifications: Option<String>,
    /// Whether a broker without support for the store delivers notifications.
    notified_by_topic: bool,
}

fn topics_of_all_clients() -> Vec<Topics> {
    let hex = hex(CLIENT.as_bytes());
    vec![
        Topics {
            client: "Rust",
            response: format!("clients/{CLIENT}/services/{REQUEST_TOPIC}/response"),
            options: 1,
            notifications: Some(format!("{NOTIFICATION_PREFIX}/{hex}/command/notify/+")),
            notified_by_topic: true,
        },
        Topics {
            client: ".NET",
            response: format!("clients/{CLIENT}/{REQUEST_TOPIC}"),
            options: 1,
            notifications: Some(format!("{NOTIFICATION_PREFIX}/{CLIENT}/command/notify")),
            notified_by_topic: false,
        },
        Topics {
            client: "Go",
            response: format!("clients/{hex}/{REQUEST_TOPIC}/response"),
            options: 1 | 4,
            notifications: None,
            notified_by_topic: false,
        },
        Topics {
            client: "documents",
            response: format!("clients/{CLIENT}/services/statestore/_any_/command/invoke/response"),
            options: 1,
            notifications: Some(format!("{NOTIFICATION_PREFIX}/{hex}/command/notify/6B6579")),
            notified_by_topic: true,
        },
    ]
}

/// Each client subscribes, watches a key, changes it, and receives responses and notifications on
/// its own topics.
fn each_client_works_on_its_topics(site: &Site) {
    for topics in topics_of_all_clients() {
        let name = topics.client;
        let connect = example::connect(CLIENT);
        let mut client = Client::connect(site.address(), &connect);
        let granted = client.subscribe(&topics.response, topics.options);
        assert_eq!(granted, 1, "{name}: {}", topics.response);
        if let Some(filter) = &topics.notifications {
            assert_eq!(client.subscribe(filter, 1), 1, "{name}: {filter}");
        }
        let mut store = Store::on(client, CLIENT);
        for (command, expected) in [
            (&["KEYNOTIFY", "key"][..], "+OK\\r\\n"),
            (&["SET", "key", name], "+OK\\r\\n"),
            (&["DEL", "key"], ":1\\r\\n"),
        ] {
            let mut request = store.command(command);
            request.response_topic = Some(topics.response.clone());
            store.client.start(request.publish());
            let answer = store.client.take_publish(&topics.response);
            let text = answer.payload.escape_ascii().to_string();
            assert_eq!(text, expected, "{name}: {command:?}");
        }
        if site.is_broker() || topics.notified_by_topic {
            // The watch of the previous client with this id may send more notifications, since
            // presence is off.
            let mut wait_for = |end: &[u8]| {
                while !store.notification().payload.ends_with(end) {}
            };
            wait_for(format!("{name}\r\n").as_bytes());
            wait_for(b"DELETE\r\n");
        }
        store.client.disconnect();
    }
}

async fn rust_client_works(site: &Site) {
    let peer = Peer::connect_as(site, CLIENT, PASSWORD);
    let store = &peer.store;
    let key = || b"key".to_vec();
    let observed = store.observe(key(), TIMEOUT).await.unwrap();
    let mut seen = observed.response;
    peer.set("key", "one").await;
    expect_notification(&mut seen, Operation::Set(b"one".to_vec())).await;
    let got = store.get(key(), TIMEOUT).await.unwrap();
    assert_eq!(got.response.as_deref(), Some(&b"one"[..]));
    let vdel = store.vdel(key(), b"one".to_vec(), None, TIMEOUT).await;
    assert_eq!(vdel.unwrap().response, 1);
    expect_notification(&mut seen, Operation::Del).await;
    let deleted = store.del(key(), None, TIMEOUT).await.unwrap();
    assert_eq!(deleted.response, 0);
    assert!(store.unobserve(key(), TIMEOUT).await.unwrap().response);

    let lock = peer.lock("lock");
    lock.lock(TIMEOUT, TIMEOUT, None).await.unwrap();
    lock.unlock(TIMEOUT).await.unwrap();
    peer.leave().await;
}

fn all_clients_work(site: &Site) {
    each_client_works_on_its_topics(site);
    crate::run(rust_client_works(site));
}

#[test]
fn official_clients_work_with_users() {
    all_clients_work(&embedded(None));
}

#[test]
fn official_clients_work_with_rules() {
    all_clients_work(&embedded(Some(RULES)));
}

/// Starts an attached server without presence. All clients have the same client id, and the store
/// could detect the end of one only after the next one has registered a watch.
fn attached(broker: &Mosquitto) -> Server {
    example::attached(broker, &[("presence", "off")])
}

#[test]
fn official_clients_work_behind_the_documented_acl_file() {
    let broker = example::mosquitto(&[CLIENT]);
    let server = attached(&broker);
    all_clients_work(&Site::behind(server, broker));
}

#[test]
fn official_clients_work_behind_dynamic_security() {
    let broker = example::dynamic_security(CLIENT);
    let server = attached(&broker);
    all_clients_work(&Site::behind(server, broker));
}
