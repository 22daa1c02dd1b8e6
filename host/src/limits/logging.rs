//! Bounds of log lines.

use std::time::Duration;

/// Log lines about refusals of one kind (of what, by whom, to strangers or not) in a second: enough to see who is there, and a flood of refusals is not one of log lines.
pub const AUDIT_LINES_PER_SECOND_MAX: u32 = 10;

/// Log lines that wait for whoever reads stderr, in bytes; as many may be on their way out. At one line of 250 bytes for each
/// request that is a tenth of a second of a busy store.
pub const LOG_QUEUE_BYTES_MAX: usize = 1 << 20;

/// Beside them, what waits of panics and of the reason of an end, in bytes: a panic with its backtrace has some ten thousand.
pub const LOG_LAST_WORDS_BYTES_MAX: usize = 64 << 10;

/// How long an end waits for log lines to be read.
pub const LOG_FLUSH_WAIT: Duration = Duration::from_millis(500);

/// The pause before stderr is tried again, where another process made it one that does not wait.
pub const LOG_RETRY_PAUSE: Duration = Duration::from_millis(10);

/// Of a topic or a key that was refused, what a log line shows.
pub const NO_RULE_SHOWN_BYTES: usize = 128;

/// The id of a request in the log: those of the official clients have 16 bytes.
pub const REQUEST_LINE_ID_BYTES_MAX: usize = 32;

/// The text of its error there.
pub const REQUEST_LINE_ERROR_BYTES_MAX: usize = 256;

/// A client id or user name in such a line, before it is escaped.
pub const AUDIT_NAME_BYTES_MAX: usize = 256;
