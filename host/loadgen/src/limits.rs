//! Bounds of the load that `statehouse bench` makes.

use std::time::Duration;

/// Connections of a load (`statehouse bench`), and as many of its watchers: what a store takes by default.
pub const LOAD_CONNECTIONS_MAX: usize = 10_000;

/// Requests of a load in flight over all its connections: what is remembered of each makes some hundred megabytes.
pub const LOAD_IN_FLIGHT_MAX: usize = 1_000_000;

/// Keys of a load: those of the largest store and some.
pub const LOAD_KEYS_MAX: u64 = 100_000_000;

/// Requests per second of a load: more than loopback carries.
pub const LOAD_RATE_MAX: u64 = 10_000_000;

/// Threads of a load.
pub const LOAD_THREADS_MAX: usize = 64;

/// Threads of a load by itself: half of the cores, since the server needs some, and no more than it takes to keep the
/// largest server busy.
pub const LOAD_THREADS_DEFAULT_MAX: usize = 8;

/// The longest load.
pub const LOAD_DURATION_MAX: Duration = Duration::from_secs(86_400);

/// The shortest: enough answers for a p99.
pub const LOAD_DURATION_MIN: Duration = Duration::from_millis(100);

/// Runs of a sweep.
pub const LOAD_SWEEP_MAX: usize = 64;

/// Encoded requests that wait for the socket of one connection, in bytes: what one write takes. Above, no further ones are
/// encoded.
pub const LOAD_OUTPUT_BYTES_HIGH: usize = 256 << 10;

/// Bytes asked of a socket in one read, at least: a batch of short answers.
pub const LOAD_READ_BYTES: usize = 8 << 10;

/// What a packet holds besides a value, at most.
pub const LOAD_ENVELOPE_BYTES: usize = 64 << 10;

/// Keep alive of a load's connections in seconds: only watchers are ever silent.
pub const LOAD_KEEP_ALIVE_S: u16 = 60;

/// How often a connection looks whether an answer is overdue, the run is over, or a sign of life is due.
pub const LOAD_TICK: Duration = Duration::from_millis(100);

/// How far ahead the first request is planned, so that all connections have begun by then.
pub const LOAD_START: Duration = Duration::from_millis(20);

/// The shortest latency that is told from none, in nanoseconds: a hundredth of what a socket takes.
pub const LOAD_LATENCY_NS_MIN: u64 = 100;

/// The longest, in nanoseconds: what took longer counts as this.
pub const LOAD_LATENCY_NS_MAX: u64 = 600_000_000_000;

/// Kinds of errors that are told apart.
pub const LOAD_ERROR_KINDS_MAX: usize = 16;
