//! Which work is compared with whom, and what is aimed at.

use crate::contender::Who;

/// A row: the same work for all.
pub(crate) struct Row {
    /// What `--only` looks for a word in.
    pub(crate) name: &'static str,
    /// Connections, requests in flight on each, GETs of a hundred.
    pub(crate) work: (usize, u16, u8),
    /// Whether each write is on disk before its answer.
    pub(crate) durable: bool,
    /// Judged by its p50 and not by its throughput.
    pub(crate) by_latency: bool,
    /// Rivals, each with the ratio that is aimed at, where there is one.
    pub(crate) rivals: &'static [(Who, Option<f64>)],
}

/// GET and SET.
pub(crate) const PLAIN: bool = false;
/// Functions with the meaning of the store's SET.
pub(crate) const FUNCTIONS: bool = true;

/// All of them.
pub(crate) const ROWS: &[Row] = &[
    Row {
        name: "memory GET 64 B, 50 × 1",
        work: (50, 1, 100),
        durable: false,
        by_latency: false,
        rivals: &[
            (Who::RedisBenchmark { functions: PLAIN }, Some(0.9)),
            (Who::Redis { functions: PLAIN }, None),
            (
                Who::Redis {
                    functions: FUNCTIONS,
                },
                None,
            ),
            (Who::Mosquitto { nodelay: false }, Some(4.0)),
            (Who::Mosquitto { nodelay: true }, None),
        ],
    },
    Row {
        name: "memory GET 64 B, 50 × 16",
        work: (50, 16, 100),
        durable: false,
        by_latency: false,
        rivals: &[
            (
                Who::RedisBenchmark {
                    functions: FUNCTIONS,
                },
                Some(1.0),
            ),
            (
                Who::Redis {
                    functions: FUNCTIONS,
                },
                None,
            ),
            (Who::Redis { functions: PLAIN }, None),
            (Who::Mosquitto { nodelay: false }, Some(6.0)),
            (Who::Mosquitto { nodelay: true }, None),
        ],
    },
    Row {
        name: "memory SET 64 B, 50 × 1",
        work: (50, 1, 0),
        durable: false,
        by_latency: false,
        rivals: &[
            (Who::RedisBenchmark { functions: PLAIN }, None),
            (
                Who::Redis {
                    functions: FUNCTIONS,
                },
                None,
            ),
            (Who::Mosquitto { nodelay: false }, Some(4.0)),
            (Who::Mosquitto { nodelay: true }, None),
        ],
    },
    Row {
        name: "memory SET 64 B, 50 × 16",
        work: (50, 16, 0),
        durable: false,
        by_latency: false,
        rivals: &[
            (
                Who::RedisBenchmark {
                    functions: FUNCTIONS,
                },
                Some(1.0),
            ),
            (
                Who::Redis {
                    functions: FUNCTIONS,
                },
                None,
            ),
            (Who::Redis { functions: PLAIN }, None),
            (Who::Mosquitto { nodelay: false }, Some(6.0)),
            (Who::Mosquitto { nodelay: true }, None),
        ],
    },
    Row {
        name: "durable SET 64 B, 50 × 1",
        work: (50, 1, 0),
        durable: true,
        by_latency: false,
        rivals: &[
            (Who::RedisBenchmark { functions: PLAIN }, Some(0.9)),
            (Who::Redis { functions: PLAIN }, Some(0.9)),
            (
                Who::Redis {
                    functions: FUNCTIONS,
                },
                None,
            ),
            (Who::JetStream, Some(5.0)),
            (Who::Etcd, Some(5.0)),
        ],
    },
    Row {
        name: "durable SET 64 B, 50 × 16",
        work: (50, 16, 0),
        durable: true,
        by_latency: false,
        rivals: &[
            (
                Who::RedisBenchmark {
                    functions: FUNCTIONS,
                },
                Some(0.8),
            ),
            (
                Who::Redis {
                    functions: FUNCTIONS,
                },
                Some(0.8),
            ),
            (Who::Redis { functions: PLAIN }, None),
            (Who::JetStream, None),
        ],
    },
    Row {
        name: "memory unloaded round trip, GET 64 B, 1 × 1",
        work: (1, 1, 100),
        durable: false,
        by_latency: true,
        // At most twice its time.
        rivals: &[(Who::Redis { functions: PLAIN }, Some(0.5))],
    },
];
