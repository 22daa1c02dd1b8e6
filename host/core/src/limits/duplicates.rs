//! Limits of the dedup table.

/// Keys, calls or properties that are captured of one request for re-execution. Policies read a
/// few; if one reads more, the answer is stored instead.
pub const CAPTURED_READS_MAX: usize = 64;

/// Captured reads of one request, in bytes. Beyond this the answer is stored instead, which is
/// nearly always smaller.
pub const CAPTURED_BYTES_MAX: u64 = 16 << 10;

/// The default Receive Maximum. Every start remembers this many requests of a session, and only a
/// higher maximum is recorded.
pub const RECEIVE_MAX_REMEMBERED_MIN: u16 = 1024;

/// A page of keys that is captured for re-execution.
pub const CAPTURED_PAGE_BYTES_MAX: usize = 4 << 10;

/// Answers up to this size are stored with the record of their request, to check re-execution.
/// Answers of the published commands that change anything have some ten bytes.
pub const OUTCOME_INLINE_BYTES_MAX: usize = 256;

/// What a remembered request costs apart from its captured reads and its answer: its slot, and its
/// entries in two indexes with their spare capacity.
pub const REMEMBERED_OVERHEAD_BYTES: u64 = 256;

/// The shortest time that a request is remembered: longer than any client waits before a
/// redelivery.
pub const DUPLICATE_WINDOW_MS_MIN: u64 = 60_000;

/// Default of the longest time that a request is remembered (`duplicate_window`).
pub const DUPLICATE_WINDOW_MS_DEFAULT: u64 = 10 * 60_000;

/// Default limit of remembered requests, not counting the last ones of live sessions
/// (`max_duplicates`).
pub const DUPLICATES_MAX_DEFAULT: u64 = 100_000;

/// Remembered requests take at most this fraction of the disk, and the last ones of live sessions
/// as much again. They are in the last snapshot and in the next one, and must leave room for the
/// state itself.
pub const DUPLICATE_DISK_PART: u64 = 64;

/// Default limit of remembered requests in bytes (`max_duplicate_bytes`). The last ones of live
/// sessions may take as much again. The default is at most a thirty-second of the memory.
pub const DUPLICATE_BYTES_MAX_DEFAULT: u64 = 64 << 20;
