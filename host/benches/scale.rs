//! Measures how the cost of a request grows with the number of keys, of watches and of watchers of
//! one key, and with the length of a value. Each request is one step of the store, including the
//! policy, without MQTT and without a disk.
//!
//! ```text
//! cargo bench -p statehouse --bench scale                      # up to a million keys, half a
//! minute
//! cargo bench -p statehouse --bench scale -- --large 10000000  # this many, some 2 GB of memory
//! cargo bench -p statehouse --bench scale -- --prefixes        # only watches of prefixes
//! ```
//!
//! All times are CPU times of one thread in one process. Quote only ratios.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use statehouse::STANDARD_POLICY;
use statehouse_core::policy::{Engine, Policy, Registry};
use statehouse_core::request::{Delivery, Incoming};
use statehouse_core::store::{Peer, Quota, Store, Transaction};
use statehouse_core::{Core, Input, Now, Settings};
use statehouse_loadgen::Usage;
use statehouse_mqtt::{Properties, PropertiesBuilder};

const NOW_MS: u64 = 1_700_000_000_000;
const TIMESTAMP: &str = "001700000000000:00000:bench";
const VALUE_BYTES: usize = 64;
const CLIENTS: u64 = 50;
/// Requests that are generated at a time, before the measurement.
const BATCH: usize = 4_000;
/// CPU time per figure. Long, because the kernel counts a thread's time in ticks of some
/// milliseconds.
const MEASURED_NS: f64 = 5e8;

/// Batches of each kind that are compared.
const TURNS: usize = 60;

/// A store and its clients.
struct Bench {
    core: Core,
    now: Now,
    properties: Properties,
    peers: Vec<Peer>,
    asked: u64,
    dice: u64,
}

impl Bench {
    fn new(policy: &Arc<Policy<Transaction>>) -> Self {
        let properties = PropertiesBuilder::new()
            .response_topic("clients/bench/response")
            .correlation_data(&[7; 16])
            .user("__ts", TIMESTAMP)
            .user("__protVer", "1.0")
            .finish()
            .and_then(Properties::parse)
            .expect("short properties");
        let quota = Quota {
            keys_max: u64::MAX,
            bytes_max: u64::MAX,
            client_keys_max: u64::MAX,
            client_bytes_max: u64::MAX,
            ..Quota::default()
        };
        let mut store = Store::new(Registry::new(policy.clone(), None), quota);
        store.supervision().purity_every = 0;
        Self {
            core: Core::in_memory(store, Settings::default()),
            now: Now {
                ms: NOW_MS,
                instant: Instant::now(),
            },
            properties,
            peers: (1..=CLIENTS).map(peer).collect(),
            asked: 0,
            dice: 0x9E37_79B9_7F4A_7C15,
        }
    }

    fn ask(&mut self, by: Option<&Peer>, payload: &Bytes) -> usize {
        let turn = self.asked;
        self.asked += 1;
        let peer = by.unwrap_or(&self.peers[(turn % CLIENTS) as usize]);
        let incoming = Incoming {
            delivery: Delivery::new(peer, (turn % 60_000 + 1) as u16, false),
            ..Incoming::new(peer, payload, &self.properties)
        };
        let decision = self.core.handle(Input::Publish(&incoming), self.now);
        let effects = decision.effects;
        assert_eq!(effects.failures, 0);
        let notified = effects.notifications.iter().map(|it| it.to.len()).sum();
        black_box(effects);
        notified
    }

    fn roll(&mut self, sides: u64) -> u64 {
        self.dice ^= self.dice << 13;
        self.dice ^= self.dice >> 7;
        self.dice ^= self.dice << 17;
        self.dice % sides
    }

    fn fill(&mut self, keys: u64, value: &[u8]) {
        for key in 0..keys {
            let payload = command(&[b"SET", &name(key), value]);
            self.ask(None, &payload);
        }
    }

    /// Measures a step with random keys in nanoseconds.
    fn steps(&mut self, keys: u64, batch: usize, of: impl Fn(&[u8]) -> Bytes) -> f64 {
        let (mut worked, mut steps) = (0.0, 0);
        while worked < MEASURED_NS {
            let payloads: Vec<Bytes> = (0..batch).map(|_| of(&name(self.roll(keys)))).collect();
            let before = worked_ns();
            for payload in &payloads {
                self.ask(None, payload);
            }
            worked += worked_ns() - before;
            steps += batch;
        }
        worked / steps as f64
    }

    /// Measures a batch of SETs of random keys in nanoseconds.
    fn sets(&mut self, keys: u64, value: &[u8]) -> f64 {
        let payloads: Vec<Bytes> = (0..BATCH)
            .map(|_| command(&[b"SET", &name(self.roll(keys)), value]))
            .collect();
        let before = Instant::now();
        for payload in &payloads {
            self.ask(None, payload);
        }
        before.elapsed().as_nanos() as f64 / BATCH as f64
    }

    /// Measures the search for the watchers of random keys in nanoseconds.
    fn searches(&mut self, keys: u64) -> f64 {
        let names: Vec<_> = (0..BATCH).map(|_| name(self.roll(keys))).collect();
        let watches = &self.core.store().state().watches;
        let before = Instant::now();
        for name in &names {
            assert!(watches.of(name).is_empty());
        }
        before.elapsed().as_nanos() as f64 / BATCH as f64
    }

    /// Measures a GET and a SET in nanoseconds.
    fn reads_and_writes(&mut self, keys: u64, value: &[u8]) -> (f64, f64) {
        let batch = (BATCH * 256 / (value.len() + 256)).max(20);
        // First fill the table of remembered requests, because it makes steps slower.
        self.steps(keys, batch, |key| command(&[b"SET", key, value]));
        let get = self.steps(keys, batch, |key| command(&[b"GET", key]));
        let set = self.steps(keys, batch, |key| command(&[b"SET", key, value]));
        (get, set)
    }
}

fn peer(number: u64) -> Peer {
    Peer::numbered(&format!("client-{number:06}"), number)
}

fn name(key: u64) -> Vec<u8> {
    format!("bench/64/{key:010}").into_bytes()
}

fn command(arguments: &[&[u8]]) -> Bytes {
    statehouse_policy::resp::request(arguments).into()
}

/// The CPU time of this thread. Other processes affect it only through caches and memory.
fn worked_ns() -> f64 {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").expect("a Linux kernel");
    let first = stat.split_whitespace().next().expect("three numbers");
    first.parse().expect("a number")
}

fn resident_mb() -> f64 {
    let usage = Usage::of(std::process::id()).expect("it runs");
    usage.resident as f64 / 1e6
}

fn keys(policy: &Arc<Policy<Transaction>>, counts: &[u64]) {
    println!("keys of 19 B with values of 64 B; memory includes the remembered requests");
    println!("| keys | GET, ns | SET, ns | ratio to the first | MB |\n|---|---|---|---|---|");
    let value = [b'v'; VALUE_BYTES];
    let mut first = None;
    for &keys in counts {
        let before = resident_mb();
        let mut bench = Bench::new(policy);
        bench.fill(keys, &value);
        let mb = resident_mb() - before;
        let (get, set) = bench.reads_and_writes(keys, &value);
        let (get_first, set_first) = *first.get_or_insert((get, set));
        let (of_get, of_set) = (get / get_first, set / set_first);
        println!("| {keys} | {get:.0} | {set:.0} | {of_get:.2}, {of_set:.2} | {mb:.0} |");
    }
}

fn watches(policy: &Arc<Policy<Transaction>>) {
    println!("\nwatches of other keys, 100 for each connection");
    println!("| watches | GET, ns | SET, ns |\n|---|---|---|");
    for watches in [0, 1, 1_000, 100_000] {
        let mut bench = Bench::new(policy);
        for watch in 0..watches {
            let key = format!("watched/{watch:010}");
            let watcher = peer(1_000 + watch / 100);
            bench.ask(Some(&watcher), &command(&[b"KEYNOTIFY", key.as_bytes()]));
        }
        assert_eq!(bench.core.store().state().watches.len() as u64, watches);
        let (get, set) = bench.reads_and_writes(1_000, &[b'v'; VALUE_BYTES]);
        println!("| {watches} | {get:.0} | {set:.0} |");
    }
}

/// SETs under none of ten thousand watched prefixes, in turns with the same SETs without watches.
fn prefixes(policy: &Arc<Policy<Transaction>>, keys: u64) {
    println!(
        "\n10000 watched prefixes, 100 for each connection, and {keys} keys under none of them"
    );
    println!("| prefixes | SET without, ns | SET with, ns | ratio | search, ns |");
    println!("|---|---|---|---|---|");
    let value = [b'v'; VALUE_BYTES];
    let mut bench = Bench::new(policy);
    bench.fill(keys, &value);
    // All bytes of the second kind are compared up to the first that differs.
    for (what, stem) in [
        ("elsewhere", "watched/"),
        ("next to the keys", "bench/64/1"),
    ] {
        let watchers: Vec<Peer> = (0..100).map(|it| peer(1_000 + it)).collect();
        let mut sets = [Vec::new(), Vec::new()];
        let mut searches = Vec::new();
        for _ in 0..TURNS {
            for watch in 0..10_000 {
                let prefix = format!("{stem}{watch:09}/");
                let request = command(&[b"KEYNOTIFY", prefix.as_bytes(), b"PREFIX"]);
                bench.ask(Some(&watchers[watch % 100]), &request);
            }
            // The first batch finds the caches cold.
            bench.sets(keys, &value);
            sets[1].push(bench.sets(keys, &value));
            searches.push(bench.searches(keys));
            for watcher in &watchers {
                bench.core.handle(Input::Disconnected(watcher), bench.now);
            }
            assert!(bench.core.store().state().watches.is_empty());
            bench.sets(keys, &value);
            sets[0].push(bench.sets(keys, &value));
        }
        let [without, with] = sets.map(undisturbed);
        let (ratio, search) = (with / without, undisturbed(searches));
        println!("| {what} | {without:.0} | {with:.0} | {ratio:.3} | {search:.0} |");
    }
}

/// The figure without interruptions: the fastest tenth.
fn undisturbed(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures[figures.len() / 10]
}

/// SETs of one key of which every prefix is watched, and of its neighbours.
fn nested_prefixes(policy: &Arc<Policy<Transaction>>) {
    println!("\nwatched prefixes of the key that changes, by one connection");
    println!("| prefixes | SET, ns |\n|---|---|");
    let key = vec![b'k'; 1024];
    for prefixes in [0, 1, 32, 1024] {
        let mut bench = Bench::new(policy);
        let watcher = peer(1_000);
        for prefix in 0..prefixes {
            for last in [b"k", b"a"] {
                let prefix = [&key[..prefix], last].concat();
                let request = command(&[b"KEYNOTIFY", &prefix, b"PREFIX"]);
                bench.ask(Some(&watcher), &request);
            }
        }
        let set = command(&[b"SET", &key, b"v"]);
        assert_eq!(bench.ask(None, &set), usize::from(prefixes > 0));
        let took = bench.steps(1, 400, |_| set.clone());
        println!("| {prefixes} | {took:.0} |");
    }
}

fn watchers(policy: &Arc<Policy<Transaction>>) {
    println!("\nwatchers of the key that changes");
    println!("| watchers | SET, ns | for each watcher, ns |\n|---|---|---|");
    let mut alone = None;
    for watchers in [0, 1, 100, 10_000] {
        let mut bench = Bench::new(policy);
        for watcher in 0..watchers {
            let watcher = peer(1_000 + watcher as u64);
            bench.ask(Some(&watcher), &command(&[b"KEYNOTIFY", &name(0)]));
        }
        let set = command(&[b"SET", &name(0), &[b'v'; VALUE_BYTES]]);
        assert_eq!(bench.ask(None, &set), watchers);
        let batch = (BATCH * 10 / (watchers + 10)).max(20);
        let took = bench.steps(1, batch, |_| set.clone());
        let more = (took - *alone.get_or_insert(took)) / watchers.max(1) as f64;
        println!("| {watchers} | {took:.0} | {more:.0} |");
    }
}

fn values(policy: &Arc<Policy<Transaction>>) {
    println!("\nvalues");
    println!("| bytes | GET, ns | SET, ns |\n|---|---|---|");
    for bytes in [16, 64, 1 << 10, 16 << 10, 256 << 10, 1 << 20] {
        let value = vec![b'v'; bytes];
        let mut bench = Bench::new(policy);
        let keys = 100;
        bench.fill(keys, &value);
        let (get, set) = bench.reads_and_writes(keys, &value);
        println!("| {bytes} | {get:.0} | {set:.0} |");
    }
}

fn main() {
    let mut counts = vec![1_000, 100_000, 1_000_000];
    let mut only_prefixes = false;
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--large" => {
                let large = arguments.next().and_then(|it| it.parse().ok());
                counts.push(large.expect("--large takes a number of keys"));
            }
            "--prefixes" => only_prefixes = true,
            // Cargo adds this argument.
            "--bench" => {}
            other => panic!("unknown argument {other}; there are --large KEYS and --prefixes"),
        }
    }
    let engine = Engine::new().expect("an engine");
    let policy = Arc::new(engine.load(STANDARD_POLICY).expect("the standard policy"));
    let most = counts.iter().max().copied().unwrap_or_default();
    prefixes(&policy, most);
    nested_prefixes(&policy);
    if only_prefixes {
        return;
    }
    keys(&policy, &counts);
    watches(&policy);
    watchers(&policy);
    values(&policy);
}
