//! Bounds of what is read from a data directory and shown, and of transcripts.

/// A value as `history` and `replay` show it; `get --as-of` gives the whole.
pub const VALUE_SHOWN_BYTES_MAX: usize = 4 << 10;

/// Policies that a replay holds ready at once: compiling one again costs less than holding all that ever answered.
pub const REPLAY_POLICIES_MAX: usize = 8;

/// Blocks of a backup on their way from its file into a data directory.
pub const RESTORE_BLOCKS_MAX: usize = 4;

/// How often a checkup looks again at what seems damaged, since a server may just be writing it.
pub const CHECKUP_ATTEMPTS_MAX: u32 = 5;

/// How long it waits before that: a frame is written in far less.
pub const CHECKUP_RETRY_MS: u64 = 50;
