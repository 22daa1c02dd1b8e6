//! `statehouse lock NAME -- COMMAND`: one command at a time, its exit code, and a lock that is given back.

use std::{
    fs,
    net::SocketAddr,
    path::Path,
    process::{Child, Stdio},
    thread,
    time::{Duration, Instant},
};

use statehouse_tests::{
    Fate, Hlc, Proxy, Ran, Server, Way, client::PATIENCE, command, command::finish, packet::kind,
    server,
};

fn locked(
    server: &Server,
    directory: &Path,
    options: &[&str],
    script: &str,
) -> std::process::Command {
    let at = server.address();
    locked_at(at, directory, options, script)
}

fn locked_at(
    at: SocketAddr,
    directory: &Path,
    options: &[&str],
    script: &str,
) -> std::process::Command {
    let (host, port) = (at.ip().to_string(), at.port().to_string());
    let mut all = vec!["lock", "--host", &host, "--port", &port];
    all.extend(options);
    all.extend(["--", "sh", "-c", script]);
    let mut command = command(&all);
    command.current_dir(directory);
    command
}

fn run(server: &Server, options: &[&str], script: &str) -> Ran {
    let directory = tempfile::tempdir().unwrap();
    finish(locked(server, directory.path(), options, script), b"")
}

fn background(server: &Server, directory: &Path, options: &[&str], script: &str) -> Child {
    locked(server, directory, options, script)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

/// Waits for a file that a command makes.
fn wait_for(path: &Path) {
    let end = Instant::now() + PATIENCE;
    while !path.exists() {
        assert!(Instant::now() < end, "{} was not made", path.display());
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn the_exit_code_is_the_commands() {
    let server = Server::start();
    for code in [0, 1, 3, 42, 255] {
        run(&server, &["lock"], &format!("exit {code}")).code(code);
    }
    run(&server, &["lock"], "kill -TERM $$").code(143);
    let port = server.port().to_string();
    let missing = ["lock", "lock", "--port", &port, "--", "/no/such/program"];
    statehouse_tests::run(&missing, b"")
        .code(127)
        .says("/no/such/program");
    // Each gave the lock back.
    assert_eq!(server.store("reader").get("lock"), None);
}

#[test]
fn the_command_is_told_and_passed_through() {
    let server = Server::start();
    let ran = run(
        &server,
        &["my lock", "--holder", "me"],
        "echo $STATEHOUSE_LOCK; echo $STATEHOUSE_FENCING_TOKEN; echo aside >&2",
    );
    let ran = ran.code(0).says("aside");
    let lines: Vec<String> = ran.text().lines().map(String::from).collect();
    assert_eq!(lines[0], "my lock");
    assert_eq!(Hlc::parse_padded(&lines[1]).unwrap().node, "StateStore");
    // Its input is the command's.
    let directory = tempfile::tempdir().unwrap();
    let cat = locked(&server, directory.path(), &["lock"], "cat");
    assert_eq!(finish(cat, b"\0in\xFF").code(0).stdout, b"\0in\xFF");
}

/// Six at once read, wait and write one number; none is lost, so never were two inside.
#[test]
fn one_command_at_a_time() {
    let server = Server::start();
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("count"), "0").unwrap();
    let script =
        "mkdir inside || exit 9; n=$(cat count); sleep 0.1; echo $((n + 1)) > count; rmdir inside";
    let mut children: Vec<Child> = (0..6)
        .map(|_| {
            background(
                &server,
                directory.path(),
                &["lock", "--lease", "30s"],
                script,
            )
        })
        .collect();
    for child in &mut children {
        let status = server::wait(child, Duration::from_secs(60)).expect("it gets its turn");
        assert_eq!(status.code(), Some(0), "two were inside");
    }
    let count = fs::read_to_string(directory.path().join("count")).unwrap();
    assert_eq!(count.trim(), "6");
    assert_eq!(server.store("reader").get("lock"), None);
}

/// A command that outlives its lease keeps the lock, since that is renewed.
#[test]
fn the_lease_is_renewed() {
    let server = Server::start();
    let directory = tempfile::tempdir().unwrap();
    let mut holder = background(
        &server,
        directory.path(),
        &["lock", "--lease", "2s", "--holder", "first"],
        "touch begun; while [ ! -e end ]; do sleep 0.05; done",
    );
    wait_for(&directory.path().join("begun"));
    let mut reader = server.store("reader");
    reader.watch("lock");
    // Renewed more often than the first lease would have had time for.
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(4) {
        let heard = reader.notification();
        assert!(!heard.payload.ends_with(b"DELETE\r\n"), "the lease ended");
        assert_eq!(reader.get("lock"), Some(b"first".to_vec()));
    }
    run(&server, &["lock", "--wait", "100ms"], "exit 0")
        .code(1)
        .says("held by another");
    fs::write(directory.path().join("end"), "").unwrap();
    let status = server::wait(&mut holder, Duration::from_secs(20)).expect("it ends");
    assert_eq!(status.code(), Some(0));
    run(&server, &["lock", "--wait", "10s"], "exit 0").code(0);
}

/// The holder is killed: its lock ends with the lease, and the next one gets it.
#[test]
fn a_killed_holder_lets_go_at_its_lease() {
    let server = Server::start();
    let directory = tempfile::tempdir().unwrap();
    let mut holder = background(
        &server,
        directory.path(),
        &["lock", "--lease", "1500ms"],
        "touch begun; exec sleep 60",
    );
    wait_for(&directory.path().join("begun"));
    holder.kill().unwrap();
    holder.wait().unwrap();
    run(&server, &["lock", "--wait", "30s"], "exit 7").code(7);
}

/// A signal is passed to the command, and the lock given back.
#[test]
fn signals_reach_the_command() {
    let server = Server::start();
    let directory = tempfile::tempdir().unwrap();
    let mut holder = background(
        &server,
        directory.path(),
        &["lock"],
        "trap 'exit 5' TERM; touch begun; while true; do sleep 0.05; done",
    );
    wait_for(&directory.path().join("begun"));
    server::signal(holder.id(), "TERM");
    let status = server::wait(&mut holder, Duration::from_secs(20)).expect("it ends");
    assert_eq!(status.code(), Some(5));
    assert_eq!(server.store("reader").get("lock"), None);
}

/// Somebody else took the lock: the command is stopped, and the exit code says so.
#[test]
fn a_lost_lease_stops_the_command() {
    let server = Server::start();
    let directory = tempfile::tempdir().unwrap();
    let mut holder = background(
        &server,
        directory.path(),
        &["lock", "--lease", "3s"],
        "trap 'touch stopped; exit 0' TERM; touch begun; while true; do sleep 0.05; done",
    );
    wait_for(&directory.path().join("begun"));
    server.store("thief").set("lock", "thief");
    let status = server::wait(&mut holder, Duration::from_secs(20)).expect("it ends");
    assert_eq!(status.code(), Some(3));
    assert!(directory.path().join("stopped").exists(), "no SIGTERM");
    // It took nothing from the new holder.
    assert_eq!(server.store("reader").get("lock"), Some(b"thief".to_vec()));
}

/// The answers of the store to a SET of the lock take longer than its lease. The command must not run.
#[test]
fn answers_after_the_lease_are_no_lock() {
    let server = Server::start();
    let proxy = Proxy::start(server.address());
    let mut locks = 0;
    proxy.script(move |seen| {
        let is_answer = seen.way == Way::FromBroker && seen.packet.kind() == kind::PUBLISH;
        // The first answer is that to KEYNOTIFY.
        locks += usize::from(is_answer);
        match is_answer && locks > 1 {
            true => Fate::Delay(Duration::from_millis(600)),
            false => Fate::Pass,
        }
    });
    let directory = tempfile::tempdir().unwrap();
    let options = ["lock", "--lease", "400ms", "--wait", "1s"];
    let late = locked_at(proxy.address(), directory.path(), &options, "touch ran");
    finish(late, b"").code(1).says("answers too slowly");
    assert!(!directory.path().join("ran").exists());
    // With answers in time it is a lock again.
    proxy.pass();
    let early = locked_at(proxy.address(), directory.path(), &options, "touch ran");
    finish(early, b"").code(0);
}

/// Renewals are sent, and no answer arrives: the command is stopped when the lease ends.
#[test]
fn renewals_without_answers_stop_the_command() {
    let server = Server::start();
    let proxy = Proxy::start(server.address());
    let directory = tempfile::tempdir().unwrap();
    let mut holder = locked_at(
        proxy.address(),
        directory.path(),
        &["lock", "--lease", "1500ms"],
        "trap 'touch stopped; exit 0' TERM; touch begun; while true; do sleep 0.05; done",
    )
    .stdin(Stdio::null())
    .spawn()
    .unwrap();
    wait_for(&directory.path().join("begun"));
    proxy.script(|seen| match seen.way {
        Way::FromBroker => Fate::Hold,
        Way::ToBroker => Fate::Pass,
    });
    let status = server::wait(&mut holder, Duration::from_secs(20)).expect("it ends");
    assert_eq!(status.code(), Some(3));
    assert!(directory.path().join("stopped").exists(), "no SIGTERM");
}
