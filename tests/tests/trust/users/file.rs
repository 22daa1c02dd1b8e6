//! The users file, and the commands that maintain it.

use std::{
    fs,
    io::{Read, Write},
    os::unix::fs::{PermissionsExt, symlink},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
};

use statehouse_tests::{
    Client, Connect, Ran, Server, binary, command,
    command::{add_user, finish, in_terminal},
    run,
};
use tempfile::TempDir;

/// A users file in a directory of its own.
pub(super) struct UsersFile {
    pub(super) directory: TempDir,
}

impl UsersFile {
    pub(super) fn new(users: &[(&str, &str)]) -> UsersFile {
        let file = UsersFile {
            directory: tempfile::tempdir().unwrap(),
        };
        for (name, password) in users {
            file.add(name, password).code(0);
        }
        file
    }

    pub(super) fn path(&self) -> PathBuf {
        self.directory.path().join("users")
    }

    pub(super) fn user(&self, arguments: &[&str], stdin: &str) -> Ran {
        let path = self.path();
        let mut all = vec!["user"];
        all.extend(arguments);
        all.extend(["--users", path.to_str().unwrap()]);
        run(&all, stdin.as_bytes())
    }

    pub(super) fn add(&self, name: &str, password: &str) -> Ran {
        add_user(self.path(), name, password)
    }

    pub(super) fn server(&self, further: &[&str]) -> Server {
        let path = self.path();
        let mut arguments = vec!["--users", path.to_str().unwrap()];
        arguments.extend(further);
        Server::with("", &arguments)
    }
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o777
}

#[test]
fn user_command_maintains_the_users_file() {
    let file = UsersFile::new(&[]);
    file.add("anna", "secret").code(0).says("added anna");
    assert_eq!(mode(&file.path()), 0o600);
    let text = fs::read_to_string(file.path()).unwrap();
    assert!(
        text.starts_with("anna:$argon2id$v=19$m=19456,t=2,p=1$"),
        "{text}"
    );
    assert!(!text.contains("secret"));
    fs::write(file.path(), format!("# people\n{text}\n")).unwrap();
    fs::set_permissions(file.path(), fs::Permissions::from_mode(0o640)).unwrap();
    file.add("bert", "secret\nmore").code(0);
    file.add("anna", "other").code(0).says("changed anna");
    assert_eq!(file.user(&["list"], "").code(0).text(), "anna\nbert\n");
    let changed = fs::read_to_string(file.path()).unwrap();
    assert!(
        changed.starts_with("# people\nanna:$argon2id$"),
        "{changed}"
    );
    assert!(
        !changed.contains(text.trim()),
        "the old hash must be removed"
    );
    // The command keeps the permissions of the file.
    assert_eq!(mode(&file.path()), 0o640);
    // A changed password keeps the role, and a changed role keeps the password.
    let line = |name: &str| {
        let text = fs::read_to_string(file.path()).unwrap();
        let mut lines = text.lines().filter_map(|line| line.strip_prefix(name));
        lines.next().unwrap().to_owned()
    };
    let plain = line("anna:");
    file.user(&["role", "anna", "operate"], "").code(0);
    assert_eq!(line("anna:"), format!("{plain}:operate"));
    file.add("anna", "third").code(0);
    assert!(line("anna:").ends_with(":operate") && !line("anna:").contains(&plain));
    let listed = file.user(&["list"], "").code(0).text();
    assert_eq!(listed, "anna\toperate\nbert\n");
    file.user(&["role", "anna", "none"], "").code(0);
    assert_eq!(file.user(&["list"], "").code(0).text(), "anna\nbert\n");
    file.user(&["role", "carl", "read"], "")
        .fails(1, "no user carl");
    file.user(&["role", "anna", "root"], "").fails(2, "no role");
    file.user(&["remove", "anna"], "").code(0);
    file.user(&["remove", "anna"], "").fails(1, "no user anna");
    assert_eq!(file.user(&["list"], "").code(0).text(), "bert\n");

    file.add("", "secret").fails(2, "a user name has");
    file.add("a:b", "secret").fails(2, "a user name has");
    file.add("carl", "").fails(2, "the password is empty");
    file.add("carl", "\nsecret")
        .fails(2, "the password is empty");
    let long = "x".repeat(2000);
    file.add("carl", &long).fails(2, "at most 1024 bytes");
    file.user(&["add", "carl"], "secret")
        .fails(2, "--password-stdin");
    assert_eq!(file.user(&["list"], "").code(0).text(), "bert\n");
}

/// Regression: by the rule with the keys `{principal.username}/*`, the user `press` could access
/// the keys of `press/4`.
#[test]
fn new_user_with_a_slash_is_refused_and_an_old_one_stays() {
    let file = UsersFile::new(&[("press", "secret")]);
    file.add("press/4", "secret").fails(2, "has no `/`");
    assert_eq!(file.user(&["list"], "").code(0).text(), "press\n");
    // An earlier version took such names.
    let text = fs::read_to_string(file.path()).unwrap();
    fs::write(file.path(), text.replace("press:", "press/4:")).unwrap();
    file.add("press/4", "new").code(0).says("changed press/4");
    file.user(&["role", "press/4", "read"], "").code(0);
    assert_eq!(file.user(&["list"], "").code(0).text(), "press/4\tread\n");
}

/// Regression: the mark was a part of the first name, so that its user could not log in.
#[test]
fn byte_order_mark_is_no_part_of_the_first_user() {
    let file = UsersFile::new(&[("anna", "secret"), ("bert", "secret")]);
    let text = fs::read_to_string(file.path()).unwrap();
    fs::write(file.path(), format!("\u{feff}{text}")).unwrap();
    let server = file.server(&[]);
    let login = Connect::new("a").login("anna", "secret");
    let (_client, answer) = Client::try_connect(server.address(), &login);
    assert_eq!(answer.reason, 0, "{}", answer.text());
    assert_eq!(file.user(&["list"], "").code(0).text(), "anna\nbert\n");
    file.add("anna", "other").code(0).says("changed anna");
    assert_eq!(file.user(&["list"], "").code(0).text(), "anna\nbert\n");
}

#[test]
fn user_command_keeps_mode_and_link_under_any_umask() {
    let file = UsersFile::new(&[("anna", "secret")]);
    let target = file.directory.path().join("target");
    fs::rename(file.path(), &target).unwrap();
    symlink("target", file.path()).unwrap();
    fs::set_permissions(&target, fs::Permissions::from_mode(0o644)).unwrap();
    let mut add = Command::new("sh");
    add.args([
        "-c",
        "umask 077; exec \"$0\" user role anna read --users users",
    ]);
    add.arg(command(&[]).get_program());
    add.current_dir(file.directory.path());
    finish(add, b"").code(0);
    assert!(file.path().is_symlink());
    assert_eq!(mode(&target), 0o644);
    assert_eq!(file.user(&["list"], "").code(0).text(), "anna\tread\n");
    assert_eq!(fs::read_dir(file.directory.path()).unwrap().count(), 2);
}

#[test]
fn users_that_are_added_at_the_same_time_are_all_added() {
    let file = UsersFile::new(&[]);
    let names: Vec<String> = (0..8).map(|number| format!("user-{number}")).collect();
    thread::scope(|scope| {
        for name in &names {
            scope.spawn(|| file.add(name, "secret").code(0));
        }
    });
    let listed = file.user(&["list"], "").code(0).text();
    let mut listed: Vec<&str> = listed.lines().collect();
    listed.sort_unstable();
    assert_eq!(listed, names);
}

#[test]
fn user_removed_during_a_password_prompt_stays_removed() {
    let file = UsersFile::new(&[("anna", "secret")]);
    let users = file.path();
    let mut add = in_terminal(&format!("user add bert --users {}", users.display()))
        .spawn()
        .expect("script of util-linux runs");
    let (mut terminal, mut keys) = (add.stdout.take().unwrap(), add.stdin.take().unwrap());
    let mut wait_for = |text: &str| {
        let mut seen = String::new();
        while !seen.contains(text) {
            let mut byte = [0];
            terminal.read_exact(&mut byte).expect(&seen);
            seen.push(byte[0].into());
        }
    };
    wait_for("Password of bert: ");
    file.user(&["remove", "anna"], "").code(0);
    keys.write_all(b"secret\n").unwrap();
    wait_for("Repeat the password: ");
    keys.write_all(b"secret\n").unwrap();
    wait_for("added bert");
    assert!(add.wait().unwrap().success());
    assert_eq!(file.user(&["list"], "").code(0).text(), "bert\n");
}

#[test]
fn bad_users_file_prevents_the_start_with_advice() {
    let file = UsersFile::new(&[("anna", "secret")]);
    let path = file.path();
    let serve = || {
        let mut serve = command(&["serve", "--listen", "127.0.0.1:0", "--users"]);
        serve.arg(&path).current_dir(file.directory.path());
        finish(serve, b"").code(2)
    };
    fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).unwrap();
    serve().says("chmod 600");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    fs::write(&path, "anna:secret\n").unwrap();
    serve().says("line 1 of").says("statehouse user add");
    fs::remove_file(&path).unwrap();
    serve().says("cannot read");
    let behind = [
        "serve",
        "--broker",
        "mqtt://127.0.0.1:1",
        "--users",
        "users",
    ];
    run(&behind, b"").fails(2, "configure them there");
}

/// Runs a shell script on a terminal, and types Ctrl-C at the prompt for a password if `types`.
fn on_terminal(script: &str, types: bool) -> String {
    let directory = tempfile::tempdir().unwrap();
    let program = binary::statehouse().display();
    let script = script.replace("ADD", &format!("{program} user add anna --users users"));
    let mut terminal = Command::new("script")
        .args([
            "-qec",
            // Before the prompt takes the terminal over, Ctrl-C signals the shell too.
            &format!("trap : INT; {script}; echo code=$?; stty -a"),
            "/dev/null",
        ])
        .current_dir(directory.path())
        .env("SHELL", "/bin/sh")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut keyboard = terminal.stdin.take().unwrap();
    let mut screen = terminal.stdout.take().unwrap();
    let mut shown = String::new();
    let mut bytes = [0; 1000];
    let mut has_typed = !types;
    loop {
        let read = screen.read(&mut bytes).unwrap();
        if read == 0 {
            break;
        }
        shown.push_str(&String::from_utf8_lossy(&bytes[..read]));
        if !has_typed && shown.contains("Password of anna: ") {
            keyboard.write_all(b"\x03").unwrap();
            has_typed = true;
        }
    }
    terminal.wait().unwrap();
    assert!(!directory.path().join("users").exists());
    shown
}

#[test]
fn signal_at_the_password_prompt_restores_the_terminal() {
    for (script, types, code) in [
        ("ADD", true, 130),
        ("ADD </dev/tty & sleep 2; kill -INT $!; wait $!", false, 130),
        (
            "ADD </dev/tty & sleep 2; kill -TERM $!; wait $!",
            false,
            143,
        ),
    ] {
        let shown = on_terminal(script, types);
        assert!(shown.contains("Password of anna: "), "{script}: {shown}");
        assert!(shown.contains(&format!("code={code}")), "{script}: {shown}");
        for flag in ["isig", "icanon", "echo"] {
            let is_on = shown.split_whitespace().any(|it| it == flag);
            assert!(is_on, "{script}: {flag}: {shown}");
        }
    }
}
