//! Pieces of snapshots, and what a recovery repeats.

/// Ends of keys that a start behind a foreign broker tells of again, since nobody knows whether the run before did: more
/// than expire while the broker takes a message.
pub const EXPIRIES_RENOTIFIED_MAX: usize = 1024;

/// How long ago they may have been: whoever waited for longer, such as for a lock, has looked by itself.
pub const EXPIRIES_RENOTIFIED_MS_MAX: u64 = 10 * 60_000;

/// A piece of a snapshot: the store's lock is held while one is made, so that requests wait for some tens of
/// microseconds at most.
pub const SNAPSHOT_PIECE_BYTES: usize = 64 << 10;

/// Entries of one piece, for small ones.
pub const SNAPSHOT_PIECE_ENTRIES: usize = 512;
