//! Limits of the load of `statehouse bench`.

use std::time::Duration;

/// Connections that send requests, and also the maximum of watchers: the number that a store
/// accepts by default.
pub const LOAD_CONNECTIONS_MAX: usize = 10_000;

/// Requests in flight over all connections. Their slots take some hundred megabytes.
pub const LOAD_IN_FLIGHT_MAX: usize = 1_000_000;

/// Keys: more than the largest store has.
pub const LOAD_KEYS_MAX: u64 = 100_000_000;

/// Requests per second: more than loopback carries.
pub const LOAD_RATE_MAX: u64 = 10_000_000;

/// Client threads.
pub const LOAD_THREADS_MAX: usize = 64;

/// The maximum default of client threads. The default is half of the cores, because the server
/// needs some, and this many threads keep the largest server busy.
pub const LOAD_THREADS_DEFAULT_MAX: usize = 8;

/// The longest measurement.
pub const LOAD_DURATION_MAX: Duration = Duration::from_secs(86_400);

/// The shortest measurement, which gives enough answers for a p99.
pub const LOAD_DURATION_MIN: Duration = Duration::from_millis(100);

/// Runs in a sweep.
pub const LOAD_SWEEP_MAX: usize = 64;

/// Bytes of encoded requests that wait for the socket of one connection: as much as one write
/// takes. Above this, no more requests are encoded.
pub const LOAD_OUTPUT_BYTES_HIGH: usize = 256 << 10;

/// The minimum size of the buffer for one read of a socket: a batch of short answers.
pub const LOAD_READ_BYTES: usize = 8 << 10;

/// The maximum size of a packet without its value.
pub const LOAD_ENVELOPE_BYTES: usize = 64 << 10;

/// The Keep Alive of connections, in seconds. Only watchers are ever silent.
pub const LOAD_KEEP_ALIVE_S: u16 = 60;

/// How often a connection checks whether an answer is overdue, the run is over, or a ping is due.
pub const LOAD_TICK: Duration = Duration::from_millis(100);

/// The delay before the first request, so that all connections are ready by then.
pub const LOAD_START: Duration = Duration::from_millis(20);

/// The shortest latency that the histogram resolves, in nanoseconds: a hundredth of a round trip
/// through a socket.
pub const LOAD_LATENCY_NS_MIN: u64 = 100;

/// The longest latency of the histogram, in nanoseconds. Longer ones count as this.
pub const LOAD_LATENCY_NS_MAX: u64 = 600_000_000_000;

/// Kinds of errors that are counted separately.
pub const LOAD_ERROR_KINDS_MAX: usize = 16;
