//! Tests `statehouse snapshot` and `statehouse restore`. A restored store must have the complete
//! state of the first one, and no command may overwrite an existing store or backup.

use std::{
    fs,
    os::unix::{
        fs::{FileTypeExt, symlink},
        net::UnixListener,
    },
    path::Path,
    process::Command,
    thread,
    time::Duration,
};

use statehouse_tests::{
    Answer, Client, Connect, Hlc, Property, Publish, Request, Server, Store, binary, command,
    files::of_kind, policies, property,
};

use crate::{
    ask, ask_with,
    data_directory::{flip, log, restore_into, run_checked},
};

fn resume(server: &Server, id: &str) -> Client {
    Client::connect(server.address(), &Connect::resume(id, 3600))
}

/// A restore must not reset the quotas of clients.
#[test]
fn restored_store_keeps_the_owners_of_keys() {
    let mut server = Server::restartable(&[("max_client_keys", "2")]);
    let mut store = server.store("client");
    store.set("one", "x");
    store.set("two", "x");
    server.store("other").set("three", "x");
    server.stop();
    restore_into(&server, "again");
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

/// The state that a test has written.
struct Written {
    versions: Vec<(&'static str, Hlc)>,
    /// A request that only its first execution accepts, with packet id 4242.
    once: Request,
    answer: Answer,
}

/// Writes keys with versions, a fence and an expiry, a retained message, and a session with a
/// queued message and a remembered answer.
fn write_state(server: &Server) -> Written {
    let mut store = Store::new(resume(server, "client"), "client");
    let lock = store.set("lock", "client");
    let plain = store.set("plain", vec![0, 0xFF, b'\n']);
    let fenced = store.command(&["SET", "fenced", "x"]).with("__ft", &lock);
    let fenced = store.call(&fenced).version().unwrap();
    let expiring = store.ask(&["SET", "expiring", "x", "PX", "3600000"]);
    let expiring = expiring.version().unwrap();
    store.set("deleted", "x");
    store.ask(&["DEL", "deleted"]);
    let once = store.command(&["SET", "once", "x", "NX"]);
    let answer = store.redeliver(&once, 4242, false);
    let mut other = server.connect("other");
    other.publish(Publish::new("kept", "retained").qos(1).retained());
    store.client.disconnect();
    other.publish(Publish::new("clients/client/news", "queued").qos(1));
    other.disconnect();
    Written {
        versions: vec![
            ("lock", lock),
            ("plain", plain),
            ("fenced", fenced),
            ("expiring", expiring),
        ],
        once,
        answer,
    }
}

fn check_state(server: &Server, written: &Written) {
    let client = resume(server, "client");
    assert!(client.session_present());
    let mut store = Store::on(client, "client");
    let news = store.client.take_publish("clients/client/news");
    assert_eq!(news.payload, b"queued");
    for (key, version) in &written.versions {
        let found = store.ask(&["GET", key]).version();
        assert_eq!(found.as_ref(), Some(version), "{key}");
    }
    assert_eq!(store.get("plain"), Some(vec![0, 0xFF, b'\n']));
    assert_eq!(store.get("deleted"), None);
    let refused = store.ask(&["SET", "fenced", "y"]);
    assert!(refused.text().contains("fencing token is required"));
    // The redelivered request gets the same answer, byte for byte, and is not executed again.
    let again = store.redeliver(&written.once, 4242, true);
    assert_eq!(again.payload(), b"+OK\r\n");
    assert_eq!(
        (again.payload(), again.version()),
        (written.answer.payload(), written.answer.version())
    );
    // New versions are above all earlier ones.
    assert!(store.set("new", "x") > written.answer.version().unwrap());
    store.client.subscribe("kept", 1);
    let kept = store.client.take_publish("kept");
    assert_eq!(kept.payload, b"retained");
    assert!(property::users(&kept.properties).is_empty());
}

#[test]
fn restored_store_has_the_complete_state() {
    for stopped in [false, true] {
        let mut server = Server::restartable(&[]);
        let written = write_state(&server);
        if stopped {
            server.stop();
        }

        let wrote = server
            .run(&["snapshot", "backup", "--json"])
            .code(0)
            .object();
        assert_eq!((&wrote["keys"], &wrote["sessions"]), (&5.into(), &1.into()));
        assert_eq!(wrote["retained"], 1);
        assert!(wrote["remembered"].as_u64().unwrap() >= 6, "{wrote}");
        assert_eq!(wrote["policies"][0]["active"], true);
        // A restore into another directory works while the server runs.
        let restore = ["restore", "backup", "--data", "made/for/it", "--json"];
        let restored = server.run(&restore).code(0).object();
        assert_eq!(restored, wrote);
        server.run(&["doctor", "made/for/it"]).code(0);
        if !stopped {
            server.stop();
        }
        server.restart_with(&[("data", "made/for/it")]);
        check_state(&server, &written);
        let history = ["history", "expiring", "--data", "made/for/it", "--json"];
        let history = server.run(&history).code(0).object();
        let (_, expiring) = &written.versions[3];
        assert_eq!(history["before"]["version"], expiring.to_string());
    }
}

#[test]
fn backup_counts_only_retained_messages_that_it_contains() {
    let mut server = Server::restartable(&[]);
    let mut client = server.connect("client");
    for (topic, expiry_s) in [("kept", 3600), ("expired", 1)] {
        let message = Publish::new(topic, "retained").qos(1).retained();
        client.publish(message.with(Property::MessageExpiry(expiry_s)));
    }
    client.disconnect();
    server.stop();
    thread::sleep(Duration::from_millis(1500));
    let retained = |arguments: &[&str]| {
        let object = server.run(arguments).code(0).object();
        object["retained"].as_u64()
    };
    assert_eq!(retained(&["snapshot", "backup", "--json"]), Some(1));
    assert_eq!(
        retained(&["restore", "backup", "--check", "--json"]),
        Some(1)
    );
    let doctor = server.run(&["doctor", "statehouse-data", "--json"]);
    let doctor = doctor.code(0).object();
    assert_eq!(doctor["holds"]["retained"], 1, "{doctor}");
}

/// The backup contains the modules of policies, so a restored directory needs no other file.
#[test]
fn backup_contains_the_policy() {
    let mut server = Server::restartable(&[("policy", policies::faulty())]);
    let mut store = server.store("client");
    assert_eq!(store.ask(&["SET", "key", "fine"]).payload(), b"+OK\r\n");
    drop(store);
    restore_into(&server, "restored");
    server.stop();
    // Without --policy the last active policy is active.
    let restored = server.directory().join("restored");
    let restored = Server::with("", &["--data", restored.to_str().unwrap()]);
    assert!(
        restored.stdout()[1].starts_with("policy faulty "),
        "{:?}",
        restored.stdout()
    );

    // The command writes a backup without the missing module, and names the policy.
    fs::remove_dir_all(server.data_directory().join("policies")).unwrap();
    let ran = server
        .run(&["snapshot", "lacking"])
        .code(0)
        .says("faulty 0.1.0@");
    // The second policy is the built-in one, which is part of the program.
    assert!(ran.text().contains("2 policies"), "{ran:?}");
    server
        .run(&["restore", "lacking", "--data", "poorer"])
        .code(0)
        .says("faulty 0.1.0@");
    server.run(&["doctor", "poorer"]).code(1);
}

/// The restored store may have an older order serial. Without a new name it would accept old orders
/// of the first store again.
#[test]
fn restored_store_has_another_name() {
    let mut server = Server::restartable(&[]);
    restore_into(&server, "restored");
    let name = |data: &Path| fs::read_to_string(data.join("mqtt-client-id")).unwrap();
    let first = name(&server.data_directory());
    server.stop();
    server.restart();
    assert_eq!(name(&server.data_directory()), first);
    server.stop();
    server.restart_with(&[("data", "restored")]);
    assert_ne!(name(&server.directory().join("restored")), first);
}

#[test]
fn snapshot_and_restore_overwrite_nothing() {
    let mut server = Server::restartable(&[]);
    let mut store = server.store("client");
    let version = store.set("key", "1");
    server.run(&["snapshot", "backup"]).code(0);
    let first = fs::read(server.directory().join("backup")).unwrap();
    store.set("key", "2");
    server.run(&["snapshot", "backup"]).fails(2, "--force");
    assert_eq!(fs::read(server.directory().join("backup")).unwrap(), first);
    server.run(&["snapshot", "backup", "--force"]).code(0);
    assert_ne!(fs::read(server.directory().join("backup")).unwrap(), first);
    // A link stays, and a device is never replaced.
    let place = |name: &str| server.directory().join(name);
    symlink("backup", place("link")).unwrap();
    server.run(&["snapshot", "link", "--force"]).code(0);
    assert!(place("link").is_symlink());
    symlink("/mnt/missing/backup", place("dangling")).unwrap();
    let _socket = UnixListener::bind(place("socket")).unwrap();
    for (name, why) in [
        ("dangling", "a file that does not exist"),
        ("socket", "a device, a pipe or a socket"),
        (".", "is a directory"),
        ("-", "name a file"),
    ] {
        let commands: [&[&str]; 2] = [&["snapshot", name], &["doctor", "--salvage", name]];
        for command in commands {
            server.run(command).fails(2, why);
            server.run(&[command, &["--force"]].concat()).fails(2, why);
        }
    }
    assert!(place("dangling").is_symlink() && !place("-").exists());
    let about = place("socket").symlink_metadata().unwrap();
    assert!(about.file_type().is_socket());
    // The command removes its temporary file.
    assert!(of_kind(server.directory(), "tmp").is_empty());

    fs::write(server.directory().join("first"), &first).unwrap();
    server
        .run(&["restore", "first"])
        .fails(3, "in use by another process");
    drop(store);
    server.stop();
    let before = fs::read(log(&server)).unwrap();
    server
        .run(&["restore", "first"])
        .fails(2, "statehouse-data holds a store already");
    assert!(fs::read(log(&server)).unwrap() == before);
    server.run(&["doctor"]).code(0);
    (server.run(&["restore", "first", "--data", "backup"]))
        .fails(2, "backup is not a directory and was not changed");
    // An existing empty directory is accepted.
    fs::create_dir(server.directory().join("empty")).unwrap();
    server.run(&["restore", "first", "--data", "empty"]).code(0);
    server.restart_with(&[("data", "empty")]);
    assert_eq!(
        server.store("client").ask(&["GET", "key"]).version(),
        Some(version)
    );
}

/// Regression: the client refused the padded token in the description of the key.
#[test]
fn keys_with_the_longest_fencing_token_are_exported() {
    let (source, target) = (Server::start(), Server::start());
    let mut store = source.store("client");
    // An MQTT string has room for it, but not with padding.
    let node = "n".repeat(65_535 - "1:1:".len());
    let set = store.command(&["SET", "fenced", "x"]);
    let set = set.with("__ft", format!("1:1:{node}"));
    assert_eq!(store.call(&set).payload(), b"+OK\r\n");
    let fence = format!("000000000000001:00001:{node}");
    let exported = ask(&source, &["export"]).code(0);
    assert_eq!(exported.object()["fence"], fence);
    for command in [
        &["scan", "--long", "--json"][..],
        &["get", "fenced", "--meta", "--json"],
    ] {
        let described = ask(&source, command).code(0).object();
        assert_eq!(described["fencing_token"], fence);
    }
    // The import sends it without padding, and the key is as protected as before.
    ask_with(&target, &["import"], &exported.stdout).code(0);
    let described = ask(&target, &["get", "fenced", "--meta", "--json"]);
    assert_eq!(described.code(0).object()["fencing_token"], fence);
    ask(&target, &["del", "fenced"]).code(4);
}

/// Regression: a pipe was reported as a damaged backup.
#[test]
fn restore_of_a_pipe_a_device_or_a_directory_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let made = Command::new("mkfifo").arg(path.join("pipe")).status();
    assert!(made.unwrap().success());
    let special = "it is a device, a pipe or a socket: name a file";
    for (file, what) in [
        ("pipe", special),
        ("/dev/null", special),
        (".", "it is a directory: name a file in it"),
    ] {
        for to in [&["--check"][..], &["--data", "new"]] {
            let restore = [&["restore", file][..], to].concat();
            run_checked(path, &restore).fails(2, what);
        }
    }
    assert!(!path.join("new").exists());
}

/// Otherwise a start after an interrupted restore would begin a new, empty store.
#[test]
fn interrupted_restore_is_no_store_and_can_be_repeated() {
    let mut server = Server::restartable(&[]);
    server.store("client").set("key", "value");
    server.stop();
    server.run(&["snapshot", "backup"]).code(0);
    let restore = ["restore", "backup", "--data", "new"];
    server.run(&restore).code(0);
    // The marker that an interrupted restore leaves, beside a part of the files or none of them.
    let directory = server.directory().join("new");
    let marker = directory.join("restore-unfinished");
    for is_empty in [false, true] {
        fs::write(&marker, "").unwrap();
        if is_empty {
            let files = fs::read_dir(&directory)
                .unwrap()
                .map(|it| it.unwrap().path());
            let files = files.filter(|it| it.extension().is_some());
            files.for_each(|it| fs::remove_file(it).unwrap());
        }
        for refused in [
            &["serve", "--data", "new", "--listen", "127.0.0.1:0"][..],
            &[
                "serve",
                "--check",
                "--data",
                "new",
                "--listen",
                "127.0.0.1:0",
            ],
            &["doctor", "new"],
            &["history", "key", "--data", "new"],
        ] {
            let ran = server.run(refused);
            assert_ne!(ran.code, Some(0), "{refused:?}: {ran:?}");
            ran.says("restore into it");
        }
        server.run(&restore).code(0);
        assert!(!marker.exists());
        server.run(&["doctor", "new"]).code(0);
    }
    server.restart_with(&[("data", "new")]);
    assert_eq!(server.store("client").get("key"), Some("value".into()));
}

#[test]
fn damaged_backup_is_refused_and_creates_nothing() {
    let server = Server::start();
    let mut store = server.store("client");
    store.set("key", vec![b'v'; 3000]);
    server.run(&["snapshot", "backup"]).code(0);
    let path = server.directory().join("backup");
    let whole = fs::read(&path).unwrap();
    let restore = |code| {
        server
            .run(&["restore", "backup", "--data", "restored"])
            .code(code)
    };
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
        "no file may be created before the whole backup is verified"
    );
    fs::write(&path, &whole).unwrap();
    restore(0);
    server
        .run(&["snapshot", "no/such/place"])
        .fails(3, "no/such/place");
}

/// Regression: only a directory with a log was refused.
#[test]
fn restore_refuses_a_directory_with_other_files() {
    let server = Server::start();
    server.run(&["snapshot", "backup"]).code(0);
    let restore = |code| {
        server
            .run(&["restore", "backup", "--data", "used"])
            .code(code)
    };
    let used = server.directory().join("used");
    fs::create_dir(&used).unwrap();
    fs::write(used.join("notes.txt"), "mine").unwrap();
    restore(2).says("used holds other files, such as notes.txt, and was not changed");
    assert_eq!(fs::read_dir(&used).unwrap().count(), 1);
    // What a file system, an interrupted restore and an earlier store without its log leave.
    fs::remove_file(used.join("notes.txt")).unwrap();
    for name in ["lost+found", "policies"] {
        fs::create_dir(used.join(name)).unwrap();
    }
    for name in ["lock", "mqtt-client-id"] {
        fs::write(used.join(name), "").unwrap();
    }
    restore(0);
    server.run(&["doctor", "used"]).code(0);
    restore(2).says("used holds a store already");
}

/// Such a file would replace one of the store, or a start would take it for a part of the log.
#[test]
fn backup_inside_the_data_directory_is_refused() {
    let mut server = Server::restartable(&[]);
    server.store("client").set("key", "value");
    symlink(server.data_directory(), server.directory().join("link")).unwrap();
    fs::create_dir(server.data_directory().join("below")).unwrap();
    for file in [
        "statehouse-data/000000000001.log",
        "statehouse-data/000000000099.log",
        "statehouse-data/below/backup",
        "link/000000000099.log",
    ] {
        for command in [
            &["snapshot", "--force", file][..],
            &["doctor", "--force", "--salvage", file],
        ] {
            server.run(command).fails(2, "is inside the data directory");
        }
    }
    assert!(!server.data_directory().join("000000000099.log").exists());
    server.kill_and_restart();
    let value = server.store("client").get("key");
    assert_eq!(value, Some(b"value".to_vec()));
}

/// Regression: the signal of this limit ended the command without a word.
#[test]
fn snapshot_beyond_the_limit_of_file_sizes_names_it() {
    let server = Server::restartable(&[]);
    server.store("client").set("key", vec![b'x'; 8192]);
    let mut snapshot = Command::new("prlimit");
    snapshot.arg("--fsize=4096").arg(binary::statehouse());
    snapshot.args(["snapshot", "backup"]);
    snapshot.current_dir(server.directory());
    command::finish(snapshot, b"").fails(3, "file too large");
    assert!(!server.directory().join("backup").exists());
}

/// A module that cannot be written says nothing about the backup.
#[test]
fn restore_that_cannot_write_does_not_blame_the_backup() {
    let server = Server::restartable(&[("policy", policies::faulty())]);
    server.run(&["snapshot", "backup"]).code(0);
    let target = server.directory().join("target");
    fs::create_dir(&target).unwrap();
    fs::write(target.join("policies"), "").unwrap();
    let ran = server
        .run(&["restore", "backup", "--data", "target"])
        .fails(3, "target: was not restored: cannot write")
        .says("restore again");
    assert!(!ran.stderr.contains("the backup"), "{ran:?}");
}
