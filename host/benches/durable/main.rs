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
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use common::{Client, Server, resp};
use redis::Redis;
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

/// One store's figures of one round.
#[derive(Clone, Copy)]
struct Figures {
    per_second: f64,
    p50_us: u128,
    p99_us: u128,
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
            ours.push(round_of(
                clients,
                |id| {
                    let mut client = Client::connect(&server.address, &format!("client{id}"));
                    let set = resp(&[b"SET", format!("bench/{id}").as_bytes(), &[b'v'; 64]]);
                    move || client.round_trip(&set)
                },
                || thread::sleep(ROUND),
            ));
            drop(server);
            if let Some(redis) = Redis::start(&place) {
                theirs.push(round_of(
                    clients,
                    |id| {
                        let mut client = redis.connect();
                        let set = resp(&[b"SET", format!("bench/{id}").as_bytes(), &[b'v'; 64]]);
                        move || client.ask(&set, 1)
                    },
                    || thread::sleep(ROUND),
                ));
            }
            std::fs::remove_dir_all(&place).expect("the directory of the stores");
        }
        let a = median(ours);
        print!(
            "| {clients} | {:.0} | {} | {} ",
            a.per_second, a.p50_us, a.p99_us
        );
        if theirs.is_empty() {
            println!("| | | | |");
        } else {
            let b = median(theirs);
            let ratio = a.per_second / b.per_second;
            println!(
                "| {:.0} | {} | {} | {ratio:.2} |",
                b.per_second, b.p50_us, b.p99_us
            );
        }
    }
}

/// Runs this many clients until `wait` returns.
fn round_of<W: FnMut() + Send>(
    clients: usize,
    client: impl Fn(usize) -> W,
    wait: impl FnOnce(),
) -> Figures {
    let over = AtomicBool::new(false);
    let workers: Vec<W> = (0..clients).map(client).collect();
    let start = Instant::now();
    let mut micros: Vec<u128> = thread::scope(|scope| {
        let threads: Vec<_> = workers
            .into_iter()
            .map(|mut work| {
                let over = &over;
                scope.spawn(move || {
                    let mut micros = Vec::new();
                    while !over.load(Ordering::Relaxed) {
                        let begun = Instant::now();
                        work();
                        micros.push(begun.elapsed().as_micros());
                    }
                    micros
                })
            })
            .collect();
        wait();
        over.store(true, Ordering::Relaxed);
        let micros = threads.into_iter();
        micros.flat_map(|it| it.join().expect("a client")).collect()
    });
    let per_second = micros.len() as f64 / start.elapsed().as_secs_f64();
    micros.sort_unstable();
    Figures {
        per_second,
        p50_us: micros[micros.len() / 2],
        p99_us: micros[micros.len() * 99 / 100],
    }
}

fn median(mut rounds: Vec<Figures>) -> Figures {
    rounds.sort_by(|a, b| a.per_second.total_cmp(&b.per_second));
    rounds[rounds.len() / 2]
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

fn files(directory: &Path) -> impl Iterator<Item = (String, u64)> + use<> {
    let entries = std::fs::read_dir(directory).expect("a data directory");
    entries.map_while(Result::ok).filter_map(|entry| {
        let name = entry.file_name().to_string_lossy().into_owned();
        Some((name, entry.metadata().ok()?.len()))
    })
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
