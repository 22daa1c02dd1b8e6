//! Tests `statehouse doctor` on intact data directories and on directories with various kinds of
//! damage. Doctor must report all damage, and must never change the directory.

use std::{fs, os::unix::fs::symlink};

use serde_json::Value;
use statehouse_tests::{Ran, Server, assert_contains, files::of_kind, policies};

use crate::data_directory::{find, flip, log, restore_into};

fn doctor(server: &Server, code: i32) -> Value {
    server.run(&["doctor", "--json"]).code(code).object()
}

/// A value that a test can find in a file.
fn value(n: usize) -> String {
    format!("this is value number {n:05}")
}

/// A server with `count` keys.
fn filled(count: usize) -> Server {
    let server = Server::restartable(&[]);
    let mut store = server.store("client");
    for n in 0..count {
        store.set(format!("key {n}"), value(n));
    }
    drop(store);
    server
}

/// Salvages a directory, restores the salvaged backup, and starts a store on it. Returns the number
/// of its keys.
fn salvage(server: &Server, code: i32) -> (Ran, usize) {
    let ran = server.run(&["doctor", "--salvage", "salvaged"]).code(code);
    server
        .run(&["restore", "salvaged", "--data", "mended"])
        .code(0);
    server.run(&["doctor", "mended"]).code(0);
    let mended = server.directory().join("mended");
    let mended = Server::with("", &["--data", mended.to_str().unwrap()]);
    let mut store = mended.store("client");
    let mut keys = 0;
    while let Some(found) = store.get(format!("key {keys}")) {
        assert_eq!(found, value(keys).as_bytes());
        keys += 1;
    }
    let next = store.get(format!("key {}", keys + 1));
    assert_eq!(next, None, "a key is missing");
    (ran, keys)
}

/// Asserts that the disk figures agree with the list of files.
fn assert_disk_figures_agree(found: &Value) {
    let disk = |what: &str| found["disk"][what].as_u64().unwrap();
    let of = |ending: &str| -> u64 {
        let files = found["files"].as_array().unwrap().iter();
        let named = files.filter(|file| file["name"].as_str().unwrap().ends_with(ending));
        named.map(|file| file["bytes"].as_u64().unwrap()).sum()
    };
    assert!(disk("log_bytes") > 0 && disk("free_bytes") > 0, "{found:#}");
    let held = disk("log_bytes") + disk("history_bytes") + disk("snapshot_bytes");
    assert_eq!(held, of(".log") + of(".snapshot"));
    assert_eq!(disk("spare_bytes"), of(".spare"));
    assert_eq!(found["disk"]["refuses_writes"], false);
}

#[test]
fn intact_directory_is_reported_well() {
    let mut server = filled(10);
    for stopped in [false, true] {
        if stopped {
            server.stop();
        }
        let found = doctor(&server, 0);
        assert_eq!(found["well"], true);
        assert_eq!(found["holds"]["keys"], 10);
        assert_eq!(found["holds"]["policies"][0]["name"], "standard");
        assert_eq!(found["history"]["from_record"], 1);
        assert_eq!(found["history"]["to_record"], found["records"]);
        assert!(found["problems"].as_array().unwrap().is_empty());
        assert_disk_figures_agree(&found);
        server.run(&["doctor"]).code(0).prints(&[
            "all is well",
            "10 keys",
            "000000000001.log",
            "the policy standard",
            "mqtt-client-id  name of the store, ",
            "on the disk: log ",
            "there is room for writes",
            "beginning of the store",
        ]);
    }
    // A salvage that cannot be written fails, although the directory is intact.
    server
        .run(&["doctor", "--salvage", "nowhere/salvaged"])
        .fails(3, "nowhere/salvaged");
    let (ran, keys) = salvage(&server, 0);
    assert!(ran.text().contains("Nothing is missing"), "{ran:?}");
    assert_eq!(keys, 10);
}

/// A crash has torn the last write, which no client saw acknowledged. A start must accept this.
#[test]
fn torn_tail_is_not_damage() {
    let mut server = filled(10);
    server.kill();
    // This file may record the write as durable. A torn write is not durable.
    fs::remove_file(server.data_directory().join("newest")).unwrap();
    let content = fs::read(log(&server)).unwrap();
    let last = content.iter().rposition(|byte| *byte != 0).unwrap();
    flip(&log(&server), last as u64);
    let found = doctor(&server, 0);
    let notes = found["notes"].to_string();
    assert!(notes.contains("torn tail"), "{found:#}");
    server.restart();
}

#[test]
fn damage_inside_the_log_is_reported_and_salvaged() {
    let mut server = filled(20);
    server.stop();
    let path = log(&server);
    flip(&path, find(&path, value(7).as_bytes()));
    let found = doctor(&server, 1);
    assert_eq!(found["well"], false);
    assert!(
        found["holds"].is_null(),
        "a start must refuse the directory"
    );
    let refused = found["refused"].as_str().unwrap();
    assert_contains!(refused, "000000000001.log", "Records");
    let damaged = found["files"].as_array().unwrap().iter();
    let damaged: Vec<&Value> = damaged.filter(|file| file["well"] == false).collect();
    assert_eq!(damaged.len(), 1, "{found:#}");

    server.run(&["doctor"]).code(1).prints(&[
        "WRONG",
        "a start refuses this",
        "--salvage",
        "statehouse restore",
    ]);
    let (ran, keys) = salvage(&server, 1);
    assert_eq!(keys, 7);
    assert!(ran.text().contains("What came later is lost"), "{ran:?}");
    server
        .run(&["doctor", "--salvage", "salvaged"])
        .fails(2, "--force");
    server
        .run(&["doctor", "--salvage", "salvaged", "--force"])
        .code(1);
    server.run(&["doctor", "--force"]).code(2);
    // The other commands refuse the directory with the same message.
    for command in [
        &["history", "key 1"][..],
        &["get", "key 1", "--as-of", "0s"],
        &["replay"],
        &["snapshot", "backup"],
    ] {
        let ran = server.run(command).fails(3, "000000000001.log");
        assert!(ran.stdout.is_empty(), "{ran:?}");
    }
    assert!(!server.directory().join("backup").exists());
}

#[test]
fn truncated_log_is_reported_and_salvaged() {
    let mut server = filled(20);
    server.stop();
    let path = log(&server);
    let end = find(&path, value(12).as_bytes());
    fs::File::options()
        .write(true)
        .open(&path)
        .unwrap()
        .set_len(end)
        .unwrap();
    let found = doctor(&server, 1);
    let refused = found["refused"].as_str().unwrap();
    assert!(refused.contains("was created with"), "{refused}");
    let (_, keys) = salvage(&server, 1);
    assert_eq!(keys, 12);
}

/// Also after kill -9, a start must refuse a log that was truncated, shifted or removed, and must
/// say what to do.
#[test]
fn changed_log_after_a_kill_is_refused() {
    let mut server = filled(20);
    server.kill();
    let path = log(&server);
    let content = fs::read(&path).unwrap();
    let cut = find(&path, value(12).as_bytes()) as usize;
    let shifted = [&content[..cut], b"inserted", &content[cut..]].concat();
    for spoiled in [&content[..cut], &shifted] {
        fs::write(&path, spoiled).unwrap();
        let refused = doctor(&server, 1)["refused"].to_string();
        assert!(refused.contains("000000000001.log"), "{refused}");
        let mut serve = statehouse_tests::command(&["serve", "--listen", "127.0.0.1:0"]);
        serve.arg("--data").arg(server.data_directory());
        let started = serve.output().unwrap();
        let error = String::from_utf8_lossy(&started.stderr).into_owned();
        assert!(!started.status.success(), "{error}");
        for says in ["000000000001.log", "statehouse doctor", "--salvage"] {
            assert!(error.contains(says), "no {says:?} in\n{error}");
        }
        let (_, keys) = salvage(&server, 1);
        assert_eq!(keys, 12);
        fs::remove_file(server.directory().join("salvaged")).unwrap();
        fs::remove_dir_all(server.directory().join("mended")).unwrap();
    }
    fs::remove_file(&path).unwrap();
    let refused = doctor(&server, 1)["refused"].to_string();
    assert!(refused.contains("missing"), "{refused}");
    // With its original log the store starts again.
    fs::write(&path, content).unwrap();
    server.restart();
    assert_eq!(server.store("client").get("key 19"), Some(value(19).into()));
}

/// Without the beginning of the log, nothing can be read. Doctor must report this and write no
/// backup.
#[test]
fn log_without_its_beginning_is_not_salvaged() {
    let mut server = filled(5);
    server.stop();
    flip(&log(&server), 10);
    doctor(&server, 1);
    let ran = server.run(&["doctor", "--salvage", "salvaged"]).code(1);
    assert!(ran.stderr.contains("000000000001.log"), "{ran:?}");
    assert!(!server.directory().join("salvaged").exists());
    fs::remove_file(log(&server)).unwrap();
    let found = doctor(&server, 1);
    assert_contains!(found["refused"].as_str().unwrap(), "missing");
}

/// The log of a restored store contains only changes after the snapshot, so the snapshot is needed.
#[test]
fn damaged_snapshot_is_reported() {
    let mut server = filled(5);
    server.stop();
    restore_into(&server, "restored");
    let restored = server.directory().join("restored");
    let snapshot = of_kind(&restored, "snapshot").pop().unwrap();
    flip(&snapshot, find(&snapshot, value(3).as_bytes()));
    let found = server
        .run(&["doctor", "restored", "--json"])
        .code(1)
        .object();
    let name = snapshot.file_name().unwrap().to_str().unwrap();
    let refused = found["refused"].as_str().unwrap();
    assert!(
        refused.contains(name) && !refused.contains("at byte 0:"),
        "{found:#}"
    );
    // Nothing else leads to a state.
    let text = server.run(&["doctor", "restored"]).code(1).text();
    assert!(
        text.contains("No consistent state") && !text.contains("--salvage"),
        "{text}"
    );
    server
        .run(&["doctor", "restored", "--salvage", "salvaged"])
        .fails(1, "restore a backup");
    flip(&snapshot, find(&snapshot, b"this is value number 0000"));
    server.run(&["doctor", "restored"]).code(1);
    fs::remove_file(&snapshot).unwrap();
    let found = server
        .run(&["doctor", "restored", "--json"])
        .code(1)
        .object();
    let refused = found["refused"].as_str().unwrap();
    assert_contains!(refused, "no snapshot leads to its first record");
}

#[test]
fn snapshot_without_its_log_is_salvaged() {
    let mut server = filled(5);
    server.stop();
    restore_into(&server, "restored");
    fs::remove_dir_all(server.data_directory()).unwrap();
    fs::rename(server.directory().join("restored"), server.data_directory()).unwrap();
    fs::remove_file(log(&server)).unwrap();
    doctor(&server, 1);
    let (_, keys) = salvage(&server, 1);
    assert_eq!(keys, 5);
}

#[test]
fn damaged_or_missing_policy_module_is_reported() {
    let mut server = Server::restartable(&[("policy", policies::faulty())]);
    let mut store = server.store("client");
    assert_eq!(store.ask(&["SET", "key", "fine"]).payload(), b"+OK\r\n");
    drop(store);
    server.stop();
    let found = doctor(&server, 0);
    let policies = found["holds"]["policies"].as_array().unwrap();
    let faulty = policies.iter().find(|it| it["name"] == "faulty").unwrap();
    assert_eq!(faulty["module"], "its module is whole");
    let digest = faulty["digest"].as_str().unwrap();
    let digest = digest.strip_prefix("blake3:").unwrap();
    let module = server
        .data_directory()
        .join(format!("policies/{digest}.wasm"));
    flip(&module, 100);
    let found = doctor(&server, 1);
    let problem = found["problems"][0].as_str().unwrap();
    assert_contains!(problem, "faulty", "damaged");
    // Regression: nothing was missing in the backup.
    let ran = server.run(&["doctor", "--salvage", "salvaged"]).code(1);
    let absent = ["faulty", "is not in it, since its module cannot be used"];
    ran.prints(&[&absent[..], &["--policy FILE", "Nothing else is missing"]].concat());
    let ran = server.run(&["restore", "salvaged", "--check"]).code(0);
    ran.says("is not in it: start the restored store with --policy FILE");
    fs::remove_file(module).unwrap();
    let problems = doctor(&server, 1)["problems"].to_string();
    assert_contains!(problems, "no module any more", "--policy");
    let ran = server.run(&["doctor"]).code(1);
    ran.prints(&["the newest state can be read. Correct each problem that prevents a start"]);
    // The module is not needed when another policy is active and no redelivered request can need
    // the old one.
    server.restart_with(&[("policy", "builtin")]);
    server.stop();
    server.run(&["doctor"]).code(0);
}

/// Doctor once reported that only a replay would need such a module. But the next start dropped the
/// policy.
#[test]
fn missing_module_of_an_inactive_policy_is_reported() {
    let mut server = Server::restartable(&[]);
    server.run(&["policy", "load", policies::faulty()]).code(0);
    server.stop();
    let modules = fs::read_dir(server.data_directory().join("policies")).unwrap();
    for module in modules {
        fs::remove_file(module.unwrap().path()).unwrap();
    }
    let problems = doctor(&server, 1)["problems"].to_string();
    assert_contains!(problems, "faulty", "held ready");
    server.restart();
    server.stop();
    doctor(&server, 0);
}

/// Regression: it said that all is well.
#[test]
fn name_of_the_store_that_a_start_refuses_is_reported() {
    let mut server = filled(1);
    server.stop();
    let file = server.data_directory().join("mqtt-client-id");
    for name in [&b""[..], b"\xff", b"a\nb\n"] {
        fs::write(&file, name).unwrap();
        let ran = server.run(&["doctor"]).code(1);
        ran.prints(&[
            "WRONG",
            "mqtt-client-id contains no MQTT client id",
            "remove it",
        ]);
        // Nothing else is wrong.
        assert!(!ran.text().contains("What next"), "{ran:?}");
        let serve = ["serve", "--listen", "127.0.0.1:0"];
        server
            .run(&serve)
            .fails(2, "mqtt-client-id contains no MQTT client id");
    }
    fs::remove_file(&file).unwrap();
    server.run(&["doctor"]).code(0);
}

/// Regression: it said that all is well.
#[test]
fn lock_and_policies_that_a_start_refuses_are_reported() {
    let mut server = filled(1);
    server.stop();
    let [lock, policies] = ["lock", "policies"].map(|it| server.data_directory().join(it));
    let refused = |what: &str| {
        let ran = server.run(&["doctor"]).code(1);
        ran.prints(&["WRONG", "a start refuses this", what]);
        let serve = ["serve", "--listen", "127.0.0.1:0"];
        let check = [&serve[..], &["--check"]].concat();
        for command in [&check[..], &serve] {
            server.run(command).fails(2, what);
        }
    };
    fs::remove_file(&lock).unwrap();
    fs::create_dir(&lock).unwrap();
    refused("cannot open the lock file of ");
    fs::remove_dir(&lock).unwrap();
    symlink("missing/lock", &lock).unwrap();
    refused("cannot open the lock file of ");
    fs::remove_file(&lock).unwrap();
    if policies.exists() {
        fs::remove_dir_all(&policies).unwrap();
    }
    fs::write(&policies, "a file").unwrap();
    refused("File exists");
    fs::remove_file(&policies).unwrap();
    let spare = server.data_directory().join("000000009999.spare");
    fs::create_dir(&spare).unwrap();
    refused("cannot remove 000000009999.spare: Is a directory");
    fs::remove_dir(&spare).unwrap();
    server.run(&["doctor"]).code(0);
}

#[test]
fn empty_directory_is_not_a_store() {
    let server = Server::start();
    fs::create_dir(server.directory().join("empty")).unwrap();
    let found = server.run(&["doctor", "empty", "--json"]).code(1).object();
    assert!(found["refused"].as_str().unwrap().contains("no log"));
    let text = server.run(&["doctor", "empty"]).code(1).text();
    assert!(text.contains("Is it the directory of the store?"), "{text}");
    assert_eq!(
        fs::read_dir(server.directory().join("empty"))
            .unwrap()
            .count(),
        0
    );
    // A start that failed early leaves these files. They are not a store that could be salvaged.
    fs::write(server.directory().join("empty/lock"), b"").unwrap();
    fs::create_dir(server.directory().join("empty/policies")).unwrap();
    let text = server.run(&["doctor", "empty"]).code(1).text();
    assert!(text.contains("Is it the directory of the store?"), "{text}");
    assert!(!text.contains("--salvage"), "{text}");
}

#[test]
fn help_of_offline_commands_names_directory_and_lock() {
    for name in ["history", "replay", "snapshot", "restore", "doctor", "get"] {
        let help = statehouse_tests::run(&[name, "--help"], b"").code(0);
        help.prints(&["STATEHOUSE_DATA", "lock"]);
    }
}
