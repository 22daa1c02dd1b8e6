//! Limits of traces. Clients choose which requests are traced, so every stage is limited.

use std::time::Duration;

/// Requests and notifications whose spans wait for the collector. Each has some 300 bytes, at most
/// 1 KiB. Further ones are dropped and counted.
pub const TRACE_QUEUE_MAX: usize = 4_096;

/// Requests and notifications in one message to the collector: some 500 KiB in protobuf.
pub const TRACE_BATCH_MAX: usize = 512;

/// The pause before each message to the collector. With [`TRACE_BATCH_MAX`] it limits the rate to
/// some 2000 requests per second, so that the encoding of spans never takes a tenth of a core.
pub const TRACE_BATCH_PAUSE: Duration = Duration::from_millis(250);

/// Notifications of one request that have spans of their own: a key may have a million watchers.
pub const TRACED_NOTIFICATIONS_MAX: usize = 16;

/// Bytes of a client id or a name of a command or policy in a span.
pub const TRACE_TEXT_BYTES_MAX: usize = 256;

/// How long the collector may take for one message, with the connection and repetitions.
pub const TRACE_EXPORT_TIMEOUT: Duration = Duration::from_secs(10);

/// How long the body of an answer may take after its head.
pub const TRACE_ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// The body of the collector's answer, which only says how many spans it refused.
pub const TRACE_ANSWER_BYTES_MAX: usize = 64 << 10;

/// The file with HTTP headers for the collector: tokens have at most some KiB.
pub const TRACE_HEADERS_BYTES_MAX: u64 = 64 << 10;

/// The pause between two log lines about a collector that takes no spans.
pub const TRACE_WARNING_PAUSE: Duration = Duration::from_secs(60);

/// How long a stopping store waits for the collector to take the last spans.
pub const TRACE_STOP_WAIT: Duration = Duration::from_secs(2);

/// The share of requests without a trace context that are traced by default.
pub const TRACE_SAMPLE_DEFAULT: f64 = 0.01;
