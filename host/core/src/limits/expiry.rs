//! Deadlines of keys, and clock steps.

/// Forward steps of the system clock, in milliseconds and added up, that postpone the deadlines of
/// keys. Below this, keys may expire that much early, which is less than what NTP corrects by a
/// step (128). Above it, the new deadline of each expiring key is recorded.
pub const CLOCK_STEP_MS_MIN: u64 = 100;

/// Keys whose deadlines one record postpones, and their bytes: a part of what one record may hold.
pub const POSTPONED_KEYS_PER_RECORD_MAX: usize = 10_000;
/// See [`POSTPONED_KEYS_PER_RECORD_MAX`].
pub const POSTPONED_BYTES_PER_RECORD_MAX: usize = 4 << 20;

/// The bytes of a new deadline in a record, without the key: the deadline (10), the length of the
/// key (5), whether it is hidden, and its part of the record itself.
pub const NEW_DEADLINE_BYTES_MAX: u64 = 20;
