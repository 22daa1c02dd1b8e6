//! Compares durable writes with Redis and `appendfsync always`, in one run on one disk: writes per
//! second at 1, 16, 50 and 64 clients, the time to reopen a million keys, their memory, and the
//! bytes that reach the device.
//!
//! ```text
//! cargo bench -p statehouse --bench durable                 # all but the device, a few minutes
//! cargo bench -p statehouse --bench durable -- --rounds 5   # more rounds, tighter medians
//! cargo bench -p statehouse --bench durable -- --device     # as root: on a loop device
//! cargo bench -p statehouse --bench durable -- --clients 64 # only this number, also with --device
//! ```
//!
//! Redis is Debian's package `redis-server`. Without it, its columns are empty. Both stores get the
//! same clients: one thread each, one write at a time. Rounds alternate, so that a noisy neighbour
//! affects both.

use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use common::{Client, Server, resp, run_clients};
use redis::Redis;
use servers::{Figures, median};
use statehouse_loadgen::Usage;

#[path = "../common/mod.rs"]
mod common;
mod device;
mod redis;
#[path = "../rivals/servers.rs"]
#[allow(dead_code, reason = "the clients of this benchmark are its own")]
mod servers;

const ROUND: Duration = Duration::from_secs(3);
const CLIENTS: [usize; 4] = [1, 16, 50, 64];
const KEYS: usize = 1_000_000;
const IN_FLIGHT: usize = 500;

fn main() {
    let mut rounds = 3;
    let mut clients = CLIENTS.to_vec();
    let mut device = false;
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--rounds" => {
                let count = arguments.next().and_then(|count| count.parse().ok());
                rounds = count.expect("--rounds takes a number");
            }
            "--clients" => {
                let list = arguments.next().unwrap_or_default();
                let numbers = list.split(',').map(|it| it.parse().ok()).collect();
                clients =
                    Option::expect(numbers, "--clients takes numbers with commas between them");
            }
            "--device" => device = true,
            // Cargo adds this argument.
            "--bench" => {}
            other => {
                panic!("unknown argument {other}; there are --rounds N, --clients N,N and --device")
            }
        }
    }
    if device {
        return device::measure(&clients);
    }
    // On a real disk, because the default temporary directory is in memory on some systems.
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    writes_per_second(directory.path(), rounds, &clients);
    million_keys(directory.path());
}

fn writes_per_second(directory: &Path, rounds: usize, clients: &[usize]) {
    println!(
        "durable SET, values of 64 bytes, a key for each client, one write at a time; medians of {rounds} rounds of {ROUND:?}"
    );
    println!("| clients | statehouse/s | p50 us | p99 us | redis/s | p50 us | p99 us | ratio |");
    println!("|---|---|---|---|---|---|---|---|");
    for &clients in clients {
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for round in 0..rounds {
            let place = directory.join(format!("{clients}-{round}"));
            std::fs::create_dir(&place).expect("a new directory");
            let server = Server::start(&place, &[]);
            let client = |id: usize| {
                let mut client = Client::connect(&server.address, &format!("client{id}"));
                let set = set(id);
                move || client.round_trip(&set)
            };
            ours.push(round_of(clients, client, || thread::sleep(ROUND)));
            drop(server);
            if let Some(redis) = Redis::start(&place) {
                let client = |id: usize| {
                    let (mut client, set) = (redis.connect(), set(id));
                    move || client.ask(&set, 1)
                };
                theirs.push(round_of(clients, client, || thread::sleep(ROUND)));
            }
            std::fs::remove_dir_all(&place).expect("the directory of the stores");
        }
        let by = |it: &Figures| it.per_second;
        let ours = median(ours, by).expect("at least one round");
        let shown = |it: Figures| format!("{:.0} | {} | {}", it.per_second, it.p50_us, it.p99_us);
        let theirs = median(theirs, by).map_or("| | |".to_owned(), |theirs| {
            let ratio = ours.per_second / theirs.per_second;
            format!("{} | {ratio:.2}", shown(theirs))
        });
        println!("| {clients} | {} | {theirs} |", shown(ours));
    }
}

/// Runs this many clients until `wait` returns.
fn round_of<W: FnMut() + Send>(
    clients: usize,
    client: impl Fn(usize) -> W,
    wait: impl FnOnce(),
) -> Figures {
    let (micros, took) = run_clients(clients, client, Duration::ZERO, wait);
    Figures {
        per_second: micros.len() as f64 / took.as_secs_f64(),
        p50_us: micros[micros.len() / 2],
        p99_us: micros[micros.len() * 99 / 100],
        cpu_us: None,
    }
}

/// The request of a client.
fn set(id: usize) -> Vec<u8> {
    resp(&[b"SET", format!("bench/{id}").as_bytes(), &[b'v'; 64]])
}

fn million_keys(directory: &Path) {
    println!("\n{KEYS} keys of 16 bytes with values of 64");
    println!("| | open after kill -9, ms | resident, MB | on disk, MB |");
    println!("|---|---|---|---|");
    let place = directory.join("ours");
    std::fs::create_dir(&place).expect("a new directory");
    let server = Server::start(&place, &[]);
    let mut client = Client::connect(&server.address, "filler");
    for from in (0..KEYS).step_by(IN_FLIGHT) {
        let sets: Vec<Vec<u8>> = (from..from + IN_FLIGHT)
            .map(|n| resp(&[b"SET", format!("bench/{n:010}").as_bytes(), &[b'v'; 64]]))
            .collect();
        client.round_trips(sets.iter().map(Vec::as_slice));
    }
    let filled_mb = resident_mb(server.id());
    drop(server);
    let start = Instant::now();
    let server = Server::start(&place, &[]);
    let took = start.elapsed();
    println!(
        "| statehouse | {} | {filled_mb} when filled, {} when opened again | {} |",
        took.as_millis(),
        resident_mb(server.id()),
        disk_mb(&place)
    );
    drop(server);
    let place = directory.join("theirs");
    std::fs::create_dir(&place).expect("a new directory");
    let Some(redis) = Redis::start(&place) else {
        return;
    };
    let mut client = redis.connect();
    for from in (0..KEYS).step_by(IN_FLIGHT) {
        let mut sets = Vec::new();
        for n in from..from + IN_FLIGHT {
            let key = format!("bench/{n:010}");
            let version = format!("{:015}:00000:StateStore", 1_700_000_000_000 + n);
            // The same value and version, in a hash.
            let fields = [key.as_bytes(), b"v", &[b'v'; 64], b"t", version.as_bytes()];
            let [key, v, value, t, version] = fields;
            sets.extend(resp(&[b"HSET", key, v, value, t, version]));
        }
        client.ask(&sets, IN_FLIGHT);
    }
    let filled_mb = resident_mb(redis.0.id());
    drop(redis);
    let start = Instant::now();
    let redis = Redis::start(&place).expect("it started before");
    let took = start.elapsed();
    println!(
        "| redis, a hash for each key | {} | {filled_mb} when filled, {} when opened again | {} |",
        took.as_millis(),
        resident_mb(redis.0.id()),
        disk_mb(&place)
    );
}

fn disk_mb(directory: &Path) -> String {
    let output = Command::new("du").args(["-sm"]).arg(directory).output();
    let output = output.expect("du runs");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.split_whitespace().next().unwrap_or("?").to_owned()
}

fn resident_mb(id: u32) -> u64 {
    Usage::of(id).expect("it runs").resident >> 20
}
