//! Measures a whole round trip over loopback with a minimal client: one PUBLISH, its answer and its
//! PUBACK.
//!
//! ```text
//! cargo bench -p statehouse --bench round_trip
//! ```

use std::time::Instant;

use common::{Client, Server, resp};
use criterion::{Criterion, criterion_group, criterion_main};

mod common;

const ROUND_TRIPS: usize = 20_000;

fn round_trip(c: &mut Criterion) {
    let directory = tempfile::tempdir().expect("a directory");
    let server = Server::start(directory.path(), &["--durability", "memory"]);
    let mut client = Client::connect(&server.address, "bench");
    let set = resp(&[b"SET", b"bench/key", &[b'v'; 64]]);
    let get = resp(&[b"GET", b"bench/key"]);
    client.round_trip(&set);
    c.bench_function("round trip, GET 64 B", |b| {
        b.iter(|| client.round_trip(&get))
    });
    c.bench_function("round trip, SET 64 B", |b| {
        b.iter(|| client.round_trip(&set))
    });

    // Criterion reports means, but operators need percentiles.
    let mut micros: Vec<u128> = (0..ROUND_TRIPS)
        .map(|_| {
            let start = Instant::now();
            client.round_trip(&get);
            start.elapsed().as_micros()
        })
        .collect();
    micros.sort_unstable();
    let at = |share: usize| micros[ROUND_TRIPS * share / 1000];
    println!(
        "round trip, GET 64 B, one client, one in flight: p50 {} us, p99 {} us, p99.9 {} us",
        at(500),
        at(990),
        at(999)
    );
}

criterion_group!(benches, round_trip);
criterion_main!(benches);
