//! Deadlines of keys, and clock steps.

/// Forward steps of the system clock, in milliseconds and added up, that postpone the deadlines of
/// keys. Below this, keys may expire that much early, which is less than what NTP corrects by a
/// step (128). Above it, each expiring key is rewritten.
pub const CLOCK_STEP_MS_MIN: u64 = 100;

/// Entries whose deadlines one record postpones, and their bytes: a part of what one record may
/// hold.
pub const POSTPONED_KEYS_PER_RECORD_MAX: usize = 10_000;
/// See [`POSTPONED_KEYS_PER_RECORD_MAX`].
pub const POSTPONED_BYTES_PER_RECORD_MAX: u64 = 4 << 20;
