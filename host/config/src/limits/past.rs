//! Limits of history and of the system clock.

/// Default of `history_retention`: long enough to look into what happened overnight.
pub const HISTORY_MS_DEFAULT: u64 = 86_400_000;

/// Default of `history_bytes`: a quarter of a small gateway's data partition.
pub const HISTORY_BYTES_DEFAULT: u64 = 256 << 20;

/// How far the system clock may be behind the last recorded time at a start without
/// `--accept-clock`.
pub const CLOCK_BEHIND_MS_MAX: u64 = 60_000;

/// The system clock this far behind the store's time makes `/readyz` say so, in milliseconds. NTP
/// keeps clocks within some ten of them and steps if they differ by more than 128, so it was
/// stepped back, and versions run ahead of it.
pub const CLOCK_UNHEALTHY_MS_MIN: u64 = 1_000;
