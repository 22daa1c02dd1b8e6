//! Runs the binary as a command with arguments and standard input. Captures the exit code and both
//! outputs.

use std::{
    ffi::OsStr,
    fs,
    io::{Read, Write},
    path::Path,
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use serde_json::Value;

use crate::{
    binary,
    server::{self, Server},
};

#[derive(Debug)]
pub struct Ran {
    /// Exit code, or `None` if a signal ended the command.
    pub code: Option<i32>,
    pub stdout: Vec<u8>,
    pub stderr: String,
}

impl Ran {
    /// Standard output as text.
    pub fn text(&self) -> String {
        String::from_utf8(self.stdout.clone()).unwrap()
    }

    /// Parses one JSON object per line of standard output.
    pub fn objects(&self) -> Vec<Value> {
        let text = self.text();
        let parse =
            |line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{line}: {e}: {self:#?}"));
        text.lines().map(parse).collect()
    }

    /// Parses the only JSON object of standard output, which is one line.
    pub fn object(&self) -> Value {
        let mut objects = self.objects();
        assert_eq!(objects.len(), 1, "not one object: {self:#?}");
        objects.remove(0)
    }

    #[track_caller]
    pub fn code(self, expected: i32) -> Ran {
        assert_eq!(self.code, Some(expected), "{self:#?}");
        self
    }

    /// Asserts that the command failed with this exit code, and that standard error says why.
    #[track_caller]
    pub fn fails(self, code: i32, why: &str) -> Ran {
        self.code(code).says(why)
    }

    /// Asserts that standard output contains each of these texts.
    #[track_caller]
    pub fn prints(&self, expected: &[&str]) {
        let text = self.text();
        for part in expected {
            assert_contains!(text, part);
        }
    }

    /// Asserts that standard error contains `what`, ignoring case.
    #[track_caller]
    pub fn says(self, what: &str) -> Ran {
        assert!(
            self.stderr.to_lowercase().contains(&what.to_lowercase()),
            "standard error does not say {what:?}: {self:#?}"
        );
        self
    }
}

/// The binary with arguments, without `STATEHOUSE_` variables.
pub fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(binary::statehouse());
    command.args(arguments);
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("STATEHOUSE_") {
            command.env_remove(name);
        }
    }
    // The tests share compiled policies, and leave the caches of this user alone.
    command.env(
        "XDG_CACHE_HOME",
        binary::statehouse().with_file_name("caches"),
    );
    command
}

/// Runs the binary to its end, within a minute.
pub fn run(arguments: &[&str], stdin: &[u8]) -> Ran {
    finish(command(arguments), stdin)
}

pub fn run_in(directory: &Path, arguments: &[&str]) -> Ran {
    let mut command = command(arguments);
    command.current_dir(directory);
    finish(command, b"")
}

impl Server {
    /// Runs a command in the server's directory, where its data directory has the default name.
    pub fn run(&self, arguments: &[&str]) -> Ran {
        let ran = run_in(self.directory(), arguments);
        assert!(!ran.stderr.contains("panicked"), "{ran:#?}");
        ran
    }
}

/// Adds a user with a password to a file of users, or changes the password.
pub fn add_user(users: impl AsRef<OsStr>, name: &str, password: &str) -> Ran {
    let mut add = command(&["user", "add", name, "--password-stdin", "--users"]);
    add.arg(users);
    finish(add, password.as_bytes())
}

/// The name and the synopsis of each command that is no group of others, such as `policy list`.
/// They are read from the manual pages, which the definition of the command line yields.
pub fn subcommands() -> Vec<(String, String)> {
    let pages = tempfile::tempdir().unwrap();
    run_in(pages.path(), &["man", "."]).code(0);
    let mut all: Vec<_> = fs::read_dir(pages.path())
        .unwrap()
        .map(|page| {
            let page = fs::read_to_string(page.unwrap().path()).unwrap();
            let (_, rest) = page.split_once(".SH SYNOPSIS\n").unwrap();
            // The codes of bold, roman and italic, and the escapes of dashes.
            let codes = ["\\fB", "\\fR", "\\fI", "\\"];
            let synopsis = rest.lines().next().unwrap().to_owned();
            let synopsis = codes.iter().fold(synopsis, |it, code| it.replace(code, ""));
            let (name, flags) = synopsis.split_once(" [").unwrap();
            let name = name.trim_start_matches("statehouse").trim();
            (name.to_owned(), format!("[{flags}"))
        })
        .filter(|(_, synopsis)| !synopsis.contains("<subcommands>"))
        .collect();
    all.sort();
    assert!(all.len() > 50, "{all:?}");
    all
}

/// The binary with these arguments in a terminal of 24 lines and 80 columns, for at most a minute.
/// The test types into its input.
pub fn in_terminal(arguments: &str) -> Command {
    let program = binary::statehouse().display();
    let line = format!("stty rows 24 cols 80; exec {program} {arguments}");
    let mut terminal = Command::new("timeout");
    terminal
        .args(["60", "script", "--quiet", "--return"])
        .args(["--command", &line, "/dev/null"])
        .env("TERM", "xterm")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    terminal
}

/// Runs any command to its end, within a minute.
pub fn finish(command: Command, stdin: &[u8]) -> Ran {
    finish_within(command, stdin, Duration::from_secs(60))
}

/// Runs any command to its end, within this time.
pub fn finish_within(mut command: Command, stdin: &[u8], patience: Duration) -> Ran {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| panic!("cannot run {command:?}: {error}"));
    let (mut input, bytes) = (child.stdin.take().unwrap(), stdin.to_vec());
    // Closes the input at the end. A command that does not read its input may have ended before.
    let writer = thread::spawn(move || drop(input.write_all(&bytes)));
    let (stdout, stderr) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
    let (stdout, stderr) = (collect(stdout), collect(stderr));
    let Some(status) = server::wait(&mut child, patience) else {
        let _ = child.kill();
        let _ = child.wait();
        panic!(
            "{command:?} still ran after {patience:?}; standard error: {:?}",
            String::from_utf8_lossy(&stderr.join().unwrap())
        );
    };
    writer.join().unwrap();
    Ran {
        code: status.code(),
        stdout: stdout.join().unwrap(),
        stderr: String::from_utf8_lossy(&stderr.join().unwrap()).into_owned(),
    }
}

fn collect(mut stream: impl Read + Send + 'static) -> thread::JoinHandle<Vec<u8>> {
    thread::spawn(move || {
        let mut out = Vec::new();
        // If reading fails, return the bytes before the error.
        let _ = stream.read_to_end(&mut out);
        out
    })
}
