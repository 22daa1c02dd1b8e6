//! One running server: started on a port of its own, stopped on drop, killed and started again on demand.
//! What leaves: its address, its lines, its memory. Its log is shown when the test fails.

use std::{
    net::SocketAddr,
    path::Path,
    process::{Child, ChildStderr, Command, ExitStatus, Stdio},
    sync::atomic::{AtomicU16, Ordering},
    thread,
    time::{Duration, Instant},
};

use tempfile::TempDir;

use crate::{
    binary,
    cgroup::Cgroup,
    client::{Client, PATIENCE},
    connect::Connect,
    lines::Lines,
    store::Store,
};

/// Long enough for a start with a policy of 18 MB on a machine with every core busy; nothing is asserted about speed.
const START_TIMEOUT: Duration = Duration::from_secs(240);

/// A running `statehouse serve`.
pub struct Server {
    child: Child,
    stdout: Lines,
    stderr: Lines,
    address: SocketAddr,
    /// Whether that is a broker's: then the server has none of its own.
    attached: bool,
    directory: TempDir,
    /// What it runs, to run it again.
    command: Command,
    /// What limits its memory. Dropped after the child has ended.
    cgroup: Option<Cgroup>,
}

impl Server {
    /// With the defaults, on a free port of loopback.
    pub fn start() -> Server {
        Server::with("", &[])
    }

    /// With a configuration file of these lines.
    pub fn with_config(toml: &str) -> Server {
        Server::with(toml, &[])
    }

    /// With a configuration file of these lines (none where empty) and these further arguments.
    pub fn with(toml: &str, arguments: &[&str]) -> Server {
        let (command, directory) = Server::command(toml, arguments);
        Server::spawn(command, directory)
    }

    /// The same, whose log nobody reads before the test does.
    pub fn unheard(toml: &str, arguments: &[&str]) -> (Server, ChildStderr) {
        let (command, directory) = Server::command(toml, arguments);
        let (mut server, log) = Server::launch_unheard(command, directory, None);
        server.wait_until_ready();
        (server, log)
    }

    fn command(toml: &str, arguments: &[&str]) -> (Command, TempDir) {
        let mut command = Command::new(binary::statehouse());
        command.args(["serve", "--listen", "127.0.0.1:0"]);
        let directory = tempfile::tempdir().unwrap();
        if !toml.is_empty() {
            let path = directory.path().join("statehouse.toml");
            std::fs::write(&path, toml).unwrap();
            command.arg("--config").arg(path);
        }
        command.args(arguments);
        (command, directory)
    }

    /// Runs a command that is to print `listening on …` and `ready`.
    pub fn spawn(command: Command, directory: TempDir) -> Server {
        let mut server = Server::launch(command, directory, None);
        server.wait_until_ready();
        server
    }

    /// Attached to the broker of this URL, whose clients connect to `clients`. Settings are pairs such as
    /// `("durability", "interval")`. It is not waited for: the broker may not be there.
    pub fn attaching(url: &str, clients: SocketAddr, settings: &[(&str, &str)]) -> Server {
        let mut command = Command::new(binary::statehouse());
        command.args(["serve", "--broker", url]);
        set(&mut command, settings);
        Server::launch(command, tempfile::tempdir().unwrap(), Some(clients))
    }

    /// The same, once it is ready.
    pub fn attached(url: &str, clients: SocketAddr, settings: &[(&str, &str)]) -> Server {
        let mut server = Server::attaching(url, clients, settings);
        server.wait_until_ready();
        server
    }

    fn launch(command: Command, directory: TempDir, clients: Option<SocketAddr>) -> Server {
        let (mut server, log) = Server::launch_unheard(command, directory, clients);
        server.stderr = Lines::follow(log);
        server
    }

    fn launch_unheard(
        mut command: Command,
        directory: TempDir,
        clients: Option<SocketAddr>,
    ) -> (Server, ChildStderr) {
        for (name, _) in std::env::vars_os() {
            let ours = name.to_string_lossy().starts_with("STATEHOUSE_");
            if ours && !command.get_envs().any(|(set, _)| set == name) {
                command.env_remove(&name);
            }
        }
        let mut child = command
            .current_dir(directory.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("cannot run {command:?}: {error}"));
        let stdout = Lines::follow(child.stdout.take().unwrap());
        let log = child.stderr.take().unwrap();
        let server = Server {
            child,
            stdout,
            stderr: Lines::default(),
            address: clients.unwrap_or_else(|| ([127, 0, 0, 1], 0).into()),
            attached: clients.is_some(),
            directory,
            command,
            cgroup: None,
        };
        (server, log)
    }

    /// One that can be killed and started again: the same address each time, which no other test takes meanwhile.
    /// Settings are pairs such as `("durability", "interval")`.
    pub fn restartable(settings: &[(&str, &str)]) -> Server {
        Server::spawn(restartable(settings), tempfile::tempdir().unwrap())
    }

    /// The same with a limit on its memory, in MiB. Prints the reason if that is not possible.
    pub fn limited(limit_mib: u64, settings: &[(&str, &str)]) -> Option<Server> {
        let cgroup = Cgroup::with_limit(limit_mib)?;
        let command = cgroup.enter(&restartable(settings));
        let mut server = Server::launch(command, tempfile::tempdir().unwrap(), None);
        server.cgroup = Some(cgroup);
        server.wait_until_ready();
        Some(server)
    }

    /// What limits its memory, where something does.
    pub fn cgroup(&self) -> Option<&Cgroup> {
        self.cgroup.as_ref()
    }

    /// `kill -9`: the process gets no chance to write anything more.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        let status = self.child.wait().unwrap();
        assert_eq!(status.code(), None, "it had ended by itself: {status}");
    }

    /// Runs the same command again, on the same directory and address. It has to have ended.
    pub fn restart(&mut self) {
        self.restart_with(&[]);
    }

    /// The same with other settings, which stay for later restarts.
    pub fn restart_with(&mut self, settings: &[(&str, &str)]) {
        self.start_again(settings);
        self.wait_until_ready();
    }

    /// The same without waiting for it.
    pub fn start_again(&mut self, settings: &[(&str, &str)]) {
        assert!(!self.runs(), "the server has to be killed or stopped first");
        set(&mut self.command, settings);
        let child = self.command.spawn();
        self.child = child.unwrap_or_else(|error| panic!("cannot run {:?}: {error}", self.command));
        self.stdout = Lines::follow(self.child.stdout.take().unwrap());
        self.stderr = Lines::follow(self.child.stderr.take().unwrap());
    }

    /// Waits until it takes requests.
    pub fn wait_until_ready(&mut self) {
        let ready = self.stdout.wait(START_TIMEOUT, |line| line == "ready");
        assert!(ready.is_some(), "the server did not become ready");
        if !self.attached {
            self.address = self.addresses()[0];
        }
    }

    /// Where clients connect: to the first listener, or to the broker that it is attached to.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Whether clients connect to the server itself.
    pub fn is_broker(&self) -> bool {
        !self.attached
    }

    /// The port of [`Self::address`].
    pub fn port(&self) -> u16 {
        self.address.port()
    }

    /// Where every listener listens, in the order printed.
    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.stdout()
            .iter()
            .filter_map(|line| line.strip_prefix("listening on "))
            .map(|url| url.split_once("://").unwrap().1.parse().unwrap())
            .collect()
    }

    /// A directory of the server's own, which goes with it.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// What it has printed so far.
    pub fn stdout(&self) -> Vec<String> {
        self.stdout.all()
    }

    /// What it has logged so far.
    pub fn stderr(&self) -> Vec<String> {
        self.stderr.all()
    }

    /// Waits for a line that it prints.
    pub fn wait_for_line(&self, start: &str) -> String {
        self.stdout
            .wait(PATIENCE, |line| line.starts_with(start))
            .unwrap_or_else(|| panic!("it does not print {start:?}"))
    }

    /// Waits for a line of its log.
    pub fn wait_for_log(&self, what: &str) -> String {
        self.stderr
            .wait(Duration::from_secs(10), |line| line.contains(what))
            .unwrap_or_else(|| panic!("the log does not say {what:?}"))
    }

    /// A raw connection on which nothing was sent.
    pub fn open(&self) -> Client {
        Client::open(self.address)
    }

    /// A client with a session of its own, clean.
    pub fn connect(&self, id: &str) -> Client {
        Client::connect(self.address, &Connect::new(id))
    }

    /// A client that asks the store, in the dialect of the SDKs.
    pub fn store(&self, id: &str) -> Store {
        let client = self.connect(id);
        match self.attached {
            true => Store::behind(client, id),
            false => Store::new(client, id),
        }
    }

    /// The process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Resident memory in KiB.
    pub fn memory_kib(&self) -> u64 {
        self.memory("VmRSS:")
    }

    /// The most that it ever was.
    pub fn memory_peak_kib(&self) -> u64 {
        self.memory("VmHWM:")
    }

    fn memory(&self, what: &str) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap();
        let line = status.lines().find(|l| l.starts_with(what)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }

    /// Open file descriptors.
    pub fn descriptors(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.pid()))
            .unwrap()
            .count()
    }

    /// Whether the process still runs.
    pub fn runs(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// Sends a signal by name (`TERM`, `INT`).
    pub fn signal(&self, name: &str) {
        signal(self.pid(), name);
    }

    /// Waits for the end of the process.
    pub fn wait(&mut self, timeout: Duration) -> ExitStatus {
        wait(&mut self.child, timeout)
            .unwrap_or_else(|| panic!("the server still runs after {timeout:?}"))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Already dead is as good.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if thread::panicking() {
            // The threads that read are a moment behind the end of the process.
            self.stderr.wait(Duration::from_secs(1), |_| false);
            eprintln!("--- the server printed");
            self.stdout().iter().for_each(|line| eprintln!("{line}"));
            eprintln!("--- the server logged (its last 60 lines)");
            let log = self.stderr();
            for line in &log[log.len().saturating_sub(60)..] {
                eprintln!("{line}");
            }
            eprintln!("---");
        }
    }
}

/// A command that can run again at the same address.
fn restartable(settings: &[(&str, &str)]) -> Command {
    let mut command = Command::new(binary::statehouse());
    command.args(["serve", "--listen", &own_address().to_string()]);
    set(&mut command, settings);
    command
}

/// Settings go through the environment, since a flag can be given only once.
fn set(command: &mut Command, settings: &[(&str, &str)]) {
    for (name, value) in settings {
        command.env(format!("STATEHOUSE_{}", name.to_uppercase()), value);
    }
}

/// An address of loopback that only this process uses, and no port that the system hands out by itself: whoever
/// tries to reconnect while nobody listens would sooner or later be connected to itself.
pub(crate) fn own_address() -> SocketAddr {
    static USED: AtomicU16 = AtomicU16::new(0);
    let [_, high, middle, low] = std::process::id().to_be_bytes();
    let port = 20_000 + USED.fetch_add(1, Ordering::Relaxed) % 10_000;
    // The highest process id of Linux has 22 bits; 127.0.0.1 stays for the others.
    ([127, 64 + high % 64, middle, low], port).into()
}

/// Sends a signal to a process that this test started.
pub fn signal(pid: u32, name: &str) {
    let status = Command::new("kill")
        .args([format!("-{name}"), pid.to_string()])
        .status()
        .unwrap();
    assert!(status.success(), "kill -{name} {pid} failed");
}

/// Waits for the end of a child; `None` where it still runs at the end of the time.
pub fn wait(child: &mut Child, timeout: Duration) -> Option<ExitStatus> {
    let end = Instant::now() + timeout;
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return Some(status);
        }
        if Instant::now() > end {
            return None;
        }
        // The standard library has no wait with a time-out.
        thread::sleep(Duration::from_millis(5));
    }
}
