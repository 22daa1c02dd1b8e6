//! Tests how operators list, read and change keys through the admin API.

use serde_json::{Value as Json, json};
use statehouse_tests::{Admin, Server, Store};

/// All entries of a list, in pages of `limit`.
fn list(admin: &Admin, query: &str, limit: usize) -> Vec<Json> {
    let (mut all, mut after) = (Vec::new(), String::new());
    loop {
        let path = format!("/v1/keys?{query}&limit={limit}{after}");
        let page = admin.done("GET", &path, b"");
        let entries = page["entries"].as_array().unwrap();
        assert!(entries.len() <= limit);
        all.extend(entries.iter().cloned());
        match page["next"].as_str() {
            Some(next) => after = format!("&after={next}"),
            None => return all,
        }
    }
}

fn names(entries: &[Json]) -> Vec<Json> {
    let name = |it: &Json| match it["kind"].as_str() {
        Some("prefix") => json!([it["name"], it["keys"]]),
        _ => it["key"].clone(),
    };
    entries.iter().map(name).collect()
}

/// Sets a key with the options of SET.
fn set(store: &mut Store, arguments: &[&[u8]]) {
    let answer = store.ask(&[&[&b"SET"[..]], arguments].concat());
    assert_eq!(answer.payload(), b"+OK\r\n");
}

#[test]
fn lists_and_keys_show_what_clients_wrote() {
    let server = Server::start();
    let admin = Admin::of(&server);
    let mut store = server.store("press-4");
    for number in 0..150 {
        store.set(format!("many/{number:03}"), "v");
    }
    for key in [&b"a"[..], b"a/1", b"a/b/2", b"a/b/3", b"\xff\xfe/x"] {
        store.set(key, "v");
    }
    let all = list(&admin, "prefix=&delimiter=%2F", 2);
    let binary = json!({ "base64": "//4v" });
    let top = [
        json!("a"),
        json!(["a/", 3]),
        json!(["many/", 150]),
        json!([binary, 1]),
    ];
    assert_eq!(names(&all), top);
    let below = list(&admin, "prefix=a%2F&delimiter=%2F", 1);
    assert_eq!(names(&below), [json!("a/1"), json!(["a/b/", 2])]);
    // A list of more keys than the store reads at once, and all of it in one or in many answers.
    let many = list(&admin, "prefix=many%2F", 1000);
    assert_eq!(many.len(), 150);
    assert_eq!(many, list(&admin, "prefix=many%2F", 70));
    assert_eq!(many[149]["bytes"], 1);
    assert!(list(&admin, "prefix=none&delimiter=%2F", 10).is_empty());

    // Keys that are too long for a cursor do not stop a list.
    let long = "k".repeat(5000);
    for end in ["a", "b", "c"] {
        store.set(format!("long/{long}{end}"), "v");
    }
    store.set("long/z", "v");
    let found = list(&admin, "prefix=long%2F", 1);
    assert_eq!(names(&found).last(), Some(&json!("long/z")));

    store.watch("secret");
    store.watch_prefix("sec");
    let version = store.set("secret", b"\xff\0");
    set(&mut store, &[b"brief", b"text", b"PX", b"600000"]);
    let found = admin.done("GET", "/v1/key?key=secret", b"");
    let version = version.to_string();
    for (name, expected) in [
        ("key", json!("secret")),
        ("value", json!({ "base64": "/wA=" })),
        ("bytes", json!(2)),
        ("truncated", json!(false)),
        ("expires_ms", Json::Null),
        ("fencing_token", Json::Null),
        ("client", json!("press-4")),
        ("watches", json!(2)),
        ("version", json!(version)),
    ] {
        assert_eq!(found[name], expected, "{name} of {found}");
    }
    let brief = admin.done("GET", "/v1/key?key=brief", b"");
    assert!(
        brief["expires_ms"].as_u64().unwrap() > 1_700_000_000_000,
        "{brief}"
    );
    for (path, status) in [
        ("/v1/key?key=none", 404),
        ("/v1/key", 400),
        ("/v1/keys?after=no", 400),
        ("/v1/keys?prefix=%zz", 400),
        ("/v1/keys?limit=1001", 400),
        ("/v1/keys?delimiter=12345678901234567", 400),
    ] {
        let (found, answer) = admin.ask("GET", path, b"");
        assert_eq!(found, status, "{path}: {answer}");
    }
}
