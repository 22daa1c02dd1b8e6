//! Durable writes beside Redis with `appendfsync always`, in one run on one disk: writes per second at 1, 16
//! and 64 clients, the time to open a million keys again, what they take in memory, and how many bytes
//! reach the device.
//!
//! ```text
//! cargo bench -p statehouse --bench durable                 # everything but the device, in a few minutes
//! cargo bench -p statehouse --bench durable -- --rounds 5   # more rounds, tighter medians
//! cargo bench -p statehouse --bench durable -- --device     # as root: on a loop device that counts its bytes
//! ```
//!
//! Redis is Debian's package `redis-server`; without it the columns beside are empty. Both stores get the
//! same clients: one thread each, one write at a time. Rounds alternate, so that a noisy neighbour hits both.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use common::{Client, Server, resp};

mod common;

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
            // What cargo adds by itself.
            "--bench" => {}
            other => {
                panic!("unknown argument {other}; there are --rounds N, --clients N,N and --device")
            }
        }
    }
    if device {
        return bytes_of_a_device();
    }
    // On a real disk: the default place of temporary files is memory on some systems.
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    writes_per_second(directory.path(), rounds, &clients);
    a_million_keys(directory.path());
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
            ours.push(round_of(clients, |id| {
                let mut client = Client::connect(&server.address, &format!("client{id}"));
                let set = resp(&[b"SET", format!("bench/{id}").as_bytes(), &[b'v'; 64]]);
                move || client.round_trip(&set)
            }));
            drop(server);
            if let Some(redis) = Redis::start(&place) {
                theirs.push(round_of(clients, |id| {
                    let mut client = redis.connect();
                    let set = resp(&[b"SET", format!("bench/{id}").as_bytes(), &[b'v'; 64]]);
                    move || client.ask(&set, 1)
                }));
            }
            std::fs::remove_dir_all(&place).expect("what the stores wrote");
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

/// Lets this many clients work for a round.
fn round_of<W: FnMut() + Send>(clients: usize, client: impl Fn(usize) -> W) -> Figures {
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
        thread::sleep(ROUND);
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

fn a_million_keys(directory: &Path) {
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
    let filled_mb = resident_mb(redis.process.id());
    drop(redis);
    let start = Instant::now();
    let redis = Redis::start(&place).expect("it started before");
    let took = start.elapsed();
    println!(
        "| redis, a hash for each key | {} | {filled_mb} when filled, {} when opened again | {} |",
        took.as_millis(),
        resident_mb(redis.process.id()),
        disk_mb(&place)
    );
}

/// How many bytes reach the device for each byte of the journal, at 64 clients. The kernel's own count of a
/// process's writes is wrong for overwritten files, so the device is one of our own.
fn bytes_of_a_device() {
    let scratch = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let (image, mount) = (scratch.path().join("image"), scratch.path().join("mount"));
    let file = std::fs::File::create(&image).expect("a file");
    file.set_len(2 << 30).expect("a sparse file");
    std::fs::create_dir(&mount).expect("a directory");
    let run = |program: &str, arguments: &[&std::ffi::OsStr]| -> String {
        let output = Command::new(program).args(arguments).output();
        let output = output.unwrap_or_else(|error| panic!("{program}: {error}"));
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            output.status.success(),
            "{program} (this needs root): {said}"
        );
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    };
    let device = run(
        "losetup",
        &["--find".as_ref(), "--show".as_ref(), image.as_ref()],
    );
    run("mkfs.ext4", &["-q".as_ref(), device.as_ref()]);
    run("mount", &[device.as_ref(), mount.as_ref()]);
    let name = device.rsplit('/').next().expect("a device has a name");
    let written = || -> u64 {
        let stat = std::fs::read_to_string(format!("/sys/block/{name}/stat"));
        let stat = stat.expect("every block device has one");
        let sectors = stat.split_whitespace().nth(6).expect("sectors written");
        512 * sectors.parse::<u64>().expect("a number")
    };
    println!(
        "| clients | writes/s | bytes of journal for each | bytes of device for each | device / journal |"
    );
    println!("|---|---|---|---|---|");
    for clients in CLIENTS {
        // As a store is that has run for long: its segments are written over again, and nothing is kept for
        // history alone, which would be whole segments of its own.
        let place = mount.join(clients.to_string());
        std::fs::create_dir(&place).expect("a directory");
        let server = Server::start(&place, &["--history-bytes", "0"]);
        let set = |id: usize| {
            let mut client = Client::connect(&server.address, &format!("client{id}"));
            let set = resp(&[b"SET", format!("bench/{id}").as_bytes(), &[b'v'; 64]]);
            move || client.round_trip(&set)
        };
        for _ in 0..3 {
            round_of(clients, set);
        }
        let before = written();
        let figures = round_of(clients, set);
        let device_bytes = written() - before;
        drop(server);
        let writes = figures.per_second * ROUND.as_secs_f64();
        let each = device_bytes as f64 / writes;
        let journal = journal_bytes_for_each(&mount);
        println!(
            "| {clients} | {:.0} | {journal:.0} | {each:.0} | {:.2} |",
            figures.per_second,
            each / journal
        );
        std::fs::remove_dir_all(&place).expect("what the store wrote");
    }
    run("umount", &[mount.as_ref()]);
    run("losetup", &["--detach".as_ref(), device.as_ref()]);
}

/// How many bytes of journal a write takes: a start cuts the segment before its own to what is in it.
fn journal_bytes_for_each(mount: &Path) -> f64 {
    const WRITES: usize = 10_000;
    let place = mount.join("journal");
    std::fs::create_dir(&place).expect("a directory");
    let server = Server::start(&place, &[]);
    let mut client = Client::connect(&server.address, "client0");
    let set = resp(&[b"SET", b"bench/0", &[b'v'; 64]]);
    for _ in 0..WRITES / IN_FLIGHT {
        client.round_trips(std::iter::repeat_n(&set[..], IN_FLIGHT));
    }
    drop(server);
    drop(Server::start(&place, &[]));
    let mut logs: Vec<_> = files(&place.join("statehouse-data"))
        .filter(|(name, _)| name.ends_with(".log"))
        .collect();
    logs.sort();
    // The last one is that of the second start.
    logs.pop();
    std::fs::remove_dir_all(&place).expect("what the store wrote");
    logs.iter().map(|(_, bytes)| bytes).sum::<u64>() as f64 / WRITES as f64
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
    let status = std::fs::read_to_string(format!("/proc/{id}/status")).expect("it runs");
    let line = status.lines().find(|line| line.starts_with("VmRSS:"));
    let kib = line.and_then(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
    kib.expect("every process has one") / 1024
}

/// A Redis of its own, gone with the benchmark.
struct Redis {
    process: Child,
    socket: std::net::SocketAddr,
}

impl Redis {
    fn start(directory: &Path) -> Option<Self> {
        // A port that was free a moment ago: Redis takes none by itself.
        let free = std::net::TcpListener::bind("127.0.0.1:0").ok()?;
        let socket = free.local_addr().ok()?;
        drop(free);
        let process = Command::new("redis-server")
            .args(["--port", &socket.port().to_string(), "--bind", "127.0.0.1"])
            .args([
                "--appendonly",
                "yes",
                "--appendfsync",
                "always",
                "--save",
                "",
            ])
            .arg("--dir")
            .arg(directory)
            .stdout(Stdio::null())
            .spawn()
            .ok()?;
        let redis = Self { process, socket };
        // It listens while it still loads, and says so.
        for _ in 0..6_000 {
            if let Ok(stream) = TcpStream::connect(socket) {
                let mut client = RedisClient {
                    stream,
                    read: Vec::new(),
                };
                if client.line(b"PING\r\n") == b"+PONG\r\n" {
                    return Some(redis);
                }
            }
            thread::sleep(Duration::from_millis(5));
        }
        None
    }

    fn connect(&self) -> RedisClient {
        let stream = TcpStream::connect(self.socket).expect("it listens");
        stream.set_nodelay(true).expect("a socket option");
        RedisClient {
            stream,
            read: Vec::new(),
        }
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        // It may be gone already; either way nothing is left behind.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

struct RedisClient {
    stream: TcpStream,
    read: Vec<u8>,
}

impl RedisClient {
    /// Sends commands that are answered by one line each.
    fn ask(&mut self, commands: &[u8], answers: usize) {
        self.stream.write_all(commands).expect("redis reads");
        self.read.clear();
        while self.read.iter().filter(|byte| **byte == b'\n').count() < answers {
            self.more();
        }
        assert!(!self.read.contains(&b'-'), "an error of redis");
    }

    fn line(&mut self, command: &[u8]) -> Vec<u8> {
        self.stream.write_all(command).expect("redis reads");
        self.read.clear();
        while !self.read.ends_with(b"\n") {
            self.more();
        }
        self.read.clone()
    }

    fn more(&mut self) {
        let mut chunk = [0; 16 << 10];
        let count = self.stream.read(&mut chunk).expect("an answer");
        assert_ne!(count, 0, "redis hung up");
        self.read.extend_from_slice(&chunk[..count]);
    }
}
