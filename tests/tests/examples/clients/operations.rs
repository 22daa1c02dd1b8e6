//! Each operation, with arbitrary bytes, and what a client reports if the store refuses it.

use std::{fs, net::TcpListener, process::Command};

use serde_json::{Value, json};
use statehouse_tests::{
    Server,
    command::{add_user, finish},
    server::own_address,
};

use super::driver::{Driver, LANGUAGES, Language, hex, python, workspace};

/// Bytes that a text protocol could confuse.
const BYTES: &[u8] = b"\x00\r\n$-1\r\n\xFF*+:\xC3";

fn assert_operations(language: Language) {
    let server = Server::start();
    let mut store = Driver::connect(language, server.address());
    let (key, value) = (hex(BYTES), hex([BYTES, BYTES].concat()));
    assert_eq!(store.ask(json!({"do": "get", "key": key})), Value::Null);
    let set = store.ask(json!({"do": "set", "key": key, "value": value}));
    assert_eq!(set["applied"], true);
    let got = store.ask(json!({"do": "get", "key": key}));
    assert_eq!(got, json!({"data": value, "version": set["version"]}));
    let stored = server.store("other").get(BYTES);
    assert_eq!(stored, Some([BYTES, BYTES].concat()));

    let refused = json!({"applied": false, "version": set["version"]});
    for condition in [
        json!({"nx": true}),
        json!({"nex": true}),
        json!({"if_version": "1:0:StateStore"}),
    ] {
        let mut request = json!({"do": "set", "key": key, "value": hex("other")});
        let more = condition.as_object().unwrap().clone();
        request.as_object_mut().unwrap().extend(more);
        assert_eq!(store.ask(request), refused, "{condition}");
    }
    let absent = json!({"do": "set", "key": hex("none"), "value": "", "if_version": "1:0:a"});
    let refused = json!({"applied": false, "version": null});
    assert_eq!(store.ask(absent), refused);
    let renewed = json!({"do": "set", "key": key, "value": value, "if_version": set["version"]});
    let renewed = store.ask(renewed);
    assert_eq!(renewed["applied"], true);

    let found = store.ask(json!({"do": "scan", "pattern": hex("*")}));
    assert_eq!(found, json!([key]));
    let version = &renewed["version"];
    for (value, expected) in [
        (hex("other"), json!({"deleted": false, "version": version})),
        (value.clone(), json!({"deleted": true, "version": version})),
        (value, json!({"deleted": false, "version": null})),
    ] {
        let deleted = store.ask(json!({"do": "vdelete", "key": key, "value": value}));
        assert_eq!(deleted, expected, "{value}");
    }
    assert_eq!(store.ask(json!({"do": "delete", "key": key})), Value::Null);
    let set = store.ask(json!({"do": "set", "key": key, "value": ""}));
    assert_eq!(store.ask(json!({"do": "get", "key": key}))["data"], "");
    let deleted = store.ask(json!({"do": "delete", "key": key}));
    assert_eq!(deleted, set["version"]);
    store.ask(json!({"do": "close"}));
}

#[test]
fn python_client_executes_each_operation() {
    assert_operations(Language::Python);
}

#[test]
fn javascript_client_executes_each_operation() {
    assert_operations(Language::JavaScript);
}

/// Regression: the store closed the connection, and the Python client sent the request again on
/// each later one.
#[test]
fn request_that_the_store_does_not_take_is_refused_before_it_is_sent() {
    let server = Server::start();
    for language in LANGUAGES {
        let mut store = Driver::connect(language, server.address());
        let large = hex(vec![b'x'; 2 << 20]);
        let refused = store.attempt(json!({"do": "set", "key": hex("large"), "value": large}));
        let said = refused["text"]
            .to_string()
            .contains("the store takes 2097152");
        assert!(said, "{language:?}: {refused}");
        let set = store.ask(json!({"do": "set", "key": hex("small"), "value": hex("x")}));
        assert_eq!(set["applied"], true, "{language:?}");
    }
}

#[test]
fn scan_continues_over_pages() {
    let server = Server::start();
    let mut writer = server.store("writer");
    let keys: Vec<String> = (0..1500)
        .map(|n| format!("{n:04}{}", "k".repeat(200)))
        .collect();
    for key in &keys {
        writer.set(key, "");
    }
    for language in LANGUAGES {
        let mut store = Driver::connect(language, server.address());
        let found = store.ask(json!({"do": "scan", "pattern": hex("*")}));
        let found = found.as_array().unwrap();
        let mut found: Vec<_> = found.iter().map(Value::as_str).collect();
        found.sort();
        let expected: Vec<_> = keys.iter().map(hex).collect();
        let expected: Vec<_> = expected.iter().map(|it| Some(it.as_str())).collect();
        assert_eq!(found, expected, "{language:?}");
    }
}

#[test]
fn watch_reports_each_change_and_the_expiry() {
    let server = Server::start();
    for language in LANGUAGES {
        let mut store = Driver::connect(language, server.address());
        let key = hex(BYTES);
        store.ask(json!({"do": "watch", "key": key}));
        for value in ["one", "", "two"] {
            store.ask(json!({"do": "set", "key": key, "value": hex(value)}));
        }
        store.ask(json!({"do": "set", "key": key, "value": key, "ttl_ms": 50}));
        for expected in [
            json!(hex("one")),
            json!(""),
            json!(hex("two")),
            json!(key),
            Value::Null,
        ] {
            let event = store.ask(json!({"do": "next", "key": key, "timeout_ms": 20_000}));
            assert_eq!(event, json!({"data": expected}), "{language:?}");
        }
        store.ask(json!({"do": "unwatch", "key": key}));
        store.ask(json!({"do": "watch", "key": key}));
        let event = store.ask(json!({"do": "next", "key": key, "timeout_ms": 100}));
        assert_eq!(event, Value::Null, "{language:?}");
    }
}

/// Regression: the STOP of the earlier watch followed the registration of the later one, which then
/// got no event.
#[test]
fn watch_that_replaces_another_one_gets_changes() {
    let server = Server::start();
    let mut store = Driver::connect(Language::Python, server.address());
    let key = hex("key");
    store.ask(json!({"do": "watch", "key": key}));
    store.ask(json!({"do": "replace_watch", "key": key}));
    store.ask(json!({"do": "set", "key": key, "value": hex("value")}));
    let event = store.ask(json!({"do": "next", "key": key, "timeout_ms": 20_000}));
    assert_eq!(event, json!({"data": hex("value")}));
}

#[test]
fn error_of_the_store_is_reported_with_its_text() {
    let server = Server::start();
    for language in LANGUAGES {
        let mut store = Driver::connect(language, server.address());
        let refused = store.attempt(json!({"do": "get", "key": ""}));
        let expected = json!({"error": "refused", "text": "the key length is zero"});
        assert_eq!(refused, expected, "{language:?}");
        let reached = Driver::start(language).attempt(json!({
            "do": "connect", "url": format!("mqtt://{}", own_address()), "timeout_ms": 2000
        }));
        assert_eq!(reached["error"], "transport", "{language:?}: {reached}");
    }
}

/// Regression: the JavaScript client repeated the password, and the Python client gave no reason.
#[test]
fn failed_connection_has_a_reason_and_shows_no_password() {
    // It accepts connections and never answers.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("mqtt://anna:SECRET@{}", silent.local_addr().unwrap());
    for language in LANGUAGES {
        let connect = json!({"do": "connect", "url": url, "timeout_ms": 500});
        let failed = Driver::start(language).attempt(connect);
        assert_eq!(failed["error"], "transport", "{language:?}: {failed}");
        let text = failed["text"].as_str().unwrap();
        let has_reason = ["within", "timeout"].iter().any(|it| text.contains(it));
        assert!(
            has_reason && !text.contains("SECRET"),
            "{language:?}: {text}"
        );
    }
}

/// Regression: a timer of JavaScript that is longer than 2^31 ms ends at once.
#[test]
fn longer_timeout_than_that_of_a_timer_is_taken() {
    let server = Server::start();
    let url = format!("mqtt://{}", server.address());
    for language in LANGUAGES {
        let mut store = Driver::start(language);
        store.ask(json!({"do": "connect", "url": url, "timeout_ms": 1_u64 << 32}));
        let set = store.ask(json!({"do": "set", "key": hex("key"), "value": ""}));
        assert_eq!(set["applied"], true, "{language:?}");
    }
}

#[test]
fn wrong_password_is_denied_over_tls_and_websocket() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| format!("{}/{name}", directory.path().display());
    let names = vec!["localhost".to_owned(), "127.0.0.1".to_owned()];
    let issued = rcgen::generate_simple_self_signed(names).unwrap();
    fs::write(path("store.crt"), issued.cert.pem()).unwrap();
    fs::write(path("store.key"), issued.signing_key.serialize_pem()).unwrap();
    let users = path("users");
    add_user(&users, "panel", "right").code(0);
    let server = Server::with(
        "",
        &[
            &[
                "--listen",
                "mqtts://127.0.0.1:0",
                "--listen",
                "ws://127.0.0.1:0",
            ][..],
            &[
                "--tls-cert",
                &path("store.crt"),
                "--tls-key",
                &path("store.key"),
            ],
            &["--users", &users],
        ]
        .concat(),
    );
    let addresses = server.addresses();
    for language in LANGUAGES {
        for url in [
            format!("mqtts://{}", addresses[1]),
            format!("ws://{}/mqtt", addresses[2]),
        ] {
            let mut connect = json!({
                "do": "connect", "url": url, "user": "panel", "password": "wrong",
                "timeout_ms": 30_000
            });
            if url.starts_with("mqtts") {
                connect["ca"] = path("store.crt").into();
            }
            let denied = Driver::start(language).attempt(connect.clone());
            assert_eq!(denied["error"], "denied", "{language:?} {url}: {denied}");
            connect["password"] = "right".into();
            let mut store = Driver::start(language);
            store.ask(connect);
            store.ask(json!({"do": "set", "key": hex("key"), "value": hex("value")}));
        }
        let untrusted = format!("mqtts://{}", addresses[1]);
        let untrusted =
            json!({"do": "connect", "url": untrusted, "user": "panel", "password": "right"});
        let untrusted = Driver::start(language).attempt(untrusted);
        assert_eq!(untrusted["error"], "transport", "{language:?}: {untrusted}");
    }
}

/// Regression: Nagle's algorithm delayed each request by 40 ms behind Mosquitto.
#[test]
fn sockets_of_both_clients_send_without_delay() {
    let server = Server::start();
    for language in LANGUAGES {
        let mut store = Driver::connect(language, server.address());
        let nodelay = store.ask(json!({"do": "nodelay"}));
        assert_eq!(nodelay, true, "{language:?}");
    }
}

#[test]
fn types_of_both_clients_hold() {
    let clients = workspace().join("examples/clients");
    let mut mypy = Command::new(python());
    mypy.args(["-m", "mypy", "--strict", "--cache-dir"])
        .arg(workspace().join("target/tmp/mypy"))
        .arg(clients.join("python/statehouse.py"));
    finish(mypy, b"").code(0);
    let mut tsc = Command::new(clients.join("javascript/node_modules/.bin/tsc"));
    tsc.arg("--project").arg(clients.join("javascript"));
    finish(tsc, b"").code(0);
}

/// The store refuses timestamps that are more than a minute ahead.
#[test]
fn client_sets_again_after_its_clock_is_set_back() {
    let server = Server::start();
    for language in LANGUAGES {
        let mut store = Driver::connect(language, server.address());
        let set = json!({"do": "set", "key": hex("key"), "value": ""});
        store.ask(json!({"do": "wall", "ahead_ms": 86_400_000}));
        let refused = store.attempt(set.clone());
        assert_eq!(refused["error"], "refused", "{language:?}: {refused}");
        store.ask(json!({"do": "wall", "ahead_ms": 0}));
        assert_eq!(store.ask(set)["applied"], true, "{language:?}");
    }
}

/// Regression: a wait of the JavaScript client lasted longer by the time that its clock was set
/// back.
#[test]
fn wait_for_a_change_ends_although_the_clock_is_set_back() {
    let server = Server::start();
    let mut store = Driver::connect(Language::JavaScript, server.address());
    let key = hex("key");
    store.ask(json!({"do": "watch", "key": key}));
    let next =
        json!({"do": "next", "key": key, "timeout_ms": 500, "then_wall_ahead_ms": -86_400_000});
    assert_eq!(store.ask(next), Value::Null);
}
