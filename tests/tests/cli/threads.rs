//! Tests an account that may have no more threads. A start must end with words and an exit code of
//! the table, and a running store must go on. The limit does not bind root, so the stores of these
//! tests have accounts of their own. Only root can start them.

use std::{
    fs::{self, Permissions},
    os::unix::{
        fs::{PermissionsExt, chown},
        process::CommandExt,
    },
    process::{self, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use statehouse_tests::{Lines, Server, binary, client::PATIENCE, reload::replace, wait::until};
use tempfile::TempDir;

/// Returns none and prints the reason if this account may not start processes of others.
fn account() -> Option<(u32, TempDir)> {
    // No other process has this account, so only the threads of the store count.
    let account = 2_000_000_000 + process::id();
    let directory = tempfile::tempdir().unwrap();
    fs::set_permissions(directory.path(), Permissions::from_mode(0o755)).unwrap();
    match chown(directory.path(), Some(account), Some(account)) {
        Ok(()) => Some((account, directory)),
        Err(error) => {
            eprintln!("skipped: the directory of another account cannot be made: {error}");
            None
        }
    }
}

fn limit_threads(server: &Server, account: u32, threads: &str) {
    let mut limit = Command::new("prlimit");
    limit.arg(format!("--nproc={threads}:"));
    limit.arg(format!("--pid={}", server.pid()));
    limit.uid(account).gid(account);
    assert!(limit.status().unwrap().success());
}

#[test]
fn start_without_enough_threads_ends_with_words() {
    let Some((account, directory)) = account() else {
        return;
    };
    let mut refused = 0;
    for threads in 1..=9 {
        let mut serve = Command::new("prlimit");
        serve.arg(format!("--nproc={threads}"));
        serve.arg(binary::statehouse()).arg("serve");
        serve.args(["--listen", "127.0.0.1:0", "--threads", "2"]);
        serve.uid(account).gid(account);
        serve.current_dir(directory.path());
        serve.stdin(Stdio::null());
        serve.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = serve.spawn().unwrap();
        let stdout = Lines::follow(child.stdout.take().unwrap());
        let stderr = Lines::follow(child.stderr.take().unwrap());
        let end = Instant::now() + PATIENCE;
        let code = loop {
            let is_ready = stdout.all().iter().any(|it| it == "ready");
            if let Some(status) = child.try_wait().unwrap() {
                break status.code();
            }
            if is_ready {
                child.kill().unwrap();
                child.wait().unwrap();
                break Some(0);
            }
            assert!(Instant::now() < end, "{threads} threads: it hangs");
            thread::sleep(Duration::from_millis(10));
        };
        let log = stderr.all();
        refused += u32::from(code != Some(0));
        let is_in_table = code.is_some_and(|code| [0, 75].contains(&code));
        assert!(is_in_table, "{threads} threads: {code:?} {log:?}");
        assert!(!log.iter().any(|it| it.contains("panicked")), "{log:?}");
    }
    assert!(refused > 3);
}

#[test]
fn files_are_reloaded_after_a_shortage_of_threads() {
    let Some((account, directory)) = account() else {
        return;
    };
    let settings = directory.path().join("settings.toml");
    fs::write(&settings, "max_keys = 5\n").unwrap();
    let mut serve = Command::new(binary::statehouse());
    serve.args(["serve", "--listen", "127.0.0.1:0"]);
    serve.args(["--config", "settings.toml"]);
    serve.uid(account).gid(account);
    let server = Server::spawn(serve, directory);
    // Before the first look at the files.
    limit_threads(&server, account, "1");
    server.wait_for_log("files are not reloaded");
    replace(&settings, "max_keys = 7\n");
    server.signal("HUP");
    until("the server receives SIGHUP", || {
        server.stderr().iter().any(|it| it.contains("SIGHUP: "))
    });
    let is_reloaded = |server: &Server| {
        let log = server.stderr();
        log.iter().any(|it| it.contains("max_keys is 7"))
    };
    assert!(!is_reloaded(&server));
    let mut store = server.store("client");
    assert_eq!(store.ask(&["SET", "key", "value"]).payload(), b"+OK\r\n");

    limit_threads(&server, account, "1000");
    until("the files are reloaded", || is_reloaded(&server));
}
