//! Limits of watched files.

use std::time::Duration;

/// How often watched files are checked for changes. A second is soon enough to revoke a right, and
/// a check costs one system call for each file.
pub(crate) const RELOAD_POLL_INTERVAL: Duration = Duration::from_secs(1);

/// How often a problem that a file does not change, such as the expiry of a certificate, is logged.
pub(crate) const WARNING_INTERVAL: Duration = Duration::from_secs(86_400);

/// Minimum age of a file's last write before the file is read again without a SIGHUP. A younger
/// file may be half written, if a program writes it in place, line by line. With the interval above
/// a change takes effect within two seconds.
pub(crate) const RELOAD_SETTLED: Duration = Duration::from_secs(1);

/// Minimum age of a file's last write from which its stamps identify its content: two writes within
/// one tick of the kernel's clock, at most 10 ms, leave the same time of modification. A start
/// waits so long for a younger file.
pub(crate) const STAMP_SETTLED: Duration = Duration::from_millis(50);

/// Consecutive polls that may find a file too young, before it is read anyway: it may be written
/// continually, or its file system may report no usable times.
pub(crate) const RELOAD_PUT_OFF_MAX: u64 = 10;
