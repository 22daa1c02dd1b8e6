//! Policies of other people, through the real binary: each fault is the faulty request's alone.

use statehouse_tests::{Server, policies::faulty};

#[test]
fn a_faulty_policy_is_contained() {
    // Otherwise the host would go back to the built-in one after the tenth fault.
    let arguments = ["--policy", faulty(), "--guard-failures", "0"];
    let mut server = Server::with("", &arguments);
    assert!(
        server.stdout()[1].starts_with("policy faulty 0.1.0 blake3:"),
        "{:?}",
        server.stdout()
    );
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
    // Its log names the policy that failed.
    server.wait_for_log("faulty");
    store.expect_nothing();
    other.expect_nothing();
    // Keys of this policy live for a second.
    assert_eq!(other.ask(&["SET", "kept", "fine"]).payload(), b"+OK\r\n");
    assert_eq!(other.get("kept"), Some(b"fine".to_vec()));
}

/// What cannot be told of does not happen; what expires goes all the same, and the standard policy tells of it.
#[test]
fn a_policy_that_cannot_tell() {
    let server = Server::with("", &["--policy", faulty()]);
    let mut store = server.store("client");
    assert_eq!(
        store.ask(&["SET", "bad-notify", "fine"]).payload(),
        b"+OK\r\n"
    );
    let mut watcher = server.store("watcher");
    watcher.watch("bad-notify");
    assert_eq!(
        store.ask(&["SET", "bad-notify", "fine"]).payload(),
        b"-ERR internal error\r\n"
    );
    let gone = watcher.notification();
    assert_eq!(gone.payload, b"*2\r\n$6\r\nNOTIFY\r\n$6\r\nDELETE\r\n");
    assert_eq!(store.get("bad-notify"), None);
    watcher.expect_nothing();
}
