//! Tests `statehouse replay`, which executes recorded requests again with their own policy or
//! another one. Replay with their own policy must reproduce every answer.

use std::fs;

use serde_json::Value;
use statehouse_tests::{Ran, Server, assert_contains, policies};

use crate::data_directory::restore_into;

/// Runs a replay. Returns the differences and the summary.
fn replay(server: &Server, arguments: &[&str], code: i32) -> (Vec<Value>, Value) {
    let mut all = vec!["replay", "--json"];
    all.extend(arguments);
    let ran = server.run(&all).code(code);
    let mut lines = ran.objects();
    let summary = lines.pop().unwrap();
    (lines, summary)
}

/// The numbers of same, different and not comparable requests.
fn counts(counted: &Value) -> (u64, u64, u64) {
    let count = |name: &str| counted[name].as_u64().unwrap();
    (count("same"), count("different"), count("not_comparable"))
}

/// Sends each kind of request that the standard policy records. Returns the number of requests to
/// replay.
fn send_all_kinds(server: &Server) -> u64 {
    let mut store = server.store("client");
    let mut recorded = 0;
    for round in 0..3 {
        for arguments in [
            &["SET", "a", "1"][..],
            &["SET", "a", "2", "NX"],
            &["SET", "b", "2", "NEX", "PX", "600000"],
            &["SET", "b", "3", "NEX"],
            &["VDEL", "a", "3"],
            &["VDEL", "a", "1"],
            &["DEL", "b"],
            &["DEL", "b"],
        ] {
            store.ask(arguments);
            recorded += 1;
        }
        let lock = store.set("lock", format!("{round}"));
        let fenced = store.command(&["SET", "fenced", "x"]).with("__ft", &lock);
        store.call(&fenced);
        store.ask(&["SET", "fenced", "y"]);
        store.watch("a");
        store.ask(&["KEYNOTIFY", "a", "STOP"]);
        store.ask(&["SET", "long", &"v".repeat(5000), "PX", "30"]);
        // The KEYNOTIFY that registered the watch is not recorded: a redelivery registers it again.
        recorded += 5;
    }
    recorded
}

#[test]
fn replay_with_the_same_policy_has_no_differences() {
    let mut server = Server::restartable(&[]);
    let recorded = send_all_kinds(&server);
    for stopped in [false, true] {
        if stopped {
            server.stop();
        }
        let (differences, summary) = replay(&server, &[], 0);
        assert!(differences.is_empty(), "{differences:#?}");
        let (same, different, not_comparable) = counts(&summary["summary"]);
        assert_eq!((different, not_comparable), (0, 0), "{summary}");
        assert_eq!(same, recorded);
        assert!(counts(&summary["commands"]["SET"]).0 >= 15);
        assert!(counts(&summary["commands"]["KEYNOTIFY"]).0 >= 3);
    }
    let ran = server.run(&["replay"]).code(0);
    let text = ran.text();
    assert_contains!(text, "not comparable", "VDEL");
    // The result is the same with the policy's name, and after a restart.
    replay(&server, &["--policy", "builtin"], 0);
    server.restart();
    server.store("client").set("a", "again");
    replay(&server, &[], 0);
}

/// The quota may have changed since, so replay must use the recorded refusal.
#[test]
fn replay_repeats_recorded_quota_refusals() {
    let server = Server::with_config("max_keys = 1");
    let mut store = server.store("client");
    store.set("one", "1");
    assert!(store.ask(&["SET", "two", "2"]).text().contains("quota"));
    store.ask(&["DEL", "one"]);
    store.set("two", "2");
    let (_, summary) = replay(&server, &[], 0);
    assert_eq!(counts(&summary["summary"]).1, 0, "{summary}");
    assert!(counts(&summary["commands"]["SET"]).0 >= 2);
}

/// A candidate has the fuel limit of the target store: with more, a replay would accept a candidate
/// that fails at every request there. A policy that replays its own requests always has enough
/// fuel.
#[test]
fn replay_of_a_candidate_uses_the_given_fuel_limit() {
    let faulty = policies::faulty();
    let server = Server::with_config(&format!("policy = {faulty:?}\nmax_fuel = 40000000\n"));
    let answer = server
        .store("client")
        .ask(&["SET", "key", "burn", "2000000"]);
    assert_eq!(answer.payload(), [b'+'; 300]);
    replay(&server, &[], 0);
    replay(&server, &["--max-fuel", "50000"], 0);
    let (differences, _) = replay(&server, &["--policy", faulty], 1);
    let why = differences[0]["now"]["failure"].as_str().unwrap();
    assert!(why.contains("max_fuel"), "{why}");
    replay(&server, &["--policy", faulty, "--max-fuel", "40000000"], 0);
}

/// Regression: a replay accepted a command that fails after a promotion.
#[test]
fn replay_of_a_candidate_checks_its_commands() {
    let server = Server::start();
    server.store("client").set("key", "beyond");
    let (differences, _) = replay(&server, &["--policy", policies::faulty()], 1);
    let why = differences[0]["now"]["failure"].as_str().unwrap();
    assert!(why.contains("it declares 3 commands"), "{why}");
}

/// Regression: a script took a replay that compared nothing for one without differences.
#[test]
fn replay_of_a_candidate_that_compares_nothing_exits_with_1() {
    let server = Server::start();
    for code in [1, 0] {
        let (_, summary) = replay(&server, &["--policy", "builtin"], code);
        assert_eq!(counts(&summary["summary"]).1, 0, "{summary}");
        server.store("client").set("key", "value");
    }
    // Without a candidate, a store without requests is as it should be.
    replay(&Server::start(), &[], 0);
}

#[test]
fn replay_with_another_policy_prints_differences() {
    let server = Server::start();
    let mut store = server.store("client\n1");
    let version = store.set("key", "fine");
    store.set("key", "panic");
    store.ask(&["SET", "key", "fine", "PX", "600000"]);
    store.watch("key");
    assert_eq!(
        store.ask(&["KEYNOTIFY", "key", "STOP"]).payload(),
        b"+OK\r\n"
    );

    let faulty = policies::faulty();
    let (differences, summary) = replay(&server, &["--policy", faulty], 1);
    // The faulty policy registers a watch, but the standard one removed it. The result of the
    // registration was not recorded.
    assert_eq!(counts(&summary["summary"]), (0, 3, 1), "{summary}");
    assert_eq!(counts(&summary["commands"]["SET"]), (0, 3, 0));
    assert_eq!(counts(&summary["commands"]["KEYNOTIFY"]), (0, 0, 1));
    assert_eq!(summary["reasons"].as_object().unwrap().len(), 1);
    let [fine, panics, expiring] = &differences[..] else {
        panic!("{differences:#?}");
    };
    assert_eq!(fine["client"], "client\n1");
    assert_eq!(fine["request"], serde_json::json!(["SET", "key", "fine"]));
    assert_eq!(fine["recorded"]["answer"], "+OK\r\n");
    assert_eq!(fine["recorded"]["version"], version.to_string());
    assert_eq!(fine["now"]["answer"], "+OK\r\n");
    assert!(
        fine["now"]["version"].is_null(),
        "this policy returns no version"
    );
    let (was, is) = (&fine["recorded"]["writes"][0], &fine["now"]["writes"][0]);
    assert_eq!((&was["key"], &is["key"]), (&"key".into(), &"key".into()));
    assert_eq!(was["version"], version.to_string());
    assert!(was["expires"].is_null() && is["expires"].is_string());
    assert_eq!(panics["now"]["answer"], "-ERR internal error\r\n");
    assert!(panics["now"]["failure"].is_string());
    assert_eq!(panics["now"]["writes"].as_array().unwrap().len(), 0);
    assert_eq!(expiring["request"][3], "PX");

    let ran = server
        .run(&["replay", "--policy", faulty, "--limit", "1"])
        .code(1);
    let text = ran.text();
    assert!(text.contains("2 more differences not printed"), "{text}");
    assert!(
        text.contains("client\\n1") && !text.contains("client\n1"),
        "{text}"
    );
    assert!(text.contains("not comparable: 1, because"), "{text}");
    assert_eq!(text.matches("    recorded ").count(), 1, "{text}");
}

/// A policy with hidden state in its instance gives another answer on a fresh one. Requests of a
/// policy without its module are not comparable.
#[test]
fn replay_uses_the_policy_that_handled_each_request() {
    let mut server = Server::restartable(&[("policy", policies::faulty())]);
    let mut store = server.store("client");
    assert_eq!(store.ask(&["SET", "key", "fine"]).payload(), b"+OK\r\n");
    store.ask(&["HIDE", "secret"]);
    assert_eq!(store.ask(&["COUNT", "key"]).payload(), b":3\r\n");
    drop(store);
    let (differences, summary) = replay(&server, &[], 1);
    assert_eq!(counts(&summary["summary"]), (2, 1, 0), "{summary}");
    assert_eq!(differences[0]["now"]["answer"], ":1\r\n");
    let (_, summary) = replay(&server, &["--policy", "builtin"], 1);
    assert_eq!(counts(&summary["summary"]), (0, 3, 0), "{summary}");

    // Without the module, only requests of the standard policy are comparable.
    server.stop();
    server.restart_with(&[("policy", "builtin")]);
    server.store("client").set("key", "2");
    let modules = server.data_directory().join("policies");
    let digest = server.stdout()[1].rsplit(':').next().unwrap().to_owned();
    for entry in fs::read_dir(&modules).unwrap() {
        let path = entry.unwrap().path();
        if !path.to_string_lossy().contains(&digest) {
            fs::remove_file(path).unwrap();
        }
    }
    let (_, summary) = replay(&server, &[], 0);
    assert_eq!(counts(&summary["summary"]), (1, 0, 3), "{summary}");
    let text = server.run(&["replay"]).code(0).text();
    assert_contains!(text, "not in the data directory any more");
}

#[test]
fn range_selects_requests_by_record_or_time() {
    let mut server = Server::restartable(&[]);
    let mut store = server.store("client");
    for n in 0..10 {
        store.set("key", format!("{n}"));
    }
    drop(store);
    server.stop();
    let ran = server.run(&["history", "key", "--json"]).code(0);
    let mut changes = ran.objects();
    changes.pop();
    changes.reverse();
    let record = |n: usize| changes[n]["record"].to_string();
    let count = |arguments: &[&str]| counts(&replay(&server, arguments, 0).1["summary"]).0;
    assert_eq!(count(&[]), 10);
    assert_eq!(count(&["--from", &record(3)]), 7);
    assert_eq!(count(&["--to", &record(3)]), 4);
    assert_eq!(count(&["--from", &record(3), "--to", &record(3)]), 1);
    assert_eq!(count(&["--from", &record(4), "--to", &record(3)]), 0);
    assert_eq!(count(&["--from", "0"]), 10);
    assert_eq!(count(&["--from", "100000"]), 0);
    assert_eq!(count(&["--from", "1h"]), 10);
    assert_eq!(count(&["--to", "1h"]), 0);
    let time = |n: usize| changes[n]["time"].as_str().unwrap().to_owned();
    let since = changes
        .iter()
        .filter(|it| it["time"].as_str().unwrap() >= time(5).as_str());
    assert_eq!(count(&["--from", &time(5)]), since.count() as u64);
    let until = changes
        .iter()
        .filter(|it| it["time"].as_str().unwrap() <= time(5).as_str());
    assert_eq!(count(&["--to", &time(5)]), until.count() as u64);
    let text = server.run(&["replay", "--from", "100000"]).code(0).text();
    assert!(text.contains("no request is recorded there"), "{text}");
    for wrong in [["--from", "soon"], ["--to", "-1"], ["--limit", "x"]] {
        server.run(&["replay", wrong[0], wrong[1]]).code(2);
    }
    let wrong = |policy: &str| -> Ran { server.run(&["replay", "--policy", policy]).code(2) };
    wrong("missing.wasm").says("missing.wasm");
    fs::write(server.directory().join("rubbish.wasm"), "rubbish").unwrap();
    wrong("rubbish.wasm").says("WebAssembly");
}

/// A restored directory has no records from before its backup, so replay starts with the state of
/// the backup.
#[test]
fn replay_of_a_restored_store_starts_at_the_backup() {
    let mut server = Server::restartable(&[]);
    let mut store = server.store("client");
    store.set("key", "1");
    store.set("key", "2");
    drop(store);
    restore_into(&server, "restored");
    server.stop();
    server.restart_with(&[("data", "restored")]);
    let mut store = server.store("client");
    // These answers depend on the state in the backup.
    assert_eq!(store.ask(&["SET", "key", "3", "NX"]).payload(), b":-1\r\n");
    assert_eq!(store.ask(&["VDEL", "key", "2"]).payload(), b":1\r\n");
    let ran = server.run(&["replay", "--from", "1", "--data", "restored"]);
    let ran = ran.code(0).says("does not reach back that far");
    assert_contains!(ran.text(), "all                        2           0");
}
