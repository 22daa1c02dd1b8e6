//! Bounds of log lines.

use std::time::Duration;

/// Log lines that wait for whoever reads stderr, in bytes; as many may be on their way out. At one line of 250 bytes for each
/// request that is a tenth of a second of a busy store.
pub const LOG_QUEUE_BYTES_MAX: usize = 1 << 20;

/// Beside them, what waits of panics and of the reason of an end, in bytes: a panic with its backtrace has some ten thousand.
pub const LOG_LAST_WORDS_BYTES_MAX: usize = 64 << 10;

/// How long an end waits for log lines to be read.
pub const LOG_FLUSH_WAIT: Duration = Duration::from_millis(500);

/// The pause before stderr is tried again, where another process made it one that does not wait.
pub const LOG_RETRY_PAUSE: Duration = Duration::from_millis(10);

/// The id of a request in the log: those of the official clients have 16 bytes.
pub const REQUEST_LINE_ID_BYTES_MAX: usize = 32;

/// The text of its error there.
pub const REQUEST_LINE_ERROR_BYTES_MAX: usize = 256;
