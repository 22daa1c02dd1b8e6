//! Pieces of snapshots, notifications that a start sends again, and versions that it skips.

/// How far ahead of the wall clock, and of what is durable, a version may be that is answered
/// before its record is durable. A start after a crash skips this much time, so the clocks of most
/// clients should be within it, and the next versions should not be much ahead.
pub const UNRECORDED_AHEAD_MS_MAX: u64 = 1000;

/// Expired keys whose watchers a start behind a foreign broker notifies again, because the earlier
/// run may not have done so. More than expire while the broker takes a message.
pub const EXPIRIES_RENOTIFIED_MAX: usize = 1024;

/// Older expiries are not notified again: a client that waits longer than this, such as for a lock,
/// polls.
pub const EXPIRIES_RENOTIFIED_MS_MAX: u64 = 10 * 60_000;

/// A piece of a snapshot, in bytes. The store's lock is held while a piece is made, so requests
/// wait for some tens of microseconds at most.
pub const SNAPSHOT_PIECE_BYTES: usize = 64 << 10;

/// Entries of one piece, if they are small.
pub const SNAPSHOT_PIECE_ENTRIES: usize = 512;
