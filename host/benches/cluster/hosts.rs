//! The hosts of a cluster, each in its own process.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use crate::common::Running;
use crate::etcd::{Etcd, insist};
use crate::servers::free_address;

const NAME: &str = "bench";

/// How long a host may take for anything.
const PATIENCE: Duration = Duration::from_secs(120);

/// A host of the cluster. Drop ends it.
pub(crate) struct Host {
    name: String,
    pub(crate) address: SocketAddr,
    command: Command,
    process: Running,
    /// What it has printed since its start.
    lines: Arc<Mutex<Vec<String>>>,
    data: PathBuf,
}

impl Host {
    fn start(place: &Path, name: &str, urls: &str) -> Self {
        let (address, port) = (free_address(), free_address());
        let data = place.join(name);
        let mut command = Command::new(env!("CARGO_BIN_EXE_statehouse"));
        command
            .args(["serve", "--log-filter", "error", "--name", name])
            .args(["--listen", &address.to_string()])
            .args(["--cluster-listen", &port.to_string()])
            .args(["--cluster", urls, "--cluster-name", NAME])
            .args(["--cluster-quota", "4294967296", "--data"])
            .arg(&data)
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        let (process, lines) = run(&mut command);
        Self {
            name: name.to_owned(),
            address,
            command,
            process,
            lines,
            data,
        }
    }

    pub(crate) fn id(&self) -> u32 {
        self.process.0.id()
    }

    /// The number of its leadership, if it leads.
    fn epoch(&self) -> Option<u64> {
        let leads = format!("{} leads {NAME} (epoch ", self.name);
        let ended = format!("{} does not lead {NAME} any more", self.name);
        let lines = self.lines.lock().expect("no reader panics");
        lines.iter().fold(None, |epoch, line| {
            let number = line
                .strip_prefix(&leads)
                .and_then(|it| it.strip_suffix(')'));
            match number {
                Some(number) => number.parse().ok(),
                None if line.starts_with(&ended) => None,
                None => epoch,
            }
        })
    }

    pub(crate) fn wait_until_ready(&self) {
        wait("a host that is ready", || {
            let lines = self.lines.lock().expect("no reader panics");
            lines.iter().any(|line| line == "ready").then_some(())
        });
    }

    pub(crate) fn kill(&mut self) {
        self.process.0.kill().expect("it runs");
        self.process.0.wait().expect("it has ended");
        self.lines.lock().expect("no reader panics").clear();
    }

    pub(crate) fn restart(&mut self) {
        (self.process, self.lines) = run(&mut self.command);
    }

    /// Lets the host hand over.
    pub(crate) fn hand_over(&self) {
        insist(|| {
            let mut command = Command::new(env!("CARGO_BIN_EXE_statehouse"));
            command
                .args(["cluster", "handover", "--data"])
                .arg(&self.data);
            command
        });
    }
}

fn run(command: &mut Command) -> (Running, Arc<Mutex<Vec<String>>>) {
    let mut process = command.spawn().expect("cargo built the binary before");
    let output = process.stdout.take().expect("it is piped");
    let lines = Arc::<Mutex<Vec<String>>>::default();
    let written = lines.clone();
    thread::spawn(move || {
        for line in BufReader::new(output).lines().map_while(Result::ok) {
            written.lock().expect("no reader panics").push(line);
        }
    });
    (Running(process), lines)
}

/// Waits until `look` finds something, and panics after [`PATIENCE`].
pub(crate) fn wait<T>(what: &str, look: impl Fn() -> Option<T>) -> T {
    let end = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < end, "waited in vain for: {what}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Three hosts over three etcd servers.
pub(crate) struct Cluster {
    // The first field, so that the hosts end before their etcd.
    pub(crate) hosts: Vec<Host>,
    etcd: Etcd,
    place: PathBuf,
}

impl Cluster {
    pub(crate) fn start(place: &Path) -> Self {
        let etcd = Etcd::start(place);
        let urls = etcd.urls.join(",");
        insist(|| {
            let mut command = Command::new(env!("CARGO_BIN_EXE_statehouse"));
            command.args(["cluster", "init", "--cluster", &urls]);
            command.args(["--cluster-name", NAME]);
            command
        });
        let names = ["gw1", "gw2", "gw3"];
        let cluster = Self {
            hosts: names.map(|name| Host::start(place, name, &urls)).into(),
            etcd,
            place: place.to_owned(),
        };
        cluster.hosts.iter().for_each(Host::wait_until_ready);
        cluster.leader();
        cluster
    }

    pub(crate) fn urls(&self) -> &[String] {
        &self.etcd.urls
    }

    fn newest(&self) -> Option<(u64, usize)> {
        let hosts = self.hosts.iter().enumerate();
        hosts
            .filter_map(|(at, host)| Some((host.epoch()?, at)))
            .max()
    }

    /// The host that leads.
    pub(crate) fn leader(&self) -> usize {
        wait("a host that leads", || self.newest()).1
    }

    /// A host that does not lead.
    pub(crate) fn follower(&self) -> usize {
        (self.leader() + 1) % self.hosts.len()
    }

    /// Starts another host. Returns the time until it is ready.
    pub(crate) fn join(&mut self) -> Duration {
        let name = format!("gw{}", self.hosts.len() + 1);
        let began = Instant::now();
        let host = Host::start(&self.place, &name, &self.etcd.urls.join(","));
        host.wait_until_ready();
        let took = began.elapsed();
        self.hosts.push(host);
        took
    }
}
