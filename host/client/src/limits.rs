//! Every limit of the client, with its unit in the name and its reason.

use std::time::Duration;

/// Largest packet that is sent or accepted. A store accepts packets of 2 MiB by default. Twice that
/// allows for a larger configuration and bounds the memory that a broker can make the client use.
pub const PACKET_BYTES_MAX: usize = 4 << 20;

/// Concurrent requests. More requests wait within their own timeout. This keeps a store busy over a
/// slow link, and the resend after a reconnect stays a small burst.
pub(crate) const REQUESTS_MAX: usize = 256;

/// Unacknowledged PUBLISH packets in each direction (MQTT 5 section 3.1.2.11.3). Four times the
/// requests, so that packet ids are not reused while an old request may still be unacknowledged.
pub(crate) const IN_FLIGHT_MAX: u16 = 1024;

/// Bytes of events that a watch buffers for a slow reader before it reports a gap.
pub(crate) const WATCH_BYTES_MAX: usize = 16 << 20;

/// Bytes that a watch buffers while held changes are added. The rest is for new changes.
pub(crate) const WATCH_HELD_BYTES_MAX: usize = WATCH_BYTES_MAX / 2;

/// Bytes that a watch buffers at most when it asks for more missed changes. The next page, or one
/// change of the largest packet, then fits [`WATCH_HELD_BYTES_MAX`].
pub(crate) const WATCH_PAGE_ROOM_BYTES_MAX: usize = WATCH_BYTES_MAX / 4;

/// Memory of a buffered event besides its key and value, rounded up.
pub(crate) const WATCH_EVENT_OVERHEAD_BYTES: usize = 256;

/// Times that a watch asks for missed changes again because the held ones did not fit. After that
/// it reports a gap, so that a store with many changes cannot keep it from being registered.
pub(crate) const WATCH_RESTARTS_MAX: usize = 16;

/// Watches that are registered at the same time after a reconnect. More watches wait, so that
/// thousands of them do not delay the requests of callers.
pub(crate) const WATCH_REGISTRATIONS_MAX: usize = 8;

/// Longest text of a fencing token in a request: that of an MQTT string (MQTT 5 section 1.5.4).
pub(crate) const FENCE_TEXT_BYTES_MAX: usize = 65_535;

/// Longest client id. Its hexadecimal form and a key must fit a topic of 65 535 bytes.
pub(crate) const CLIENT_ID_BYTES_MAX: usize = 1024;

/// Longest topic (MQTT 5 section 1.5.4).
pub(crate) const TOPIC_BYTES_MAX: usize = 65_535;

/// Depth of arrays within arrays in a response. Parsing recurses.
pub(crate) const RESP_DEPTH_MAX: usize = 16;

/// Longest error text that is copied from a response.
pub(crate) const ERROR_TEXT_BYTES_MAX: usize = 4096;

/// How far in the future a version may be and still move the client's clock. The store refuses a
/// `__ts` more than 60 s ahead (section 5), so following further would break every SET.
pub(crate) const CLOCK_AHEAD_MS_MAX: u64 = 60_000;

/// Shortest pause between two questions how far the store is.
pub(crate) const WATCH_REFRESH_MIN: Duration = Duration::from_millis(10);

/// Pause before a watch is registered again if no store was subscribed to requests, or if a limit
/// of the broker refused the request. Behind a foreign broker that restarted, the client is often
/// connected before the store.
pub(crate) const WATCH_RETRY_PAUSE: Duration = Duration::from_millis(500);

/// First pause between attempts to reconnect.
pub(crate) const RECONNECT_PAUSE_MIN: Duration = Duration::from_millis(50);
/// Longest pause between attempts to reconnect.
pub(crate) const RECONNECT_PAUSE_MAX: Duration = Duration::from_secs(2);

/// Shortest pause before a held lock is retried without a notification, so that a very short lease
/// does not cause a busy loop.
pub(crate) const LOCK_RETRY_MIN: Duration = Duration::from_millis(100);

/// A lock counts as acquired only if at least a third of its lease remains when the response
/// arrives. With less there is no time to renew it at a store that just took two thirds for a
/// response.
pub(crate) const LOCK_LEASE_LEFT_DIVISOR: u32 = 3;

/// Longest sleep of a wait for the end of a lease. Timers stand still while the machine is
/// suspended, so after a resume the end is noticed within this time.
pub(crate) const LEASE_CHECK_PAUSE: Duration = Duration::from_secs(1);

/// Longest duration, a hundred years. Adding more to an instant could overflow.
pub(crate) const DURATION_MAX: Duration = Duration::from_secs(100 * 365 * 86_400);

/// The text of a trace context: 55 bytes in the present version, and some more in later ones.
pub(crate) const TRACEPARENT_BYTES_MIN: usize = 55;
pub(crate) const TRACEPARENT_BYTES_MAX: usize = 256;
