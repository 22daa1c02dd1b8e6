//! Limits of metrics and of the list of slow requests.

use std::time::Duration;

/// Commands with time series of their own. Policies name their commands, and each has a histogram
/// for each outcome: further commands are `other`.
pub const METRIC_COMMANDS_MAX: usize = 32;

/// Policies that slow requests name, and whose commands have time series, in one run: more than are
/// loaded at once.
pub const METRIC_POLICIES_MAX: usize = 256;

/// Slow requests that are kept: enough to see a pattern, in some hundred KiB.
pub const SLOW_REQUESTS_MAX: usize = 256;

/// Bytes of a key in the list of slow requests. Each waiting response holds as much.
pub const SLOW_KEY_BYTES_MAX: usize = 40;

/// From which time on a request is slow (`slow_threshold`): a flush of a slow disk is not.
pub const SLOW_THRESHOLD_DEFAULT: Duration = Duration::from_millis(100);

/// Keys that the search for hot keys tracks at once: every key with more than one of so many
/// requests is among them. A sample costs a scan of as many numbers.
pub const HOT_KEYS_TRACKED_MAX: usize = 128;

/// Bytes of a tracked key. All of them together take some ten KiB.
pub const HOT_KEY_BYTES_MAX: usize = 256;

/// Hot keys in an overview.
pub const HOT_KEYS_SHOWN_MAX: usize = 10;

/// The share of the requests from which a key is hot, in thousandths. The search finds every key
/// with this share.
pub const HOT_KEY_PER_MILLE_MIN: u64 = 10;

/// Requests per second that the search for hot keys looks at. A sample takes at most a microsecond,
/// so at any rate of requests the search takes a thousandth of a processor.
pub const HOT_KEY_SAMPLES_PER_SECOND: u64 = 1_000;
