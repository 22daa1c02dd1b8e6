//! Tests `statehouse policy logs`, and how a store shows the last failure of a policy.

use std::fs;

use serde_json::Value as Json;
use statehouse_tests::{
    Admin, Background, Server, assert_contains, command::command, policies, server::signal,
};

use crate::{listing, policy, until};

/// A store whose active policy fails and logs on request.
fn faulty() -> Server {
    Server::with(
        "",
        &["--policy", policies::faulty(), "--guard-failures", "0"],
    )
}

/// Runs `statehouse policy logs` in the background.
fn follow(server: &Server, arguments: &[&str]) -> Background {
    background(server, &[&["logs"], arguments].concat())
}

/// Runs `statehouse policy …` in the server's directory, in the background.
pub(crate) fn background(server: &Server, arguments: &[&str]) -> Background {
    let mut command = command(&[&["policy"], arguments].concat());
    Background::start(command.current_dir(server.directory()))
}

#[test]
fn failure_names_message_file_and_line_of_the_panic() {
    let server = faulty();
    server.store("client").ask(&["SET", "k", "panic"]);
    let cause = "tests/policies/faulty/src/lib.rs:";
    let log = server.wait_for_log("client=\"client\" ");
    assert_contains!(log, cause, ": a panic on request");
    let listing = listing(&server);
    let failed = |it: &&Json| it["last_failure"].is_object();
    let mut policies = listing["policies"]
        .as_array()
        .unwrap()
        .iter()
        .filter(failed);
    let why = policies.next().unwrap()["last_failure"]["why"]
        .as_str()
        .unwrap();
    assert!(
        why.starts_with(cause) && why.ends_with(": a panic on request"),
        "{why}"
    );
    assert!(policies.next().is_none(), "the other policies did not fail");
    let table = policy(&server, &["list"]).code(0).text();
    assert!(table.contains("last failure of faulty@0.1.0 ("), "{table}");
    assert!(table.contains(why), "{table}");
}

#[test]
fn lines_are_followed_live_and_by_policy() {
    let server = faulty();
    let mut store = server.store("client");
    store.ask(&["SET", "k", "say", "before"]);
    let all = follow(&server, &[]);
    all.wait_for("\tbefore");
    let (faulty, standard) = (
        follow(&server, &["faulty", "--json"]),
        follow(&server, &["builtin"]),
    );
    faulty.wait_for("\"before\"");
    store.ask(&["SET", "k", "say", "after"]);
    let line = all.wait_for("\tafter");
    assert!(line.contains("\tinfo\tfaulty 0.1.0@"), "{line}");
    let line: Json = serde_json::from_str(&faulty.wait_for("\"after\"")).unwrap();
    assert_eq!(
        (line["level"].as_str(), line["text"].as_str()),
        (Some("info"), Some("after"))
    );
    assert_eq!(line["digest"].as_str().map(str::len), Some(64));
    assert!(standard.lines.all().is_empty());
}

/// Regression: a second version of the policy ended the command, and an unload hid the lines.
#[test]
fn lines_by_name_follow_all_versions_and_outlive_them() {
    let server = Server::start();
    let first = fs::read(policies::faulty()).unwrap();
    // An empty custom section with the name `x`.
    let second = [&first[..], &[0, 2, 1, b'x']].concat();
    fs::write(server.directory().join("second.wasm"), &second).unwrap();
    let say = |text: &str| {
        let answer = server.store("client").ask(&["SET", "k", "say", text]);
        assert_eq!(answer.payload(), b"+OK\r\n");
    };
    policy(&server, &["load", "--promote", policies::faulty()]).code(0);
    say("one");
    let follower = follow(&server, &["faulty"]);
    follower.wait_for("\tone");
    policy(&server, &["load", "--promote", "second.wasm"]).code(0);
    say("two");
    follower.wait_for("\ttwo");
    policy(&server, &["promote", "builtin"]).code(0);
    for file in [&first, &second] {
        let digest = blake3::hash(file).to_hex();
        policy(&server, &["unload", &digest]).code(0);
    }
    policy(&server, &["load", "--promote", policies::faulty()]).code(0);
    say("three");
    follower.wait_for("\tthree");
    policy(&server, &["promote", "builtin"]).code(0);
    policy(&server, &["unload", "faulty"]).code(0);
    let recent = policy(&server, &["logs", "faulty", "--recent"]).code(0);
    let recent = recent.text();
    let texts = recent.lines().filter_map(|it| it.rsplit('\t').next());
    assert_eq!(texts.collect::<Vec<_>>(), ["one", "two", "three"]);
}

#[test]
fn hostile_lines_are_cut_and_escaped() {
    let server = faulty();
    let mut store = server.store("client");
    store.ask(&["SET", "k", "say", "\x1b[2J\n2026-01-01 forged\tline\u{7f}"]);
    // A megabyte per line, until the fuel ends.
    store.ask(&["SET", "k", "repeat", "log"]);
    let text = policy(&server, &["logs", "--recent"]).code(0).text();
    let first = "\\u{1b}[2J\\n2026-01-01 forged\\tline\\u{7f}\n";
    assert!(text.contains(first), "{}", &text[..300]);
    let long: Vec<&str> = text.lines().filter(|line| line.ends_with("xxxx")).collect();
    assert!(long.len() > 5, "{}", long.len());
    assert!(long.iter().all(|line| line.len() < 1200));
}

/// A reader that stops reading holds nothing in the store. When it reads again, it learns how many
/// lines it missed.
#[test]
fn slow_reader_loses_lines_and_learns_how_many() {
    let server = faulty();
    let mut store = server.store("client");
    store.ask(&["SET", "k", "say", "first"]);
    let follower = follow(&server, &[]);
    follower.wait_for("\tfirst");
    let pid = follower.child.id();
    signal(pid, "STOP");
    for _ in 0..20 {
        store.ask(&["SET", "k", "say", "flood", "1000"]);
    }
    store.ask(&["SET", "k", "say", "last"]);
    signal(pid, "CONT");
    follower.wait_for("\tlast");
    let lines = follower.lines.all();
    let lost = lines.iter().filter_map(|line| line.strip_prefix("lost\t"));
    let lost: usize = lost.map(|count| count.parse::<usize>().unwrap()).sum();
    let read = lines
        .iter()
        .filter(|line| line.ends_with("\tflood"))
        .count();
    assert!(lost > 10_000 && lost + read == 20_000, "{lost} + {read}");
    assert!(store.ask(&["SET", "k", "fine"]).payload() == b"+OK\r\n");
}

/// The log has keys and values of clients, so it needs the same token as the policies.
#[test]
fn log_needs_the_token_and_few_may_follow_it() {
    let server = faulty();
    let admin = Admin::of(&server);
    let (status, _) = admin.without_token().ask("GET", "/v1/log", b"");
    assert_eq!(status, 401);
    for bad in ["/v1/log?from=x", "/v1/log?policy=%FF"] {
        assert_eq!(admin.ask("GET", bad, b"").0, 400, "{bad}");
    }
    assert_eq!(admin.ask("GET", "/v1/log?policy=none", b"").0, 404);
    assert_eq!(admin.ask("POST", "/v1/log", b"").0, 405);
    // Requests from the first line on are then answered at once.
    server.store("client").ask(&["SET", "k", "say", "first"]);
    let followers: Vec<Background> = (0..8).map(|_| follow(&server, &[])).collect();
    until("the ninth follower is refused", || {
        admin.ask("GET", "/v1/log?from=0", b"").0 == 503
    });
    // The others are not disturbed, and operators are served.
    policy(&server, &["list"]).code(0);
    server.store("client").ask(&["SET", "k", "say", "on"]);
    for follower in &followers {
        follower.wait_for("\ton");
    }
}
