//! Who takes part: how each is started, and how it is asked.

use std::any::Any;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use statehouse_loadgen::{Job, Mqtt};

use crate::VALUE_BYTES;
use crate::common::Server;
use crate::etcd::{Etcd, Gateway};
use crate::mosquitto::Mosquitto;
use crate::nats::{Nats, NatsClient};
use crate::redis::{self, Redis, Resp};
use crate::servers::{Figures, Work, lean};

/// Connections and requests in flight on each while keys are filled in.
const FILLING: (usize, u16) = (16, 16);

/// Who takes part in a row.
#[derive(Clone, Copy)]
pub(crate) enum Who {
    Ours,
    /// Redis, by GET and SET or by functions with the meaning of the store's SET.
    Redis {
        functions: bool,
    },
    /// The same under redis-benchmark.
    RedisBenchmark {
        functions: bool,
    },
    /// With its defaults, or with the one setting that spares it Nagle's algorithm.
    Mosquitto {
        nodelay: bool,
    },
    JetStream,
    Etcd,
}

/// One server that takes part.
pub(crate) struct Contender {
    pub(crate) who: Who,
    pub(crate) name: String,
    pub(crate) address: SocketAddr,
    pub(crate) pid: u32,
    /// Whether it keeps what the row asks for, so that an aim means something.
    pub(crate) keeps: bool,
    /// What keeps it running.
    pub(crate) _process: Box<dyn Any>,
}

impl Contender {
    /// Why not, where it cannot be started.
    pub(crate) fn start(who: Who, durable: bool, place: &Path) -> Result<Self, String> {
        let started = |name: &str, address, pid, process| Self {
            who,
            name: name.to_owned(),
            address,
            pid,
            keeps: true,
            _process: process,
        };
        let missing = |what: &str, package: &str| {
            format!("{what} is missing (Debian's package {package}), or does not start")
        };
        Ok(match who {
            Who::Ours => {
                let memory: &[&str] = &["--durability", "memory"];
                let server = Server::start(place, if durable { &[] } else { memory });
                let address = server.address.parse().expect("an address");
                started("statehouse", address, server.id(), Box::new(server))
            }
            Who::Redis { functions } | Who::RedisBenchmark { functions } => {
                let own = matches!(who, Who::RedisBenchmark { .. });
                let name = match (functions, own) {
                    (false, false) => "Redis",
                    (true, false) => "Redis, FCALL of the same SET",
                    (false, true) => "Redis by redis-benchmark",
                    (true, true) => "Redis by redis-benchmark, FCALL of the same SET",
                };
                let redis = Redis::start(place, durable);
                let redis = redis.ok_or_else(|| missing(name, "redis-server"))?;
                started(name, redis.0.address, redis.0.id(), Box::new(redis))
            }
            Who::Mosquitto { nodelay } => {
                let name = match nodelay {
                    false => "Mosquitto + rumqttc responder",
                    true => "the same with set_tcp_nodelay",
                };
                let it =
                    Mosquitto::start(place, nodelay).ok_or_else(|| missing(name, "mosquitto"))?;
                started(name, it.broker.address, it.broker.id(), Box::new(it))
            }
            Who::JetStream => {
                let it = Nats::start(place);
                let it = it.ok_or_else(|| missing("JetStream KV", "nats-server"))?;
                let (keeps, name) = match it.syncs {
                    true => (true, "JetStream KV, sync always"),
                    false if !durable => (true, "JetStream KV"),
                    false => (
                        false,
                        "JetStream KV, NOT durable: this version cannot sync always",
                    ),
                };
                let (address, pid) = (it.process.address, it.process.id());
                Self {
                    keeps,
                    ..started(name, address, pid, Box::new(it))
                }
            }
            Who::Etcd => {
                let it = Etcd::start(place).ok_or_else(|| missing("etcd", "etcd-server"))?;
                started(
                    "etcd by its JSON gateway",
                    it.0.address,
                    it.0.id(),
                    Box::new(it),
                )
            }
        })
    }

    /// Does a job; of the two that are measured by time, one round.
    pub(crate) fn work(&self, work: &Work, job: Job) -> Result<Figures, String> {
        let nonce = u64::from(self.pid) << 32 | u64::from(work.connections as u32);
        match self.who {
            Who::Ours => lean(self.address, self.pid, work, job, |it, role, n| {
                Mqtt::new(it, nonce, role, n)
            }),
            Who::Mosquitto { .. } => {
                let done = lean(self.address, self.pid, work, job, |it, role, n| {
                    Mqtt::new(it, nonce, role, n)
                });
                // The broker is only half of it.
                done.map(|done| Figures {
                    cpu_us: None,
                    ..done
                })
            }
            Who::Redis { functions } => lean(self.address, self.pid, work, job, |it, _, _| {
                Resp::new(it, functions)
            }),
            Who::RedisBenchmark { functions } => {
                redis::own_benchmark(self.address, self.pid, work, functions)
            }
            Who::JetStream => lean(self.address, self.pid, work, job, |it, _, n| {
                NatsClient::new(it, n)
            }),
            Who::Etcd => lean(self.address, self.pid, work, job, |it, _, _| {
                Gateway::new(it)
            }),
        }
    }

    /// Sets all keys.
    pub(crate) fn fill(&self, keys: u64) -> Result<(), String> {
        let (connections, in_flight) = match self.who {
            Who::Etcd => (FILLING.0, 1),
            // It sets its own keys itself.
            Who::RedisBenchmark { .. } => return Ok(()),
            _ => FILLING,
        };
        let work = Work {
            connections,
            in_flight,
            reads: 0,
            keys,
            value_bytes: VALUE_BYTES,
            round: Duration::from_secs(1),
        };
        self.work(&work, Job::Fill).map(|_| ())
    }
}
