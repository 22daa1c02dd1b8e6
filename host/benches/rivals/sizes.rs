//! The rows about memory, cold start, and the cost of many keys.

use std::path::Path;
use std::time::{Duration, Instant};

use statehouse_loadgen::{Job, Usage};

use crate::common::Server;
use crate::contender::{Commands, Contender, Kind};
use crate::servers::{Work, median};
use crate::{Options, verdict};

/// Compares the memory of many keys with values and versions. Redis has a hash for each key.
pub(crate) fn many_keys(place: &Path, options: &Options) {
    println!(
        "\nmany keys: resident memory of {} keys of 19 B with values of 64 B\n",
        options.keys
    );
    println!("| | MB | ratio | aim |\n|---|---|---|---|");
    let directory = tempfile::tempdir_in(place).expect("a directory");
    let mut ours = None;
    for (number, kind) in [Kind::Statehouse, Kind::Redis(Commands::Full)]
        .into_iter()
        .enumerate()
    {
        let own = directory.path().join(number.to_string());
        std::fs::create_dir(&own).expect("a new directory");
        let filled =
            Contender::start(kind, false, &own).and_then(|it| it.fill(options.keys).map(|()| it));
        let contender = match filled {
            Ok(contender) => contender,
            Err(why) => {
                println!("| {why} | | | |");
                continue;
            }
        };
        let mb = resident_mb(contender.pid);
        // Less memory is better, so the ratio is inverted.
        let ratio = ours.map(|ours: f64| mb / ours);
        let shown = ratio.map_or(String::new(), |it| format!("{it:.2}"));
        println!(
            "| {} | {mb:.0} | {shown} | {} |",
            contender.name,
            verdict(ratio, ratio.map(|_| 1.0))
        );
        ours.get_or_insert(mb);
    }
}

/// Measures the time from the start of the process to its first answer, and its memory then.
pub(crate) fn idle(place: &Path, options: &Options) {
    println!("\nidle: memory and cold start to the first answer (aims: 30 MB, 100 ms)\n");
    println!("| | ms | MB |\n|---|---|---|");
    for kind in [Kind::Statehouse, Kind::Redis(Commands::Plain)] {
        let mut rounds = Vec::new();
        let mut name = String::new();
        for _ in 0..options.rounds {
            let directory = tempfile::tempdir_in(place).expect("a directory");
            let begun = Instant::now();
            let first = Contender::start(kind, false, directory.path()).and_then(|it| {
                let one = Work {
                    connections: 1,
                    in_flight: 1,
                    reads: 0,
                    keys: 1,
                    round: Duration::from_millis(1),
                };
                it.work(&one, Job::Fill).map(|_| it)
            });
            match first {
                Ok(contender) => {
                    rounds.push((
                        begun.elapsed().as_secs_f64() * 1e3,
                        resident_mb(contender.pid),
                    ));
                    name = contender.name;
                }
                Err(why) => {
                    println!("| {why} | | |");
                    break;
                }
            }
        }
        rounds.sort_by(|a, b| a.0.total_cmp(&b.0));
        if let Some((ms, mb)) = rounds.get(rounds.len() / 2) {
            println!("| {name} | {ms:.0} | {mb:.1} |");
        }
    }
}

/// Compares the cost of a request with many keys and with a thousand keys.
pub(crate) fn scale(place: &Path, options: &Options) {
    let Some(large) = options.large else {
        println!("\nscale: not measured; `--large 10000000` measures it with some 5 GB of memory");
        return;
    };
    println!(
        "\nscale: keys, GET and SET of 64 B, 50 × 16 (aim: 1.25 times the CPU of a thousand keys)\n"
    );
    println!(
        "| keys | requests/s | p50 us | p99 us | CPU us of the server |\n|---|---|---|---|---|"
    );
    for keys in [1_000, large] {
        let directory = tempfile::tempdir_in(place).expect("a directory");
        let arguments = [
            "--durability",
            "memory",
            "--max-bytes",
            "64000000000",
            "--max-keys",
            "1000000000",
        ];
        let server = Server::start(directory.path(), &arguments);
        let contender = Contender {
            kind: Kind::Statehouse,
            name: "statehouse".to_owned(),
            address: server.address.parse().expect("an address"),
            pid: server.id(),
            comparable: true,
            _process: Box::new(server),
        };
        if let Err(why) = contender.fill(keys) {
            println!("| {keys} failed: {why} | | | | |");
            continue;
        }
        let work = Work {
            connections: 50,
            in_flight: 16,
            reads: 50,
            keys,
            round: options.round,
        };
        let rounds =
            (0..options.rounds).filter_map(|_| contender.work(&work, Job::Mix { reads: 50 }).ok());
        if let Some(it) = median(rounds.collect(), |it| it.per_second) {
            println!("| {keys} | {it} |");
        }
    }
}

fn resident_mb(pid: u32) -> f64 {
    Usage::of(pid).map_or(0.0, |usage| usage.resident as f64 / 1e6)
}
