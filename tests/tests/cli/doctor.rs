//! `statehouse doctor`: a directory that is well, and one that is not, in every way that is cheap to make.

use std::fs;

use serde_json::Value;
use statehouse_tests::{Hlc, Ran, Server, policies};

use crate::looking::{data, files, find, flip, log, look, object, stop};

fn doctor(server: &Server, code: i32) -> Value {
    object(&look(server, &["doctor", "--json"]).code(code))
}

/// A value that can be found in a file.
fn value(n: usize) -> String {
    format!("this is value number {n:05}")
}

/// Keys 0 to `count`, and their versions.
fn fill(server: &Server, count: usize) -> Vec<Hlc> {
    let mut store = server.store("client");
    (0..count)
        .map(|n| store.set(format!("key {n}"), value(n)))
        .collect()
}

/// Salvages, restores what was salvaged, and counts the keys that a store has that is started there.
fn salvage(server: &Server, code: i32) -> (Ran, usize) {
    let ran = look(server, &["doctor", "--salvage", "salvaged"]).code(code);
    look(server, &["restore", "salvaged", "--data", "mended"]).code(0);
    look(server, &["doctor", "mended"]).code(0);
    let mut serve = statehouse_tests::command(&["serve", "--listen", "127.0.0.1:0"]);
    serve.arg("--data").arg(server.directory().join("mended"));
    let mended = Server::spawn(serve, tempfile::tempdir().unwrap());
    let mut store = mended.store("client");
    let mut keys = 0;
    while let Some(found) = store.get(format!("key {keys}")) {
        assert_eq!(found, value(keys).as_bytes());
        keys += 1;
    }
    assert_eq!(store.get(format!("key {}", keys + 1)), None, "a gap");
    (ran, keys)
}

/// The figures of the disk agree with the list of files.
fn assert_disk_is_shown(found: &Value) {
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
fn all_is_well() {
    let mut server = Server::restartable(&[]);
    fill(&server, 10);
    for stopped in [false, true] {
        if stopped {
            stop(&mut server);
        }
        let found = doctor(&server, 0);
        assert_eq!(found["well"], true);
        assert_eq!(found["holds"]["keys"], 10);
        assert_eq!(found["holds"]["policies"][0]["name"], "standard");
        assert_eq!(found["history"]["from_record"], 1);
        assert_eq!(found["history"]["to_record"], found["records"]);
        assert!(found["problems"].as_array().unwrap().is_empty());
        assert_disk_is_shown(&found);
        let text = look(&server, &["doctor"]).code(0).text();
        for says in [
            "all is well",
            "10 keys",
            "000000000001.log",
            "the policy standard",
            "on the disk: log ",
            "there is room for writes",
            "beginning of the store",
        ] {
            assert!(text.contains(says), "no {says:?} in\n{text}");
        }
    }
    // What was asked for did not happen, however well everything is.
    look(&server, &["doctor", "--salvage", "nowhere/salvaged"])
        .code(3)
        .says("nowhere/salvaged");
    let (ran, keys) = salvage(&server, 0);
    assert!(ran.text().contains("Nothing is missing"), "{ran:?}");
    assert_eq!(keys, 10);
}

/// The end of the last write was torn by a crash: nobody was told of it, and a start goes on.
#[test]
fn a_torn_tail_is_no_damage() {
    let mut server = Server::restartable(&[]);
    fill(&server, 10);
    server.kill();
    // It may say that the write was durable, which a write that a crash tore is not.
    fs::remove_file(data(&server).join("newest")).unwrap();
    let content = fs::read(log(&data(&server))).unwrap();
    let last = content.iter().rposition(|byte| *byte != 0).unwrap();
    flip(&log(&data(&server)), last as u64);
    let found = doctor(&server, 0);
    let notes = found["notes"].to_string();
    assert!(notes.contains("torn tail"), "{found:#}");
    server.restart();
}

#[test]
fn damage_in_the_middle() {
    let mut server = Server::restartable(&[]);
    fill(&server, 20);
    stop(&mut server);
    let path = log(&data(&server));
    flip(&path, find(&path, value(7).as_bytes()));
    let found = doctor(&server, 1);
    assert_eq!(found["well"], false);
    assert!(found["holds"].is_null(), "a start refuses it");
    let refused = found["refused"].as_str().unwrap();
    assert!(
        refused.contains("000000000001.log") && refused.contains("Records"),
        "{refused}"
    );
    let damaged = found["files"].as_array().unwrap().iter();
    let damaged: Vec<&Value> = damaged.filter(|file| file["well"] == false).collect();
    assert_eq!(damaged.len(), 1, "{found:#}");

    let text = look(&server, &["doctor"]).code(1).text();
    for says in [
        "WRONG",
        "a start refuses this",
        "--salvage",
        "statehouse restore",
    ] {
        assert!(text.contains(says), "no {says:?} in\n{text}");
    }
    let (ran, keys) = salvage(&server, 1);
    assert_eq!(keys, 7);
    assert!(ran.text().contains("What came later is lost"), "{ran:?}");
    look(&server, &["doctor", "--salvage", "salvaged"])
        .code(2)
        .says("--force");
    look(&server, &["doctor", "--salvage", "salvaged", "--force"]).code(1);
    look(&server, &["doctor", "--force"]).code(2);
    // The other commands refuse with the same words.
    for command in [
        &["history", "key 1"][..],
        &["get", "key 1", "--as-of", "0s"],
        &["replay"],
        &["snapshot", "backup"],
    ] {
        let ran = look(&server, command).code(3).says("000000000001.log");
        assert!(ran.stdout.is_empty(), "{ran:?}");
    }
    assert!(!server.directory().join("backup").exists());
}

#[test]
fn a_log_that_is_cut_off() {
    let mut server = Server::restartable(&[]);
    fill(&server, 20);
    stop(&mut server);
    let path = log(&data(&server));
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

/// After kill -9, too, a start refuses a log that was cut, shifted or removed, and says what to do.
#[test]
fn a_log_that_is_cut_off_or_removed_after_a_kill() {
    let mut server = Server::restartable(&[]);
    fill(&server, 20);
    server.kill();
    let path = log(&data(&server));
    let content = fs::read(&path).unwrap();
    let cut = find(&path, value(12).as_bytes()) as usize;
    let shifted = [&content[..cut], b"inserted", &content[cut..]].concat();
    for spoiled in [&content[..cut], &shifted] {
        fs::write(&path, spoiled).unwrap();
        let refused = doctor(&server, 1)["refused"].to_string();
        assert!(refused.contains("000000000001.log"), "{refused}");
        let mut serve = statehouse_tests::command(&["serve", "--listen", "127.0.0.1:0"]);
        serve.arg("--data").arg(data(&server));
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
    // All is well again with the file as it was.
    fs::write(&path, content).unwrap();
    server.restart();
    assert_eq!(server.store("client").get("key 19"), Some(value(19).into()));
}

/// Nothing can be read without the beginning: it is said, and nothing is written.
#[test]
fn a_log_without_its_beginning() {
    let mut server = Server::restartable(&[]);
    fill(&server, 5);
    stop(&mut server);
    flip(&log(&data(&server)), 10);
    doctor(&server, 1);
    let ran = look(&server, &["doctor", "--salvage", "salvaged"]).code(1);
    assert!(ran.stderr.contains("000000000001.log"), "{ran:?}");
    assert!(!server.directory().join("salvaged").exists());
    fs::remove_file(log(&data(&server))).unwrap();
    let found = doctor(&server, 1);
    assert!(
        found["refused"].as_str().unwrap().contains("missing"),
        "{found:#}"
    );
}

/// A snapshot that is damaged takes the state with it where the log behind it is all there is.
#[test]
fn damage_of_a_snapshot() {
    let mut server = Server::restartable(&[]);
    fill(&server, 5);
    stop(&mut server);
    look(&server, &["snapshot", "backup"]).code(0);
    look(&server, &["restore", "backup", "--data", "restored"]).code(0);
    let restored = server.directory().join("restored");
    let snapshot = files(&restored, "snapshot").pop().unwrap();
    flip(&snapshot, find(&snapshot, value(3).as_bytes()));
    let found = object(&look(&server, &["doctor", "restored", "--json"]).code(1));
    let name = snapshot.file_name().unwrap().to_str().unwrap();
    assert!(
        found["refused"].as_str().unwrap().contains(name),
        "{found:#}"
    );
    flip(&snapshot, find(&snapshot, b"this is value number 0000"));
    look(&server, &["doctor", "restored"]).code(1);
}

/// With its log gone a snapshot is still worth keeping.
#[test]
fn a_snapshot_alone() {
    let mut server = Server::restartable(&[]);
    fill(&server, 5);
    stop(&mut server);
    look(&server, &["snapshot", "backup"]).code(0);
    look(&server, &["restore", "backup", "--data", "restored"]).code(0);
    fs::remove_dir_all(data(&server)).unwrap();
    fs::rename(server.directory().join("restored"), data(&server)).unwrap();
    fs::remove_file(log(&data(&server))).unwrap();
    doctor(&server, 1);
    let (_, keys) = salvage(&server, 1);
    assert_eq!(keys, 5);
}

#[test]
fn modules() {
    let mut server = Server::restartable(&[("policy", policies::faulty())]);
    let mut store = server.store("client");
    assert_eq!(store.ask(&["SET", "key", "fine"]).payload(), b"+OK\r\n");
    drop(store);
    stop(&mut server);
    let found = doctor(&server, 0);
    let policies = found["holds"]["policies"].as_array().unwrap();
    let faulty = policies.iter().find(|it| it["name"] == "faulty").unwrap();
    assert_eq!(faulty["module"], "its module is whole");
    let digest = faulty["digest"].as_str().unwrap();
    let digest = digest.strip_prefix("blake3:").unwrap();
    let module = data(&server).join(format!("policies/{digest}.wasm"));
    flip(&module, 100);
    let found = doctor(&server, 1);
    let problem = found["problems"][0].as_str().unwrap();
    assert!(
        problem.contains("faulty") && problem.contains("damaged"),
        "{problem}"
    );
    fs::remove_file(module).unwrap();
    let problems = doctor(&server, 1)["problems"].to_string();
    assert!(
        problems.contains("no module any more") && problems.contains("--policy"),
        "{problems}"
    );
    // Once another policy answers, and nothing that the old one answered can come again, nothing needs it.
    server.restart_with(&[("policy", "builtin")]);
    stop(&mut server);
    look(&server, &["doctor"]).code(0);
}

/// It once said that only a replay would need such a module, and the next start forgot the policy.
#[test]
fn a_module_of_a_policy_that_is_held_ready() {
    let mut server = Server::restartable(&[]);
    look(&server, &["policy", "load", policies::faulty()]).code(0);
    stop(&mut server);
    let modules = fs::read_dir(data(&server).join("policies")).unwrap();
    for module in modules {
        fs::remove_file(module.unwrap().path()).unwrap();
    }
    let problems = doctor(&server, 1)["problems"].to_string();
    assert!(
        problems.contains("faulty") && problems.contains("held ready"),
        "{problems}"
    );
    server.restart();
    stop(&mut server);
    doctor(&server, 0);
}

#[test]
fn an_empty_directory() {
    let server = Server::start();
    fs::create_dir(server.directory().join("empty")).unwrap();
    let found = object(&look(&server, &["doctor", "empty", "--json"]).code(1));
    assert!(found["refused"].as_str().unwrap().contains("no journal"));
    let text = look(&server, &["doctor", "empty"]).code(1).text();
    assert!(text.contains("Is it the directory of the store?"), "{text}");
    assert_eq!(
        fs::read_dir(server.directory().join("empty"))
            .unwrap()
            .count(),
        0
    );
    // What a start leaves behind that ended early is no store that could be salvaged.
    fs::write(server.directory().join("empty/lock"), b"").unwrap();
    fs::create_dir(server.directory().join("empty/policies")).unwrap();
    let text = look(&server, &["doctor", "empty"]).code(1).text();
    assert!(text.contains("Is it the directory of the store?"), "{text}");
    assert!(!text.contains("--salvage"), "{text}");
    look(&server, &["doctor", "nowhere"])
        .code(2)
        .says("nowhere");
}

#[test]
fn help() {
    for name in ["history", "replay", "snapshot", "restore", "doctor", "get"] {
        let help = statehouse_tests::run(&[name, "--help"], b"").code(0).text();
        for says in ["Usage:", "Examples:", "STATEHOUSE_DATA", "lock"] {
            assert!(help.contains(says), "no {says:?} in\n{help}");
        }
    }
}
