//! How long no client is answered when the leader changes.
//!
//! One client asks without a pause, and reconnects when its connection ends. The longest time
//! between two of its answers is the figure, so it includes the client's own reconnecting.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};

use crate::common::{Client, resp};
use crate::hosts::{Cluster, wait};

/// How long the client is answered before and after each change.
const CALM: Duration = Duration::from_millis(500);

/// A change of the leader.
#[derive(Clone, Copy)]
enum Change {
    Kill,
    Restart,
    HandOver,
}

/// Prints a row for each kind of change.
pub(crate) fn measure(cluster: &mut Cluster, changes: usize) {
    println!("\nchanges of the leader: time without an answer, {changes} times each\n");
    println!("| | p50 ms | longest ms |");
    println!("|---|---|---|");
    for (name, change) in [
        (
            "`kill -9` of the leader, through another host",
            Change::Kill,
        ),
        ("`kill -9` and restart, through itself", Change::Restart),
        (
            "`statehouse cluster handover`, through another host",
            Change::HandOver,
        ),
    ] {
        let mut gaps: Vec<_> = (0..changes).map(|_| gap(cluster, change)).collect();
        gaps.sort_unstable();
        let (p50, longest) = (gaps[gaps.len() / 2], gaps[gaps.len() - 1]);
        println!("| {name} | {} | {} |", p50.as_millis(), longest.as_millis());
    }
}

fn gap(cluster: &mut Cluster, change: Change) -> Duration {
    let leader = cluster.leader();
    let asked = match change {
        Change::Restart => leader,
        Change::Kill | Change::HandOver => cluster.follower(),
    };
    let address = cluster.hosts[asked].address;
    let (over, answers) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        let client = scope.spawn(|| ask_until(address, &over, &answers));
        let ends = EndsClient(&over);
        wait_for_answers(&answers);
        match change {
            Change::Kill => cluster.hosts[leader].kill(),
            Change::Restart => {
                cluster.hosts[leader].kill();
                cluster.hosts[leader].restart();
            }
            Change::HandOver => cluster.hosts[leader].hand_over(),
        }
        wait_for_answers(&answers);
        if matches!(change, Change::Kill) {
            cluster.hosts[leader].restart();
        }
        cluster.hosts[leader].wait_until_ready();
        drop(ends);
        client.join().expect("the client counts its answers")
    })
}

/// Ends the client when this is dropped, also by a panic. Otherwise the scope would wait for it.
struct EndsClient<'a>(&'a AtomicBool);

impl Drop for EndsClient<'_> {
    fn drop(&mut self) {
        self.0.store(true, SeqCst);
    }
}

/// Waits until a client has been answered for some time.
fn wait_for_answers(answers: &AtomicU64) {
    thread::sleep(CALM);
    let before = answers.load(SeqCst);
    wait("an answer", || {
        (answers.load(SeqCst) != before).then_some(())
    });
    thread::sleep(CALM);
}

/// Asks until `over`. Returns the longest time between two answers.
fn ask_until(address: SocketAddr, over: &AtomicBool, answers: &AtomicU64) -> Duration {
    let address = address.to_string();
    let get = resp(&[b"GET", b"missing"]);
    let (mut last, mut longest) = (None, Duration::ZERO);
    while !over.load(SeqCst) {
        let Ok(mut client) = Client::try_connect(&address, "gap") else {
            thread::sleep(Duration::from_millis(1));
            continue;
        };
        while !over.load(SeqCst) && client.try_round_trips(std::iter::once(&get[..])).is_ok() {
            let now = Instant::now();
            longest = longest.max(last.map_or(Duration::ZERO, |last| now - last));
            last = Some(now);
            answers.fetch_add(1, SeqCst);
        }
    }
    longest
}
