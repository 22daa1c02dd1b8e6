//! Tests a store with a log that is read late or not at all: a full log pipe must never delay a
//! client or the shutdown. Tests the log in JSON, and the log lines of policies.

use std::{
    process::Stdio,
    time::{Duration, Instant},
};

use serde_json::Value;
use statehouse_tests::{Background, Lines, Server, client::PATIENCE, command, policies};

/// Sends requests until the pipe and the log queue are full.
fn fill(server: &Server) {
    // Each log line contains the client id.
    let mut store = server.store(&"x".repeat(200));
    let end = Instant::now() + Duration::from_secs(120);
    while server.metric("log_dropped_total") == 0 {
        let asked = [(); 500].map(|()| {
            let request = store.command(&["GET", "key"]);
            (store.client.start(request.publish()), request)
        });
        for (id, request) in asked {
            assert_eq!(store.finish(&request, id).payload(), b"$-1\r\n");
        }
        assert!(Instant::now() < end, "the log never becomes full");
    }
}

#[test]
fn unread_log_drops_lines_and_reports_them_later() {
    let (mut server, unread) = Server::unheard();
    assert_eq!(server.metric("log_dropped_total"), 0);
    fill(&server);
    let mut store = server.store("client");
    store.set("key", "value");
    assert_eq!(store.get("key").as_deref(), Some(&b"value"[..]));

    let log = Lines::follow(unread);
    let line = log.wait(Duration::from_secs(10), |line| {
        line.contains("log lines were dropped")
    });
    let line = line.expect("no line about dropped lines");
    let (_, number) = line.split_once(" dropped=").expect("no number");
    assert!(number.parse::<u64>().unwrap() > 0, "{line}");
    store.set("key", "other");
    server.signal("TERM");
    assert!(server.wait(Duration::from_secs(10)).success());
    // The last line is in the log.
    log.wait(Duration::from_secs(10), |_| false);
    let last = log.all().pop().unwrap();
    assert!(last.contains("stopped"), "{last}");
}

#[test]
fn unread_log_does_not_delay_the_shutdown() {
    let (mut server, _unread) = Server::unheard();
    fill(&server);
    server.signal("TERM");
    assert!(server.wait(Duration::from_secs(10)).success());
}

#[test]
fn durations_in_json_are_numbers() {
    let server = Server::with("", &["--policy", policies::faulty(), "--log", "json"]);
    let line = server.wait_for_log("compiled a policy");
    let line: Value = serde_json::from_str(&line).unwrap();
    assert!(line["ms"].is_u64() && line["bytes"].is_u64(), "{line}");
}

/// Regression: the command said that the store was killed and had left its file `admin`.
#[test]
fn policy_logs_say_that_the_store_has_stopped_and_ask_again() {
    let mut server = Server::with("", &["--policy", policies::faulty()]);
    let mut logs = command(&["policy", "logs"]);
    logs.current_dir(server.directory()).stderr(Stdio::piped());
    let mut logs = Background::start(&mut logs);
    let stderr = Lines::follow(logs.child.stderr.take().unwrap());
    let mut store = server.store("client");
    store.ask(&["SET", "k", "say", "before"]);
    logs.wait_for("\tbefore");
    drop(store);
    server.stop();
    stderr.wait(PATIENCE, |line| line.contains("Asking again"));
    let text = stderr.all().join("\n");
    assert!(text.contains("`statehouse serve`"), "{text}");
    assert!(!text.contains("killed"), "{text}");
}
