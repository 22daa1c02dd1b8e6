//! Policies of other people, through the real binary: each fault is the faulty request's alone.

use std::{fs, os::unix::fs::PermissionsExt, time::Duration};

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

/// Stops it, and says how many policies it had compiled.
fn compiled_by(server: &mut Server) -> usize {
    server.signal("TERM");
    server.wait(Duration::from_secs(10));
    server.wait_for_log("stopped");
    let log = server.stderr();
    log.iter()
        .filter(|it| it.contains("compiled a policy"))
        .count()
}

#[test]
fn a_policy_is_compiled_by_its_first_start_only() {
    let mut server = Server::restartable(&[]);
    assert_eq!(compiled_by(&mut server), 0, "the standard policy");
    server.restart_with(&[("policy", faulty())]);
    assert_eq!(compiled_by(&mut server), 1);
    let answers = |server: &mut Server| {
        server.restart();
        let mut store = server.store("client");
        assert_eq!(store.ask(&["SET", "key", "fine"]).payload(), b"+OK\r\n");
    };
    answers(&mut server);
    assert_eq!(compiled_by(&mut server), 0);

    let code = server.directory().join("statehouse-data/code");
    let file = fs::read_dir(&code).unwrap().next().unwrap().unwrap().path();
    let mut bytes = fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&file, bytes).unwrap();
    answers(&mut server);
    assert_eq!(compiled_by(&mut server), 1, "it was damaged");

    fs::set_permissions(&code, fs::Permissions::from_mode(0o755)).unwrap();
    answers(&mut server);
    server.wait_for_log("the machine code of policies is not kept");
    assert_eq!(compiled_by(&mut server), 1, "others may look into it");
}
