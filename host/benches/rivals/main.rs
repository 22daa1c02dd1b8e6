//! Compares this store with its alternatives, under the same load in one run on loopback.
//!
//! ```text
//! cargo bench -p statehouse --bench rivals                            # all rows, some minutes
//! cargo bench -p statehouse --bench rivals -- --rounds 3 --seconds 1  # faster, less precise
//! cargo bench -p statehouse --bench rivals -- --only durable          # rows with this word
//! cargo bench -p statehouse --bench rivals -- --large 10000000        # a thousand keys and this
//! many
//! ```
//!
//! Rivals are Debian's packages redis-server, redis-tools, mosquitto, nats-server and etcd-server.
//! A missing package is reported in its row. Every server of a row runs for the whole row, and
//! rounds alternate between the servers, so that a noisy neighbour affects all. Figures are
//! medians. All servers get the clients of `statehouse bench`, and Redis also runs its own
//! benchmark. A ratio above 1 is in this store's favour. Every row must be printed, even if a rival
//! wins.

use std::path::Path;
use std::time::Duration;

use contender::{Contender, Kind};
use rows::{ROWS, Row};
use servers::{Figures, Work, median};
use statehouse_loadgen::Job;

#[path = "../common/mod.rs"]
#[allow(
    dead_code,
    unused_imports,
    reason = "the lean client of the other benchmarks is not needed here"
)]
mod common;
mod contender;
mod etcd;
mod mosquitto;
mod nats;
mod redis;
mod rows;
mod servers;
mod sizes;

/// The default number of keys.
const KEYS: u64 = 10_000;

struct Options {
    rounds: usize,
    round: Duration,
    only: Option<String>,
    /// Number of keys in the rows about memory.
    keys: u64,
    large: Option<u64>,
}

fn main() {
    let mut options = Options {
        rounds: 5,
        round: Duration::from_secs(2),
        only: None,
        keys: 1_000_000,
        large: None,
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
            "--keys" => options.keys = value().parse().expect("a number of keys"),
            "--large" => options.large = Some(value().parse().expect("a number of keys")),
            // Internal: runs this program as the responder behind Mosquitto.
            "--responder" => {
                return mosquitto::respond(value().parse().expect("an address"), false);
            }
            "--responder-nodelay" => {
                return mosquitto::respond(value().parse().expect("an address"), true);
            }
            // Cargo adds this argument.
            "--bench" => {}
            other => panic!(
                "unknown argument {other}; there are --rounds N, --seconds N, --only WORD, --keys N and --large KEYS"
            ),
        }
    }
    assert!(options.rounds > 0, "--rounds is at least 1");
    // On a real disk, because the default temporary directory is in memory on some systems.
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let place = directory.path();
    println!(
        "medians of {} rounds of {:?}; a ratio above 1 is in this store's favour",
        options.rounds, options.round
    );
    let selected = |name: &str| options.only.as_ref().is_none_or(|word| name.contains(word));
    for row in ROWS.iter().filter(|row| selected(row.name)) {
        measure(row, place, &options);
    }
    if selected("many keys: resident memory") {
        sizes::many_keys(place, &options);
    }
    if selected("idle: memory and cold start") {
        sizes::idle(place, &options);
    }
    if selected("scale: keys") {
        sizes::scale(place, &options);
    }
    println!(
        "\nThe cost of a policy call is measured by `cargo bench -p statehouse --bench policy_call`."
    );
}

fn measure(row: &Row, place: &Path, options: &Options) {
    let (connections, in_flight, reads) = row.work;
    let work = Work {
        connections,
        in_flight,
        reads,
        keys: KEYS,
        round: options.round,
    };
    println!("\n{}\n", row.name);
    println!("| | requests/s | p50 us | p99 us | CPU us of the server | ratio | aim |");
    println!("|---|---|---|---|---|---|---|");
    let directory = tempfile::tempdir_in(place).expect("a directory");
    let mut contenders = Vec::new();
    let everyone = std::iter::once((Kind::Statehouse, None)).chain(row.rivals.iter().copied());
    for (number, (kind, aim)) in everyone.enumerate() {
        let own = directory.path().join(number.to_string());
        std::fs::create_dir(&own).expect("a new directory");
        let started = Contender::start(kind, row.durable, &own)
            .and_then(|it| it.fill(work.keys).map(|()| it));
        match started {
            Ok(contender) => contenders.push((contender, aim, Vec::new(), None)),
            Err(why) => println!("| {why} | | | | | | |"),
        }
    }
    for _ in 0..options.rounds {
        for (contender, _, rounds, failed) in &mut contenders {
            match contender.work(&work, Job::Mix { reads }) {
                Ok(figures) => rounds.push(figures),
                Err(why) => *failed = Some(why),
            }
        }
    }
    let by = |it: &Figures| match row.by_latency {
        true => it.p50_us,
        false => it.per_second,
    };
    let mut ours = None;
    for (contender, aim, rounds, failed) in contenders {
        if let Some(why) = failed {
            println!("| {} failed: {why} | | | | | | |", contender.name);
        }
        let Some(it) = median(rounds, by) else {
            continue;
        };
        let ratio = ours.map(|ours: Figures| match row.by_latency {
            true => it.p50_us / ours.p50_us,
            false => ours.per_second / it.per_second,
        });
        if matches!(contender.kind, Kind::Statehouse) {
            ours = Some(it);
        }
        println!(
            "| {} | {it} | {} | {} |",
            contender.name,
            ratio.map_or(String::new(), |ratio| format!("{ratio:.2}")),
            verdict(ratio, aim.filter(|_| contender.comparable)),
        );
    }
}

/// The aim, and whether the ratio meets it.
fn verdict(ratio: Option<f64>, aim: Option<f64>) -> String {
    match (ratio, aim) {
        (Some(ratio), Some(aim)) => {
            let word = if ratio >= aim { "met" } else { "MISSED" };
            format!("{aim}, {word}")
        }
        _ => String::new(),
    }
}
