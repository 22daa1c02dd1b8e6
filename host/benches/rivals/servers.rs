//! Starts and ends server processes, and runs one round of work on a server.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use statehouse_loadgen::{Catalogue, Job, Pace, Plan, Protocol, Role, put_on};

/// How long a server may take to listen.
const PATIENCE: Duration = Duration::from_secs(20);

/// A server process. Drop ends it.
pub(crate) struct Process {
    child: Child,
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
        let mut process = Self { child, address };
        let end = Instant::now() + PATIENCE;
        while Instant::now() < end {
            if TcpStream::connect(address).is_ok() {
                return Some(process);
            }
            if process
                .child
                .try_wait()
                .is_ok_and(|status| status.is_some())
            {
                return None;
            }
            thread::sleep(Duration::from_millis(5));
        }
        None
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // An error means that the process has already ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
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
    pub(crate) value_bytes: usize,
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
    let catalogue = Arc::new(Catalogue::new(work.value_bytes));
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
    let outcome = put_on(&plan, |role, n| client(catalogue.clone(), role, n), |_| {});
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
