//! What a run knows of its requests and messages, and of the failures of policies.

use std::collections::{BTreeMap, HashMap, HashSet};

use statehouse_core::clock::Stamp;

/// Requests and messages are known by their number.
#[derive(Default)]
pub(crate) struct Ledger {
    /// The numbers of all requests, and of those that only read; the QoS of each operation.
    pub(crate) requests: HashSet<u64>,
    pub(crate) reads: HashSet<u64>,
    pub(crate) qos: HashMap<u64, u8>,
    /// Reads at QoS 2 whose packet id may not be recorded, and those that a crash left so.
    pub(crate) unrecorded: HashSet<u64>,
    pub(crate) open: HashSet<u64>,
    /// Operations whose acknowledgement has just left, and how many commits there were before.
    pub(crate) acked: Vec<(u64, u64)>,
    pub(crate) commits: u64,
    /// Every response that a request had when it was handled, and the position that it depends on.
    pub(crate) possible: HashMap<u64, HashMap<Vec<u8>, u64>>,
    /// Requests that the store may not remember: after a full disk, or the end of the retention. Each
    /// execution has its own response.
    pub(crate) unremembered: HashSet<u64>,
    /// Requests that are remembered in memory only, since the disk was full; those of earlier lives.
    pub(crate) in_memory: HashSet<u64>,
    pub(crate) forgotten: HashSet<u64>,
    /// Operations that some life has handled, and messages that were published again.
    pub(crate) handled: HashSet<u64>,
    pub(crate) repeated: HashSet<u64>,
    /// Retained messages that the last subscriber received.
    pub(crate) retained: BTreeMap<String, u64>,
    /// The policies that handled each request, and the position that its response depends on if it
    /// only reads.
    pub(crate) by: HashMap<u64, HashSet<usize>>,
    pub(crate) needed: HashMap<u64, u64>,
    /// Whether the present step removes expired keys.
    pub(crate) sweeps: bool,
    /// Failures of policies since the guard last rolled one back, and in this life.
    pub(crate) failures: u64,
    pub(crate) failed: u64,
    /// Failures under this assignment, of the active policy or the canary, by client.
    pub(crate) counted: HashMap<(bool, usize), u32>,
    /// The highest version that a client saw.
    pub(crate) observed: Stamp,
    /// The store may have forgotten changes: after a start from a snapshot, or one that lost
    /// records.
    pub(crate) may_forget: bool,
    /// A crash has lost records that were released before they were durable.
    pub(crate) lossy: bool,
}
