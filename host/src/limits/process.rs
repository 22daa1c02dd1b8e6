//! Bounds of the process: its threads, its files that are read again, its end.

use std::time::Duration;

/// How long a stopping host waits for clients to take what is theirs. SIGTERM to exit is at most two seconds.
pub const SHUTDOWN_GRACE: Duration = Duration::from_millis(1000);

/// How long it then waits for calls of the administration: long enough to answer one that was about to, while a compiler
/// goes on for seconds.
pub const SHUTDOWN_BLOCKING_GRACE: Duration = Duration::from_millis(200);

/// A configuration file.
pub const CONFIG_FILE_BYTES_MAX: u64 = 1 << 20;

/// How often a standby looks whether the data directory is free: unnoticed by clients, and by an idle machine.
pub const STANDBY_POLL: Duration = Duration::from_millis(100);

/// Threads that serve clients (`threads`): more than one lock can keep busy.
pub const SERVE_THREADS_MAX: usize = 64;

/// Of these by default half of the cores, since journal, policies and other programs want some, and no more than this: every
/// request passes one lock, and a second thread on two cores costs a third of the requests by waiting for it.
pub const SERVE_THREADS_DEFAULT_MAX: usize = 4;
