//! Limits of log lines.

use std::time::Duration;

/// Log lines that wait for the reader of stderr, in bytes; as many again may be in the middle of a
/// write. With one line of 250 bytes for each request, this is a tenth of a second of a busy store.
pub const LOG_QUEUE_BYTES_MAX: usize = 1 << 20;

/// Extra bytes of the queue for panics and for the reason of an exit: a panic with its backtrace
/// has some ten thousand.
pub const LOG_LAST_WORDS_BYTES_MAX: usize = 64 << 10;

/// How long an exit waits until log lines are written.
pub const LOG_FLUSH_WAIT: Duration = Duration::from_millis(500);

/// The pause before a retry if another process made stderr non-blocking.
pub const LOG_RETRY_PAUSE: Duration = Duration::from_millis(10);

/// The id of a request in the log: the official clients' ids have 16 bytes.
pub const REQUEST_LINE_ID_BYTES_MAX: usize = 32;

/// The error text of a request in the log.
pub const REQUEST_LINE_ERROR_BYTES_MAX: usize = 256;

/// Lines a minute about requests that clients build wrongly. There is one for each client and
/// mistake, so this many are enough to see what is wrong with a fleet.
pub const CLIENT_ERROR_LINES_PER_MINUTE_MAX: usize = 32;

/// Lines of the audit log that are kept in memory: as many refusals and as many acts of operators.
pub const AUDIT_LINES_KEPT_MAX: usize = 256;

/// Bytes of such a line: a reason, and two names of the longest form that the log shows.
pub const AUDIT_LINE_BYTES_MAX: usize = 2 << 10;
