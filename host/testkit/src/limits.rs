//! Bounds of transcripts.

/// How far a transcript's clock runs on by itself to the end of a key that somebody is to be told of: as long as
/// the tests over sockets wait for a message.
pub const TRANSCRIPT_WAIT_MS_MAX: u64 = 10_000;

/// A transcript: far more than a person reads.
pub const TRANSCRIPT_BYTES_MAX: u64 = 16 << 20;
