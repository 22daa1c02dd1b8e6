//! Tests of the time that a leadership hands to the next one.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::cluster::{Host, head, world};
use crate::{After, LeaderLog};

/// How long clients only read.
const READS: Duration = Duration::from_secs(600);

fn since_ms(began: Instant) -> u64 {
    u64::try_from(began.elapsed().as_millis()).unwrap()
}

/// Reads once per second. The clock of the leader goes on from 1 s after 1970.
async fn read(leader: &Host, log: &LeaderLog) {
    let began = Instant::now();
    while began.elapsed() < READS {
        leader.seen.lock().unwrap().wall_ms = Some(1_000 + since_ms(began));
        log.may_decide().await.unwrap();
        sleep(Duration::from_secs(1)).await;
    }
}

/// The clock of the next leader stands still, so it knows the time of the log only.
#[tokio::test(start_paused = true)]
async fn time_of_reads_does_not_step_back_at_a_takeover() {
    let world = world(1).await;
    let (leader, log) = Host::lead(&world, "a", |_| {}).await;
    let follower = Host::start(&world, "b", |_| {});
    follower.follows("a").await;
    Host::append(&log, b"x").await;
    let seq = head(&world).await.seq;
    let began = Instant::now();
    read(&leader, &log).await;
    assert_eq!(head(&world).await.seq, seq, "a read has written a frame");
    drop((leader, log));
    follower.member.suspect();
    follower.leads().await;
    assert_eq!(follower.member.figures().takeovers(After::Silence), 1);
    let read_ms = 1_000 + u64::try_from(READS.as_millis()).unwrap();
    let begins_ms = follower.seen.lock().unwrap().begins_ms;
    // The last change of the head was at most a lease before the last read.
    assert!(begins_ms > read_ms - 2_000, "{begins_ms}");
    assert!(begins_ms <= 1_000 + since_ms(began), "{begins_ms}");
    // A further takeover continues there.
    assert!(head(&world).await.now_ms > read_ms - 2_000);
}
