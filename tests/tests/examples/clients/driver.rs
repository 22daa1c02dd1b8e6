//! A client in another language, which executes the requests of a test.

use std::{
    ffi::OsString,
    io::Write,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, Stdio},
    time::Duration,
};

use serde_json::{Value, json};
use statehouse_tests::Lines;

/// An interpreter takes some seconds to start if every core is busy.
const PATIENCE: Duration = Duration::from_secs(60);

/// The languages of the clients.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Language {
    Python,
    JavaScript,
}

pub(crate) const LANGUAGES: [Language; 2] = [Language::Python, Language::JavaScript];

/// The process of a client. Drop kills it.
pub(crate) struct Driver {
    language: Language,
    child: Child,
    input: ChildStdin,
    answers: Lines,
    errors: Lines,
    asked: usize,
    answered: usize,
}

/// The directory of the workspace.
pub(crate) fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The Python interpreter with paho and mypy.
pub(crate) fn python() -> OsString {
    let installed = workspace().join("target/venv/bin/python").into_os_string();
    std::env::var_os("STATEHOUSE_TEST_PYTHON").unwrap_or(installed)
}

impl Driver {
    /// Starts the client without a connection.
    pub(crate) fn start(language: Language) -> Driver {
        let scripts = workspace().join("tests/tests/examples/clients");
        let clients = workspace().join("examples/clients");
        let mut command = match language {
            Language::Python => {
                let mut command = Command::new(python());
                command.arg("-B").arg(scripts.join("driver.py"));
                command.env("PYTHONPATH", clients.join("python"));
                command
            }
            Language::JavaScript => {
                let mut command = Command::new("node");
                command.arg(scripts.join("driver.mjs"));
                command
            }
        };
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("{command:?}: {error}. `bash tests/run` installs it."));
        Driver {
            language,
            input: child.stdin.take().unwrap(),
            answers: Lines::follow(child.stdout.take().unwrap()),
            errors: Lines::follow(child.stderr.take().unwrap()),
            child,
            asked: 0,
            answered: 0,
        }
    }

    /// Starts the client and connects it.
    pub(crate) fn connect(language: Language, address: SocketAddr) -> Driver {
        let mut driver = Driver::start(language);
        let url = format!("mqtt://{address}");
        driver.ask(json!({"do": "connect", "url": url, "timeout_ms": 30_000}));
        driver
    }

    /// Starts a request without waiting for its result.
    pub(crate) fn begin(&mut self, request: Value) {
        self.asked += 1;
        writeln!(self.input, "{request}").expect("the client reads its input");
    }

    /// Waits for the result of the oldest request: an object with `ok`, or with `error` and `text`.
    pub(crate) fn end(&mut self) -> Value {
        assert!(self.answered < self.asked, "no request is under way");
        let line = self.answers.at(self.answered, PATIENCE);
        let language = self.language;
        let line = line.unwrap_or_else(|| panic!("{language:?}: {:#?}", self.errors.all()));
        self.answered += 1;
        serde_json::from_str(&line).unwrap()
    }

    /// Executes a request, and returns its result or its error.
    pub(crate) fn attempt(&mut self, request: Value) -> Value {
        self.begin(request);
        self.end()
    }

    /// Executes a request that must succeed.
    #[track_caller]
    pub(crate) fn ask(&mut self, request: Value) -> Value {
        let mut answer = self.attempt(request.clone());
        assert!(
            answer.get("error").is_none(),
            "{:?}: {request}: {answer}",
            self.language
        );
        answer["ok"].take()
    }

    /// Ends the client as a crash does.
    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        // An error means that the process has already ended.
        _ = self.child.kill();
        _ = self.child.wait();
    }
}

/// The hexadecimal form of a key or a value.
pub(crate) fn hex(bytes: impl AsRef<[u8]>) -> String {
    data_encoding::HEXLOWER.encode(bytes.as_ref())
}
