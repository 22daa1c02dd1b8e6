//! `statehouse bench`: measures the throughput and latency of a running store.

mod address;
mod interruption;
mod picture;
mod report;
mod sweep;

use std::fs::File;
use std::io::{self, Write};
use std::net::SocketAddr;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use rustls::pki_types::ServerName;
use statehouse_client::{Login, parse_duration};
use statehouse_link::is_untrusted;

use self::address::resolve;
use self::interruption::Interruption;
use self::report::{Point, Report};
use self::sweep::Sweep;
use super::data::count;
use super::output::{Exit, Failure, emit, notice};
use super::progress::Progress;
use super::remote::{Credentials, START_ONE, TRUST_ONE, Target};
use crate::admin::Endpoint;
use crate::time::millis;
use statehouse_config::{BrokerUrl, limits, size};
use statehouse_loadgen::{
    Broken, Catalogue, Encryption, Job, Live, LoadError, Mqtt, Outcome, Pace, Plan, Role,
    limits as load_limits, listener, put_on, socket_listener,
};

/// Requests in flight on each connection while keys are set before a run and removed after it.
const FILL_IN_FLIGHT: u16 = 16;

/// Connections that set and remove keys.
const FILL_CONNECTIONS: usize = 16;

/// Measure the throughput and latency of a running store
///
/// Connections send GETs and SETs of random keys, check every response, and count. By default each
/// connection sends its next request after the response to the last one (a closed loop), which
/// measures the store's throughput. With --rate, requests are due at fixed times regardless of the
/// store (an open loop), and latency counts from the due time, which shows how long users wait at
/// that load.
///
/// Requests per second are the correct answers that arrive during the measurement. Latencies are
/// those of requests with a correct answer. Above the capacity of the store, requests without an
/// answer within --timeout are counted as errors and are not in the percentiles.
///
/// All keys are set before the run and removed after it; their names begin with `bench/`. SIGINT
/// (Ctrl-C) or SIGTERM ends the run without results and removes the keys, unless --keep is given. A
/// second signal ends the command at once and leaves the keys.
///
/// The store's `serve --durability` decides whether writes reach the disk. The client uses one
/// core, or half of the cores if there are more: run it on another machine to measure a store at
/// its limit.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Load")]
#[command(after_help = "\
Examples:
  statehouse bench                                        # 50 clients, one request at a time
  statehouse bench --reads 0 --in-flight 16               # writes only, sixteen at a time
  statehouse bench --rate 20000                           # latency at 20 000 requests per second
  statehouse bench --watchers 1000 --keys 1 --reads 0 --connections 1    # 1000 watchers of a key
  statehouse bench --sweep rate=5000,10000,20000,40000 --svg curve.svg   # latency over throughput
  statehouse bench --sweep connections=1,10,100,1000 --json figures.json
  statehouse bench --url mqtts://gateway:8883 --ca ca.crt --user operator --password-file password
  statehouse bench --port 1884 --data /var/lib/statehouse # behind a foreign broker

Exit codes: 0 all requests were answered correctly, 1 some were not, 2 usage, 3 no store or no
answer, 4 refused, 130 ended by SIGINT, 143 ended by SIGTERM.")]
pub(super) struct Args {
    /// Number of clients that send requests
    #[arg(long, value_name = "N", default_value_t = 50,
          value_parser = clap::value_parser!(u64).range(1..=load_limits::LOAD_CONNECTIONS_MAX as u64))]
    connections: u64,

    /// Requests in flight per client [default: 1; with --rate as many as the server allows]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    in_flight: Option<u16>,

    /// Requests per second of all clients together, each sent at its due time regardless of earlier
    /// responses
    #[arg(long, value_name = "N",
          value_parser = clap::value_parser!(u64).range(1..=load_limits::LOAD_RATE_MAX))]
    rate: Option<u64>,

    /// How long to measure
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = parse_duration)]
    duration: Duration,

    /// How long to run before the measurement
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = parse_duration)]
    warm_up: Duration,

    /// Number of keys
    #[arg(long, value_name = "N", default_value_t = 10_000,
          value_parser = clap::value_parser!(u64).range(1..=load_limits::LOAD_KEYS_MAX))]
    keys: u64,

    /// Length of each value
    #[arg(long, value_name = "BYTES", default_value = "64", value_parser = value_bytes)]
    value_bytes: u64,

    /// Percentage of GETs; the other requests are SETs
    #[arg(long, value_name = "PERCENT", default_value_t = 50,
          value_parser = clap::value_parser!(u8).range(0..=100))]
    reads: u8,

    /// Additional clients, each of which watches one key; the keys are assigned in order
    #[arg(long, value_name = "N", default_value_t = 0,
          value_parser = clap::value_parser!(u64).range(0..=load_limits::LOAD_CONNECTIONS_MAX as u64))]
    watchers: u64,

    /// Seed of the request sequence
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,

    /// Measure once for each value: connections=N,N,... or rate=N,N,...
    #[arg(long, value_name = "WHAT=N,N,...")]
    sweep: Option<Sweep>,

    /// Threads of the clients [default: half of the cores, at most 8]
    #[arg(long, value_name = "N",
          value_parser = clap::value_parser!(u64).range(1..=load_limits::LOAD_THREADS_MAX as u64))]
    threads: Option<u64>,

    /// Do not set the keys before the run: GETs use the existing keys
    #[arg(long)]
    no_fill: bool,

    /// Do not remove the keys at the end
    #[arg(long)]
    keep: bool,

    /// Write the results to this file as JSON
    #[arg(long, value_name = "FILE", help_heading = "Report")]
    json: Option<PathBuf>,

    /// Draw latency over throughput into this SVG file; needs --sweep
    #[arg(long, value_name = "FILE", requires = "sweep", help_heading = "Report")]
    svg: Option<PathBuf>,

    /// The process of the store, for its CPU time and memory [default: the process that listens at
    /// the address on this machine]
    #[arg(long, value_name = "PID", help_heading = "Report")]
    pid: Option<u32>,

    /// The store's data directory instead; its file `admin` identifies the process
    #[arg(
        long,
        value_name = "DIR",
        conflicts_with = "pid",
        help_heading = "Report"
    )]
    data: Option<PathBuf>,

    #[command(flatten)]
    target: Target,

    /// Timeout of a connection and of a response
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = parse_duration,
          help_heading = "Connection")]
    timeout: Duration,
}

/// The length of a value, at most that of a packet.
fn value_bytes(text: &str) -> Result<u64, String> {
    match size(text)? {
        bytes if bytes <= limits::PACKET_BYTES_MAX_MAX as u64 => Ok(bytes),
        _ => Err(format!(
            "a value has at most {} bytes",
            limits::PACKET_BYTES_MAX_MAX
        )),
    }
}

pub(super) fn run(args: &Args) -> Result<Exit, Failure> {
    let points = points(args)?;
    // Opened before the run, so that no results are lost if a directory is missing.
    let mut json = args.json.as_deref().map(open).transpose()?;
    let mut svg = args.svg.as_deref().map(open).transpose()?;
    let target = args.target.with_context()?;
    let url = plain_url(&target)?;
    let address = resolve(&url)?;
    let process = process(args, address)?;
    let bench = Bench {
        args,
        address,
        encryption: encryption(&target.credentials, &url)?,
        login: target.credentials.login(Some(&url))?,
        catalogue: Arc::new(Catalogue::new(bounded(args.value_bytes))),
        pid: process.as_ref().map(|(pid, _)| *pid),
        interruption: Interruption::watch(match args.keep {
            true => "stopping",
            false => "removing the keys; a second signal ends at once and leaves them",
        })?,
    };
    let mut progress = Progress::new();
    if !args.no_fill {
        bench.every_key(Job::Fill, &mut progress)?;
    }
    let measured = bench.measure_all(points, &mut progress);
    let interrupted = bench.interruption.signal();
    // A failure without a fill has probably set no key.
    if measured.is_ok() || !args.no_fill {
        bench.clean(&mut progress);
    }
    progress.clear();
    if let Some(signal) = interrupted {
        let why = "interrupted before the end of the measurement, so there are no results";
        return Err(Failure::new(128 + signal, why));
    }
    let report = Report {
        args,
        address,
        process,
        measured: measured?,
    };
    if let (Some(file), Some(path)) = (&mut json, &args.json) {
        write(file, path, &format!("{:#}\n", report.json()))?;
    }
    if let (Some(file), Some(path)) = (&mut svg, &args.svg) {
        write(file, path, &picture::draw(&report))?;
    }
    emit(report.text().as_bytes())?;
    Ok(Exit::of(report.errors() == 0))
}

/// The URL of the store, which must speak MQTT without a WebSocket.
fn plain_url(target: &Target) -> Result<BrokerUrl, Failure> {
    let url = target.url();
    match url.scheme.websocket {
        false => Ok(url),
        true => Err(Failure::usage(format!(
            "{url} is a WebSocket, and bench speaks MQTT over TCP or TLS: name a listener of mqtt:// or mqtts://"
        ))),
    }
}

/// State that all runs of one command share.
struct Bench<'a> {
    args: &'a Args,
    address: SocketAddr,
    encryption: Option<Encryption>,
    login: Option<Login>,
    catalogue: Arc<Catalogue>,
    pid: Option<u32>,
    interruption: Interruption,
}

impl Bench<'_> {
    fn plan(&self) -> Plan {
        let args = self.args;
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let threads = (cores / 2).clamp(1, load_limits::LOAD_THREADS_DEFAULT_MAX);
        Plan {
            address: self.address,
            encryption: self.encryption.clone(),
            job: Job::Mix { reads: args.reads },
            pace: Pace::Closed,
            connections: FILL_CONNECTIONS,
            in_flight: Some(FILL_IN_FLIGHT),
            watchers: 0,
            keys: args.keys,
            catalogue: self.catalogue.clone(),
            seed: args.seed,
            warm_up: args.warm_up,
            duration: args.duration,
            timeout: args.timeout,
            threads: args.threads.map_or(threads, bounded),
            pid: self.pid,
        }
    }

    /// Runs a plan until its end or a signal. A signal does not end the removal of keys.
    fn put_on(&self, plan: &Plan, mut watch: impl FnMut(Live)) -> Result<Outcome, Failure> {
        let nonce = statehouse_link::random();
        let login = self.login.clone().map(|it| (it.user, it.password));
        let client = |role: Role, number| {
            Mqtt::new(self.catalogue.clone(), nonce, role, number).with_login(login.clone())
        };
        let is_cleaning = matches!(plan.job, Job::Clean);
        let watch = |live| {
            watch(live);
            match self.interruption.signal() {
                Some(_) if !is_cleaning => ControlFlow::Break(()),
                _ => ControlFlow::Continue(()),
            }
        };
        Ok(put_on(plan, client, watch)?)
    }

    /// Measures each point, up to a signal.
    fn measure_all(
        &self,
        points: Vec<Point>,
        progress: &mut Progress,
    ) -> Result<Vec<(Point, Outcome)>, Failure> {
        let runs = points.len();
        let mut measured = Vec::with_capacity(runs);
        for (at, point) in points.into_iter().enumerate() {
            if self.interruption.signal().is_some() {
                break;
            }
            let step = match runs {
                1 => String::new(),
                _ => format!("{}/{runs}: {}  ", at + 1, point.name),
            };
            let outcome = self.measure(&point, &step, progress)?;
            let lost = outcome.measured < self.args.duration;
            measured.push((point, outcome));
            if lost {
                // All connections have failed.
                break;
            }
        }
        Ok(measured)
    }

    /// Removes all keys, unless they are to stay. A failure is a notice: the results, or an earlier
    /// failure, matter more.
    fn clean(&self, progress: &mut Progress) {
        if !self.args.keep
            && let Err(failure) = self.every_key(Job::Clean, progress)
        {
            notice(&format!(
                "the keys stay, since they could not be removed: {}",
                failure.message()
            ));
        }
    }

    /// Sets or removes all keys.
    fn every_key(&self, job: Job, progress: &mut Progress) -> Result<(), Failure> {
        let word = match job {
            Job::Clean => "removed",
            _ => "set",
        };
        let plan = Plan { job, ..self.plan() };
        let outcome = self.put_on(&plan, |live| {
            progress.share(live.answered, plan.keys, || {
                format!("{}/{} keys {word}", live.answered, plan.keys)
            });
        })?;
        let Some((kind, _)) = outcome.tally.errors.kinds().next() else {
            return Ok(());
        };
        if matches!(job, Job::Fill) && outcome.tally.replied > 0 {
            self.clean(progress);
        }
        let why = format!("not all keys could be {word}: {kind}");
        Err(match kind.strip_prefix("refused: ") {
            Some(text) if text.contains("quota") => Failure::refused(format!(
                "{why}. Ask for fewer keys or shorter values (--keys, --value-bytes), or raise the quota of the store"
            )),
            Some(_) => Failure::refused(why),
            None => Failure::transport(why),
        })
    }

    fn measure(
        &self,
        point: &Point,
        step: &str,
        progress: &mut Progress,
    ) -> Result<Outcome, Failure> {
        let plan = Plan {
            pace: match point.rate {
                Some(rate) => Pace::Open {
                    per_second: rate as f64,
                },
                None => Pace::Closed,
            },
            connections: point.connections,
            in_flight: match point.rate {
                Some(_) => self.args.in_flight,
                None => Some(self.args.in_flight.unwrap_or(1)),
            },
            watchers: bounded(self.args.watchers),
            ..self.plan()
        };
        let total = plan.warm_up + plan.duration;
        let mut last = (Duration::ZERO, 0);
        let mut per_second = 0.0;
        self.put_on(&plan, |live| {
            let (took, answered) = (live.elapsed.saturating_sub(last.0), live.answered - last.1);
            if took >= Duration::from_millis(500) {
                per_second = answered as f64 / took.as_secs_f64();
                last = (live.elapsed, live.answered);
            }
            progress.share(millis(live.elapsed), millis(total), || {
                let phase = match live.elapsed < plan.warm_up {
                    true => "warming up",
                    false => "measuring",
                };
                format!(
                    "{step}{phase}  {per_second:.0}/s  {}",
                    count(live.failed, "error")
                )
            });
        })
    }
}

fn points(args: &Args) -> Result<Vec<Point>, Failure> {
    let (low, high) = (
        load_limits::LOAD_DURATION_MIN,
        load_limits::LOAD_DURATION_MAX,
    );
    if args.duration < low || args.duration > high || args.warm_up > high {
        return Err(Failure::usage(format!(
            "--duration is between {low:?} and {} h, and --warm-up no longer",
            high.as_secs() / 3600
        )));
    }
    if args.timeout.is_zero() || args.timeout > high {
        return Err(Failure::usage(
            "--timeout must be greater than zero and at most one day",
        ));
    }
    let one = Point {
        name: String::new(),
        connections: bounded(args.connections),
        rate: args.rate,
    };
    let points: Vec<Point> = match &args.sweep {
        None => vec![one],
        Some(Sweep::Connections(all)) => {
            let each = all.iter().map(|n| Point {
                name: count(*n, "connection"),
                connections: bounded(*n),
                ..one
            });
            each.collect()
        }
        Some(Sweep::Rate(_)) if args.rate.is_some() => {
            return Err(Failure::usage(
                "--rate and a sweep of rates exclude each other",
            ));
        }
        Some(Sweep::Rate(all)) => {
            let each = all.iter().map(|n| Point {
                name: format!("{n}/s"),
                rate: Some(*n),
                ..one
            });
            each.collect()
        }
    };
    let most = points.iter().map(|point| point.connections).max();
    let in_flight = most.unwrap_or(0) * usize::from(args.in_flight.unwrap_or(1));
    if in_flight > load_limits::LOAD_IN_FLIGHT_MAX {
        return Err(Failure::usage(format!(
            "--connections times --in-flight is {in_flight}; at most {} requests can be on their way",
            load_limits::LOAD_IN_FLIGHT_MAX
        )));
    }
    Ok(points)
}

/// The TLS configuration, if the URL is encrypted.
fn encryption(credentials: &Credentials, url: &BrokerUrl) -> Result<Option<Encryption>, Failure> {
    if credentials.tls(url)?.is_none() {
        return Ok(None);
    }
    let name = ServerName::try_from(url.host.clone());
    Ok(Some(Encryption {
        config: credentials.client_config()?,
        name: name.map_err(|_| Failure::usage(format!("{} is no name of a host", url.host)))?,
    }))
}

/// The process id and the name of the store's process.
fn process(args: &Args, address: SocketAddr) -> Result<Option<(u32, String)>, Failure> {
    if let Some(pid) = args.pid {
        let name = std::fs::read_to_string(format!("/proc/{pid}/comm"));
        let name = name.map_err(|_| Failure::usage(format!("there is no process {pid} here")))?;
        return Ok(Some((pid, name.trim_end().to_owned())));
    }
    let Some(data) = &args.data else {
        let found = address
            .ip()
            .is_loopback()
            .then(|| listener(address))
            .flatten();
        if let Some((pid, name)) = &found
            && name != env!("CARGO_PKG_NAME")
        {
            notice(&format!(
                "{address} is the process {pid}, {name}: its CPU time and memory are reported. Use --data or --pid if the store is another process"
            ));
        }
        return Ok(found);
    };
    let endpoint = Endpoint::read(data).map_err(|error| {
        Failure::usage(format!(
            "no store runs in {}, or its admin API is off: {error}",
            data.display()
        ))
    })?;
    let found = match endpoint.url.strip_prefix("unix:") {
        Some(path) => socket_listener(path.as_ref()),
        None => {
            let url = endpoint
                .url
                .trim_start_matches("http://")
                .trim_end_matches('/');
            url.parse().ok().and_then(listener)
        }
    };
    if found.is_none() {
        notice(&format!(
            "the process of the store in {} was not found: its CPU time and memory are not reported",
            data.display()
        ));
    }
    Ok(found)
}

/// Opens a file for results. Earlier results stay until [`write`] replaces them.
fn open(path: &Path) -> Result<File, Failure> {
    let mut options = File::options();
    let options = options.write(true).create(true).truncate(false);
    options
        .open(path)
        .map_err(|error| cannot_write(path, &error))
}

fn write(file: &mut File, path: &Path, text: &str) -> Result<(), Failure> {
    let mut replace = || {
        // A pipe or a device has no length.
        if file.metadata()?.is_file() {
            file.set_len(0)?;
        }
        file.write_all(text.as_bytes())
    };
    replace().map_err(|error| cannot_write(path, &error))
}

fn cannot_write(path: &Path, error: &io::Error) -> Failure {
    Failure::usage(format!("cannot write {}: {error}", path.display()))
}

/// A number that the limits of the command line keep small.
fn bounded(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

impl From<LoadError> for Failure {
    fn from(error: LoadError) -> Self {
        let text = error.to_string();
        match error {
            LoadError::Connect(_, error) if error.raw_os_error() == Some(FILES_MAX) => {
                Self::transport(format!(
                    "{text}. `ulimit -n` raises how many files a process opens"
                ))
            }
            LoadError::Connect(_, error) if is_untrusted(&error) => {
                Self::transport(format!("{text}. {TRUST_ONE}"))
            }
            LoadError::Connect(..) => Self::transport(format!("{text}. {START_ONE}")),
            LoadError::Silent(..) => {
                Self::transport(format!("{text}. Is a state store running there?"))
            }
            LoadError::Broken(_, Broken::Refused(_)) | LoadError::Watch(..) => Self::refused(text),
            LoadError::Broken(..) | LoadError::System(_) => Self::transport(text),
            LoadError::InFlight { .. } => Self::usage(text),
        }
    }
}

/// EMFILE of Linux: this process has too many files open.
const FILES_MAX: i32 = 24;
