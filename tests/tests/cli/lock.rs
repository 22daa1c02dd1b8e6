//! Tests `statehouse lock NAME -- COMMAND`. Two commands must never run under one lock, and a
//! command must stop when its lease is lost.

use std::{
    fs,
    io::Write,
    net::{SocketAddr, TcpListener},
    os::unix::process::ExitStatusExt,
    path::Path,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use statehouse_tests::{
    Fate, Hlc, Lines, Proxy, Ran, Server, Way,
    client::PATIENCE,
    command,
    command::{finish, in_terminal},
    packet::kind,
    server,
    wait::{eventually, until},
};
use tempfile::TempDir;

/// A command that holds a lock of the store at this address while a script runs.
fn locked(at: SocketAddr, directory: &Path, options: &[&str], script: &str) -> Command {
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
    let at = server.address();
    finish(locked(at, directory.path(), options, script), b"")
}

fn background(at: SocketAddr, directory: &Path, options: &[&str], script: &str) -> Child {
    locked(at, directory, options, script)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

/// The same command run by another program, without standard streams.
fn under(program: &[&str], command: &Command) -> Command {
    let mut outer = Command::new(program[0]);
    outer.args(&program[1..]);
    outer.arg(command.get_program()).args(command.get_args());
    outer.current_dir(command.get_current_dir().unwrap());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => outer.env(name, value),
            None => outer.env_remove(name),
        };
    }
    outer.stdin(Stdio::null()).stdout(Stdio::null());
    outer.stderr(Stdio::null());
    outer
}

/// Waits for the end of a command, which must have this exit code.
fn expect_end(command: &mut Child, code: i32) {
    let status = server::wait(command, Duration::from_secs(20)).expect("the process did not end");
    assert_eq!(status.code(), Some(code));
}

/// Waits until a command has created the file `begun`.
fn wait_for_begin(directory: &Path) {
    let path = directory.join("begun");
    until("the command begins", || path.exists());
}

/// Runs until the file `end` exists.
const UNTIL_END: &str = "touch begun; while [ ! -e end ]; do sleep 0.05; done";

/// Runs until SIGTERM, and creates the file `stopped` then.
const UNTIL_TERM: &str =
    "trap 'touch stopped; exit 0' TERM; touch begun; while true; do sleep 0.05; done";

/// Starts a command with a script that has begun. Returns also the directory of the script.
fn holder(at: SocketAddr, options: &[&str], script: &str) -> (Child, TempDir) {
    let directory = tempfile::tempdir().unwrap();
    let child = background(at, directory.path(), options, script);
    wait_for_begin(directory.path());
    (child, directory)
}

#[test]
fn exit_code_of_the_command_is_returned() {
    let server = Server::start();
    for code in [0, 1, 3, 42, 255] {
        run(&server, &["lock"], &format!("exit {code}")).code(code);
    }
    run(&server, &["lock"], "kill -TERM $$").code(143);
    // This program handles the signal, and its command does not inherit that.
    run(&server, &["lock"], "kill -XFSZ $$").code(153);
    // Each command released the lock.
    assert_eq!(server.store("reader").get("lock"), None);
}

#[test]
fn command_gets_lock_variables_and_standard_streams() {
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
    // The command reads the standard input.
    let directory = tempfile::tempdir().unwrap();
    let cat = locked(server.address(), directory.path(), &["lock"], "cat");
    assert_eq!(finish(cat, b"\0in\xFF").code(0).stdout, b"\0in\xFF");
}

/// Six commands read, wait, and write one number. Two at the same time would lose an increment.
#[test]
fn commands_under_one_lock_run_one_at_a_time() {
    let server = Server::start();
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("count"), "0").unwrap();
    let script =
        "mkdir inside || exit 9; n=$(cat count); sleep 0.1; echo $((n + 1)) > count; rmdir inside";
    let options = ["lock", "--lease", "30s"];
    let children = (0..6).map(|_| background(server.address(), directory.path(), &options, script));
    let mut children: Vec<_> = children.collect();
    for child in &mut children {
        let status =
            server::wait(child, Duration::from_secs(60)).expect("the command did not get the lock");
        assert_eq!(status.code(), Some(0), "two commands ran at the same time");
    }
    let count = fs::read_to_string(directory.path().join("count")).unwrap();
    assert_eq!(count.trim(), "6");
    assert_eq!(server.store("reader").get("lock"), None);
}

/// The command runs longer than its first lease.
#[test]
fn lease_is_renewed_while_the_command_runs() {
    let server = Server::start();
    let options = ["lock", "--lease", "2s", "--holder", "first"];
    let (mut holder, directory) = holder(server.address(), &options, UNTIL_END);
    let mut reader = server.store("reader");
    reader.watch("lock");
    // Twice the lease: each renewal is a notification.
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(4) {
        let renewal = reader.notification();
        assert!(!renewal.payload.ends_with(b"DELETE\r\n"), "the lease ended");
        assert_eq!(reader.get("lock"), Some(b"first".to_vec()));
    }
    run(&server, &["lock", "--wait", "100ms"], "exit 0").fails(1, "held by another");
    fs::write(directory.path().join("end"), "").unwrap();
    expect_end(&mut holder, 0);
    run(&server, &["lock", "--wait", "10s"], "exit 0").code(0);
}

#[test]
fn lock_of_a_killed_holder_ends_with_its_lease() {
    let server = Server::start();
    let options = ["lock", "--lease", "1500ms"];
    let script = "touch begun; exec sleep 60";
    let (mut holder, _directory) = holder(server.address(), &options, script);
    holder.kill().unwrap();
    holder.wait().unwrap();
    run(&server, &["lock", "--wait", "30s"], "exit 7").code(7);
}

/// The sessions of the commands last for seconds, but the store may evict them.
#[test]
fn ended_commands_leave_room_for_further_sessions() {
    let server = Server::with_config("max_sessions = 12\n");
    for _ in 0..14 {
        run(&server, &["job", "--lease", "1h"], "true").code(0);
    }
    // A refused request ends its session, too.
    let port = server.port().to_string();
    for _ in 0..14 {
        let set = ["set", "", "value", "--port", &port];
        statehouse_tests::run(&set, b"").code(4);
    }
}

#[test]
fn command_without_room_for_its_session_names_the_limit() {
    let server = Server::with_config("max_sessions = 12\n");
    let others: Vec<_> = (0..12)
        .map(|number| server.connect(&format!("other-{number}")))
        .collect();
    run(&server, &["job"], "true").fails(3, "`max_sessions`");
    drop(others);
}

/// The command receives the signal, and the lock is released after it.
#[test]
fn signals_are_forwarded_to_the_command() {
    let server = Server::start();
    for name in ["HUP", "INT", "QUIT", "TERM"] {
        let script =
            "trap 'exit 5' HUP INT QUIT TERM; touch begun; while true; do sleep 0.05; done";
        let (mut holder, _directory) = holder(server.address(), &["lock"], script);
        server::signal(holder.id(), name);
        expect_end(&mut holder, 5);
        assert_eq!(server.store("reader").get("lock"), None);
    }
}

/// `nohup` ignores SIGHUP for the command and all that it starts.
#[test]
fn ignored_signal_stays_ignored_by_the_command() {
    let server = Server::start();
    let directory = tempfile::tempdir().unwrap();
    let locked = locked(server.address(), directory.path(), &["lock"], UNTIL_END);
    let mut holder = under(&["nohup"], &locked).spawn().unwrap();
    wait_for_begin(directory.path());
    server::signal(holder.id(), "HUP");
    // The command, if it received the signal, ends before the next request is answered.
    run(&server, &["lock", "--wait", "500ms"], "exit 0").code(1);
    fs::write(directory.path().join("end"), "").unwrap();
    expect_end(&mut holder, 0);
}

/// Another client overwrites the lock.
#[test]
fn lost_lock_stops_the_command_with_code_3() {
    let server = Server::start();
    let options = ["lock", "--lease", "3s"];
    let (mut holder, directory) = holder(server.address(), &options, UNTIL_TERM);
    server.store("thief").set("lock", "thief");
    expect_end(&mut holder, 3);
    assert!(directory.path().join("stopped").exists(), "no SIGTERM");
    // The release did not affect the new holder.
    assert_eq!(server.store("reader").get("lock"), Some(b"thief".to_vec()));
}

/// The answers to a SET of the lock take longer than the lease, so the command must not run.
#[test]
fn answer_after_the_lease_does_not_acquire_the_lock() {
    let server = Server::start();
    let proxy = Proxy::start(server.address());
    let mut locks = 0;
    proxy.script(move |seen| {
        let is_answer = seen.way == Way::FromBroker && seen.packet.kind() == kind::PUBLISH;
        // The first answer belongs to KEYNOTIFY.
        locks += usize::from(is_answer);
        match is_answer && locks > 1 {
            true => Fate::Delay(Duration::from_millis(600)),
            false => Fate::Pass,
        }
    });
    let directory = tempfile::tempdir().unwrap();
    let options = ["lock", "--lease", "400ms", "--wait", "1s"];
    let late = locked(proxy.address(), directory.path(), &options, "touch ran");
    finish(late, b"").fails(1, "answers too slowly");
    assert!(!directory.path().join("ran").exists());
    // Without the delay the command acquires the lock.
    proxy.pass();
    let early = locked(proxy.address(), directory.path(), &options, "touch ran");
    finish(early, b"").code(0);
}

#[test]
fn lease_too_short_to_be_held_is_refused() {
    let server = Server::start();
    let short = run(&server, &["lock", "--lease", "1ms"], "true");
    short.fails(2, "the shortest lease is 100 ms");
}

fn hold_answers(proxy: &Proxy) {
    proxy.script(|seen| match seen.way {
        Way::FromBroker => Fate::Hold,
        Way::ToBroker => Fate::Pass,
    });
}

/// Whether a client has sent this command of the protocol through a relay.
fn has_asked(proxy: &Proxy, command: &str) -> bool {
    proxy.seen().iter().any(|seen| {
        let is_request = seen.way == Way::ToBroker && seen.packet.kind() == kind::PUBLISH;
        is_request && {
            let payload = seen.packet.publish().payload;
            String::from_utf8_lossy(&payload).contains(&format!("\n{command}\r"))
        }
    })
}

/// Sends SIGINT until the process ends.
fn interrupt(child: &mut Child) {
    let status = eventually("the process ends", || {
        server::signal(child.id(), "INT");
        child.try_wait().unwrap()
    });
    assert_eq!(status.code(), Some(130));
}

/// Regression: it ignored signals until the connection timed out.
#[test]
fn signal_ends_lock_while_it_connects() {
    for (name, number) in [("INT", 2), ("TERM", 15)] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let directory = tempfile::tempdir().unwrap();
        let at = listener.local_addr().unwrap();
        let options = ["lock", "--timeout", "10m"];
        let mut connecting = background(at, directory.path(), &options, "true");
        let silent = listener.accept().unwrap();
        server::signal(connecting.id(), name);
        let status = server::wait(&mut connecting, Duration::from_secs(20));
        let status = status.expect("the process did not end");
        assert_eq!(status.signal(), Some(number));
        drop(silent);
    }
}

/// Regression: it ignored signals until the release timed out.
#[test]
fn second_signal_ends_a_release_without_an_answer() {
    let server = Server::start();
    let proxy = Proxy::start(server.address());
    let options = ["lock", "--lease", "1h", "--timeout", "10m"];
    let (mut holder, directory) = holder(proxy.address(), &options, UNTIL_END);
    hold_answers(&proxy);
    fs::write(directory.path().join("end"), "").unwrap();
    until("the lock is released", || has_asked(&proxy, "VDEL"));
    interrupt(&mut holder);
}

/// Regression: it ignored signals until the deletion of its key timed out.
#[test]
fn second_signal_ends_an_interrupted_wait_without_an_answer() {
    let server = Server::start();
    server.store("holder").set("lock", "holder");
    let proxy = Proxy::start(server.address());
    let directory = tempfile::tempdir().unwrap();
    let options = ["lock", "--timeout", "10m"];
    let mut waiting = background(proxy.address(), directory.path(), &options, "true");
    until("it asks for the lock", || has_asked(&proxy, "SET"));
    hold_answers(&proxy);
    server::signal(waiting.id(), "INT");
    until("it takes the request back", || has_asked(&proxy, "VDEL"));
    interrupt(&mut waiting);
}

/// Regression: with another standard input the command got SIGINT from the terminal, and again from
/// `lock`.
#[test]
fn ctrl_c_on_a_terminal_reaches_the_command_once() {
    let server = Server::start();
    let directory = tempfile::tempdir().unwrap();
    let script = "count=0
        trap 'count=$((count + 1)); echo interrupted' INT
        trap 'exit $((10 + count))' TERM
        echo $PPID > holder
        touch begun
        while true; do sleep 0.05; done";
    fs::write(directory.path().join("script"), script).unwrap();
    let port = server.port();
    let lock = format!("lock lock --port {port} -- sh script < /dev/null");
    let mut terminal = in_terminal(&lock)
        .current_dir(directory.path())
        .spawn()
        .expect("script of util-linux runs");
    let lines = Lines::follow(terminal.stdout.take().unwrap());
    let mut keys = terminal.stdin.take().unwrap();
    wait_for_begin(directory.path());
    keys.write_all(b"\x03").unwrap();
    let interrupted = lines.wait(PATIENCE, |line| line.contains("interrupted"));
    assert!(interrupted.is_some(), "{:?}", lines.all());
    // `lock` handles SIGINT first, and forwards SIGTERM.
    let holder = fs::read_to_string(directory.path().join("holder")).unwrap();
    server::signal(holder.trim().parse().unwrap(), "TERM");
    expect_end(&mut terminal, 11);
}

/// The relay holds all answers to renewals, so the command must stop when the lease ends.
#[test]
fn renewals_without_answers_stop_the_command() {
    let server = Server::start();
    let proxy = Proxy::start(server.address());
    let options = ["lock", "--lease", "1500ms"];
    let (mut holder, directory) = holder(proxy.address(), &options, UNTIL_TERM);
    hold_answers(&proxy);
    expect_end(&mut holder, 3);
    assert!(directory.path().join("stopped").exists(), "no SIGTERM");
}

/// Without a controlling terminal, SIGTERM reaches the processes that the command started.
#[test]
fn lost_lock_stops_all_processes_of_the_command() {
    let server = Server::start();
    let directory = tempfile::tempdir().unwrap();
    let script = "sh -c 'while touch begun; do sleep 0.05; done'; true";
    let locked = locked(
        server.address(),
        directory.path(),
        &["lock", "--lease", "3s"],
        script,
    );
    let mut holder = under(&["setsid"], &locked).spawn().unwrap();
    wait_for_begin(directory.path());
    server.store("thief").set("lock", "thief");
    expect_end(&mut holder, 3);
    let begun = directory.path().join("begun");
    fs::remove_file(&begun).unwrap();
    std::thread::sleep(Duration::from_millis(500));
    assert!(!begun.exists(), "a process of the command still runs");
}
