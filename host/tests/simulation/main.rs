//! Seeded runs of a store on a disk that forgets, tears and lies, with clients that send again.
//!
//! One seed is one run. Everything that decides is production code: the parsing of requests, the store's step,
//! the recorder, the log, recovery. Around it stand a simulated disk, a clock that is told what to say and
//! clients with sessions. There are no threads, no sockets and no files in a run, so a seed that fails
//! fails again:
//!
//! ```text
//! STATEHOUSE_SIM_SEED=<seed> cargo nextest run -p statehouse --test simulation --no-capture
//! ```
//!
//! In one run of three the store is behind a foreign broker, which brings requests again after it lost the store or has
//! not heard of an acknowledgement, keeps clients connected while the store is away, and takes what the store has for
//! them some time after it left the store.
//!
//! `STATEHOUSE_SIM_SEEDS` is how many seeds are run. What must hold is said where it is checked: in `world.rs` for
//! each step, in `recovery.rs` for each start, in `client.rs` for what clients see, in `promises.rs` for watchers.

mod client;
mod deed;
mod events;
mod exit;
mod habits;
mod history;
mod policies;
mod promises;
mod recovery;
mod story;
mod world;

use std::env;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use story::Tally;
use world::World;

/// Seeds of the quick test, and of the long one.
const SEEDS: u64 = 3_000;
const SEEDS_LONG: u64 = 20_000;

/// Threads that run seeds.
const THREADS: usize = 2;

fn number(variable: &str) -> Option<u64> {
    let value = env::var(variable).ok()?;
    Some(
        value
            .parse()
            .unwrap_or_else(|_| panic!("{variable} is no number: {value}")),
    )
}

/// Runs one seed; where it fails, says how to run it again.
fn run(seed: u64) -> Option<Tally> {
    let ran = catch_unwind(AssertUnwindSafe(|| World::run(seed)));
    if ran.is_err() {
        eprintln!(
            "seed {seed} failed: run it again with STATEHOUSE_SIM_SEED={seed} cargo nextest run -p statehouse --test simulation --no-capture"
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
                // The first failure ends it: a story is for one reader.
                while failed.load(Ordering::Relaxed) == 0 {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= seeds.end {
                        break;
                    }
                    match run(seed) {
                        Some(tally) => total.lock().expect("no panic under it").add(&tally),
                        None => _ = failed.fetch_add(1, Ordering::Relaxed),
                    }
                }
            });
        }
    });
    let total = total.into_inner().expect("no panic under it");
    println!("{} seeds: {total:?}", seeds.end - seeds.start);
    assert_eq!(failed.into_inner(), 0, "seeds failed, see above");
    if seeds.end - seeds.start >= 100 {
        total.assert_everything_happened();
    }
}

#[test]
fn no_crash_loses_or_doubles_what_was_answered() {
    match number("STATEHOUSE_SIM_SEED") {
        Some(seed) => run_all(seed..seed + 1),
        None => run_all(0..number("STATEHOUSE_SIM_SEEDS").unwrap_or(SEEDS)),
    }
}

#[test]
#[ignore = "takes some minutes"]
fn no_crash_loses_or_doubles_what_was_answered_in_very_many_runs() {
    let first = SEEDS;
    run_all(first..first + number("STATEHOUSE_SIM_SEEDS").unwrap_or(SEEDS_LONG));
}
