//! Puts load on a server, and measures throughput, latencies, errors and the use of resources.
//!
//! The load is given by a [`Plan`] and a [`Protocol`], the result is an [`Outcome`]. Every answer
//! is checked. Only the [`Protocol`] may depend on the measured server; otherwise comparisons with
//! other servers would use different clients. [`Mqtt`], the protocol of the store, shares the
//! topics, the clock and the encoder of properties with the server.
//!
//! ```text
//! plan ─ threads ─ drive ──────── conversation ─── protocol ─── bytes
//!                  a socket and   slots, outcomes  MQTT 5, or
//!                  its task       (no I/O)         a rival's (no I/O)
//! ```

#![forbid(unsafe_code)]

mod conversation;
mod drive;
pub mod limits;
mod mqtt;
mod pace;
mod process;
mod protocol;
mod run;
mod share;
mod stream;
mod tally;
mod work;

use std::io;
use std::net::SocketAddr;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use tokio::sync::Notify;

pub use mqtt::{Mqtt, packet};
pub use pace::Pace;
pub use process::{Usage, listener, socket_listener};
pub use protocol::{Broken, Protocol, Received, Role};
pub use stream::Encryption;
pub use tally::{Errors, Latencies, Tally};
pub use work::{Catalogue, Job, PREFIX, Reply, Request, Verb, write_digits};

use pace::{Schedule, Turns};
use run::Run;
use share::{Share, Start};

/// The parameters of a load.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The address of the server.
    pub address: SocketAddr,
    /// The encryption of the connections; `None` for plain TCP.
    pub encryption: Option<Encryption>,
    /// The kind of requests.
    pub job: Job,
    /// When requests are sent.
    pub pace: Pace,
    /// The number of connections that send requests.
    pub connections: usize,
    /// The maximum number of requests in flight per connection. `None`: the server's maximum. A
    /// [`Job::Mix`] with more than the server's maximum fails; other jobs lower it to that.
    pub in_flight: Option<u16>,
    /// The number of connections that watch one key each. They take the keys in turn.
    pub watchers: usize,
    /// The number of keys.
    pub keys: u64,
    /// The names and values of the keys.
    pub catalogue: Arc<Catalogue>,
    /// The seed for the order of requests.
    pub seed: u64,
    /// How long the load runs before the measurement.
    pub warm_up: Duration,
    /// How long the measurement takes.
    pub duration: Duration,
    /// The maximum time for a connect or an answer.
    pub timeout: Duration,
    /// The number of client threads.
    pub threads: usize,
    /// The process of the server, if it runs on this machine.
    pub pid: Option<u32>,
}

/// The result of a load.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Counts, latencies and errors.
    pub tally: Tally,
    /// The length of the measurement. It is shorter than planned if all connections were lost or
    /// the load was stopped.
    pub measured: Duration,
    /// The processor time of the server during the measurement, and its memory at the end.
    pub server: Option<Usage>,
    /// The same for this process.
    pub client: Option<Usage>,
}

impl Outcome {
    /// Answers per second.
    #[must_use]
    pub fn per_second(&self) -> f64 {
        self.tally.arrived as f64 / self.measured.as_secs_f64().max(1e-9)
    }

    /// Processor time per answer, in microseconds.
    #[must_use]
    pub fn cpu_us(&self, usage: &Usage) -> f64 {
        usage.cpu.as_secs_f64() * 1e6 / self.tally.arrived.max(1) as f64
    }
}

/// The progress of a load.
#[derive(Clone, Copy, Debug)]
pub struct Live {
    /// The time since the first request.
    pub elapsed: Duration,
    /// Correct answers so far.
    pub answered: u64,
    /// Errors so far.
    pub failed: u64,
}

/// Why a load could not be started.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The connection failed.
    #[error("cannot connect to {0}: {why}", why = statehouse_link::describe_io(.1))]
    Connect(SocketAddr, #[source] io::Error),
    /// The server accepts the connection and does not answer.
    #[error("{0} does not answer within {1:?}")]
    Silent(SocketAddr, Duration),
    /// The server refused or ended the connection, or sent invalid bytes.
    #[error("{0}: {1}")]
    Broken(SocketAddr, #[source] Broken),
    /// The server refused a watch.
    #[error("{0} refuses a watch: {1}")]
    Watch(SocketAddr, String),
    /// The plan has more requests in flight than the server accepts.
    #[error(
        "the server accepts {max} requests in flight per connection, but {asked} were requested"
    )]
    InFlight {
        /// The number in the plan.
        asked: u16,
        /// The server's maximum.
        max: u16,
    },
    /// The system could not create a thread or an event queue.
    #[error("cannot start a thread of clients: {0}")]
    System(#[source] io::Error),
}

/// Puts a load on a server. `client` creates the client side of a connection with this role and
/// number. `watch` regularly receives the progress. If it breaks, no further request is due, and
/// the outcome is that of the requests until then. An open loop still sends those that were due
/// before. Fails if the load cannot be started; later errors are counted in the outcome.
pub fn put_on<P: Protocol>(
    plan: &Plan,
    client: impl Fn(Role, usize) -> P + Sync,
    mut watch: impl FnMut(Live) -> ControlFlow<()>,
) -> Result<Outcome, LoadError> {
    let threads = plan.threads.clamp(1, plan.connections.max(1));
    let (connected, all_connected) = mpsc::channel();
    let (client, done) = (&client, &AtomicBool::new(false));
    thread::scope(|scope| {
        let mut starts = Vec::new();
        let mut clients = Vec::new();
        for number in 0..threads {
            let (start, started) = mpsc::channel();
            starts.push(start);
            let connected = connected.clone();
            let thread = thread::Builder::new().name(format!("load-{number}"));
            let share = Share {
                plan,
                number,
                threads,
            };
            let work = move || share.run(client, &connected, &started);
            // If this fails, the threads that already run receive no start signal and end.
            clients.push(
                thread
                    .spawn_scoped(scope, work)
                    .map_err(LoadError::System)?,
            );
        }
        drop(connected);
        for _ in 0..threads {
            // A thread that ends without a message has panicked, which the join reports.
            if let Ok(Err(error)) = all_connected.recv() {
                return Err(error);
            }
        }
        let run = Arc::new(Run::new(plan, schedule(plan)));
        let wakes = match plan.pace {
            Pace::Closed => None,
            Pace::Open { .. } => Some((0..plan.connections).map(|_| Arc::default()).collect()),
        };
        for start in starts {
            let (run, wakes) = (run.clone(), wakes.clone());
            // If the thread has panicked, the join reports it.
            let _ = start.send(Start { run, wakes });
        }
        if let (Pace::Open { per_second }, Some(wakes)) = (plan.pace, wakes) {
            let schedule = run.schedule;
            scope.spawn(move || wake_connections(per_second, &schedule, &wakes, done));
        }
        // A thread that panicked cannot report the end of its connections, so this also checks the
        // threads.
        let ended = || run.is_over() || clients.iter().all(thread::ScopedJoinHandle::is_finished);
        let (measured, server, used) = measure(plan, &run, ended, &mut watch);
        let mut tally = Tally::default();
        for client in clients {
            match client.join() {
                Ok(one) => tally.add(&one),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        done.store(true, Ordering::Relaxed);
        Ok(Outcome {
            tally,
            measured,
            server,
            client: used,
        })
    })
}

fn schedule(plan: &Plan) -> Schedule {
    let begin = Instant::now() + limits::LOAD_START;
    match plan.job {
        Job::Mix { .. } => Schedule {
            begin,
            from: begin + plan.warm_up,
            until: begin + plan.warm_up + plan.duration,
        },
        // These jobs end with the last key.
        Job::Fill | Job::Clean => Schedule {
            begin,
            from: begin,
            until: begin + limits::LOAD_DURATION_MAX,
        },
    }
}

/// Waits for the end, and reads the usage of the processes at the begin and the end of the window.
fn measure(
    plan: &Plan,
    run: &Run,
    ended: impl Fn() -> bool,
    watch: &mut impl FnMut(Live) -> ControlFlow<()>,
) -> (Duration, Option<Usage>, Option<Usage>) {
    let schedule = &run.schedule;
    let look = || (plan.pid.and_then(Usage::of), Usage::of(std::process::id()));
    let wait = |until: Instant, watch: &mut dyn FnMut(Live) -> ControlFlow<()>| {
        while !ended() {
            let now = Instant::now();
            if now >= until.min(run.until()) {
                break;
            }
            thread::sleep((until - now).min(limits::LOAD_TICK));
            let live = Live {
                elapsed: now.saturating_duration_since(schedule.begin),
                answered: run.answered.load(Ordering::Relaxed),
                failed: run.failed.load(Ordering::Relaxed),
            };
            if watch(live).is_break() {
                run.stop();
            }
        }
    };
    wait(schedule.from, watch);
    let before = look();
    wait(schedule.until, watch);
    let end = Instant::now().min(run.until());
    let after = look();
    let used = |before: Option<Usage>, after: Option<Usage>| {
        let (before, after) = (before?, after?);
        Some(Usage {
            cpu: after.cpu.saturating_sub(before.cpu),
            resident: after.resident,
        })
    };
    (
        end.saturating_duration_since(schedule.from),
        used(before.0, after.0),
        used(before.1, after.1),
    )
}

/// Wakes each connection when one of its requests is due. This needs a thread of its own, because
/// the timers of a runtime are a thousand times coarser than a round trip.
fn wake_connections(
    per_second: f64,
    schedule: &Schedule,
    wakes: &[Arc<Notify>],
    done: &AtomicBool,
) {
    let turns = Turns::new(per_second, 0, 1);
    let mut turn = 0;
    while !done.load(Ordering::Relaxed) {
        let due = schedule.begin + turns.due(turn);
        if due >= schedule.until {
            return;
        }
        let now = Instant::now();
        match due > now {
            // At most a tick, to notice the end in time.
            true => thread::sleep((due - now).min(limits::LOAD_TICK)),
            false => {
                wakes[(turn % wakes.len() as u64) as usize].notify_one();
                turn += 1;
            }
        }
    }
}
