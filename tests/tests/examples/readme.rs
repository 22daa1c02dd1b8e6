//! Runs the tour of the README: every command, in order, in a clean directory. The test replaces
//! only the build of the program and the port.

use std::{
    env, fs,
    io::Write,
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, Stdio},
    time::{Duration, Instant},
};

use statehouse_tests::{Lines, admin::Admin, binary};

/// The beginning of each command, and what it must print. Every command of the README must be
/// here, in this order.
const EXPECTED: &[(&str, &[&str])] = &[
    ("rustup toolchain install", &[]),
    ("cargo build --release", &[]),
    ("export PATH=", &[]),
    ("mkdir ../tour", &[]),
    ("statehouse serve", &["ready"]),
    ("export STATEHOUSE_DATA=", &[]),
    ("statehouse set greeting hello", &[]),
    ("statehouse get greeting", &["hello"]),
    ("statehouse watch greeting --count 1 & sleep 1", &[]),
    ("statehouse set greeting hi", &["\thi"]),
    ("statehouse lock nightly-job -- echo working", &["working"]),
    ("TOPIC=statestore/v1/", &[]),
    ("mosquitto_rr -V mqttv5", &["+OK"]),
    ("statehouse history greeting", &["hello", "hi", "hey!"]),
    ("statehouse get greeting --as-of 5s", &[]),
    ("statehouse snapshot backup.state", &["wrote backup.state"]),
    ("statehouse restore backup.state", &["restored other"]),
    ("statehouse doctor", &["all is well"]),
    ("statehouse policy new rule && cd rule", &[]),
    ("statehouse policy build", &["wrote ./rule.wasm"]),
    ("statehouse policy test", &["every line holds"]),
    ("statehouse policy load", &["rule"]),
    ("statehouse policy shadow rule", &[]),
    ("statehouse set setpoint/kitchen hot", &[]),
    ("statehouse policy diff", &["-ERR"]),
    ("statehouse policy promote rule", &[]),
    ("statehouse set setpoint/kitchen hot", &["statehouse:"]),
    ("statehouse replay --policy rule.wasm", &["not comparable"]),
    ("statehouse policy rollback", &["standard"]),
    ("kill %1", &[]),
];

/// Commands that must fail: two comparisons that find differences, a value that the rule refuses.
const FAIL: &[usize] = &[24, 26, 27];

/// `get --as-of 5s` fails if the tour reaches it within five seconds.
const MAY_FAIL: usize = 14;

/// A first run compiles the dependencies of the new policy.
const PATIENCE: Duration = Duration::from_secs(600);

#[test]
fn readme_tour_works_as_shown() {
    let readme = Path::new(env!("CARGO_MANIFEST_DIR")).join("../README.md");
    let commands = commands(&fs::read_to_string(&readme).unwrap());
    let starts: Vec<&str> = EXPECTED.iter().map(|(start, _)| *start).collect();
    for (at, command) in commands.iter().enumerate() {
        let known = starts.get(at).is_some_and(|it| command.starts_with(it));
        assert!(
            known,
            "command {at} of the README is not expected: {command}"
        );
    }
    assert_eq!(commands.len(), starts.len());

    let place = tempfile::tempdir().unwrap();
    let mut shell = Shell::start(place.path());
    // The first three commands build the program.
    for (at, command) in commands.iter().enumerate().skip(3) {
        let (code, output) = shell.run(command);
        if at != MAY_FAIL {
            let must_fail = FAIL.contains(&at);
            assert_eq!(code != 0, must_fail, "{command}: {code}\n{output}");
        }
        for text in EXPECTED[at].1 {
            shell.wait_for(text, command);
        }
        if command.contains(" watch ") {
            shell.wait_for_watch();
        }
    }
}

/// The commands of all `sh` blocks up to the tour's end, without comments.
fn commands(readme: &str) -> Vec<String> {
    let blocks = readme.split("```sh\n").skip(1);
    let blocks = blocks.map(|it| it.split("```").next().unwrap());
    let text: String = blocks.collect::<Vec<_>>().concat().replace("\\\n", " ");
    let lines = text.lines().map(|line| match line.split_once(" # ") {
        Some((command, _)) => command,
        None => line,
    });
    let lines = lines.map(str::trim);
    lines
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .map(str::to_owned)
        .collect()
}

/// A shell that runs the commands one after the other.
struct Shell {
    child: Child,
    input: ChildStdin,
    output: Lines,
    /// Lines of the output that belong to earlier commands.
    read: usize,
    ran: usize,
    data: PathBuf,
}

impl Shell {
    fn start(place: &Path) -> Shell {
        let checkout = place.join("checkout");
        fs::create_dir(&checkout).unwrap();
        let toolchain = Path::new(env!("CARGO_MANIFEST_DIR")).join("../rust-toolchain.toml");
        fs::copy(toolchain, checkout.join("rust-toolchain.toml")).unwrap();
        let free = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = free.local_addr().unwrap().port();
        drop(free);
        let programs = binary::statehouse().parent().unwrap();
        let path = env::join_paths(
            [programs.to_owned()]
                .into_iter()
                .chain(env::split_paths(&env::var_os("PATH").unwrap())),
        );
        let mut child = Command::new("bash")
            .current_dir(&checkout)
            .env("PATH", path.unwrap())
            .env("STATEHOUSE_LISTEN", format!("127.0.0.1:{port}"))
            .env("STATEHOUSE_URL", format!("mqtt://127.0.0.1:{port}"))
            .env("CARGO_NET_OFFLINE", "true")
            .env("CARGO_TARGET_DIR", target())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut input = child.stdin.take().unwrap();
        // Job control, for `kill %1`. The README's port is the default one.
        writeln!(
            input,
            "exec 2>&1; set -m; mosquitto_rr() {{ command mosquitto_rr -p {port} \"$@\"; }}"
        )
        .unwrap();
        Shell {
            output: Lines::follow(child.stdout.take().unwrap()),
            input,
            child,
            read: 0,
            ran: 0,
            data: place.join("tour/statehouse-data"),
        }
    }

    /// Runs a command, and returns its exit code and the output since the command before.
    fn run(&mut self, command: &str) -> (i32, String) {
        self.ran += 1;
        self.read = self.output.all().len();
        let mark = format!("<exit of command {}: ", self.ran);
        writeln!(
            self.input,
            "{command}\ncode=$?; echo; echo \"{mark}$code>\""
        )
        .unwrap();
        let ended = self.output.wait(PATIENCE, |line| line.starts_with(&mark));
        let ended = ended.unwrap_or_else(|| panic!("{command} did not end"));
        let code = ended[mark.len()..].trim_end_matches('>').parse();
        (code.unwrap(), self.printed())
    }

    /// The output of the command, and of background jobs since it began.
    fn printed(&self) -> String {
        self.output.all()[self.read..].join("\n")
    }

    fn wait_for(&self, text: &str, command: &str) {
        self.poll(&format!("`{text}` of {command}"), || {
            self.printed().contains(text)
        });
    }

    /// Waits until the watcher, a background job, is registered.
    fn wait_for_watch(&self) {
        self.poll("the watcher", || {
            let (_, metrics) = Admin::at(&self.data).ask("GET", "/metrics", b"");
            metrics.contains("\nstatehouse_watches 1\n")
        });
    }

    fn poll(&self, what: &str, done: impl Fn() -> bool) {
        let end = Instant::now() + Duration::from_secs(30);
        while !done() {
            assert!(
                Instant::now() < end,
                "{what} is missing in:\n{}",
                self.printed()
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Ends the store, if the test failed before its last command.
impl Drop for Shell {
    fn drop(&mut self) {
        _ = writeln!(self.input, "kill %1; exit");
        _ = self.child.wait();
    }
}

/// `target/tmp/projects`, from `target/<profile>/deps/<test>`. Shared with other tests of projects,
/// so that only a first run compiles their dependencies.
fn target() -> PathBuf {
    let test = env::current_exe().unwrap();
    test.ancestors().nth(3).unwrap().join("tmp/projects")
}
