//! Bounds of what is remembered of requests that may come again.

/// Keys, calls or properties that are recorded of one request so that it can run again. Policies look at a
/// few; the answer to one that looks at more is kept instead.
pub const CAPTURED_READS_MAX: usize = 64;

/// What a request saw, in bytes: beyond it its answer is kept instead, which is nearly always smaller.
pub const CAPTURED_BYTES_MAX: u64 = 16 << 10;

/// A start remembers what a client with this Receive Maximum can have on its way, whatever is recorded: that is what one is told by
/// default, and only more is recorded.
pub const RECEIVE_MAX_REMEMBERED_MIN: u16 = 1024;

/// A page of keys that is recorded so that its request can run again.
pub const CAPTURED_PAGE_BYTES_MAX: usize = 4 << 10;

/// Answers up to this are kept with the record of their request, as a check of running it again. Those of
/// the published commands that change anything have at most some ten bytes.
pub const OUTCOME_INLINE_BYTES_MAX: usize = 256;

/// What a remembered request costs besides what it saw and was answered: itself and its places in two indexes, with the
/// room that these keep to grow.
pub const REMEMBERED_OVERHEAD_BYTES: u64 = 256;

/// The shortest that a request is remembered: longer than any client waits before it sends again.
pub const DUPLICATE_WINDOW_MS_MIN: u64 = 60_000;

/// Default bound of how long a request is remembered (`duplicate_window`).
pub const DUPLICATE_WINDOW_MS_DEFAULT: u64 = 10 * 60_000;

/// Default bound of remembered requests beyond the last ones of live sessions (`max_duplicates`).
pub const DUPLICATES_MAX_DEFAULT: u64 = 100_000;

/// Remembered requests take no more than this part of the disk, and the last ones of live sessions as much again: they are
/// in the last snapshot and in the next one, and must leave room for the state itself.
pub const DUPLICATE_DISK_PART: u64 = 64;

/// Default bound of remembered requests in bytes (`max_duplicate_bytes`). The last ones of live sessions may
/// take as much again. By default never more than a thirty-second of the memory either.
pub const DUPLICATE_BYTES_MAX_DEFAULT: u64 = 64 << 20;
