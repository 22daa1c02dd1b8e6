//! Tests of several hosts over etcd: real processes that are killed and paused, and clients that
//! use the addresses of all hosts.
#![allow(missing_docs, clippy::unwrap_used)]

#[path = "../trust/authority.rs"]
#[allow(dead_code, reason = "these tests need no clients' certificates")]
mod authority;
mod clients;
mod configuration;
mod duplicates;
mod handover;
mod history;
mod idle;
mod joining;
mod kills;
mod listeners;
mod locks;
mod partitions;
mod pauses;
mod policies;
#[path = "../durability/resumed.rs"]
mod resumed;
mod sessions;

use statehouse_tests::{histories::Manner, wait::eventually};

/// A takeover waits for the lease of a leader that died. Tests of other things wait less.
const SHORT_LEASE: (&str, &str) = ("cluster_lease", "500ms");

/// The clients of a history.
const CLIENTS: [Manner; 5] = [
    Manner::SendsAgain { dup: true },
    Manner::SendsAgain { dup: true },
    Manner::SendsAgain { dup: false },
    Manner::SendsAgain { dup: false },
    Manner::Forgets,
];
