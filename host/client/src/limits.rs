//! Every bound of the client, with its unit in the name and its reason.

use std::time::Duration;

/// The largest packet that is sent or accepted. A store takes packets of 2 MiB by default; twice
/// that leaves room for one configured larger, and still bounds what a broker can make us hold.
pub const PACKET_BYTES_MAX: usize = 4 << 20;

/// Requests under way at once; more wait their turn inside their own timeout. Enough to keep a
/// store busy over a slow link, few enough that a resend after a reconnect is a small burst.
pub(crate) const REQUESTS_MAX: usize = 256;

/// Unacknowledged PUBLISH packets in each direction (MQTT 5 section 3.1.2.11.3). Four times the
/// requests, so that packet ids are not reused while an old request may still be unacknowledged.
pub(crate) const IN_FLIGHT_MAX: u16 = 1024;

/// Events a watch holds for a reader that falls behind, before it reports a gap.
pub(crate) const WATCH_EVENTS_MAX: usize = 1024;

/// Bytes of values a watch holds for a reader that falls behind, before it reports a gap.
pub(crate) const WATCH_BYTES_MAX: usize = 16 << 20;

/// Longest text of a version: an MQTT string holds 65 535 bytes, and printing pads by up to 20.
pub(crate) const VERSION_TEXT_BYTES_MAX: usize = 65_000;

/// Longest client id: its hexadecimal form and a key must fit a topic of 65 535 bytes.
pub(crate) const CLIENT_ID_BYTES_MAX: usize = 1024;

/// Longest topic (MQTT 5 section 1.5.4).
pub(crate) const TOPIC_BYTES_MAX: usize = 65_535;

/// Elements of a RESP array: one page of SCAN. A packet of [`PACKET_BYTES_MAX`] cannot hold more
/// keys than this (`$1\r\nk\r\n` is 7 bytes), so it never refuses a page that could be read.
pub(crate) const ARRAY_ELEMENTS_MAX: usize = PACKET_BYTES_MAX / 6;

/// Longest error text that is taken over from an answer.
pub(crate) const ERROR_TEXT_BYTES_MAX: usize = 4096;

/// How far a version may be ahead of this machine's clock and still move the client's clock. The
/// store refuses a `__ts` more than 60 s ahead (section 5), so following further would break every SET.
pub(crate) const CLOCK_AHEAD_MS_MAX: u64 = 60_000;

/// First and longest pause between attempts to reconnect.
pub(crate) const RECONNECT_PAUSE_MIN: Duration = Duration::from_millis(50);
/// See [`RECONNECT_PAUSE_MIN`].
pub(crate) const RECONNECT_PAUSE_MAX: Duration = Duration::from_secs(2);

/// Shortest pause before a held lock is tried again without a notification: a very short lease
/// must not become a busy loop.
pub(crate) const LOCK_RETRY_MIN: Duration = Duration::from_millis(100);

/// A lock counts as acquired only if at least a third of its lease remains when the answer arrives.
/// With less there is no time for a renewal by a store that just took two thirds for an answer.
pub(crate) const LOCK_LEASE_LEFT_DIVISOR: u32 = 3;

/// Longest time that is counted, a hundred years: adding more to an instant could overflow.
pub(crate) const DURATION_MAX: Duration = Duration::from_secs(100 * 365 * 86_400);
