//! `statehouse snapshot` and `statehouse restore`: the same store again, from one file.

use std::{fs, path::Path};

use statehouse_tests::{Client, Connect, Publish, Server, Store, policies, property};

use crate::looking::{data, files, flip, look, object, stop};

fn resume(server: &Server, id: &str) -> Client {
    Client::connect(server.address(), &Connect::resume(id, 3600))
}

/// A store that is restored gives no client a new part.
#[test]
fn what_clients_own_is_theirs_again() {
    let mut server = Server::restartable(&[("max_client_keys", "2")]);
    let mut store = server.store("client");
    store.set("one", "x");
    store.set("two", "x");
    server.store("other").set("three", "x");
    stop(&mut server);
    look(&server, &["snapshot", "backup"]).code(0);
    look(&server, &["restore", "backup", "--data", "again"]).code(0);
    server.restart_with(&[("data", "again")]);
    let mut store = server.store("client");
    for key in ["three", "four"] {
        let answer = store.ask(&["SET", key, "x"]);
        assert!(answer.text().contains("quota"), "{key}: {}", answer.text());
    }
    server.store("other").set("four", "x");
    assert_eq!(store.ask(&["DEL", "one"]).payload(), b":1\r\n");
    store.set("four", "x");
}

/// Keys with versions, fences and expiry, sessions with what waits for them, and answers that are owed.
#[test]
fn everything_is_there_again() {
    for stopped in [false, true] {
        let mut server = Server::restartable(&[]);
        let mut store = Store::new(resume(&server, "client"), "client");
        let lock = store.set("lock", "client");
        let plain = store.set("plain", vec![0, 0xFF, b'\n']);
        let fenced = store.command(&["SET", "fenced", "x"]).with("__ft", &lock);
        let fenced = store.call(&fenced).version().unwrap();
        let expiring = store.ask(&["SET", "expiring", "x", "PX", "3600000"]);
        let expiring = expiring.version().unwrap();
        store.set("deleted", "x");
        store.ask(&["DEL", "deleted"]);
        let once = store.command(&["SET", "once", "x", "NX"]);
        let mut sent = once.publish();
        sent.packet_id = 4242;
        store.client.start(sent.clone());
        let answer = store.finish(&once, 4242);
        let mut other = server.connect("other");
        let retained = Publish::new("kept", "retained").qos(1);
        other.publish(Publish {
            retain: true,
            ..retained
        });
        let response_topic = store.response_topic();
        store.client.disconnect();
        other.publish(Publish::new("clients/client/news", "queued").qos(1));
        other.disconnect();
        if stopped {
            stop(&mut server);
        }

        let wrote = object(&look(&server, &["snapshot", "backup", "--json"]).code(0));
        assert_eq!((&wrote["keys"], &wrote["sessions"]), (&5.into(), &1.into()));
        assert_eq!(wrote["retained"], 1);
        assert!(wrote["remembered"].as_u64().unwrap() >= 6, "{wrote}");
        assert_eq!(wrote["policies"][0]["active"], true);
        // Beside a server, and only into a directory of its own.
        let restored = object(
            &look(
                &server,
                &["restore", "backup", "--data", "made/for/it", "--json"],
            )
            .code(0),
        );
        assert_eq!(restored, wrote);
        look(&server, &["doctor", "made/for/it"]).code(0);
        if !stopped {
            stop(&mut server);
        }
        server.restart_with(&[("data", "made/for/it")]);

        let client = resume(&server, "client");
        assert!(client.session_present());
        let mut store = Store::on(client, "client");
        assert_eq!(store.response_topic(), response_topic);
        let news = store.client.take_publish("clients/client/news");
        assert_eq!(news.payload, b"queued");
        for (key, version) in [
            ("lock", &lock),
            ("plain", &plain),
            ("fenced", &fenced),
            ("expiring", &expiring),
        ] {
            let found = store.ask(&["GET", key]).version();
            assert_eq!(found.as_ref(), Some(version), "{key}");
        }
        assert_eq!(store.get("plain"), Some(vec![0, 0xFF, b'\n']));
        assert_eq!(store.get("deleted"), None);
        let refused = store.ask(&["SET", "fenced", "y"]);
        assert!(refused.text().contains("fencing token is required"));
        // The answer is owed again, byte for byte, and the request does not run again.
        sent.dup = true;
        store.client.start(sent);
        let again = store.finish(&once, 4242);
        assert_eq!(again.payload(), b"+OK\r\n");
        assert_eq!(
            (again.payload(), again.version()),
            (answer.payload(), answer.version())
        );
        // Versions go on above everything that was given.
        assert!(store.set("new", "x") > answer.version().unwrap());
        let ran = look(
            &server,
            &["history", "expiring", "--data", "made/for/it", "--json"],
        );
        assert_eq!(
            object(&ran.code(0))["before"]["version"],
            expiring.to_string()
        );
        store.client.subscribe("kept", 1);
        let kept = store.client.take_publish("kept");
        assert_eq!(kept.payload, b"retained");
        assert!(property::users(&kept.properties).is_empty());
    }
}

/// The module comes along: the directory of a backup needs no file from elsewhere.
#[test]
fn the_policy_comes_along() {
    let mut server = Server::restartable(&[("policy", policies::faulty())]);
    let mut store = server.store("client");
    assert_eq!(store.ask(&["SET", "key", "fine"]).payload(), b"+OK\r\n");
    drop(store);
    look(&server, &["snapshot", "backup"]).code(0);
    look(&server, &["restore", "backup", "--data", "restored"]).code(0);
    stop(&mut server);
    // Without --policy the one that answered last answers.
    let mut serve = statehouse_tests::command(&["serve", "--listen", "127.0.0.1:0"]);
    serve.arg("--data").arg(server.directory().join("restored"));
    let restored = Server::spawn(serve, tempfile::tempdir().unwrap());
    assert!(
        restored.stdout()[1].starts_with("policy faulty "),
        "{:?}",
        restored.stdout()
    );

    // A backup without it is written, and says so.
    fs::remove_dir_all(data(&server).join("policies")).unwrap();
    let ran = look(&server, &["snapshot", "lacking"])
        .code(0)
        .says("faulty 0.1.0@");
    // The built-in one is behind it, and comes with the program.
    assert!(ran.text().contains("2 policies"), "{ran:?}");
    look(&server, &["restore", "lacking", "--data", "poorer"])
        .code(0)
        .says("faulty 0.1.0@");
    look(&server, &["doctor", "poorer"]).code(1);
}

/// Its serial of orders may be older, so it must not carry out the orders of the first store again.
#[test]
fn restored_store_has_another_name() {
    let mut server = Server::restartable(&[]);
    look(&server, &["snapshot", "backup"]).code(0);
    look(&server, &["restore", "backup", "--data", "restored"]).code(0);
    let name = |data: &Path| fs::read_to_string(data.join("mqtt-client-id")).unwrap();
    let first = name(&data(&server));
    stop(&mut server);
    server.restart();
    assert_eq!(name(&data(&server)), first);
    stop(&mut server);
    server.restart_with(&[("data", "restored")]);
    assert_ne!(name(&server.directory().join("restored")), first);
}

#[test]
fn nothing_is_overwritten() {
    let mut server = Server::restartable(&[]);
    let mut store = server.store("client");
    let version = store.set("key", "1");
    look(&server, &["snapshot", "backup"]).code(0);
    let first = fs::read(server.directory().join("backup")).unwrap();
    store.set("key", "2");
    look(&server, &["snapshot", "backup"])
        .code(2)
        .says("--force");
    assert_eq!(fs::read(server.directory().join("backup")).unwrap(), first);
    look(&server, &["snapshot", "backup", "--force"]).code(0);
    assert_ne!(fs::read(server.directory().join("backup")).unwrap(), first);
    // Beside it no temporary file stays.
    assert!(files(server.directory(), "tmp").is_empty());

    fs::write(server.directory().join("first"), &first).unwrap();
    look(&server, &["restore", "first"])
        .code(3)
        .says("in use by another process");
    drop(store);
    stop(&mut server);
    let before = fs::read(crate::looking::log(&data(&server))).unwrap();
    look(&server, &["restore", "first"])
        .code(2)
        .says("statehouse-data holds a store already");
    assert!(fs::read(crate::looking::log(&data(&server))).unwrap() == before);
    look(&server, &["doctor"]).code(0);
    // An empty directory will do.
    fs::create_dir(server.directory().join("empty")).unwrap();
    look(&server, &["restore", "first", "--data", "empty"]).code(0);
    server.restart_with(&[("data", "empty")]);
    assert_eq!(
        server.store("client").ask(&["GET", "key"]).version(),
        Some(version)
    );
}

#[test]
fn a_backup_that_is_none() {
    let server = Server::start();
    let mut store = server.store("client");
    store.set("key", vec![b'v'; 3000]);
    look(&server, &["snapshot", "backup"]).code(0);
    let path = server.directory().join("backup");
    let whole = fs::read(&path).unwrap();
    let restore = |code| look(&server, &["restore", "backup", "--data", "restored"]).code(code);
    for at in [
        0,
        8,
        40,
        63,
        70,
        200,
        2000,
        whole.len() - 33,
        whole.len() - 1,
    ] {
        flip(&path, at as u64);
        let ran = restore(3).says("backup");
        assert!(
            ran.stderr.contains("damaged") || ran.stderr.contains("format"),
            "{ran:?}"
        );
        flip(&path, at as u64);
    }
    for end in [0, 1, 63, 64, 100, whole.len() - 1] {
        fs::write(&path, &whole[..end]).unwrap();
        restore(3).says("backup");
    }
    fs::remove_file(&path).unwrap();
    restore(3).says("No such file");
    assert!(
        !server.directory().join("restored").exists(),
        "nothing is made before everything is known to be well"
    );
    fs::write(&path, &whole).unwrap();
    restore(0);
    look(&server, &["snapshot", "no/such/place"])
        .code(3)
        .says("no/such/place");
}
