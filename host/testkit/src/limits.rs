//! Limits of transcripts.

/// How far the clock of a transcript advances for a notification about an expired key: as long as
/// the tests over sockets wait for a message.
pub const TRANSCRIPT_WAIT_MS_MAX: u64 = 10_000;

/// Log lines of a policy that the report of a transcript holds.
pub const TRANSCRIPT_LOG_LINES_MAX: usize = 10_000;

/// The size of a transcript: far more than a person reads.
pub const TRANSCRIPT_BYTES_MAX: u64 = 16 << 20;
