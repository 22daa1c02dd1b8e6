//! Limits of the offline commands.

/// The longest part of a value that `history` and `replay` show. `get --as-of` prints all of it.
pub const VALUE_SHOWN_BYTES_MAX: usize = 4 << 10;

/// Compiled policies that a replay holds at once. To compile one again costs less than to hold all
/// that were ever active.
pub const REPLAY_POLICIES_MAX: usize = 8;

/// How often a checkup reads files again that seem damaged, because a server may be writing them.
pub const CHECKUP_ATTEMPTS_MAX: u32 = 5;

/// How long a checkup waits before it reads again. Writing a frame takes far less.
pub const CHECKUP_RETRY_MS: u64 = 50;

/// How often a replay looks for the oldest record, because a server may remove it meanwhile.
pub const REPLAY_ATTEMPTS_MAX: u64 = 8;
