//! A rules file, and a signed order for the store of the archive.

use std::{fs, process::Command};

use serde_json::Value;
use statehouse_tests::{
    Property, Publish, Server, binary, command::command, command::finish, property,
    wait::eventually,
};

use super::{VERSIONS, archive::Archive, fixtures};

/// What a press with the user name `anna` may do under the rules.
const DECISIONS: [(&str, &str, &str, bool); 12] = [
    ("anna:1", "CONNECT", "", true),
    ("eve", "CONNECT", "", false),
    ("anna:1", "PUBLISH", "telemetry/press/4", true),
    ("anna:1", "PUBLISH", "telemetry/mill/4", false),
    ("anna:1", "SUBSCRIBE", "alarm/4", true),
    ("anna:1", "SUBSCRIBE", "alarm/#", false),
    ("anna:1", "SET", "own/anna:1/x", true),
    ("anna:1", "SET", "own/bob/x", false),
    ("anna:1", "GET", "limits", true),
    ("anna:1", "SET", "limits", false),
    ("anna:1", "GET", "sensor/7", true),
    ("anna:1", "GET", "sensor/77", false),
];

const TOPIC: &str = "statehouse/v1/admin/policy";
const SERIAL: u64 = 7;

fn file(name: &str, version: &str, ending: &str) -> String {
    let path = fixtures().join(format!("{name}-{version}.{ending}"));
    path.to_str().unwrap().to_owned()
}

#[test]
fn rules_of_a_release_decide_as_before() {
    for version in VERSIONS {
        let rules = file("rules", version, "toml");
        for (client, action, object, is_allowed) in DECISIONS {
            let mut explain = command(&["authz", "explain", "--rules", &rules]);
            explain.args(["--user", "anna"]);
            explain.args(["--attribute", "building=17", "--attribute", "role=press"]);
            explain.args([client, action]);
            explain.args((!object.is_empty()).then_some(object));
            let ran = finish(explain, b"");
            let code = if is_allowed { 0 } else { 1 };
            assert_eq!(ran.code, Some(code), "{client} {action} {object}: {ran:#?}");
        }
    }
}

/// The client that gives the order may do so under the rules.
#[test]
fn signed_order_for_a_store_of_a_release_is_carried_out() {
    for version in VERSIONS {
        let archive = Archive::of(version);
        let order = fs::read(file("order", version, "json")).unwrap();
        let order: Value = serde_json::from_slice(&order).unwrap();
        let text = |name: &str| order[name].as_str().unwrap();
        let (_directory, data) = archive.copy("embedded");
        let mut serve = Command::new(binary::statehouse());
        serve
            .args(["serve", "--listen", "127.0.0.1:0", "--allow-anonymous"])
            .args(["--trusted-keys", text("trusted_key")])
            .args(["--rules", &file("rules", version, "toml")])
            .arg("--data")
            .arg(data)
            .envs(archive.clock().environment());
        let server = Server::spawn(serve, tempfile::tempdir().unwrap());
        let mut fleet = server.connect("fleet");
        let order = Publish::new(&format!("{TOPIC}/order"), text("payload"))
            .with(Property::user("signature", text("signature")))
            .qos(1);
        let ack = fleet.publish(order);
        let why = property::reason_string(&ack.properties);
        assert_eq!((ack.reason, why), (0, None));
        fleet.subscribe(&format!("{TOPIC}/status"), 0);
        eventually("the order is carried out", || {
            let status: Value = serde_json::from_slice(&fleet.take_publish(TOPIC).payload).unwrap();
            let is_done = status["serial"] == SERIAL && status["state"] == "done";
            is_done.then(|| assert_eq!(status["active"]["name"], "marked-first"))
        });
    }
}
