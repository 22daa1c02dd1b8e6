//! The rows of the comparison: the work, the rivals, and the aims.

use crate::contender::Commands::{Full, Lean, Plain};
use crate::contender::Kind;

/// A row: the same work for all contenders.
pub(crate) struct Row {
    /// Matched by `--only`.
    pub(crate) name: &'static str,
    /// Connections, requests in flight on each, and the percentage of GETs.
    pub(crate) work: (usize, u16, u8),
    /// Whether each write is on disk before its answer.
    pub(crate) durable: bool,
    /// Whether the p50 decides instead of the throughput.
    pub(crate) by_latency: bool,
    /// The rivals, each with the ratio to reach, if any.
    pub(crate) rivals: &'static [(Kind, Option<f64>)],
}

/// All rows.
pub(crate) const ROWS: &[Row] = &[
    Row {
        name: "memory GET 64 B, 50 × 1",
        work: (50, 1, 100),
        durable: false,
        by_latency: false,
        rivals: &[
            (Kind::RedisBenchmark(Plain), Some(0.9)),
            (Kind::Redis(Plain), None),
            (Kind::Redis(Full), None),
            (Kind::Mosquitto { nodelay: false }, Some(4.0)),
            (Kind::Mosquitto { nodelay: true }, None),
        ],
    },
    Row {
        name: "memory GET 64 B, 50 × 16",
        work: (50, 16, 100),
        durable: false,
        by_latency: false,
        rivals: &[
            (Kind::RedisBenchmark(Full), Some(1.0)),
            (Kind::Redis(Full), None),
            (Kind::Redis(Plain), None),
            (Kind::Mosquitto { nodelay: false }, Some(6.0)),
            (Kind::Mosquitto { nodelay: true }, None),
        ],
    },
    Row {
        name: "memory SET 64 B, 50 × 1",
        work: (50, 1, 0),
        durable: false,
        by_latency: false,
        rivals: &[
            (Kind::RedisBenchmark(Lean), None),
            (Kind::Redis(Lean), None),
            (Kind::RedisBenchmark(Plain), None),
            (Kind::Redis(Full), None),
            (Kind::Mosquitto { nodelay: false }, Some(4.0)),
            (Kind::Mosquitto { nodelay: true }, None),
        ],
    },
    Row {
        name: "memory SET 64 B, 50 × 16",
        work: (50, 16, 0),
        durable: false,
        by_latency: false,
        rivals: &[
            (Kind::RedisBenchmark(Lean), None),
            (Kind::Redis(Lean), None),
            (Kind::RedisBenchmark(Full), Some(1.0)),
            (Kind::Redis(Full), None),
            (Kind::Redis(Plain), None),
            (Kind::Mosquitto { nodelay: false }, Some(6.0)),
            (Kind::Mosquitto { nodelay: true }, None),
        ],
    },
    Row {
        name: "durable SET 64 B, 50 × 1",
        work: (50, 1, 0),
        durable: true,
        by_latency: false,
        rivals: &[
            (Kind::RedisBenchmark(Plain), Some(0.9)),
            (Kind::Redis(Plain), Some(0.9)),
            (Kind::Redis(Full), None),
            (Kind::JetStream, Some(5.0)),
            (Kind::Etcd, Some(5.0)),
        ],
    },
    Row {
        name: "durable SET 64 B, 50 × 16",
        work: (50, 16, 0),
        durable: true,
        by_latency: false,
        rivals: &[
            (Kind::RedisBenchmark(Full), Some(0.8)),
            (Kind::Redis(Full), Some(0.8)),
            (Kind::Redis(Plain), None),
            (Kind::JetStream, None),
        ],
    },
    Row {
        name: "memory unloaded round trip, GET 64 B, 1 × 1",
        work: (1, 1, 100),
        durable: false,
        by_latency: true,
        // At most twice the time of Redis.
        rivals: &[(Kind::Redis(Plain), Some(0.5))],
    },
];
