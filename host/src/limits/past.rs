//! Bounds of what is kept on disk and looked at later: history, snapshots, replays, backups, transcripts.

/// Default bound of the age of history (`history_retention`): long enough to look into what happened overnight.
pub const HISTORY_MS_DEFAULT: u64 = 86_400_000;

/// Default bound of the bytes of history (`history_bytes`): a quarter of a small gateway's data partition.
pub const HISTORY_BYTES_DEFAULT: u64 = 256 << 20;

/// How far the system clock may be behind the last recorded time at a start without anybody being asked.
pub const CLOCK_BEHIND_MS_MAX: u64 = 60_000;

/// The system clock this far behind the store's time makes `/readyz` say so, in milliseconds. NTP
/// keeps clocks within some ten of them and steps if they differ by more than 128, so it was
/// stepped back, and versions run ahead of it.
pub const CLOCK_UNHEALTHY_MS_MIN: u64 = 1_000;

/// Arguments of a request that are shown to a person.
pub const REQUEST_WORDS_SHOWN_MAX: usize = 16;

/// A value as `history` and `replay` show it; `get --as-of` gives the whole.
pub const VALUE_SHOWN_BYTES_MAX: usize = 4 << 10;

/// Names of commands in the summary of a replay. Clients choose them; what is beyond counts as others.
pub const REPLAY_COMMANDS_MAX: usize = 64;

/// Policies that a replay holds ready at once: compiling one again costs less than holding all that ever answered.
pub const REPLAY_POLICIES_MAX: usize = 8;

/// Blocks of a backup on their way from its file into a data directory.
pub const RESTORE_BLOCKS_MAX: usize = 4;

/// How often a checkup looks again at what seems damaged, since a server may just be writing it.
pub const CHECKUP_ATTEMPTS_MAX: u32 = 5;

/// How long it waits before that: a frame is written in far less.
pub const CHECKUP_RETRY_MS: u64 = 50;

/// How far a transcript's clock runs on by itself to the end of a key that somebody is to be told of: as long as
/// the tests over sockets wait for a message.
pub const TRANSCRIPT_WAIT_MS_MAX: u64 = 10_000;

/// A transcript: far more than a person reads.
pub const TRANSCRIPT_BYTES_MAX: u64 = 16 << 20;
