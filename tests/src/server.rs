//! Runs one server on its own port. Tests can kill and restart the server, and read its output and
//! memory use. Drop ends the server, and prints its log if the test failed.

use std::{
    mem,
    net::{SocketAddr, TcpListener},
    path::{Path, PathBuf},
    process::{Child, ChildStderr, Command, ExitStatus, Stdio},
    sync::atomic::{AtomicU16, Ordering},
    thread,
    time::{Duration, Instant},
};

use tempfile::TempDir;

use crate::{
    admin::Admin,
    binary,
    cgroup::Cgroup,
    client::{Client, PATIENCE},
    connect::Connect,
    lines::Lines,
    processor::Processor,
    store::Store,
};

/// Long enough to start with a policy of 18 MB while all cores are busy. Tests assert nothing about
/// the speed of a start.
const START_TIMEOUT: Duration = Duration::from_secs(240);

/// A running `statehouse serve`.
pub struct Server {
    child: Child,
    stdout: Lines,
    stderr: Lines,
    /// The output and the log of the run before the last restart.
    earlier: Option<(Lines, Lines)>,
    address: SocketAddr,
    /// Whether `address` belongs to another broker, because the server has no listener.
    attached: bool,
    directory: TempDir,
    command: Command,
    /// The cgroup that limits its memory. Dropped after the child has ended.
    cgroup: Option<Cgroup>,
}

impl Server {
    /// Starts with the defaults, on a free loopback port.
    pub fn start() -> Server {
        Server::with("", &[])
    }

    /// Starts with a configuration file of these lines.
    pub fn with_config(toml: &str) -> Server {
        Server::with(toml, &[])
    }

    /// Starts with these additional arguments, and with a configuration file of these lines unless
    /// they are empty.
    pub fn with(toml: &str, arguments: &[&str]) -> Server {
        let (command, directory) = Server::command(toml, arguments);
        Server::spawn(command, directory)
    }

    /// Starts a server that logs in detail, and leaves its log unread. Returns the pipe of the log.
    pub fn unheard() -> (Server, ChildStderr) {
        let (command, directory) = Server::command("", &["--log-filter", "debug"]);
        let (mut server, log) = Server::launch_with_unread_log(command, directory, None);
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

    /// Runs a command that must print `listening on …` and `ready`.
    pub fn spawn(command: Command, directory: TempDir) -> Server {
        let mut server = Server::launch(command, directory, None);
        server.wait_until_ready();
        server
    }

    /// Starts a server behind the broker at this URL, whose clients connect to `clients`. Settings
    /// are pairs such as `("durability", "interval")`. Does not wait for readiness, because the
    /// broker may be down.
    pub fn attaching(url: &str, clients: SocketAddr, settings: &[(&str, &str)]) -> Server {
        Server::attaching_in(url, clients, settings, &[])
    }

    fn attaching_in(
        url: &str,
        clients: SocketAddr,
        settings: &[(&str, &str)],
        environment: &[(&str, String)],
    ) -> Server {
        let mut command = Command::new(binary::statehouse());
        command.args(["serve", "--broker", url]);
        command.envs(environment.iter().cloned());
        set(&mut command, settings);
        Server::launch(command, tempfile::tempdir().unwrap(), Some(clients))
    }

    /// Like [`Self::attaching`], and waits until the server is ready.
    pub fn attached(url: &str, clients: SocketAddr, settings: &[(&str, &str)]) -> Server {
        let mut server = Server::attaching(url, clients, settings);
        server.wait_until_ready();
        server
    }

    /// Like [`Self::attached`], with environment variables.
    pub fn attached_in(
        url: &str,
        clients: SocketAddr,
        settings: &[(&str, &str)],
        environment: &[(&str, String)],
    ) -> Server {
        let mut server = Server::attaching_in(url, clients, settings, environment);
        server.wait_until_ready();
        server
    }

    fn launch(command: Command, directory: TempDir, clients: Option<SocketAddr>) -> Server {
        let (mut server, log) = Server::launch_with_unread_log(command, directory, clients);
        server.stderr = Lines::follow(log);
        server
    }

    fn launch_with_unread_log(
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
            earlier: None,
            address: clients.unwrap_or_else(|| ([127, 0, 0, 1], 0).into()),
            attached: clients.is_some(),
            directory,
            command,
            cgroup: None,
        };
        (server, log)
    }

    /// Runs a command without waiting until the server is ready.
    pub fn run_unready(command: Command) -> Server {
        Server::launch(command, tempfile::tempdir().unwrap(), None)
    }

    /// Runs a command that listens at this address, without waiting until the server is ready.
    pub(crate) fn launch_at(address: SocketAddr, command: Command) -> Server {
        let mut server = Server::launch(command, tempfile::tempdir().unwrap(), None);
        server.address = address;
        server
    }

    /// Starts a server that can be restarted at the same address. No other test can take the
    /// address in between. Settings are pairs such as `("durability", "interval")`.
    pub fn restartable(settings: &[(&str, &str)]) -> Server {
        Server::restartable_in(settings, &[])
    }

    /// Like [`Self::restartable`], with environment variables.
    pub fn restartable_in(settings: &[(&str, &str)], environment: &[(&str, String)]) -> Server {
        let mut command = restartable(Command::new(binary::statehouse()), settings);
        command.envs(environment.iter().cloned());
        Server::spawn(command, tempfile::tempdir().unwrap())
    }

    /// Like [`Self::restartable`], with the program for this processor.
    pub fn emulated(processor: &Processor, settings: &[(&str, &str)]) -> Server {
        Server::spawn(
            restartable(processor.command(), settings),
            tempfile::tempdir().unwrap(),
        )
    }

    /// Like [`Self::restartable`], with a memory limit in MiB. Prints the reason if that is
    /// impossible.
    pub fn limited(limit_mib: u64) -> Option<Server> {
        let cgroup = Cgroup::with_limit(limit_mib)?;
        let command = cgroup.enter(&restartable(Command::new(binary::statehouse()), &[]));
        let mut server = Server::launch(command, tempfile::tempdir().unwrap(), None);
        server.cgroup = Some(cgroup);
        server.wait_until_ready();
        Some(server)
    }

    /// The cgroup that limits its memory, if any.
    pub fn cgroup(&self) -> Option<&Cgroup> {
        self.cgroup.as_ref()
    }

    /// Ends the server with `kill -9`, so that it cannot write anything more.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        let status = self.child.wait().unwrap();
        assert_eq!(status.code(), None, "it had already ended: {status}");
    }

    /// Ends the server with `kill -9`, if it did not end by itself because its disk failed.
    pub fn end(&mut self) {
        // An error means that it has ended.
        let _ = self.child.kill();
        self.child.wait().unwrap();
    }

    /// Ends the server as an operator does.
    pub fn stop(&mut self) {
        self.signal("TERM");
        assert_eq!(self.wait(PATIENCE).code(), Some(0));
    }

    /// Kills the server, and starts it again.
    pub fn kill_and_restart(&mut self) {
        self.kill();
        self.restart();
    }

    /// Starts the server again with the same directory and address. It must have ended.
    pub fn restart(&mut self) {
        self.restart_with(&[]);
    }

    /// Like [`Self::restart`], with changed settings, which also apply to later restarts.
    pub fn restart_with(&mut self, settings: &[(&str, &str)]) {
        self.start_again(settings);
        self.wait_until_ready();
    }

    /// Like [`Self::restart_with`], without waiting until the server is ready.
    pub fn start_again(&mut self, settings: &[(&str, &str)]) {
        assert!(!self.runs(), "the server has to be killed or stopped first");
        set(&mut self.command, settings);
        let child = self.command.spawn();
        self.child = child.unwrap_or_else(|error| panic!("cannot run {:?}: {error}", self.command));
        let stdout = Lines::follow(self.child.stdout.take().unwrap());
        let stderr = Lines::follow(self.child.stderr.take().unwrap());
        self.earlier = Some((
            mem::replace(&mut self.stdout, stdout),
            mem::replace(&mut self.stderr, stderr),
        ));
    }

    /// Waits until the server accepts requests.
    pub fn wait_until_ready(&mut self) {
        let ready = self.stdout.wait(START_TIMEOUT, |line| line == "ready");
        assert!(ready.is_some(), "the server did not become ready");
        if !self.attached {
            self.address = self.addresses()[0];
        }
    }

    /// The address for clients: that of the first listener, or of the attached broker.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Whether clients connect to the server itself.
    pub fn is_broker(&self) -> bool {
        !self.attached
    }

    pub fn port(&self) -> u16 {
        self.address.port()
    }

    /// The addresses of all listeners, in the printed order.
    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.stdout()
            .iter()
            .filter_map(|line| line.strip_prefix("listening on "))
            .map(|url| url.split_once("://").unwrap().1.parse().unwrap())
            .collect()
    }

    /// The working directory, which drop removes.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// The data directory, if it has the default name.
    pub fn data_directory(&self) -> PathBuf {
        self.directory().join("statehouse-data")
    }

    /// The path of [`Self::data_directory`] as text.
    pub fn data(&self) -> String {
        self.data_directory()
            .into_os_string()
            .into_string()
            .unwrap()
    }

    pub fn stdout(&self) -> Vec<String> {
        self.stdout.all()
    }

    pub fn stderr(&self) -> Vec<String> {
        self.stderr.all()
    }

    /// Waits for a line of standard output with this prefix.
    pub fn wait_for_line(&self, start: &str) -> String {
        self.stdout
            .wait(PATIENCE, |line| line.starts_with(start))
            .unwrap_or_else(|| panic!("it does not print {start:?}"))
    }

    /// Waits for a log line that contains `what`.
    pub fn wait_for_log(&self, what: &str) -> String {
        self.stderr
            .wait(PATIENCE, |line| line.contains(what))
            .unwrap_or_else(|| panic!("the log does not say {what:?}"))
    }

    /// The address of `--metrics`, which the server must have.
    pub fn metrics_address(&self) -> String {
        let line = self.wait_for_log("metrics are at http://");
        let (_, address) = line.split_once("http://").unwrap();
        address.split('/').next().unwrap().to_owned()
    }

    /// Opens a TCP connection without sending a CONNECT.
    pub fn open(&self) -> Client {
        Client::open(self.address)
    }

    /// Connects a client with a clean session.
    pub fn connect(&self, id: &str) -> Client {
        Client::connect(self.address, &Connect::new(id))
    }

    /// Connects a client of the store that uses the dialect of the SDKs.
    pub fn store(&self, id: &str) -> Store {
        let client = self.connect(id);
        match self.attached {
            true => Store::behind(client, id),
            false => Store::new(client, id),
        }
    }

    /// The value of a metric, such as `keys` or `limit{setting="max_keys"}`, or its sum over all
    /// labels if none are named. It must exist.
    pub fn metric(&self, name: &str) -> u64 {
        self.metric_if_any(name)
            .unwrap_or_else(|| panic!("there is no metric {name}"))
    }

    pub fn metrics_page(&self) -> String {
        let (status, page) = Admin::of(self).ask("GET", "/metrics", b"");
        assert_eq!(status, 200, "{page}");
        page
    }

    /// The value of a metric, if it exists.
    pub fn metric_if_any(&self, name: &str) -> Option<u64> {
        let page = self.metrics_page();
        let values = page.lines().filter_map(|line| {
            let rest = line.strip_prefix("statehouse_")?.strip_prefix(name)?;
            let value = rest.starts_with([' ', '{']).then(|| rest.rsplit_once(' '));
            Some(value??.1.parse::<u64>().unwrap())
        });
        values.reduce(|sum, value| sum + value)
    }

    /// How often the server has refused an action to clients.
    pub fn refused(&self, what: &str) -> u64 {
        let counter = format!("access_refused_total{{what=\"{what}\"}}");
        self.metric_if_any(&counter).unwrap_or(0)
    }

    /// How often the server has read files of this kind again, with this result.
    pub fn reloads(&self, what: &str, result: &str) -> u64 {
        self.metric(&format!(
            "reloads_total{{what=\"{what}\",result=\"{result}\"}}"
        ))
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn memory_kib(&self) -> u64 {
        self.memory("VmRSS:")
    }

    pub fn memory_peak_kib(&self) -> u64 {
        self.memory("VmHWM:")
    }

    fn memory(&self, what: &str) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap();
        let line = status.lines().find(|l| l.starts_with(what)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }

    pub fn descriptors(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.pid()))
            .unwrap()
            .count()
    }

    pub fn runs(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// Sends a signal by name (`TERM`, `INT`).
    pub fn signal(&self, name: &str) {
        signal(self.pid(), name);
    }

    pub fn wait(&mut self, timeout: Duration) -> ExitStatus {
        wait(&mut self.child, timeout)
            .unwrap_or_else(|| panic!("the server still runs after {timeout:?}"))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // An error means that the process has already ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if thread::panicking() {
            let name = format!("the server at {}", self.address);
            if let Some((stdout, stderr)) = &self.earlier {
                print(&format!("{name}, before its last restart,"), stdout, stderr);
            }
            print(&name, &self.stdout, &self.stderr);
        }
    }
}

/// Prints the output and the end of the log of a process.
fn print(process: &str, stdout: &Lines, stderr: &Lines) {
    eprintln!("--- {process} printed");
    stdout.all().iter().for_each(|line| eprintln!("{line}"));
    stderr.print_last(process);
}

fn restartable(mut command: Command, settings: &[(&str, &str)]) -> Command {
    command.args(["serve", "--listen", &own_address().to_string()]);
    set(&mut command, settings);
    command
}

/// Passes settings as environment variables, because a flag can be given only once.
pub(crate) fn set(command: &mut Command, settings: &[(&str, &str)]) {
    for (name, value) in settings {
        command.env(format!("STATEHOUSE_{}", name.to_uppercase()), value);
    }
}

/// A loopback address that only this process uses, with a port outside the system's ephemeral
/// range. With an ephemeral port, a client that reconnects while no server listens would eventually
/// connect to itself.
pub fn own_address() -> SocketAddr {
    static USED: AtomicU16 = AtomicU16::new(0);
    let [_, high, middle, low] = std::process::id().to_be_bytes();
    loop {
        let port = 20_000 + USED.fetch_add(1, Ordering::Relaxed) % 10_000;
        // A Linux process id has at most 22 bits. No address equals 127.0.0.1, which other tests
        // use. Containers that share a network may have the same process ids.
        let address = ([127, 64 + high % 64, middle, low], port).into();
        if TcpListener::bind::<SocketAddr>(address).is_ok() {
            return address;
        }
    }
}

/// Sends a signal to a process that this test started.
pub fn signal(pid: u32, name: &str) {
    let status = Command::new("kill")
        .args([format!("-{name}"), pid.to_string()])
        .status()
        .unwrap();
    assert!(status.success(), "kill -{name} {pid} failed");
}

/// Waits for the end of a child. Returns `None` if it still runs after `timeout`.
pub fn wait(child: &mut Child, timeout: Duration) -> Option<ExitStatus> {
    let end = Instant::now() + timeout;
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return Some(status);
        }
        if Instant::now() > end {
            return None;
        }
        // The standard library has no wait with a timeout.
        thread::sleep(Duration::from_millis(5));
    }
}
