//! Tests messages that are not valid requests. Behind a foreign broker the store can neither
//! disconnect a client nor send it a reason code, so it must drop or answer such messages.

use std::{fs, time::Duration};

use statehouse_tests::{
    Admin, Fate, Hlc, Request,
    packet::kind,
    store::{NOTIFICATION_PREFIX, PREVIEW_TOPIC, REQUEST_TOPIC},
};

use crate::{recording_client::RecordingClient, scene::Scene};

/// Sends a request with one defect, and asserts that the store drops it and answers the next
/// request.
fn assert_dropped(client: &mut RecordingClient, wrong: impl FnOnce(&mut Request)) {
    let mut request = client.store.command(&["SET", "key", "dropped"]);
    wrong(&mut request);
    client.store.client.start(request.publish());
    assert_eq!(client.ask(&["GET", "key"]).text, "$-1\\r\\n");
    assert_eq!(client.answer_so_far(&request), None);
}

#[test]
fn forbidden_response_topic_is_dropped_and_counted() {
    let scene = Scene::start();
    let mut client = scene.client("requester");
    for (n, topic) in [
        REQUEST_TOPIC,
        PREVIEW_TOPIC,
        NOTIFICATION_PREFIX,
        &format!("{NOTIFICATION_PREFIX}/00/command/notify/00"),
        "statehouse/v1/admin/policy/status",
        // 129 levels.
        &"/".repeat(128),
    ]
    .iter()
    .enumerate()
    {
        assert_dropped(&mut client, |it| it.response_topic = Some((*topic).into()));
        assert_eq!(scene.host.metric("kicked_total"), n as u64 + 1, "{topic}");
    }
    let line = scene.host.wait_for_log("requester");
    assert!(line.contains("response topic"), "{line}");
    assert_eq!(scene.host.metric("refused_total"), 0);
    assert_eq!(scene.host.metric("broker_malformed_total"), 0);
}

const RULES: &str = r#"
[[rules]]
principals.clientIds = ["press-4"]
stateStoreResources = [{ method = "ReadWrite", keyType = "Pattern", keys = ["press-4:*"] }]

[[rules]]
principals.usernames = ["operator"]
stateStoreResources = [{ method = "ReadWrite", keyType = "Pattern", keys = ["*"] }]
"#;

/// Regression: the log said that no client can connect, and `authz explain` decided by users.
#[test]
fn rules_behind_a_broker_count_client_ids_alone() {
    let directory = tempfile::tempdir().unwrap();
    let rules = directory.path().join("rules.toml");
    fs::write(&rules, RULES).unwrap();
    let settings = [
        ("rules", rules.to_str().unwrap()),
        ("max_client_watches", "1"),
    ];
    let scene = Scene::with(&[], &settings);
    scene.host.wait_for_log("only the client id counts");
    let log = scene.host.stderr();
    let about_connecting = log.iter().find(|line| line.contains("method Connect"));
    assert_eq!(about_connecting, None);

    let explain = |question: &[&str]| scene.host.run(&[&["authz", "explain"], question].concat());
    let allowed = explain(&["press-4", "SET", "press-4:speed"]).code(0);
    allowed.prints(&["allowed: rule 1 ", "note: behind a foreign broker"]);
    let text = allowed.text();
    assert!(!text.contains("not connected") && !text.contains("own broker"));
    explain(&["press-9", "SET", "limits", "--user", "operator"]).code(1);
    for question in [&["CONNECT"][..], &["PUBLISH", "a"], &["SUBSCRIBE", "a"]] {
        let question = [&["press-4"], question].concat();
        explain(&question).fails(2, "ask about a key");
    }
    scene.client("press-4").watch("press-4:speed");
    let limit = explain(&["press-4", "KEYNOTIFY", "press-4:mode"]).code(1);
    limit.prints(&["denied at present: "]);
}

/// Regression: the exit code was that of a client that is not connected.
#[test]
fn list_of_the_clients_of_a_broker_is_refused() {
    let scene = Scene::start();
    let clients = scene.host.run(&["clients"]);
    clients.fails(4, "connected to a foreign broker");
}

#[test]
fn unanswerable_request_is_dropped_and_counted() {
    let scene = Scene::start();
    let mut client = scene.client("requester");
    assert_dropped(&mut client, |it| it.response_topic = None);
    assert_dropped(&mut client, |it| it.correlation = None);
    assert_dropped(&mut client, |it| {
        (it.qos, it.correlation) = (0, None);
    });
    for missing in ["a Response Topic", "Correlation Data"] {
        let line = scene
            .host
            .wait_for_log(&format!("a request needs {missing}"));
        assert!(line.contains("client=\"requester\""), "{line}");
    }
    assert_eq!(scene.host.metric("refused_total"), 3);
    assert_eq!(scene.host.metric("kicked_total"), 0);
}

#[test]
fn request_at_qos_0_is_answered_with_an_error() {
    let scene = Scene::start();
    let mut client = scene.client("requester");
    let mut request = client.store.command(&["SET", "key", "value"]);
    request.qos = 0;
    client.store.client.start(request.publish());
    assert_eq!(client.answer(&request).text, "-ERR syntax error\\r\\n");
}

/// A request names its client in `__srcId`, or else by its response topic. A request without a
/// client may not watch keys.
#[test]
fn watch_belongs_to_the_client_that_the_request_names() {
    let scene = Scene::start();
    let mut client = scene.client("requester");
    let watch = |client: &mut RecordingClient, key: &str, change: fn(Request) -> Request| {
        let request = change(client.store.command(&["KEYNOTIFY", key]));
        client.store.client.start(request.publish());
        client.answer(&request).text
    };
    assert_eq!(watch(&mut client, "named", |it| it), "+OK\\r\\n");
    let silent = |it: Request| it.without("__srcId");
    assert_eq!(watch(&mut client, "topic", silent), "+OK\\r\\n");
    client.store.client.subscribe("answers/#", 1);
    let unknown = |it: Request| {
        let mut it = it.without("__srcId");
        it.response_topic = Some("answers/mine".into());
        it
    };
    let refused = watch(&mut client, "unknown", unknown);
    assert_eq!(refused, "-ERR not authorized\\r\\n");
    // No client is an operator.
    let operator = |it: Request| it.without("__srcId").with("__srcId", "$operator");
    let refused = watch(&mut client, "operator", operator);
    assert_eq!(refused, "-ERR not authorized\\r\\n");
    // All other commands are answered without a client.
    let request = unknown(client.store.command(&["SET", "named", "value"]));
    client.store.client.start(request.publish());
    let named = client.answer(&request).version.unwrap();
    let topic = client.set("topic", "value");
    client.wait_for_notification("named", &named);
    client.wait_for_notification("topic", &topic);
}

#[test]
fn a_change_by_an_operator_notifies_watchers() {
    let scene = Scene::start();
    let mut client = scene.client("watcher");
    client.watch("k");
    let admin = Admin::of(&scene.host);
    let set = admin.done("PUT", "/v1/key?key=k", b"by an operator");
    let version = Hlc::parse_padded(set["version"].as_str().unwrap()).unwrap();
    client.wait_for_notification("k", &version);
    client.assert_value("k", "by an operator", &version);
    let history = admin.done("GET", "/v1/history?key=k", b"");
    let changes = history["changes"].as_array().unwrap();
    assert_eq!(changes.len(), 1, "{history}");
    assert_eq!(changes[0]["client"], "$operator");
    admin.done("DELETE", "/v1/key?key=k", b"");
    assert_eq!(client.ask(&["GET", "k"]).text, "$-1\\r\\n");
    // The store publishes no response to an operator.
    let seen = scene.proxy.seen();
    let published = seen.iter().filter(|it| it.packet.kind() == kind::PUBLISH);
    let topics: Vec<String> = published.map(|it| it.packet.publish().topic).collect();
    let is_about = |what: &str| topics.iter().any(|topic| topic.contains(what));
    assert!(
        is_about(NOTIFICATION_PREFIX) && !is_about("operator"),
        "{topics:?}"
    );
}

/// The client of an expired request does not wait for the answer any more.
#[test]
fn request_that_expires_while_the_store_is_down_is_dropped() {
    let mut scene = Scene::start();
    let mut client = scene.client("requester");
    let brief = |client: &mut RecordingClient, key: &str, expiry_s| {
        let mut request = client.store.command(&["SET", key, "value"]);
        request.expiry_s = Some(expiry_s);
        client.store.client.start(request.publish());
        request
    };
    scene.host.kill();
    let (late, patient) = (
        brief(&mut client, "late", 1),
        brief(&mut client, "patient", 60),
    );
    client.receive_for(Duration::from_millis(2100));
    scene.host.restart();
    assert_eq!(client.answer(&patient).text, "+OK\\r\\n");
    assert_eq!(client.ask(&["GET", "late"]).text, "$-1\\r\\n");
    assert_eq!(client.answer_so_far(&late), None);
}

/// The connection breaks while the request is in flight.
#[test]
fn request_that_expires_in_flight_is_dropped() {
    let scene = Scene::start();
    let mut client = scene.client("requester");
    scene.proxy.refuse(true);
    scene.proxy.script(|seen| {
        let late = seen.packet.body.windows(4).any(|part| part == b"late");
        match late {
            true => Fate::CutBefore,
            false => Fate::Pass,
        }
    });
    let mut late = client.store.command(&["SET", "late", "value"]);
    late.expiry_s = Some(1);
    client.store.client.start(late.publish());
    client.receive_for(Duration::from_millis(2100));
    scene.proxy.pass();
    scene.proxy.refuse(false);
    assert_eq!(client.ask(&["GET", "late"]).text, "$-1\\r\\n");
    assert_eq!(client.answer_so_far(&late), None);
}
