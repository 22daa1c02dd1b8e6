//! Measures the effect of policy changes on concurrent requests: the pause during a swap, the time
//! of a rollback, and the throughput with a shadow candidate.
//!
//! ```text
//! cargo bench -p statehouse --bench policies
//! ```
//!
//! The two policies are the standard policy and a copy with another digest. The load is one thread
//! for each client with one request at a time. No request waits for the disk (`--durability
//! interval`), which would hide these costs.

use std::fmt::Debug;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use common::{Client, Server, resp};
use serde_json::Value;
use statehouse::STANDARD_POLICY;

mod common;

const SWAPS: usize = 200;
const CLIENTS: usize = 16;
const ROUND: Duration = Duration::from_secs(3);
const ROUNDS: usize = 3;

fn main() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let server = Server::start(directory.path(), &["--durability", "interval"]);
    let admin = Admin::of(&directory.path().join("statehouse-data"));
    // A custom section gives the same policy another digest: id 0, its length, its name with a
    // length.
    let twin = [STANDARD_POLICY, b"\0\x05\x04twin"].concat();
    let asked = Instant::now();
    let loaded = admin.done("POST", "/v1/policies", &twin);
    println!(
        "loaded a policy of {} bytes in {:?}",
        twin.len(),
        asked.elapsed()
    );
    let twin = loaded["digest"].as_str().expect("a digest").to_owned();
    swaps(&server, &admin, &twin);
    shadow(&server, &admin, &twin);
}

/// Measures 200 swaps under load.
fn swaps(server: &Server, admin: &Admin, twin: &str) {
    let mut rollbacks = Vec::new();
    let rate = under_load(server, |done| {
        for swap in 0..SWAPS {
            let before = done.load(Ordering::Relaxed);
            let asked = Instant::now();
            if swap % 2 == 0 {
                admin.done("POST", &format!("/v1/policies/{twin}/promote"), b"");
            } else {
                admin.done("POST", "/v1/rollback", b"");
                rollbacks.push(asked.elapsed());
            }
            while done.load(Ordering::Relaxed) < before + 100 {
                thread::sleep(Duration::from_millis(1));
            }
            thread::sleep(Duration::from_millis(5));
        }
    });
    let listing = admin.done("GET", "/v1/policies", b"");
    let swaps = listing["swaps"].as_array().expect("a list");
    let gaps = swaps.iter().filter_map(|it| it["gap_us"].as_u64());
    let gaps: Vec<u64> = gaps.collect();
    println!("gaps of {} swaps in us: {gaps:?}", gaps.len());
    println!(
        "| {SWAPS} swaps at {rate:.0} requests/s of {CLIENTS} clients | median | 90 % | worst |"
    );
    println!("|---|---|---|---|");
    print_row(
        "between the last request of one policy and the first of the next, us",
        gaps,
    );
    print_row("a rollback, asked and answered over HTTP", rollbacks);
}

/// Prints the median, the ninth decile and the maximum.
fn print_row<T: Copy + Ord + Debug>(what: &str, mut all: Vec<T>) {
    all.sort_unstable();
    let of = |share: usize| all[(all.len() - 1) * share / 100];
    let (half, most, worst) = (of(50), of(90), of(100));
    println!("| {what} | {half:?} | {most:?} | {worst:?} |");
}

/// Compares requests per second without a candidate, with one that gets a tenth of the requests,
/// and with one that gets all.
fn shadow(server: &Server, admin: &Admin, twin: &str) {
    let shares: [Option<u16>; 3] = [None, Some(100), Some(1000)];
    let mut rates = [const { Vec::new() }; 3];
    for _ in 0..ROUNDS {
        for (share, rates) in shares.iter().zip(&mut rates) {
            match share {
                None => _ = admin.done("DELETE", "/v1/shadow", b""),
                Some(per_mille) => {
                    let body = format!(r#"{{"policy": "{twin}", "per_mille": {per_mille}}}"#);
                    admin.done("PUT", "/v1/shadow", body.as_bytes());
                }
            }
            rates.push(under_load(server, |_| thread::sleep(ROUND)));
        }
    }
    let report = admin.done("GET", "/v1/shadow", b"");
    println!("the last candidate: {report}");
    println!("| a candidate sees | requests/s | ratio |");
    println!("|---|---|---|");
    let rates = rates.map(|mut rates| {
        rates.sort_by(f64::total_cmp);
        rates[rates.len() / 2]
    });
    for (share, rate) in ["nothing", "10 %", "all"].iter().zip(rates) {
        println!("| {share} | {rate:.0} | {:.2} |", rate / rates[0]);
    }
}

/// Runs clients until `act` returns. `act` gets the number of answered requests. Returns requests
/// per second.
fn under_load(server: &Server, act: impl FnOnce(&AtomicU64)) -> f64 {
    static ROUND_NUMBER: AtomicU64 = AtomicU64::new(1);
    let round = ROUND_NUMBER.fetch_add(1, Ordering::Relaxed);
    let (over, done) = (AtomicBool::new(false), AtomicU64::new(0));
    let clients: Vec<_> = (0..CLIENTS)
        .map(|id| Client::connect(&server.address, &format!("client{round}-{id}")))
        .collect();
    let begun = Instant::now();
    thread::scope(|scope| {
        for (id, mut client) in clients.into_iter().enumerate() {
            let (over, done) = (&over, &done);
            scope.spawn(move || {
                let key = format!("bench/{id}");
                let set = resp(&[b"SET", key.as_bytes(), &[b'v'; 64]]);
                let get = resp(&[b"GET", key.as_bytes()]);
                while !over.load(Ordering::Relaxed) {
                    for request in [&set, &get] {
                        client.round_trip(request);
                        done.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
        }
        act(&done);
        over.store(true, Ordering::Relaxed);
    });
    done.into_inner() as f64 / begun.elapsed().as_secs_f64()
}

/// A client of the admin API that opens a connection for each request.
struct Admin {
    address: String,
    token: String,
}

impl Admin {
    fn of(data: &Path) -> Self {
        let found = std::fs::read(data.join("admin"));
        let found = found.expect("a running store writes its admin file");
        let found: Value = serde_json::from_slice(&found).expect("JSON");
        let text = |name: &str| found[name].as_str().expect("a text").to_owned();
        Self {
            address: text("url").trim_start_matches("http://").to_owned(),
            token: text("token"),
        }
    }

    fn done(&self, method: &str, path: &str, body: &[u8]) -> Value {
        let mut stream = TcpStream::connect(&self.address).expect("it listens");
        stream.set_nodelay(true).expect("a socket option");
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: {}\r\nAuthorization: Bearer {}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
            self.address,
            self.token,
            body.len()
        );
        let request = [head.as_bytes(), body].concat();
        stream.write_all(&request).expect("it reads");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("it answers");
        let is_done = answer.starts_with("HTTP/1.1 200 ");
        assert!(is_done, "{method} {path}: {answer}");
        let (_, body) = answer.split_once("\r\n\r\n").expect("a body");
        serde_json::from_str(body).expect("JSON")
    }
}
