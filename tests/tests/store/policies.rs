//! Third-party policies through the real binary. A fault of a policy must affect only the request
//! that caused it.

use std::{fs, os::unix::fs::PermissionsExt};

use statehouse_tests::{Server, policies::faulty};

#[test]
fn policy_fault_affects_only_its_request() {
    // Otherwise the host would roll back to the built-in policy after the tenth fault.
    let arguments = ["--policy", faulty(), "--guard-failures", "0"];
    let mut server = Server::with("", &arguments);
    server.wait_for_line("policy faulty 0.1.0 blake3:");
    let mut store = server.store("client");
    let mut other = server.store("other");
    assert_eq!(other.ask(&["SET", "kept", "fine"]).payload(), b"+OK\r\n");
    for mode in include_str!("../../policies/faulty/faults.txt").lines() {
        for key in ["kept", "new"] {
            let answer = store.ask(&["SET", key, mode]);
            assert_eq!(answer.payload(), b"-ERR internal error\r\n", "{mode}");
            assert_eq!(answer.version(), None, "{mode}");
        }
        assert_eq!(store.get("new"), None, "{mode} left something behind");
    }
    assert!(server.runs());
    // The log names the policy that failed.
    server.wait_for_log("faulty");
    store.expect_nothing();
    other.expect_nothing();
    // This policy gives its keys an expiry of one second.
    assert_eq!(other.ask(&["SET", "kept", "fine"]).payload(), b"+OK\r\n");
    assert_eq!(other.get("kept"), Some(b"fine".to_vec()));
}

/// A write is refused if the policy fails to notify its watchers. A key still expires, and the
/// standard policy notifies the watchers instead.
#[test]
fn failed_notification_refuses_a_write_but_no_expiry() {
    let server = Server::with("", &["--policy", faulty()]);
    let mut store = server.store("client");
    let answer = store.ask(&["SET", "bad-notify", "fine"]);
    assert_eq!(answer.payload(), b"+OK\r\n");
    let mut watcher = server.store("watcher");
    watcher.watch("bad-notify");
    let answer = store.ask(&["SET", "bad-notify", "fine"]);
    assert_eq!(answer.payload(), b"-ERR internal error\r\n");
    let expired = watcher.notification();
    assert_eq!(expired.payload, b"*2\r\n$6\r\nNOTIFY\r\n$6\r\nDELETE\r\n");
    assert_eq!(store.get("bad-notify"), None);
    watcher.expect_nothing();
}

/// Stops the server. Returns how many policies it had compiled.
fn policies_compiled_by(server: &mut Server) -> usize {
    server.stop();
    server.wait_for_log("stopped");
    let log = server.stderr();
    log.iter()
        .filter(|it| it.contains("compiled a policy"))
        .count()
}

#[test]
fn policy_code_is_cached_until_damaged_or_readable() {
    let mut server = Server::restartable(&[]);
    assert_eq!(policies_compiled_by(&mut server), 0, "the standard policy");
    server.restart_with(&[("policy", faulty())]);
    assert_eq!(policies_compiled_by(&mut server), 1);
    let answers = |server: &mut Server| {
        server.restart();
        let mut store = server.store("client");
        assert_eq!(store.ask(&["SET", "key", "fine"]).payload(), b"+OK\r\n");
    };
    answers(&mut server);
    assert_eq!(policies_compiled_by(&mut server), 0);

    let code = server.directory().join("statehouse-data/code");
    let file = fs::read_dir(&code).unwrap().next().unwrap().unwrap().path();
    let mut bytes = fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&file, bytes).unwrap();
    answers(&mut server);
    assert_eq!(
        policies_compiled_by(&mut server),
        1,
        "the cached code was damaged"
    );

    fs::set_permissions(&code, fs::Permissions::from_mode(0o755)).unwrap();
    answers(&mut server);
    server.wait_for_log("the machine code of policies is not kept");
    assert_eq!(
        policies_compiled_by(&mut server),
        1,
        "other users may read the directory"
    );
}
