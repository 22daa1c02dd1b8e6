//! A store with its own broker.

use std::{fs, path::Path, process::Command};

use serde_json::{Value, json};
use statehouse_tests::{
    Client, Connect, Hlc, Ran, Server, Store, WallClock, binary,
    command::{add_user, command, finish},
    files::of_kind,
    policies,
    wait::until,
};

use super::{
    archive::{Archive, copy_all},
    exchange, sessions,
};

/// Set after the backup and the export.
const LATE: &str = "late";

/// Expires a minute after it was set.
const BRIEF: &str = "brief";

/// Far beyond the life of any format.
const DECADES_MS: &str = "3000000000000";

/// How exactly an import keeps an expiry decades ahead.
const EXPIRY_STEP_MS: u64 = 1_000_000_000;

/// Writes to a key that fill the log until a snapshot is taken, and the size of its value.
const FILLING: usize = 120;
const FILLING_BYTES: usize = 100_000;

/// Fills a store, and copies its data to `directory`. Returns what its clients saw.
pub(super) fn make(directory: &Path) -> Value {
    let users = directory.join("users");
    add_user(&users, "anna", "secret").code(0);
    // A small history makes the store take a snapshot early.
    let mut server = Server::restartable(&[
        ("users", users.to_str().unwrap()),
        ("allow_anonymous", "true"),
        ("history_bytes", "16MiB"),
        ("history_retention", "3650d"),
    ]);
    let asker = Connect::resume("asker", u32::MAX);
    let mut asker = Store::new(Client::connect(server.address(), &asker), "asker");
    let mut exchanges = Vec::new();
    fill_keys(&server, &mut asker, &mut exchanges);
    fill_until_snapshot(&server);
    change_policies(&server, &mut asker, &mut exchanges);
    sessions::make(&server);
    let keys = export(&|it| server.run(it), &server);
    fs::write(directory.join("export.jsonl"), &keys.stdout).unwrap();
    let backup = directory.join("backup.state");
    server.run(&["snapshot", backup.to_str().unwrap()]).code(0);
    asker_after_the_backup(&mut asker, &mut exchanges);
    let history = server.run(&["history", "greeting", "--json"]).code(0);
    let policies = roles(&server.run(&["policy", "list", "--json"]));
    kill_during_writes(&mut server, asker);
    copy_all(&server.data_directory(), &directory.join("embedded"));
    json!({ "exchanges": exchanges, "history": lines(&history), "policies": policies })
}

fn fill_keys(server: &Server, asker: &mut Store, exchanges: &mut Vec<Value>) {
    let mut writer = server.store("writer");
    for number in 1..=40 {
        writer.set(format!("sensor/{number}"), format!("value {number}"));
    }
    writer.ask(&["DEL", "sensor/7"]);
    writer.set(b"\xff\x00binary", b"\x00\r\n\xfe");
    writer.set("greeting", "hello");
    for command in [
        &["SET", "greeting", "good morning"][..],
        &["SET", "once", "1", "NX"],
        &["SET", "once", "2", "NX"],
        &["SET", "expiring", "later", "PX", DECADES_MS],
        &["SET", BRIEF, "soon", "PX", "60000"],
        &["VDEL", "sensor/8", "value 8"],
        &["DEL", "sensor/9"],
        &["DEL", "nothing"],
    ] {
        exchange::ask(asker, exchanges, command);
    }
    let token = Hlc::now(0);
    let fenced = writer.command(&["SET", "guarded", "by a token"]);
    let fenced = writer.call(&fenced.with("__ft", token));
    assert_eq!(fenced.text(), "+OK\\r\\n");
}

fn fill_until_snapshot(server: &Server) {
    let mut writer = server.store("writer");
    for number in 0..FILLING {
        let fill = [b'a' + u8::try_from(number % 26).unwrap()];
        writer.set("large", fill.repeat(FILLING_BYTES));
    }
    until("a snapshot", || {
        !of_kind(&server.data_directory(), "snapshot").is_empty()
    });
}

/// Three policies are active in turn, and answer requests. The second one then has other roles.
fn change_policies(server: &Server, asker: &mut Store, exchanges: &mut Vec<Value>) {
    let run = |arguments: &[&str]| server.run(arguments).code(0);
    // This policy counts in hidden keys.
    let limiting = policies::example("rate-limit");
    run(&["policy", "load", limiting.to_str().unwrap(), "--promote"]);
    for value in ["1", "2"] {
        exchange::ask(asker, exchanges, &["SET", "limited", value]);
    }
    for mark in ["first", "second"] {
        let file = policies::marked(mark);
        run(&["policy", "load", file.to_str().unwrap(), "--promote"]);
        exchange::ask(asker, exchanges, &["TALLY", "count"]);
    }
    run(&["policy", "canary", "marked-first", "--clients", "canary-*"]);
    run(&["policy", "route", "routed/", "marked-first"]);
    run(&["policy", "shadow", "builtin", "--sample", "1%"]);
    let mut canary = server.store("canary-1");
    assert_eq!(
        canary.ask(&["TALLY", "count"]).payload()[4..11],
        *b"+first\r"
    );
}

fn asker_after_the_backup(asker: &mut Store, exchanges: &mut Vec<Value>) {
    exchange::ask(asker, exchanges, &["SET", LATE, "after the backup"]);
    exchange::ask(asker, exchanges, &["SET", "greeting", "good night"]);
    exchange::ask(asker, exchanges, &["TALLY", "count"]);
}

/// Kills the server while it writes, so that the log ends anywhere.
fn kill_during_writes(server: &mut Server, mut asker: Store) {
    for number in 0..100 {
        let write = asker.command(&["SET", "last", &number.to_string()]);
        asker.client.start(write.publish());
    }
    server.kill();
}

/// Opens the data directory. Everything that the clients saw is there.
pub(super) fn check(archive: &Archive) {
    let (_directory, data) = archive.copy("embedded");
    let expected = &archive.expected["embedded"];
    let clock = archive.clock();
    let run = at(&data, &clock);
    check_offline(&run, expected);
    let server = serve(archive, &data, &clock);
    let changed = [LATE, BRIEF, "greeting", "count", "last"];
    check_keys(archive, &export(&run, &server), &changed);
    assert_eq!(
        roles(&run(&["policy", "list", "--json"])),
        expected["policies"]
    );
    let asker = Connect::resume("asker", u32::MAX);
    let asker = Client::connect(server.address(), &asker);
    assert!(asker.session_present(), "the session of the asker");
    let mut asker = Store::on(asker, "asker");
    exchange::redeliver(&mut asker, &expected["exchanges"]);
    // The redeliveries changed nothing.
    check_keys(archive, &export(&run, &server), &changed);
    assert_eq!(asker.get(LATE), Some(b"after the backup".to_vec()));
    assert_eq!(asker.get("greeting"), Some(b"good night".to_vec()));
    assert_eq!(asker.get("count"), Some(b"4".to_vec()));
    sessions::check(&server);
}

/// Runs commands on a data directory, at the time of this clock.
fn at(data: &Path, clock: &WallClock) -> impl Fn(&[&str]) -> Ran {
    move |arguments| {
        let mut command = command(arguments);
        command
            .env("STATEHOUSE_DATA", data)
            .envs(clock.environment());
        finish(command, b"")
    }
}

/// The commands that read a data directory without a server.
fn check_offline(run: &impl Fn(&[&str]) -> Ran, expected: &Value) {
    let healthy = run(&["doctor"]).code(0).text();
    assert!(healthy.contains("all is well"), "{healthy}");
    let history = run(&["history", "greeting", "--json"]).code(0);
    assert_eq!(lines(&history), *expected["history"].as_array().unwrap());
    let earlier = expected["history"][1]["version"].as_str().unwrap();
    let value = run(&["get", "greeting", "--as-of", earlier]).code(0);
    assert_eq!(value.text(), "good morning");
    run(&["replay"]).code(0);
}

/// Starts a server on a data directory, with the users of the archive.
fn serve(archive: &Archive, data: &Path, clock: &WallClock) -> Server {
    let mut command = Command::new(binary::statehouse());
    command
        .args([
            "serve",
            "--listen",
            "127.0.0.1:0",
            "--allow-anonymous",
            "--users",
        ])
        .arg(archive.path("users"))
        .arg("--data")
        .arg(data)
        .envs(clock.environment());
    Server::spawn(command, tempfile::tempdir().unwrap())
}

/// Restores the backup, and imports the exported keys into a new store.
pub(super) fn check_backup(archive: &Archive) {
    let clock = archive.clock();
    let directory = tempfile::tempdir().unwrap();
    let data = directory.path().join("restored");
    let run = at(&data, &clock);
    let backup = archive.path("backup.state");
    run(&["restore", backup.to_str().unwrap(), "--check"]).code(0);
    run(&["restore", backup.to_str().unwrap()]).code(0);
    let server = serve(archive, &data, &clock);
    check_keys(archive, &export(&run, &server), &[]);
    assert_eq!(server.connect("probe").subscribe("shop/#", 1), 1);
    sessions::check(&server);
    drop(server);

    let own = Server::start();
    let file = archive.path("export.jsonl");
    let address = url(&own);
    let import = ["import", file.to_str().unwrap(), "--url", &address];
    finish(command(&import), b"").code(0);
    let again = export(&|it| finish(command(it), b""), &own);
    // Imported keys have new versions, and expiries that are measured again.
    let imported = |mut line: Value| {
        let fields = line.as_object_mut().unwrap();
        fields.remove("version");
        if let Some(expires) = fields.get_mut("expires_ms") {
            *expires = (expires.as_u64().unwrap() / EXPIRY_STEP_MS).into();
        }
        line
    };
    check_lines(archive, &again, &[BRIEF], imported);
}

fn url(server: &Server) -> String {
    format!("mqtt://{}", server.address())
}

/// Exports all keys of a server.
fn export(run: &impl Fn(&[&str]) -> Ran, server: &Server) -> Ran {
    run(&["export", "--url", &url(server)]).code(0)
}

/// Each exported line of the archive, except of these keys, is in this export.
fn check_keys(archive: &Archive, exported: &Ran, except: &[&str]) {
    check_lines(archive, exported, except, |line| line);
}

fn check_lines(
    archive: &Archive,
    exported: &Ran,
    except: &[&str],
    compared: impl Fn(Value) -> Value,
) {
    let first = fs::read(archive.path("export.jsonl")).unwrap();
    let exported = json_lines(&exported.stdout);
    for line in json_lines(&first) {
        let key = line["key"].clone();
        if except.iter().any(|it| key == *it) {
            continue;
        }
        let now = exported.iter().find(|it| it["key"] == key);
        let now = now.unwrap_or_else(|| panic!("the key {key} is lost"));
        let (now, line) = (compared(now.clone()), compared(line));
        for (name, value) in line.as_object().unwrap() {
            assert!(
                now[name] == *value,
                "{name} of {key}: {now} instead of {line}"
            );
        }
    }
}

fn json_lines(text: &[u8]) -> Vec<Value> {
    let lines = text.split(|byte| *byte == b'\n');
    let lines = lines.filter(|line| !line.is_empty());
    lines
        .map(|line| serde_json::from_slice(line).unwrap())
        .collect()
}

/// The changes of a key, without the line about the beginning.
fn lines(history: &Ran) -> Vec<Value> {
    let mut lines = json_lines(&history.stdout);
    lines.retain(|line| line["event"] != "beginning");
    lines
}

/// The names, versions and roles of the policies. Another program has another built-in policy.
fn roles(list: &Ran) -> Value {
    let list: Value = serde_json::from_slice(&list.stdout).unwrap();
    let mut policies = list["policies"].as_array().unwrap().clone();
    policies.retain(|it| it["built_in"] != true);
    policies.sort_by_key(|it| it["name"].to_string());
    let role = |it: &Value| json!([it["name"], it["version"], it["digest"], it["roles"]]);
    policies.iter().map(role).collect()
}
