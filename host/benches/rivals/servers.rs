//! Starts and ends server processes, and runs one round of work on a server.

use std::fmt;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::ops::ControlFlow;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use statehouse_loadgen::{Catalogue, Job, Pace, Plan, Protocol, Role, put_on};

use crate::common::Running;

/// Length of all values.
pub(crate) const VALUE_BYTES: usize = 64;

/// How long a server may take to listen.
const PATIENCE: Duration = Duration::from_secs(20);

/// A server process. Drop ends it.
pub(crate) struct Process {
    child: Running,
    pub(crate) address: SocketAddr,
}

impl Process {
    /// Starts a server. Returns `None` if the program is not installed, or ends before it listens.
    pub(crate) fn start(mut command: Command, address: SocketAddr) -> Option<Self> {
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .ok()?;
        let child = Running(child);
        let mut process = Self { child, address };
        let end = Instant::now() + PATIENCE;
        while Instant::now() < end {
            if TcpStream::connect(address).is_ok() {
                return Some(process);
            }
            if matches!(process.child.0.try_wait(), Ok(Some(_))) {
                return None;
            }
            thread::sleep(Duration::from_millis(5));
        }
        None
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.0.id()
    }
}

/// Starts Mosquitto with its defaults, anonymous access, and Nagle's algorithm unless `nodelay`.
/// Returns `None` if Mosquitto is not installed.
pub(crate) fn mosquitto(directory: &Path, nodelay: bool) -> Option<Process> {
    let address = free_address();
    let configuration = format!(
        "listener {} {}\nallow_anonymous true\nset_tcp_nodelay {nodelay}\n",
        address.port(),
        address.ip()
    );
    let path = directory.join("mosquitto.conf");
    std::fs::write(&path, configuration).expect("a file");
    // Debian installs Mosquitto in a directory that is not in a user's PATH.
    let debian = Path::new("/usr/sbin/mosquitto");
    let program = match debian.exists() {
        true => debian,
        false => Path::new("mosquitto"),
    };
    let mut command = Command::new(program);
    command.arg("-c").arg(path);
    Process::start(command, address)
}

/// An address that was free just now, for servers that cannot choose a free port.
pub(crate) fn free_address() -> SocketAddr {
    let free = TcpListener::bind("127.0.0.1:0").expect("a free port");
    free.local_addr().expect("it has one")
}

/// The work of one round.
#[derive(Clone, Copy)]
pub(crate) struct Work {
    pub(crate) connections: usize,
    pub(crate) in_flight: u16,
    /// The percentage of reads.
    pub(crate) reads: u8,
    pub(crate) keys: u64,
    pub(crate) round: Duration,
}

/// The result of a round.
#[derive(Clone, Copy)]
pub(crate) struct Figures {
    pub(crate) per_second: f64,
    pub(crate) p50_us: f64,
    pub(crate) p99_us: f64,
    /// CPU time of the server per request.
    pub(crate) cpu_us: Option<f64>,
}

/// Columns of a table: requests per second, p50, p99 and CPU time.
impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cpu = self.cpu_us.map_or(String::new(), |us| format!("{us:.1}"));
        let (per_second, p50, p99) = (self.per_second, self.p50_us, self.p99_us);
        write!(f, "{per_second:.0} | {p50:.0} | {p99:.0} | {cpu}")
    }
}

/// The median round by the figure `by`.
pub(crate) fn median(mut rounds: Vec<Figures>, by: impl Fn(&Figures) -> f64) -> Option<Figures> {
    rounds.sort_by(|a, b| by(a).total_cmp(&by(b)));
    rounds.get(rounds.len() / 2).copied()
}

/// Runs one job with the load generator of `statehouse bench`.
pub(crate) fn run_job<P: Protocol>(
    address: SocketAddr,
    pid: u32,
    work: &Work,
    job: Job,
    client: impl Fn(Arc<Catalogue>, Role, usize) -> P + Sync,
) -> Result<Figures, String> {
    let catalogue = Arc::new(Catalogue::new(VALUE_BYTES));
    let plan = Plan {
        address,
        encryption: None,
        job,
        pace: Pace::Closed,
        connections: work.connections,
        in_flight: Some(work.in_flight),
        watchers: 0,
        keys: work.keys,
        catalogue: catalogue.clone(),
        seed: 1,
        warm_up: work.round / 5,
        duration: work.round,
        timeout: PATIENCE,
        threads: 1,
        pid: Some(pid),
    };
    let client = |role, n| client(catalogue.clone(), role, n);
    let outcome = put_on(&plan, client, |_| ControlFlow::Continue(()));
    let outcome = outcome.map_err(|error| error.to_string())?;
    let errors: Vec<String> = outcome
        .tally
        .errors
        .kinds()
        .map(|(kind, count)| format!("{count} × {kind}"))
        .collect();
    if !errors.is_empty() {
        return Err(errors.join(", "));
    }
    let latencies = outcome.tally.latencies();
    Ok(Figures {
        per_second: outcome.per_second(),
        p50_us: latencies.quantile_us(0.5),
        p99_us: latencies.quantile_us(0.99),
        cpu_us: outcome.server.as_ref().map(|usage| outcome.cpu_us(usage)),
    })
}
