//! Tests of several hosts over etcd: real processes that are killed and paused, and clients that
//! use the addresses of all hosts.
#![allow(missing_docs, clippy::unwrap_used)]

#[path = "../trust/authority.rs"]
#[allow(dead_code, reason = "these tests need no clients' certificates")]
mod authority;
mod clients;
mod clocks;
mod configuration;
mod directions;
mod duplicates;
mod etcd;
mod handover;
mod history;
mod idle;
mod joining;
mod kills;
mod listeners;
mod locks;
mod logins;
mod operations;
mod partitions;
mod pauses;
mod policies;
mod power;
#[path = "../durability/resumed.rs"]
mod resumed;
mod sessions;
mod upgrades;

use statehouse_tests::{
    Client, Heard, client::PATIENCE, histories::Manner, packet::kind, wait::eventually,
};

/// A takeover waits for the lease of a leader that died. Tests of other things wait less.
const SHORT_LEASE: (&str, &str) = ("cluster_lease", "500ms");

/// The two ways to protect reads.
const LEASE: (&str, &str) = ("cluster_reads", "lease");
const CONFIRMED: (&str, &str) = ("cluster_reads", "confirmed");

/// The clients of a history.
const CLIENTS: [Manner; 5] = [
    Manner::SendsAgain { dup: true },
    Manner::SendsAgain { dup: true },
    Manner::SendsAgain { dup: false },
    Manner::SendsAgain { dup: false },
    Manner::Forgets,
];

/// Reads to the end of the connection to a leader that was replaced. It must deliver no answer,
/// because its state is old.
fn expect_closed_unanswered(client: &mut Client) {
    loop {
        match client.poll(PATIENCE) {
            Heard::Packet(packet) => {
                assert_ne!(packet.kind(), kind::PUBLISH, "an old answer: {packet:?}");
            }
            Heard::Closed => return,
            Heard::Silence => panic!("the old leader keeps a client"),
        }
    }
}
