//! Load for a server, and what comes of it.
//!
//! What enters: a [`Plan`] and a [`Protocol`]. What leaves: an [`Outcome`]: counts, latencies, errors, what the processes
//! used. It checks every answer. It never knows which server it measures, so that rivals get the same clients.
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
mod stream;
mod tally;
mod work;

use std::cell::RefCell;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use tokio::sync::Notify;

pub use mqtt::Mqtt;
pub use pace::Pace;
pub use process::{Usage, listener, socket_listener};
pub use protocol::{Broken, Heard, Protocol, Role};
pub use stream::Encryption;
pub use tally::{Errors, Latencies, Tally};
pub use work::{Catalogue, Job, PREFIX, Reply, Request, Verb, write_digits};

use conversation::Conversation;
use drive::Line;
use pace::{Schedule, Turns};
use run::Run;
use work::Source;

/// What is to be done.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Where the server listens.
    pub address: SocketAddr,
    /// How connections are encrypted, where they are.
    pub encryption: Option<Encryption>,
    /// What each connection does.
    pub job: Job,
    /// When.
    pub pace: Pace,
    /// Connections that ask.
    pub connections: usize,
    /// Requests of each of them at once, at most. `None`: as many as the server takes.
    pub in_flight: Option<u16>,
    /// Connections that watch a key each, one after the other.
    pub watchers: usize,
    /// Keys.
    pub keys: u64,
    /// Names and values of them.
    pub catalogue: Arc<Catalogue>,
    /// Of the order of requests.
    pub seed: u64,
    /// How long it runs before it is measured.
    pub warm_up: Duration,
    /// How long it is measured.
    pub duration: Duration,
    /// How long a connection or an answer may take.
    pub timeout: Duration,
    /// Threads of the clients.
    pub threads: usize,
    /// The process of the server, where it is on this machine.
    pub pid: Option<u32>,
}

/// What came of it.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Counts, latencies, errors.
    pub tally: Tally,
    /// How long was measured. Less than planned where all connections were lost.
    pub measured: Duration,
    /// What the server's process used meanwhile, and its memory at the end.
    pub server: Option<Usage>,
    /// The same of this process.
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

/// How far it is.
#[derive(Clone, Copy, Debug)]
pub struct Live {
    /// Since the first request.
    pub elapsed: Duration,
    /// Right answers so far.
    pub answered: u64,
    /// Errors so far.
    pub failed: u64,
}

/// Why a load could not be put on.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// No connection.
    #[error("cannot connect to {0}: {why}", why = statehouse_link::describe_io(.1))]
    Connect(SocketAddr, #[source] io::Error),
    /// A connection, and no word.
    #[error("{0} does not answer within {1:?}")]
    Silent(SocketAddr, Duration),
    /// A connection, and the wrong words.
    #[error("{0}: {1}")]
    Broken(SocketAddr, #[source] Broken),
    /// A watch was refused.
    #[error("{0} refuses a watch: {1}")]
    Watch(SocketAddr, String),
    /// More at once than the server allows.
    #[error("the server takes {max} requests of a connection at once, and {asked} are asked for")]
    InFlight {
        /// By the plan.
        asked: u16,
        /// By the server.
        max: u16,
    },
    /// The system has no thread or no event queue.
    #[error("cannot start a thread of clients: {0}")]
    System(#[source] io::Error),
}

/// What a thread of clients begins with, once all are connected.
struct Start {
    run: Arc<Run>,
    /// Of each connection that asks.
    wakes: Option<Vec<Arc<Notify>>>,
}

/// Puts a load on a server. `client` makes one side of a connection, of this role and number; `watch` is told every now and
/// then how far it is.
///
/// # Errors
/// Where the load cannot be put on. What goes wrong later is counted.
pub fn put_on<P: Protocol>(
    plan: &Plan,
    client: impl Fn(Role, usize) -> P + Sync,
    mut watch: impl FnMut(Live),
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
            let work = move || clients_of(plan, number, threads, client, &connected, &started);
            // Where it fails, those that run already find nobody who starts them, and end.
            clients.push(
                thread
                    .spawn_scoped(scope, work)
                    .map_err(LoadError::System)?,
            );
        }
        drop(connected);
        for _ in 0..threads {
            // A thread that ends without a word has panicked, and joining it says so.
            if let Ok(Err(error)) = all_connected.recv() {
                return Err(error);
            }
        }
        let schedule = schedule(plan);
        let watched = usize::try_from(plan.keys)
            .unwrap_or(usize::MAX)
            .min(plan.watchers);
        let catalogue = plan.catalogue.clone();
        let run = Run::new(schedule, catalogue, plan.timeout, watched, plan.job);
        let run = Arc::new(run);
        for _ in 0..plan.connections {
            run.asks();
        }
        let wakes = match plan.pace {
            Pace::Closed => None,
            Pace::Open { .. } => Some((0..plan.connections).map(|_| Arc::default()).collect()),
        };
        for start in starts {
            let (run, wakes) = (run.clone(), wakes.clone());
            // A thread that is gone says so when it is joined.
            let _ = start.send(Start { run, wakes });
        }
        if let (Pace::Open { per_second }, Some(wakes)) = (plan.pace, wakes) {
            scope.spawn(move || pace_of(per_second, &schedule, &wakes, done));
        }
        // Also where a thread panicked and cannot say that its connections have ended.
        let ended = || run.is_over() || clients.iter().all(thread::ScopedJoinHandle::is_finished);
        let (measured, server, used) = attend(plan, &run, ended, &mut watch);
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
        // These end with the last key.
        Job::Fill | Job::Clean => Schedule {
            begin,
            from: begin,
            until: begin + limits::LOAD_DURATION_MAX,
        },
    }
}

/// Waits for the end, and looks at the processes where the window begins and ends.
fn attend(
    plan: &Plan,
    run: &Run,
    ended: impl Fn() -> bool,
    watch: &mut impl FnMut(Live),
) -> (Duration, Option<Usage>, Option<Usage>) {
    let schedule = &run.schedule;
    let look = || (plan.pid.and_then(Usage::of), Usage::of(std::process::id()));
    let wait = |until: Instant, watch: &mut dyn FnMut(Live)| {
        while !ended() {
            let now = Instant::now();
            if now >= until {
                break;
            }
            thread::sleep((until - now).min(limits::LOAD_TICK));
            watch(Live {
                elapsed: now.saturating_duration_since(schedule.begin),
                answered: run.answered.load(Ordering::Relaxed),
                failed: run.failed.load(Ordering::Relaxed),
            });
        }
    };
    wait(schedule.from, watch);
    let before = look();
    wait(schedule.until, watch);
    let end = Instant::now().min(schedule.until);
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

/// Wakes each connection when a request of its is due. A thread of its own, since timers of a runtime are a thousand times
/// coarser than a round trip.
fn pace_of(per_second: f64, schedule: &Schedule, wakes: &[Arc<Notify>], done: &AtomicBool) {
    let turns = Turns::new(per_second, 0, 1);
    let mut turn = 0;
    while !done.load(Ordering::Relaxed) {
        let due = schedule.begin + turns.due(turn);
        if due >= schedule.until {
            return;
        }
        let now = Instant::now();
        match due > now {
            // Not longer than a tick, to see the end.
            true => thread::sleep((due - now).min(limits::LOAD_TICK)),
            false => {
                wakes[(turn % wakes.len() as u64) as usize].notify_one();
                turn += 1;
            }
        }
    }
}

/// One thread: connects its share of the clients, and lets them work until all is over.
fn clients_of<P: Protocol>(
    plan: &Plan,
    number: usize,
    threads: usize,
    client: &(impl Fn(Role, usize) -> P + Sync),
    connected: &mpsc::Sender<Result<(), LoadError>>,
    started: &mpsc::Receiver<Start>,
) -> Tally {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => {
            let _ = connected.send(Err(LoadError::System(error)));
            return Tally::default();
        }
    };
    let lines = runtime.block_on(async {
        let (mut asking, mut watching) = (Vec::new(), Vec::new());
        let encryption = plan.encryption.as_ref();
        for number in (number..plan.connections).step_by(threads) {
            let client = client(Role::Asks, number);
            let line = Line::open(plan.address, encryption, client, plan.timeout).await?;
            let max = line.in_flight_max();
            let in_flight = match plan.in_flight {
                Some(asked) if asked > max => return Err(LoadError::InFlight { asked, max }),
                in_flight => in_flight.unwrap_or(max),
            };
            asking.push((number, in_flight, line));
        }
        for number in (number..plan.watchers).step_by(threads) {
            let client = client(Role::Watches, number);
            let mut line = Line::open(plan.address, encryption, client, plan.timeout).await?;
            let key = number as u64 % plan.keys;
            line.watch(plan.address, key, plan.timeout).await?;
            watching.push((key, line));
        }
        Ok((asking, watching))
    });
    let (asking, watching) = match lines {
        Ok(lines) => lines,
        Err(error) => {
            let _ = connected.send(Err(error));
            return Tally::default();
        }
    };
    let _ = connected.send(Ok(()));
    let Ok(Start { run, wakes }) = started.recv() else {
        // Another thread could not connect.
        return Tally::default();
    };
    let tally = Rc::new(RefCell::new(Tally::default()));
    tally.borrow_mut().sent += watching.len() as u64;
    tally.borrow_mut().replied += watching.len() as u64;
    let local = tokio::task::LocalSet::new();
    for (number, in_flight, line) in asking {
        let source = Source::new(plan.job, plan.keys, plan.seed, number, plan.connections);
        let turns = match plan.pace {
            Pace::Closed => None,
            Pace::Open { per_second } => Some(Turns::new(per_second, number, plan.connections)),
        };
        let (stream, protocol, input) = line.split();
        let (run_of, tally_of) = (run.clone(), tally.clone());
        let conversation = Conversation::new(protocol, run_of, tally_of, source, turns, in_flight);
        let wake = wakes.as_ref().map(|wakes| wakes[number].clone());
        local.spawn_local(drive::converse(
            stream,
            conversation,
            input,
            run.clone(),
            wake,
        ));
    }
    for (key, line) in watching {
        local.spawn_local(drive::hear(line, key, run.clone(), tally.clone()));
    }
    runtime.block_on(local);
    tally.take()
}
