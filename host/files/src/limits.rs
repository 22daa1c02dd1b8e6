//! Bounds of watched files.

use std::time::Duration;

/// How often it is looked whether files of certificates, users, rules and settings have changed: soon enough for whoever takes a right
/// away, and a few calls of the system for each.
pub(crate) const RELOAD_POLL_INTERVAL: Duration = Duration::from_secs(1);

/// How long nobody may have written to a file before it is read again. Whoever writes it in place may be half way; and two
/// writes within one tick of the kernel's clock, 10 ms at most, leave the same time.
pub(crate) const RELOAD_SETTLED: Duration = Duration::from_millis(50);

/// How often in a row a file may be found just written to before it is read nevertheless: somebody writes all the time, or the
/// file system tells no times.
pub(crate) const RELOAD_PUT_OFF_MAX: u64 = 10;
