//! Tests of `statehouse explain`.

use statehouse_tests::{Server, policies, run};

#[test]
fn write_is_explained_from_request_to_notifications() {
    let ran = run(
        &[
            "explain",
            "--at",
            "2023-11-14T22:13:20Z",
            "--client",
            "thermostat",
            "--watch",
            "room",
            "--fencing-token",
            "001699999999999:00000:lock",
            "--",
            "SET",
            "room",
            "21.5",
            "PX",
            "1000",
        ],
        b"",
    );
    let ran = ran.code(0);
    ran.prints(&[
        "request        SET room 21.5 PX 1000\n               by client thermostat at 2023-11-14T22:13:20",
        "policy         standard 1.0.0@",
        "decision       +OK\\r\\n",
        "version        001700000000000:00001:StateStore",
        "gets this very answer",
        "effects        sets room to 21.5 (4 bytes), version 001700000000000:00001:StateStore, fence 001699999999999:00000:lock, expires 2023-11-14T22:13:21",
        "rests on       room, which is not there",
        "notifications  watcher receives *4\\r\\n$6\\r\\nNOTIFY",
        "fuel           ",
    ]);
    assert!(!ran.text().contains("hidden state"), "{ran:#?}");
}

#[test]
fn logged_lines_are_explained() {
    let say = ["--", "SET", "k", "say", "+OK\\r\\n", "2"];
    let explain = ["explain", "--policy", policies::faulty()];
    let shown = "\nlog            info: +OK\\r\\n\n               info: +OK\\r\\n\n";
    let ran = run(&[&explain[..], &say].concat(), b"");
    ran.code(0).prints(&[shown]);
}

/// Regression: both instances were fresh, so they never differed.
#[test]
fn hidden_state_is_explained() {
    let explain = [
        "explain",
        "--policy",
        policies::faulty(),
        "--",
        "COUNT",
        "k",
    ];
    run(&explain, b"").code(0).prints(&[
        "decision       :2\\r\\n",
        "hidden state   the policy keeps state between requests: a fresh instance answers :1",
    ]);
}

#[test]
fn refusal_or_failure_is_explained_with_its_exit_code() {
    let refused = ["explain", "--timestamp", "none", "--", "SET", "k", "v"];
    run(&refused, b"").code(4).prints(&[
        "decision       -ERR missing timestamp",
        "effects        none",
    ]);
    let faulty = policies::faulty();
    let failing = ["explain", "--policy", faulty, "--", "SET", "k", "panic"];
    let ran = run(&failing, b"").code(1);
    ran.prints(&[
        "the policy failed: ",
        "effects        none",
        "rests on       reads that are not recorded",
    ]);
    run(&["explain"], b"").code(2);
    run(&["explain", "--dialect", "latin", "--", "GET", "k"], b"").code(2);
    run(&["explain", "--policy", "/no/such", "--", "GET", "k"], b"").code(2);
}

#[test]
fn explain_json_shows_watches_duplicates_and_writes() {
    let explain = |arguments: &[&str]| {
        let mut all = vec!["explain", "--json"];
        all.extend(arguments);
        run(&all, b"").code(0).object()
    };
    let it = explain(&["--dialect", "documents", "--", "KEYNOTIFY", "k"]);
    assert_eq!(it["watched"], serde_json::json!(["k"]));
    let it = explain(&["--property", "x=y", "--", "SCAN", "*"]);
    assert_eq!(it["rests_on"], serde_json::Value::Null);
    assert_eq!(it["duplicate_is_owed"], false);
    let it = explain(&["--policy", policies::faulty(), "--", "HIDE", "k"]);
    assert_eq!(it["writes"][0]["hidden"], true);
}

#[test]
fn explain_on_a_running_store_changes_nothing() {
    let server = Server::start();
    let mut store = server.store("writer");
    store.set("k", "before");
    let data = server.data_directory();
    let data = data.to_str().unwrap();
    let ran = run(&["explain", "--data", data, "--", "DEL", "k"], b"");
    ran.code(0).prints(&[
        "decision       :1\\r\\n",
        "effects        deletes k",
        "k, which holds before (6 bytes)",
    ]);
    assert_eq!(store.get("k"), Some(b"before".to_vec()));
}
