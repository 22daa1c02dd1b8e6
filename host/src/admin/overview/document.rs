//! The document of an overview, as the admin API sends it and `statehouse top` reads it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value as Json;

/// The state of a host at a moment. A host of a cluster that does not lead has no store, so the
/// parts about the store are null or empty.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Overview {
    /// The name of the store, or of the cluster.
    pub(crate) store: String,
    /// The name of the machine, or of this host in its cluster.
    pub(crate) host: String,
    pub(crate) version: String,
    pub(crate) started_ms: u64,
    /// The system time of this document, in milliseconds since 1970.
    pub(crate) time_ms: u64,
    /// The time of the store, by which keys expire, in milliseconds since 1970. It is ahead of the
    /// system time after the system clock was set back. Null without a store.
    pub(crate) store_time_ms: Option<u64>,
    /// Whether `/readyz` answers 200.
    pub(crate) ready: bool,
    pub(crate) why_not_ready: Option<String>,
    /// Per second, over the time since the document before.
    pub(crate) rates: Option<Rates>,
    /// How long requests and notifications took lately.
    pub(crate) latency_us: Option<Latencies>,
    pub(crate) store_size: Option<StoreSize>,
    pub(crate) memory: MemoryUse,
    /// The data directory; null if the store is in memory or the log is that of a cluster.
    pub(crate) disk: Option<DiskUse>,
    pub(crate) clients: Option<ClientCounts>,
    pub(crate) foreign_broker: Option<ForeignBroker>,
    /// Bytes that wait, by what they wait for.
    pub(crate) queues: BTreeMap<String, u64>,
    pub(crate) process: ProcessUse,
    /// The policies that have a role.
    pub(crate) policies: Vec<PolicyRate>,
    /// The keys with the most requests, the first one first.
    pub(crate) hot_keys: Vec<HotKeyRate>,
    /// The limits in force, by their settings.
    pub(crate) limits: BTreeMap<String, u64>,
    /// The place in a cluster, if this host has one.
    pub(crate) cluster: Option<ClusterView>,
}

/// Events per second.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Rates {
    /// Requests that a policy answered.
    pub(crate) requests: f64,
    /// Of these GET.
    pub(crate) get: f64,
    pub(crate) set: f64,
    /// DEL and VDEL.
    pub(crate) del: f64,
    pub(crate) other: f64,
    /// Answered with an error because a right or a limit was missing, or not handled at all.
    pub(crate) refused: f64,
    pub(crate) failed: f64,
    pub(crate) notifications: f64,
    /// Messages from clients of the embedded broker.
    pub(crate) publishes_in: Option<f64>,
    pub(crate) publishes_out: Option<f64>,
}

/// Times of the last seconds.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Latencies {
    pub(crate) window_s: f64,
    /// From the turn of a connection until the response left.
    pub(crate) request: Latency,
    pub(crate) stages: Stages,
    /// From a change until its notification left.
    pub(crate) notification: Latency,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Stages {
    /// Until the policy was called.
    pub(crate) queue: Latency,
    pub(crate) policy: Latency,
    /// Until the log position of the response was durable.
    pub(crate) flush: Latency,
    /// Until the response was passed to its connection.
    pub(crate) send: Latency,
}

/// Microseconds; null if there was nothing to measure. Percentiles are estimated within the buckets
/// of the metrics.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Latency {
    pub(crate) count: u64,
    pub(crate) p50: Option<u64>,
    pub(crate) p99: Option<u64>,
    pub(crate) max: Option<u64>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct StoreSize {
    pub(crate) keys: u64,
    /// Accounted bytes of keys and values.
    pub(crate) bytes: u64,
    pub(crate) watches: u64,
    pub(crate) dedup_entries: u64,
}

/// The memory of the process in bytes.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct MemoryUse {
    pub(crate) rss: Option<u64>,
    /// The memory of the machine or of the control group.
    pub(crate) limit: Option<u64>,
    /// By owner, as the limits account it.
    pub(crate) owners: BTreeMap<String, u64>,
}

/// The data directory, in bytes.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct DiskUse {
    pub(crate) free: u64,
    /// Records that can be appended until growth is refused.
    pub(crate) room: u64,
    pub(crate) used: BTreeMap<String, u64>,
    /// Whether growth is refused.
    pub(crate) is_full: bool,
    pub(crate) flush_us: Latency,
}

/// The clients of the embedded broker.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct ClientCounts {
    pub(crate) connected: u64,
    pub(crate) limit: u64,
    /// Sessions, connected or not.
    pub(crate) sessions: u64,
    pub(crate) sessions_limit: u64,
    pub(crate) subscriptions: u64,
    pub(crate) retained: u64,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct ForeignBroker {
    pub(crate) connected: bool,
    /// Messages that the broker has not acknowledged.
    pub(crate) outstanding: u64,
    /// Messages that the store has not acknowledged.
    pub(crate) unacknowledged: u64,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct ProcessUse {
    /// CPU time per second of one processor.
    pub(crate) cpu: Option<f64>,
    pub(crate) fds: Option<u64>,
    pub(crate) fds_limit: Option<u64>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct PolicyRate {
    pub(crate) name: String,
    pub(crate) version: String,
    pub(crate) digest: String,
    /// `active`, `previous`, `shadow`, `canary` or `routed`.
    pub(crate) roles: Vec<String>,
    pub(crate) calls_per_s: f64,
    /// Failed calls since the start.
    pub(crate) failures: u64,
    pub(crate) fuel_mean: u64,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct HotKeyRate {
    /// The key: text, or `{"base64": "..."}`.
    pub(crate) key: Json,
    /// Whether it is only the beginning of a long key.
    pub(crate) is_cut: bool,
    /// At least this many requests per second.
    pub(crate) requests_per_s: f64,
    /// At least this share of all requests.
    pub(crate) share: f64,
}

/// The place of a host in its cluster.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct ClusterView {
    pub(crate) name: String,
    /// `leader` or `follower`.
    pub(crate) role: String,
    /// The name of the host that leads, if any does.
    pub(crate) leader: Option<String>,
    /// The hosts that have a link to this leader.
    pub(crate) followers: Vec<String>,
    pub(crate) epoch: u64,
    /// The last record that is durable, or that this follower applied.
    pub(crate) position: u64,
    /// The last record in the history of this host; 0 if it keeps none.
    pub(crate) history_position: u64,
    /// Records that this host knows of and has not applied.
    pub(crate) lag_records: u64,
    /// Whether the log answered the last call of this host.
    pub(crate) reaches_log: bool,
    /// Records in the log since the newest snapshot.
    pub(crate) log_records: u64,
    pub(crate) log_bytes: u64,
    pub(crate) snapshot_age_ms: Option<u64>,
    /// Records that are not durable yet, at a leader.
    pub(crate) unreleased: Option<u64>,
    /// How long a leader may still answer without a write, in milliseconds.
    pub(crate) lease_ms: Option<u64>,
}
