//! Bounds of the process: its threads, its files that are read again, its end.

use std::time::Duration;

/// How often it is looked whether files of certificates, users, rules and settings have changed: soon enough for whoever takes a right
/// away, and a few calls of the system for each.
pub const RELOAD_POLL_INTERVAL: Duration = Duration::from_secs(1);

/// How long nobody may have written to a file before it is read again. Whoever writes it in place may be half way; and two
/// writes within one tick of the kernel's clock, 10 ms at most, leave the same time.
pub const RELOAD_SETTLED: Duration = Duration::from_millis(50);

/// How often in a row a file may be found just written to before it is read nevertheless: somebody writes all the time, or the
/// file system tells no times.
pub const RELOAD_PUT_OFF_MAX: u64 = 10;

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
