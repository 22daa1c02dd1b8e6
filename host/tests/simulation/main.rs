//! Seeded runs of a store on a simulated disk that loses, tears and corrupts writes, with clients
//! that redeliver requests.
//!
//! One seed is one run. Production code makes every decision: it parses requests, steps the store,
//! records, logs and recovers. The disk, the clock and the clients with their sessions are
//! simulated. A run must use no threads, sockets or files, or a failing seed would not fail again:
//!
//! ```text
//! STATEHOUSE_SIM_SEED=<seed> cargo nextest run -p statehouse --test simulation --no-capture
//! ```
//!
//! In one of three runs the store is behind a foreign broker. This broker redelivers requests after
//! the connection to the store was lost or an acknowledgement did not arrive. It keeps its clients
//! connected while the store is away, and receives outputs some time after they left the store.
//!
//! `STATEHOUSE_SIM_SEEDS` sets the number of seeds. Each invariant stands next to its check: in
//! `world.rs` and `requests.rs` for each step, in `recovery.rs` for each start, in `client.rs` for
//! clients, and in `obligations.rs` for watchers.

mod client;
mod egress;
mod events;
mod fault_plan;
mod history;
mod obligations;
mod operation;
mod policies;
mod recovery;
mod requests;
mod trace;
mod workload;
mod world;

use std::env;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use trace::Tally;
use world::World;

/// The default number of seeds of the quick test and of the long test.
const SEEDS: u64 = 3_000;
const SEEDS_LONG: u64 = 20_000;

const THREADS: usize = 2;

fn number(variable: &str) -> Option<u64> {
    let value = env::var(variable).ok()?;
    Some(
        value
            .parse()
            .unwrap_or_else(|_| panic!("{variable} is not a number: {value}")),
    )
}

/// Runs one seed. If it fails, prints the command that repeats it.
fn run(seed: u64) -> Option<Tally> {
    let ran = catch_unwind(AssertUnwindSafe(|| World::run(seed)));
    if ran.is_err() {
        eprintln!(
            "seed {seed} failed: repeat it with STATEHOUSE_SIM_SEED={seed} cargo nextest run -p statehouse --test simulation --no-capture"
        );
    }
    ran.ok()
}

fn run_all(seeds: Range<u64>) {
    let next = AtomicU64::new(seeds.start);
    let total = Mutex::new(Tally::default());
    let failed = AtomicU64::new(0);
    thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                // The threads stop at the first failure, so that the traces of two seeds do not
                // mix.
                while failed.load(Ordering::Relaxed) == 0 {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= seeds.end {
                        break;
                    }
                    match run(seed) {
                        Some(tally) => total.lock().expect("the lock is not poisoned").add(&tally),
                        None => _ = failed.fetch_add(1, Ordering::Relaxed),
                    }
                }
            });
        }
    });
    let total = total.into_inner().expect("the lock is not poisoned");
    println!("{} seeds: {total:?}", seeds.end - seeds.start);
    assert_eq!(failed.into_inner(), 0, "seeds failed, see above");
    if seeds.end - seeds.start >= 100 {
        total.assert_every_case_occurred();
    }
}

#[test]
fn crashes_never_lose_or_repeat_answered_requests() {
    match number("STATEHOUSE_SIM_SEED") {
        Some(seed) => run_all(seed..seed + 1),
        None => run_all(0..number("STATEHOUSE_SIM_SEEDS").unwrap_or(SEEDS)),
    }
}

#[test]
#[ignore = "takes some minutes"]
fn crashes_never_lose_or_repeat_answered_requests_long() {
    let first = SEEDS;
    run_all(first..first + number("STATEHOUSE_SIM_SEEDS").unwrap_or(SEEDS_LONG));
}
