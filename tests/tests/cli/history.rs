//! Tests `statehouse history` and `statehouse get --as-of`, which read earlier values of a key from
//! the data directory. They must give the same results while the server runs and after it has
//! stopped.

use std::{thread, time::Duration};

use serde_json::{Value, json};
use statehouse_tests::{
    Client, Connect, Hlc, Server, assert_contains, command::add_user, policies, store::Store,
};

use crate::data_directory::{restore_into, run_checked};

/// The changes of a key, newest first, and the line about the beginning of the history.
fn history(server: &Server, key: &str) -> (Vec<Value>, Value) {
    let ran = server.run(&["history", key, "--json"]).code(0);
    let mut lines = ran.objects();
    let beginning = lines.pop().unwrap();
    assert_eq!(beginning["event"], "beginning");
    (lines, beginning)
}

fn events(changes: &[Value]) -> Vec<&str> {
    let events = changes.iter().map(|change| change["event"].as_str());
    events.map(Option::unwrap).collect()
}

/// The value of the key `key` at this moment; none if it did not exist.
fn as_of(server: &Server, moment: &str) -> Option<String> {
    let ran = server.run(&["get", "key", "--as-of", moment]);
    match ran.code {
        Some(0) => Some(ran.text()),
        Some(1) => {
            assert!(ran.stdout.is_empty(), "{ran:#?}");
            ran.says("did not exist then");
            None
        }
        _ => panic!("{ran:#?}"),
    }
}

/// The versions that a test has written, and the fencing token of the third.
struct Written {
    sets: [Hlc; 4],
    token: Hlc,
}

/// Sets and deletes the key `key` by two clients.
fn write_changes(server: &Server) -> Written {
    let mut store = server.store("client 1");
    let mut other = server.store("client\n2");
    let first = store.set("key", "one");
    let second = other.set("key", "two");
    let token = store.set("lock", "client");
    let fenced = store
        .command(&["SET", "key", "three", "PX", "600000"])
        .with("__ft", &token);
    let third = store.call(&fenced).version().unwrap();
    let deletion = store.command(&["DEL", "key"]).with("__ft", &token);
    assert_eq!(store.call(&deletion).payload(), b":1\r\n");
    let fourth = store.set("key", vec![0xFF; 10_000]);
    // None of these requests changes the key.
    store.get("key");
    assert_eq!(store.ask(&["SET", "key", "no", "NX"]).payload(), b":-1\r\n");
    store.set("keys", "another");
    Written {
        sets: [first, second, third, fourth],
        token,
    }
}

fn check_changes(server: &Server, written: &Written) {
    let (changes, beginning) = history(server, "key");
    assert_eq!(
        events(&changes),
        ["set", "deleted", "set", "set", "set"],
        "{changes:#?}"
    );
    let [four, deleted, three, two, one] = &changes[..] else {
        unreachable!()
    };
    for (change, version) in [one, two, three, four].into_iter().zip(&written.sets) {
        assert_eq!(change["version"], version.to_string());
        assert_eq!(change["key"], "key");
        assert_eq!(change["policy"]["name"], "standard");
        assert_eq!(
            server.stdout()[1].rsplit(' ').next().unwrap(),
            change["policy"]["digest"]
        );
    }
    let [_, _, third, fourth] = &written.sets;
    let deleted_at = Hlc::parse_padded(deleted["version"].as_str().unwrap()).unwrap();
    assert!(*third < deleted_at && deleted_at < *fourth, "{deleted}");
    assert_eq!((&one["value"], &one["bytes"]), (&"one".into(), &3.into()));
    assert_eq!(one["client"], "client 1");
    assert_eq!(two["client"], "client\n2");
    assert!(two["fencing_token"].is_null() && two["expires"].is_null());
    assert_eq!(three["fencing_token"], written.token.to_string());
    assert!(three["expires"].as_str().unwrap() > three["time"].as_str().unwrap());
    assert_eq!(four["bytes"], 10_000);
    assert_eq!(four["truncated"], true);
    assert_eq!(one["truncated"], false);
    assert!(deleted["value"].is_null() && deleted["client"] == "client 1");
    assert!(beginning["since"].is_null() && beginning["before"].is_null());
    assert_eq!(beginning["changes"], 5);
}

#[test]
fn history_lists_every_change_of_a_key() {
    let mut server = Server::restartable(&[]);
    let written = write_changes(&server);
    check_changes(&server, &written);
    server.stop();
    check_changes(&server, &written);

    // The text output escapes control characters, and says how many changes it omits.
    let text = server
        .run(&["history", "key", "--limit", "4"])
        .code(0)
        .text();
    assert_contains!(text, "client\\n2", "\\xff");
    assert!(text.contains("5 changes of key since the store began (1 older one not shown"));
    let newest = text.lines().find(|line| line.starts_with("set ")).unwrap();
    assert!(newest.contains(&written.sets[3].to_string()), "{text}");
    assert!(text.contains(&format!("fence    {}", written.token)));
    // Versions contain the name of the node.
    let ran = server.run(&["history", "key", "--node", "Other", "--limit", "1"]);
    assert!(ran.code(0).text().contains(":Other"));
    server.run(&["history", "no such key"]).code(1);
}

/// Sessions that outlive their connection are recorded, others only for their users.
#[test]
fn history_and_meta_name_the_user_of_every_session() {
    let directory = tempfile::tempdir().unwrap();
    let users = directory.path().join("users").display().to_string();
    for name in ["anna", "bert"] {
        add_user(&users, name, name).code(0);
    }
    let server = Server::restartable(&[("users", &users)]);
    let client = |connect: Connect, user: &str| {
        let id = connect.client_id.clone();
        let login = connect.login(user, user);
        Store::new(Client::connect(server.address(), &login), &id)
    };
    let mut short = client(Connect::new("short"), "anna");
    let mut long = client(Connect::resume("long", 100), "bert");
    for _ in 0..2 {
        short.set("key", "value");
        long.ask(&["SET", "key", "long", "PX", "3600000"]);
    }
    let (changes, _) = history(&server, "key");
    let by = |change: &Value| (change["client"].clone(), change["user"].clone());
    let (of_short, of_long) = (("short", "anna"), ("long", "bert"));
    let expected = [of_long, of_short, of_long, of_short];
    let expected = expected.map(|(client, user)| (client.into(), user.into()));
    assert_eq!(changes.iter().map(by).collect::<Vec<_>>(), expected);
    let text = server.run(&["history", "key"]).code(0).text();
    assert_contains!(text, "    client   long\n    user     bert\n");

    let clients = server.run(&["clients", "--json"]).code(0).object();
    let listed = clients["clients"].as_array().unwrap().iter();
    let mut listed: Vec<_> = listed.map(|it| (&it["client"], &it["user"])).collect();
    listed.sort_by_key(|it| it.0.as_str());
    let named = [of_long, of_short].map(|(client, user)| (json!(client), json!(user)));
    assert_eq!(
        listed,
        named.each_ref().map(|(client, user)| (client, user))
    );

    let password = directory.path().join("password");
    std::fs::write(&password, "anna").unwrap();
    let url = format!("mqtt://{}", server.address());
    let password = password.display().to_string();
    let meta = |more: &[&str]| {
        let get = ["get", "key", "--meta", "--url", &url, "--user", "anna"];
        let all = [&get[..], &["--password-file", &password], more].concat();
        server.run(&all).code(0)
    };
    let text = meta(&[]).text();
    assert_contains!(text, "\nholder   long\nwriter   long, user bert\n");
    short.set("key", "value");
    let shown = meta(&["--json"]).object();
    let writer = json!({ "client": "short", "user": "anna" });
    assert_eq!(shown["writer"], writer);
    assert_eq!(shown["holder"], Value::Null);
    let elsewhere = meta(&["--data", "no such directory"]);
    assert!(elsewhere.stderr.is_empty() && !elsewhere.text().contains("writer"));
}

/// The expiry of a key belongs to no client and no policy.
#[test]
fn history_lists_the_expiry_of_a_key() {
    let server = Server::start();
    let mut store = server.store("client");
    let mut watcher = server.store("watcher");
    watcher.watch("key");
    store.ask(&["SET", "key", "value", "PX", "50"]);
    watcher.notification();
    watcher.notification();
    let (changes, _) = history(&server, "key");
    assert_eq!(events(&changes), ["expired", "set"]);
    assert!(changes[0]["client"].is_null() && changes[0]["policy"].is_null());
    let set = changes[1]["version"].as_str().unwrap();
    let expired = changes[0]["version"].as_str().unwrap();
    assert_eq!(as_of(&server, set).as_deref(), Some("value"));
    assert_eq!(as_of(&server, expired), None);
    // A key ends when it expires, also before a sweep removes it.
    let expires = changes[1]["expires"].as_str().unwrap();
    assert_eq!(as_of(&server, expires), None);
}

#[test]
fn history_names_the_policy_of_each_change() {
    let mut server = Server::restartable(&[]);
    server.store("client").set("key", "fine");
    server.stop();
    server.restart_with(&[("policy", policies::faulty())]);
    let answer = server.store("client").ask(&["SET", "key", "fine"]);
    assert_eq!(answer.payload(), b"+OK\r\n");
    let (changes, _) = history(&server, "key");
    let names: Vec<&Value> = changes.iter().map(|it| &it["policy"]["name"]).collect();
    assert_eq!(&names[names.len() - 2..], ["faulty", "standard"]);
    let text = server.run(&["history", "key"]).code(0).text();
    assert_contains!(text, "faulty 0.1.0@", "standard ");
}

#[test]
fn get_as_of_a_version_returns_its_value() {
    let mut server = Server::restartable(&[]);
    let mut store = server.store("client");
    let before = store.set("other", "x");
    let mut versions = Vec::new();
    for n in 0..8 {
        let value = format!("value {n}");
        versions.push((store.set("key", &value), Some(value)));
        if n % 4 == 3 {
            store.ask(&["DEL", "key"]);
            let (changes, _) = history(&server, "key");
            let version = changes[0]["version"].as_str().unwrap();
            versions.push((Hlc::parse_padded(version).unwrap(), None));
        }
    }
    let behind = store.set("other", "y");
    for stopped in [false, true] {
        if stopped {
            server.stop();
        }
        assert_eq!(as_of(&server, &before.to_string()), None);
        for (version, value) in &versions {
            let found = as_of(&server, &version.to_string());
            assert_eq!(found, *value, "{version}");
            // The millisecond before this version.
            let earlier = format!("{}:{}", version.wall_ms - 1, u32::MAX);
            let expected = versions
                .iter()
                .rev()
                .find(|(it, _)| it.wall_ms < version.wall_ms);
            let expected = expected.and_then(|(_, value)| value.clone());
            assert_eq!(as_of(&server, &earlier), expected, "{earlier}");
        }
        assert_eq!(as_of(&server, &behind.to_string()), None);
    }
    let (version, value) = &versions[3];
    let ran = server.run(&["get", "key", "--as-of", &version.to_string(), "--json"]);
    let json = ran.code(0).object();
    assert_eq!(json["value"], value.clone().unwrap());
    assert_eq!(json["version"], version.to_string());
    let moment = version.to_string();
    let ran = server.run(&["get", "key", "--as-of", &moment, "--with-version"]);
    let expected = format!("{version}\n{}", value.clone().unwrap());
    assert_eq!(ran.code(0).text(), expected);
}

#[test]
fn get_as_of_a_time_returns_the_value_at_that_time() {
    let server = Server::start();
    let mut store = server.store("client");
    // If the clock of a client is ahead, so is the version, but not the recorded time.
    let mut ahead = store.command(&["SET", "key", "one"]).without("__ts");
    ahead = ahead.with("__ts", Hlc::now(30_000));
    assert!(store.call(&ahead).version().unwrap() > Hlc::now(20_000));
    thread::sleep(Duration::from_millis(30));
    store.set("key", "two");
    let (changes, _) = history(&server, "key");
    let (two, one) = (&changes[0]["time"], &changes[1]["time"]);
    let (two, one) = (two.as_str().unwrap(), one.as_str().unwrap());
    assert_eq!(as_of(&server, one).as_deref(), Some("one"));
    assert_eq!(as_of(&server, two).as_deref(), Some("two"));
    let spaced = one.replace('T', " ").replace('Z', "+00:00");
    assert_eq!(as_of(&server, &spaced).as_deref(), Some("one"));
    assert_eq!(as_of(&server, "0s").as_deref(), Some("two"));
    assert_eq!(as_of(&server, "1h"), None, "the store is younger");

    for wrong in ["12:30", "soon", "2026-13-01", ""] {
        server
            .run(&["get", "key", "--as-of", wrong])
            .fails(2, "--as-of");
    }
    server
        .run(&["get", "key", "--as-of", "2999-01-01"])
        .fails(2, "still to come");
    let late = Hlc::now(50_000).to_string();
    server
        .run(&["get", "key", "--as-of", &late])
        .fails(2, "no version as late as that");
}

/// A restored directory has no history from before its backup. It knows earlier values only of keys
/// that have not changed since.
#[test]
fn moment_before_the_kept_history_is_refused() {
    let mut server = Server::restartable(&[]);
    let mut store = server.store("client");
    let [old, older] = [store.set("changed", "1"), store.set("steady", "1")];
    let [new, _] = [store.set("changed", "2"), store.set("gone", "1")];
    store.ask(&["DEL", "gone"]);
    drop(store);
    restore_into(&server, "restored");
    server.stop();
    server.restart_with(&[("data", "restored")]);
    let mut store = server.store("client");
    let newest = store.set("changed", "3");
    let latest = store.set("gone", "2");

    let at = |key: &str, version: &Hlc| {
        let moment = version.to_string();
        server.run(&["get", key, "--as-of", &moment, "--data", "restored"])
    };
    assert_eq!(at("changed", &newest).code(0).text(), "3");
    assert_eq!(at("changed", &new).code(0).text(), "2");
    assert_eq!(at("steady", &older).code(0).text(), "1");
    assert_eq!(at("gone", &latest).code(0).text(), "2");
    at("gone", &newest).code(1);
    for (key, version) in [("changed", &old), ("gone", &old), ("steady", &old)] {
        at(key, version)
            .fails(2, "not kept any more")
            .says("reaches back to 20")
            .says("--history-retention");
    }
    let ran = server.run(&["history", "changed", "--data", "restored", "--json"]);
    let lines = ran.code(0).objects();
    assert_eq!(lines.len(), 2, "{lines:#?}");
    assert_eq!(lines[0]["version"], newest.to_string());
    assert_eq!(lines[1]["before"]["version"], new.to_string());
    assert!(lines[1]["since"].is_string());
    let text = server.run(&["history", "steady", "--data", "restored"]);
    let text = text.code(0).text();
    assert!(text.contains("0 changes of steady since 20"), "{text}");
    assert_contains!(text, &format!("1 byte of version {older}"));
    server
        .run(&["history", "nothing", "--data", "restored"])
        .code(1);
}

#[test]
fn directory_without_a_store_is_refused_and_unchanged() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    for command in [
        &["history", "key"][..],
        &["get", "key", "--as-of", "1m"],
        &["replay"],
        &["snapshot", "file"],
        &["doctor"],
    ] {
        let ran = run_checked(path, command).fails(2, "statehouse-data");
        assert!(ran.stdout.is_empty(), "{ran:?}");
    }
    assert!(
        !path.join("statehouse-data").exists(),
        "the command created a directory"
    );
    std::fs::create_dir(path.join("statehouse-data")).unwrap();
    for command in [
        &["history", "key"][..],
        &["get", "key", "--as-of", "1m"],
        &["replay"],
        &["snapshot", "file"],
    ] {
        run_checked(path, command).fails(2, "no log");
    }
    let left = std::fs::read_dir(path.join("statehouse-data")).unwrap();
    assert_eq!(left.count(), 0, "the command created files");
}
