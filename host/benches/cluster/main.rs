//! Measures a cluster of three hosts and three etcd servers on loopback, beside a single host with
//! the same durability and beside the log without a store, in one run.
//!
//! ```text
//! cargo bench -p statehouse --bench cluster                             # all, some five minutes
//! cargo bench -p statehouse --bench cluster -- --rounds 3 --seconds 1   # faster, less precise
//! cargo bench -p statehouse --bench cluster -- --only SET               # tables with this word
//! cargo bench -p statehouse --bench cluster -- --keys 1000000           # for the host that joins
//! ```
//!
//! etcd is Debian's package etcd-server. All servers run for the whole run, and rounds alternate
//! between them, so that a noisy neighbour affects all. Figures are medians. A ratio is the
//! throughput in relation to the single host.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use bare::Bare;
use common::Server;
use hosts::Cluster;
use servers::{Figures, Work, median, run_job};
use statehouse_loadgen::{Job, Mqtt};

mod bare;
#[path = "../common/mod.rs"]
#[allow(dead_code, reason = "the client of `gaps` expects no answer")]
mod common;
mod etcd;
mod gaps;
mod hosts;
#[path = "../rivals/servers.rs"]
#[allow(dead_code, reason = "etcd is no contender here")]
mod servers;

/// The number of keys while requests are measured.
const KEYS: u64 = 10_000;

/// How often each change of the leader is measured.
const CHANGES: usize = 8;

/// Connections, requests in flight on each, and the percentage of reads.
const WORKS: [(&str, usize, u16, u8); 5] = [
    ("SET 64 B, 50 × 1", 50, 1, 0),
    ("SET 64 B, 50 × 16", 50, 16, 0),
    ("SET 64 B, 1 × 1", 1, 1, 0),
    ("GET 64 B, 50 × 1", 50, 1, 100),
    ("GET 64 B, 50 × 16", 50, 16, 100),
];

struct Options {
    rounds: usize,
    round: Duration,
    only: Option<String>,
    changes: usize,
    /// Number of keys when a host joins.
    keys: u64,
}

impl Options {
    fn read() -> Self {
        let mut options = Self {
            rounds: 5,
            round: Duration::from_secs(2),
            only: None,
            changes: CHANGES,
            keys: 100_000,
        };
        let mut arguments = std::env::args().skip(1);
        while let Some(argument) = arguments.next() {
            let mut value = || arguments.next().expect("a value after the option");
            match argument.as_str() {
                "--rounds" => options.rounds = value().parse().expect("a number of rounds"),
                "--seconds" => {
                    options.round = Duration::from_secs_f64(value().parse().expect("seconds"));
                }
                "--only" => options.only = Some(value()),
                "--changes" => options.changes = value().parse().expect("a number of changes"),
                "--keys" => options.keys = value().parse().expect("a number of keys"),
                // Cargo adds this argument.
                "--bench" => {}
                other => panic!(
                    "unknown argument {other}; there are --rounds N, --seconds N, --only WORD, --changes N and --keys N"
                ),
            }
        }
        assert!(options.rounds > 0, "--rounds is at least 1");
        assert!(options.changes > 0, "--changes is at least 1");
        options
    }

    fn selects(&self, name: &str) -> bool {
        self.only.as_ref().is_none_or(|word| name.contains(word))
    }
}

fn main() {
    let options = Options::read();
    // On a real disk, because the default temporary directory is in memory on some systems.
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    println!(
        "medians of {} rounds of {:?}; a ratio compares the throughput with the single host",
        options.rounds, options.round
    );
    let mut cluster = Cluster::start(directory.path());
    let works: Vec<_> = (WORKS.iter())
        .filter(|(name, ..)| options.selects(name))
        .collect();
    if !works.is_empty() {
        let bench = Bench::start(&cluster, directory.path());
        for (name, connections, in_flight, reads) in works {
            let work = Work {
                connections: *connections,
                in_flight: *in_flight,
                reads: *reads,
                keys: KEYS,
                round: options.round,
            };
            bench.measure(name, &work, options.rounds);
        }
    }
    if options.selects("changes of the leader") {
        gaps::measure(&mut cluster, options.changes);
    }
    if options.selects("join") {
        join(&mut cluster, options.keys);
    }
}

/// A contender of the tables: the address for clients, and the process whose CPU time counts.
struct Contender {
    name: &'static str,
    address: SocketAddr,
    pid: u32,
}

struct Bench {
    contenders: Vec<Contender>,
    bare: Bare,
    /// Drop ends it.
    _single: Server,
}

impl Bench {
    fn start(cluster: &Cluster, place: &Path) -> Self {
        let place = place.join("single");
        std::fs::create_dir(&place).expect("a new directory");
        let single = Server::start(&place, &["--durability", "always"]);
        let address = single.address.parse().expect("an address");
        let leader = &cluster.hosts[cluster.leader()];
        let follower = &cluster.hosts[cluster.follower()];
        let (at_leader, leader) = (leader.address, leader.id());
        let (at_follower, follower) = (follower.address, follower.id());
        let contenders = [
            ("single host, --durability always", address, single.id()),
            ("at the leader", at_leader, leader),
            ("at the leader: CPU of a follower", at_leader, follower),
            (
                "through a follower: CPU of the follower",
                at_follower,
                follower,
            ),
            ("through a follower: CPU of the leader", at_follower, leader),
        ];
        let contenders = contenders.map(|(name, address, pid)| Contender { name, address, pid });
        let bench = Self {
            contenders: contenders.into(),
            bare: Bare::start(cluster.urls()),
            _single: single,
        };
        // The contenders after the leader share its keys.
        for it in &bench.contenders[..2] {
            fill(it.address, it.pid, KEYS);
        }
        bench
    }

    fn measure(&self, name: &str, work: &Work, rounds: usize) {
        println!("\n{name}\n");
        println!("| | requests/s | p50 us | p99 us | CPU us of the host | ratio |");
        println!("|---|---|---|---|---|---|");
        let mut bare = Vec::new();
        let mut figures: Vec<_> = self.contenders.iter().map(|_| Vec::new()).collect();
        for _ in 0..rounds {
            for (it, figures) in self.contenders.iter().zip(&mut figures) {
                let done = run(it.address, it.pid, work, Job::Mix { reads: work.reads });
                figures.push(done.unwrap_or_else(|why| panic!("{}: {why}", it.name)));
            }
            if work.reads == 0 {
                bare.push(self.bare.round(work));
            }
        }
        let forwarding = forwarding_ratio(&figures);
        let by = |it: &Figures| it.per_second;
        let mut single = None;
        for (it, figures) in self.contenders.iter().zip(figures) {
            let figures = median(figures, by).expect("a round");
            let single = single.get_or_insert(figures).per_second;
            print_row(it.name, figures, single);
        }
        if let (Some(bare), Some(single)) = (median(bare, by), single) {
            print_row("the log without a store, groups", bare, single.per_second);
        }
        println!("\nCPU of a request through a follower, to one at the leader: {forwarding:.2}");
    }
}

/// The CPU time of both hosts for a request through a follower, to that of both for a request at
/// the leader: the median of the rounds. A follower applies the writes of both.
fn forwarding_ratio(figures: &[Vec<Figures>]) -> f64 {
    let [_, of_leader, applying, of_follower, of_leader_behind] = figures else {
        panic!("a contender has no figures");
    };
    let cpu = |it: &Figures| it.cpu_us.expect("CPU time of a host");
    let mut ratios: Vec<f64> = (0..of_leader.len())
        .map(|round| {
            let forwarded = cpu(&of_follower[round]) + cpu(&of_leader_behind[round]);
            forwarded / (cpu(&of_leader[round]) + cpu(&applying[round]))
        })
        .collect();
    ratios.sort_by(f64::total_cmp);
    ratios[ratios.len() / 2]
}

fn print_row(name: &str, it: Figures, single_per_second: f64) {
    let ratio = it.per_second / single_per_second;
    println!("| {name} | {it} | {ratio:.2} |");
}

fn run(address: SocketAddr, pid: u32, work: &Work, job: Job) -> Result<Figures, String> {
    // Client ids must differ between the processes that a run starts.
    let nonce = u64::from(pid) << 32 | u64::from(address.port());
    run_job(address, pid, work, job, |it, role, n| {
        Mqtt::new(it, nonce, role, n)
    })
}

/// Sets all keys.
fn fill(address: SocketAddr, pid: u32, keys: u64) {
    let work = Work {
        connections: 16,
        in_flight: 16,
        reads: 0,
        keys,
        round: Duration::from_secs(1),
    };
    run(address, pid, &work, Job::Fill).unwrap_or_else(|why| panic!("the keys are not set: {why}"));
}

/// A host with an empty directory joins.
fn join(cluster: &mut Cluster, keys: u64) {
    let leader = &cluster.hosts[cluster.leader()];
    fill(leader.address, leader.id(), keys);
    println!("\njoin of a host with an empty directory\n");
    println!("| keys | until it is ready, ms |");
    println!("|---|---|");
    println!("| {keys} | {} |", cluster.join().as_millis());
}
