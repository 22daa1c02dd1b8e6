//! Tests how operators list, read and change keys through the admin API.

use std::time::{Duration, Instant};

use serde_json::{Value as Json, json};
use statehouse_tests::{Admin, Server, Store, admin::assert_refused, packet::kind};

use crate::policy;

const UNFENCED: &str = "a fencing token is required";

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
fn lists_show_the_keys_that_clients_wrote() {
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
}

#[test]
fn a_key_shows_its_value_version_and_writer() {
    let server = Server::start();
    let admin = Admin::of(&server);
    let mut store = server.store("press-4");
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
        ("/v1/keys?limit=0", 400),
        ("/v1/keys?limit=1001", 400),
        ("/v1/keys?delimiter=12345678901234567", 400),
    ] {
        let (found, answer) = admin.ask("GET", path, b"");
        assert_eq!(found, status, "{path}: {answer}");
    }
}

#[test]
fn a_change_by_an_operator_is_a_request_like_any_other() {
    let server = Server::start();
    let admin = Admin::of(&server);
    let mut store = server.store("press-4");
    let mut listener = server.connect("listener");
    listener.subscribe("clients/#", 1);
    store.watch("k");
    store.set("k", "by a client");
    store.notification();

    let before = server.metric("requests_total");
    let set = admin.done("PUT", "/v1/key?key=k", b"\xff\0 by an operator");
    assert_eq!(server.metric("requests_total"), before + 1);
    let version = set["version"].as_str().unwrap().to_owned();
    let notification = store.notification();
    assert_eq!(
        statehouse_tests::store::version(&notification)
            .unwrap()
            .to_string(),
        version
    );
    assert_eq!(store.get("k").unwrap(), b"\xff\0 by an operator");
    let shown = admin.done("GET", "/v1/key?key=k", b"");
    assert_eq!(shown["client"], "$operator");
    assert_eq!(shown["version"], set["version"]);
    let history = admin.done("GET", "/v1/history?key=k", b"");
    let last = &history["changes"][0];
    assert_eq!(last["client"], "$operator");
    assert_eq!(last["version"], set["version"]);
    assert_eq!(history["beginning"]["changes"], 2, "one record");

    // Subscribers get no responses to operators, and no client is taken for one.
    listener.ping();
    let heard: Vec<String> = (listener.drain().iter())
        .filter(|it| it.kind() == kind::PUBLISH)
        .map(|it| it.publish().topic)
        .collect();
    let is_about = |what: &str| heard.iter().any(|topic| topic.contains(what));
    assert!(is_about("press-4") && !is_about("operator"), "{heard:?}");
    let connect = statehouse_tests::Connect::new("$operator");
    let (_, refused) = statehouse_tests::Client::try_connect(server.address(), &connect);
    assert_eq!(refused.reason, 0x87, "not authorized");

    assert_replays_alike(&admin, 2);

    // A restart knows what was changed, and accepts changes.
    let value = store.get("k");
    let mut server = server;
    server.kill_and_restart();
    assert_eq!(server.store("press-4").get("k"), value);
    Admin::of(&server).done("PUT", "/v1/key?key=k", b"again");
}

/// Asserts that a replay of at least these many requests gives the same responses.
fn assert_replays_alike(admin: &Admin, least: u64) {
    let replayed = &admin.done("GET", "/v1/replay", b"")["totals"]["summary"];
    assert_eq!(replayed["different"], 0);
    assert_eq!(replayed["not_comparable"], 0);
    assert!(replayed["same"].as_u64().unwrap() >= least, "{replayed}");
}

#[test]
fn a_change_by_an_operator_has_conditions_and_fences() {
    let server = Server::start();
    let admin = Admin::of(&server);
    let mut store = server.store("press-4");
    let version = store.set("k", "by a client").to_string();
    let put = |query: &str| admin.ask("PUT", &format!("/v1/key?{query}"), b"v");
    let early = "key=k&if_version=000000000000001:00001:StateStore";
    assert_refused(put(early), 409, &version);
    assert_eq!(put("key=k&if_version=none").0, 409);
    assert_eq!(put("key=new&if_version=none").0, 200);
    assert_eq!(put(&format!("key=k&if_version={version}&px=600000")).0, 200);
    assert!(admin.done("GET", "/v1/key?key=k", b"")["expires_ms"].is_u64());
    for (query, name) in [
        ("key=k&px=-1", "`px`"),
        ("key=k&px=0", "`px`"),
        ("key=k&if_version=soon", "`if_version`"),
    ] {
        assert_refused(put(query), 400, name);
    }
    assert_eq!(put("key=").0, 400);
    // A key with a fence.
    let fence = store.set("other", "v").to_string();
    let request = store
        .command(&[&b"SET"[..], b"locked", b"v"])
        .with("__ft", &fence);
    assert_eq!(store.call(&request).payload(), b"+OK\r\n");
    assert_refused(put("key=locked"), 422, UNFENCED);
    let removed = admin.ask("DELETE", "/v1/key?key=locked", b"");
    assert_refused(removed, 422, UNFENCED);
    assert_eq!(put(&format!("key=locked&fence={fence}")).0, 200);
    for (method, key) in [("PUT", "locked"), ("DELETE", "locked"), ("DELETE", "none")] {
        for fence in ["%00", "soon", ""] {
            let path = format!("/v1/key?key={key}&fence={fence}");
            assert_refused(admin.ask(method, &path, b"v"), 400, "`fence`");
        }
    }
    let locked = admin.done("GET", "/v1/key?key=locked", b"");
    assert_eq!(locked["fencing_token"], json!(fence));
    let remove = |key: &str| admin.ask("DELETE", &format!("/v1/key?key={key}"), b"").0;
    assert_eq!((remove("new"), remove("new")), (200, 404));
    assert_replays_alike(&admin, 9);
}

#[test]
fn a_removal_with_a_version_removes_no_other_one() {
    let server = Server::start();
    let admin = Admin::of(&server);
    let mut store = server.store("press-4");
    let old = store.set("k", "same").to_string();
    let now = store.set("k", "same").to_string();
    let remove = |version: &str| {
        let path = format!("/v1/key?key=k&if_version={version}");
        admin.ask("DELETE", &path, b"")
    };
    assert_refused(remove(&old), 409, &now);
    for version in ["none", "soon", ""] {
        println!("{version:?}");
        assert_refused(remove(version), 400, "`if_version`");
    }
    assert_eq!(store.get("k"), Some(b"same".to_vec()));
    assert_eq!((remove(&now).0, remove(&now).0), (200, 404));
    assert_eq!(store.get("k"), None);
    // Any bytes, and none.
    for value in [&b"\r\n$1\r\n\xff\0"[..], b""] {
        let version = store.set("k", value).to_string();
        assert_eq!(remove(&version).0, 200);
    }
    // The fence of the key counts.
    let fence = store.set("other", "v").to_string();
    let request = store.command(&["SET", "k", "v"]).with("__ft", &fence);
    let version = store.call(&request).version().unwrap().to_string();
    assert_refused(remove(&version), 422, UNFENCED);
    assert_eq!(remove(&format!("{version}&fence={fence}")).0, 200);
    assert_replays_alike(&admin, 4);
}

#[test]
fn a_change_beyond_a_limit_or_against_a_policy_changes_nothing() {
    let server = Server::with_config("max_keys = 2\nmax_client_keys = 2\nmax_value_bytes = 1000\n");
    let admin = Admin::of(&server);
    let put = |key: &str, value: &[u8]| admin.ask("PUT", &format!("/v1/key?key={key}"), value);
    assert_eq!(put("once%2Fa", b"first").0, 200);
    assert_refused(put("long", &[b'x'; 1001]), 422, "longer than");
    assert_eq!(put("huge", &vec![b'x'; (1 << 20) + 1]).0, 413);
    assert_eq!(put("b", b"").0, 200);
    let refused = server.refused("max_keys") + server.refused("max_client_keys");
    assert_refused(put("c", b""), 422, "quota");
    let now = server.refused("max_keys") + server.refused("max_client_keys");
    assert_eq!(now, refused + 1, "a refusal is counted as that of a client");
    let line = server.wait_for_log("client=\"$operator\"");
    assert!(line.contains("statehouse::audit"), "{line}");

    let rule = statehouse_tests::policies::example("write-once");
    let path = rule.to_str().unwrap();
    policy(&server, &["load", path]).code(0);
    policy(&server, &["promote", "write-once"]).code(0);
    assert_refused(put("once%2Fa", b"second"), 422, "written once");
    let kept = admin.done("GET", "/v1/key?key=once%2Fa", b"");
    assert_eq!(kept["value"], "first");
    let keys = admin.done("GET", "/v1/keys", b"");
    assert_eq!(keys["entries"].as_array().unwrap().len(), 2, "{keys}");
}

#[test]
fn changes_are_streamed_and_a_flood_is_cut() {
    let server = Server::start();
    let admin = Admin::of(&server);
    let mut store = server.store("press-4");
    // Keys that expire at once.
    let deadline = Instant::now() + Duration::from_secs(2);
    let started = [(); 150].map(|()| {
        let key = format!("flood/{}", store.client.packet_id());
        let left = deadline.saturating_duration_since(Instant::now());
        let request = store.command(&["SET", &key, "v", "PX", &left.as_millis().to_string()]);
        (store.client.start(request.publish()), request)
    });
    for (id, request) in started {
        assert_eq!(store.finish(&request, id).payload(), b"+OK\r\n");
    }
    let mut stream = admin.stream("/v1/changes?prefix=a%2F");
    let mut flood = admin.stream("/v1/changes?prefix=flood%2F");
    let version = store.set("a/1", "v").to_string();
    store.set("b", "not below the prefix");
    admin.done("PUT", "/v1/key?key=a%2F2", b"v");
    store.ask(&["DEL", "a/1"]);
    // The client of a value that was replaced or removed since is not known any more.
    let (name, first) = stream.event();
    assert_eq!((&*name, &first["version"]), ("change", &json!(version)));
    let fields = |it: &Json| (it["key"].clone(), it["kind"].clone());
    assert_eq!(fields(&first), (json!("a/1"), json!("set")));
    assert_eq!(first["bytes"], 1);
    assert!(first["at"].as_u64().unwrap() > 1_700_000_000_000);
    let (_, second) = stream.event();
    assert_eq!(fields(&second), (json!("a/2"), json!("set")));
    assert_eq!(second["client"], "$operator");
    let (_, third) = stream.event();
    assert_eq!(fields(&third), (json!("a/1"), json!("deleted")));

    // The flood expires at once: only a part of it is sent, and the stream goes on.
    let mut sent = 0;
    loop {
        match flood.event() {
            (name, change) if name == "change" => {
                assert_eq!(change["kind"], "expired", "{change}");
                sent += 1;
            }
            (name, _) => break assert_eq!(name, "lost"),
        }
    }
    assert!(sent < 150, "{sent} of 150 changes were sent");
    store.set("flood/after", "v");
    let after = std::iter::repeat_with(|| flood.event());
    let mut after = after.skip_while(|(_, it)| it["key"] != "flood/after");
    assert_eq!(after.next().unwrap().1["client"], "press-4");
    assert_eq!(admin.ask("GET", "/v1/changes?prefix=%zz", b"").0, 400);
}
