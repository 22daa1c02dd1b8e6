//! Limits of the process: its threads, its configuration file, its exit.

use std::time::Duration;

/// How long a stopping host waits for clients to receive their output. SIGTERM to exit takes at
/// most two seconds, with [`SHUTDOWN_DRAIN`] before.
pub const SHUTDOWN_GRACE: Duration = Duration::from_millis(1000);

/// How long a stopping host waits until the log has released what was decided: some flushes of a
/// slow disk.
pub const SHUTDOWN_DRAIN: Duration = Duration::from_millis(500);

/// How often it looks.
pub const DRAIN_POLL: Duration = Duration::from_millis(2);

/// How long a stopping host then waits for threads of its runtime that block, in the lookup of a
/// name or a write to the history. A name server that does not answer would take seconds.
pub const SHUTDOWN_BLOCKING_GRACE: Duration = Duration::from_millis(200);

/// How long a stopping process waits until the service manager has read that it stops. A manager
/// that reads takes microseconds.
pub const NOTIFY_FLUSH_WAIT: Duration = Duration::from_millis(100);

/// A configuration file.
pub const CONFIG_FILE_BYTES_MAX: u64 = 1 << 20;

/// The least that the default of `max_value_bytes` may become, if it follows lower limits of packets
/// or queues: half of the smallest `max_packet_bytes`, of which the other half is the key.
pub const VALUE_BYTES_DERIVED_MIN: u64 = 512;

/// Files that the process may open besides the sockets of clients: the log and its snapshots,
/// policies, listeners, seats of the admin API, and sockets that are accepted only to be closed.
pub const OPEN_FILES_RESERVED: u64 = 256;

/// How often a standby checks whether the data directory is free: short for clients, and cheap for
/// an idle machine.
pub const STANDBY_POLL: Duration = Duration::from_millis(100);

/// The largest `threads`, which serve clients: more than one lock can keep busy.
pub const SERVE_THREADS_MAX: usize = 64;

/// Default of `threads`: half of the cores, because the log, policies and other programs need
/// some, and at most this many. Every request takes one lock. A second thread on two cores would
/// cost a third of the requests, because threads wait for that lock.
pub const SERVE_THREADS_DEFAULT_MAX: usize = 4;
