//! The simulation over many seeds, correct and with a broken rule.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use super::ledger::Ledger;
use super::scenario::run;
use crate::Broken;

const THREADS: usize = 2;

/// Runs the seeds `0..count` and returns the sums of what happened, or the first violation.
fn run_seeds(count: u64) -> Ledger {
    let next = AtomicU64::new(0);
    let total = Mutex::new(Ledger::default());
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= count {
                        return;
                    }
                    match run(seed, None) {
                        Ok(ledger) => total.lock().unwrap().add(&ledger),
                        Err(violation) => {
                            next.store(count, Ordering::Relaxed);
                            let mut total = total.lock().unwrap();
                            return total.violated(format!("seed {seed}: {violation}"));
                        }
                    }
                }
            });
        }
    });
    total.into_inner().unwrap()
}

/// Fails unless every seed is correct and the faults had their chance.
fn check_seeds(count: u64) {
    let total = run_seeds(count);
    println!("{}", total.summary());
    assert_eq!(total.violation, None);
    assert!(total.takeovers > 5 * count, "too few takeovers");
    assert!(total.writes > 10 * count, "too few writes");
    assert!(total.reads > 50 * count, "too few reads");
    assert!(total.snapshots > count / 2, "too few snapshots");
    assert!(total.refused > count / 50, "too few writes without room");
    assert!(total.parts > 2 * count, "too few parts of long groups");
}

/// Runs seeds with a broken rule until one finds it.
fn find(broken: Broken) {
    for seed in 0..1_000 {
        if let Err(violation) = run(seed, Some(broken)) {
            println!("{broken:?}: seed {seed}: {violation}");
            return;
        }
    }
    panic!("no seed finds the broken rule {broken:?}");
}

#[test]
fn simulated_cluster_is_correct() {
    check_seeds(2_000);
}

#[test]
#[ignore = "long"]
fn simulated_cluster_is_correct_over_many_seeds() {
    check_seeds(20_000);
}

/// The first question of a new leader for the quota is lost.
#[test]
fn leader_asks_again_for_the_quota() {
    assert_eq!(run(8008, None).err(), None);
}

#[test]
fn same_seed_gives_same_run() {
    for seed in 0..5 {
        let [first, second] = [(), ()].map(|()| run(seed, None).map(|it| it.summary()));
        assert_eq!(first, second);
    }
}

#[test]
fn lease_from_answer_is_found() {
    find(Broken::LeaseFromAnswer);
}

#[test]
fn lease_before_read_is_found() {
    find(Broken::LeaseBeforeRead);
}

#[test]
fn wait_from_last_frame_is_found() {
    find(Broken::WaitFromLastFrame);
}

#[test]
fn ended_leader_that_never_waited_is_found() {
    find(Broken::EndedLeaderNeverWaited);
}

#[test]
fn retry_without_condition_is_found() {
    find(Broken::RetryWithoutCondition);
}

#[test]
fn follower_that_trusts_reads_is_found() {
    find(Broken::FollowerTrustsReads);
}
