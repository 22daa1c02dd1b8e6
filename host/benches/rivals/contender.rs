//! Starts each contender and runs a job on it.

use std::any::Any;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use statehouse_loadgen::{Job, Mqtt};

use crate::common::Server;
use crate::etcd::{Etcd, Gateway};
use crate::mosquitto::Mosquitto;
use crate::nats::{Nats, NatsClient};
use crate::redis::{self, Redis, Resp};
use crate::servers::{Figures, Work, run_job};

/// Connections, and requests in flight on each, while the benchmark sets all keys.
const FILLING: (usize, u16) = (16, 16);

/// The kind of a contender.
#[derive(Clone, Copy)]
pub(crate) enum Kind {
    Statehouse,
    Redis(Commands),
    /// The same with redis-benchmark.
    RedisBenchmark(Commands),
    /// With its defaults, or with the setting that turns Nagle's algorithm off.
    Mosquitto {
        nodelay: bool,
    },
    JetStream,
    Etcd,
}

/// What Redis is asked to do.
#[derive(Clone, Copy)]
pub(crate) enum Commands {
    /// GET and SET.
    Plain,
    /// Functions that keep a version and check a fencing token.
    Lean,
    /// Functions with the semantics of the store's SET.
    Full,
}

/// A running server.
pub(crate) struct Contender {
    pub(crate) kind: Kind,
    pub(crate) name: String,
    pub(crate) address: SocketAddr,
    pub(crate) pid: u32,
    /// Whether it has the durability of the row. Otherwise its ratio is not judged by the aim.
    pub(crate) comparable: bool,
    /// Drop ends the server.
    pub(crate) _process: Box<dyn Any>,
}

impl Contender {
    /// Starts a server. Returns the reason if it cannot be started.
    pub(crate) fn start(kind: Kind, durable: bool, place: &Path) -> Result<Self, String> {
        let started = |name: &str, address, pid, process| Self {
            kind,
            name: name.to_owned(),
            address,
            pid,
            comparable: true,
            _process: process,
        };
        let missing = |what: &str, package: &str| {
            format!("{what} is missing (Debian's package {package}), or does not start")
        };
        Ok(match kind {
            Kind::Statehouse => {
                let memory: &[&str] = &["--durability", "memory"];
                let server = Server::start(place, if durable { &[] } else { memory });
                let address = server.address.parse().expect("an address");
                started("statehouse", address, server.id(), Box::new(server))
            }
            Kind::Redis(commands) | Kind::RedisBenchmark(commands) => {
                let client = match kind {
                    Kind::RedisBenchmark(_) => " by redis-benchmark",
                    _ => "",
                };
                let calls = match commands {
                    Commands::Plain => "",
                    Commands::Lean => ", FCALL of a lean SET",
                    Commands::Full => ", FCALL of the same SET",
                };
                let name = format!("Redis{client}{calls}");
                let redis = Redis::start(place, durable);
                let redis = redis.ok_or_else(|| missing(&name, "redis-server"))?;
                started(&name, redis.0.address, redis.0.id(), Box::new(redis))
            }
            Kind::Mosquitto { nodelay } => {
                let name = match nodelay {
                    false => "Mosquitto + rumqttc responder",
                    true => "the same with set_tcp_nodelay",
                };
                let it = Mosquitto::start(place, nodelay);
                let it = it.ok_or_else(|| missing(name, "mosquitto"))?;
                started(name, it.broker.address, it.broker.id(), Box::new(it))
            }
            Kind::JetStream => {
                let it = Nats::start(place);
                let it = it.ok_or_else(|| missing("JetStream KV", "nats-server"))?;
                let name = match it.syncs {
                    true => "JetStream KV, sync always",
                    false if !durable => "JetStream KV",
                    false => "JetStream KV, NOT durable: this version cannot sync always",
                };
                let (address, pid) = (it.process.address, it.process.id());
                Self {
                    comparable: it.syncs || !durable,
                    ..started(name, address, pid, Box::new(it))
                }
            }
            Kind::Etcd => {
                let it = Etcd::start(place).ok_or_else(|| missing("etcd", "etcd-server"))?;
                let name = "etcd by its JSON gateway";
                started(name, it.0.address, it.0.id(), Box::new(it))
            }
        })
    }

    /// Runs a job. A job that is measured by time runs for one round.
    pub(crate) fn work(&self, work: &Work, job: Job) -> Result<Figures, String> {
        let nonce = u64::from(self.pid) << 32 | u64::from(work.connections as u32);
        match self.kind {
            Kind::Statehouse | Kind::Mosquitto { .. } => {
                let mut done = run_job(self.address, self.pid, work, job, |it, role, n| {
                    Mqtt::new(it, nonce, role, n)
                })?;
                if matches!(self.kind, Kind::Mosquitto { .. }) {
                    // The broker's CPU time does not include the responder.
                    done.cpu_us = None;
                }
                Ok(done)
            }
            Kind::Redis(commands) => run_job(self.address, self.pid, work, job, |it, _, _| {
                Resp::new(it, commands)
            }),
            Kind::RedisBenchmark(commands) => {
                redis::own_benchmark(self.address, self.pid, work, commands)
            }
            Kind::JetStream => run_job(self.address, self.pid, work, job, |it, _, n| {
                NatsClient::new(it, n)
            }),
            Kind::Etcd => run_job(self.address, self.pid, work, job, |it, _, _| {
                Gateway::new(it)
            }),
        }
    }

    /// Sets all keys.
    pub(crate) fn fill(&self, keys: u64) -> Result<(), String> {
        let (connections, in_flight) = match self.kind {
            Kind::Etcd => (FILLING.0, 1),
            // `own_benchmark` sets its keys.
            Kind::RedisBenchmark { .. } => return Ok(()),
            _ => FILLING,
        };
        let work = Work {
            connections,
            in_flight,
            reads: 0,
            keys,
            round: Duration::from_secs(1),
        };
        self.work(&work, Job::Fill).map(|_| ())
    }
}
