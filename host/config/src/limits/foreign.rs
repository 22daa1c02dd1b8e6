//! Limits of a store behind a foreign broker: the link and presence.

use std::time::Duration;

/// Default of `broker_window`: requests that a foreign broker may have sent without a PUBACK. Twice
/// what fills Mosquitto's own default, and 128 MiB of the longest packets.
pub const BROKER_WINDOW_DEFAULT: u16 = 64;

/// The largest `broker_window`: a gateway has no memory for more of the longest packets.
pub const BROKER_WINDOW_MAX: u16 = 4096;

/// Default of `broker_keep_alive`: a half-open connection is given up after twice this.
pub const BROKER_KEEP_ALIVE_MS_DEFAULT: u64 = 15_000;

/// How long a foreign broker stores the session of an absent store, with the requests that arrive
/// in the meantime. A day covers a reboot and a repair. Requests that carry an expiry end sooner.
pub const BROKER_SESSION_EXPIRY: Duration = Duration::from_secs(86_400);

/// The same if no later run will have the client id, because it is not stored. A lost connection is
/// made again within this time. A session left behind takes requests for no longer.
pub const BROKER_SESSION_EXPIRY_UNKEPT: Duration = Duration::from_secs(300);

/// The time limit for a connection to a foreign broker, from TCP to CONNACK.
pub const BROKER_CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// First and longest pause between attempts to connect to a foreign broker.
pub const BROKER_PAUSES: (Duration, Duration) =
    (Duration::from_millis(100), Duration::from_secs(5));

/// Responses and notifications in flight to a foreign broker, if the broker allows as many: more
/// than fills any loopback.
pub const BROKER_IN_FLIGHT_MAX: u16 = 1024;

/// Responses and notifications without a PUBACK of a foreign broker, above which no further request
/// executes. Requests then wait at the broker, because it gets no PUBACK for them.
pub const BROKER_OUTBOX_HOLD: usize = 16 << 10;

/// The same in bytes: at most a thirty-second of the memory. The notifications of one change share
/// their payload, which counts once.
pub const BROKER_OUTBOX_BYTES_HOLD: usize = 64 << 20;

/// Notifications beyond this are lost: at most a quarter of the memory. With
/// [`BROKER_OUTBOX_OVERHEAD_BYTES`] this is one of 100 bytes for each of 800 000 watches, because a
/// single change may notify all of them. Only two causes reach this limit: keys that expire while
/// the broker is absent or slow, and a single change with hundreds of thousands of watchers.
pub const BROKER_OUTBOX_BYTES_MAX: usize = 512 << 20;

/// What a response or notification costs in addition to its bytes: its place in the ledger and its
/// PUBLISH, rounded up.
pub const BROKER_OUTBOX_OVERHEAD_BYTES: usize = 512;

/// Levels of a response topic: Mosquitto accepts 200, other brokers fewer. Mosquitto closes the
/// connection of a client that publishes to more.
pub const BROKER_TOPIC_LEVELS_MAX: usize = 128;

/// Messages that are passed to the store together. It may return some of them.
pub const BROKER_HELD_CHUNK: usize = 64;

/// How often in a row the broker may report that another connection took over the client id,
/// without a retained mark in between. Beyond it the marks do not work, and the store stops. Stores
/// that read their marks need one or two connections to decide which one stops.
pub const BROKER_TAKEOVERS_MAX: u8 = 3;

/// How long after its PUBACK the store's own mark may take to arrive. Mosquitto sends it before the
/// PUBACK.
pub const BROKER_MARK_WAIT: Duration = Duration::from_secs(3);

/// Messages at QoS 0 that wait for the outbox, in bytes: the broker's Receive Maximum does not
/// limit them. They are log lines about clients, of some hundred bytes each.
pub const BROKER_HELD_BYTES_MAX: usize = 8 << 20;

/// Responses that make the broker close the connection, remembered as hashes: one for each request
/// that can be redelivered.
pub const BROKER_HOPELESS_MAX: usize = BROKER_WINDOW_MAX as usize;

/// What a log line shows of a topic that a client chose.
pub const BROKER_LOG_TOPIC_BYTES_MAX: usize = 256;

/// The shortest time between two log lines that clients can cause at will; lines in between are
/// counted.
pub const BROKER_LOG_PAUSE: Duration = Duration::from_secs(10);

/// How often a stopping store checks whether the broker has taken all output.
pub const BROKER_DRAIN_POLL: Duration = Duration::from_millis(5);

/// The store's client id at a foreign broker: a length that every broker accepts.
pub const BROKER_CLIENT_ID_BYTES_MAX: usize = 256;

/// A file with a password: MQTT carries 65 535 bytes of one.
pub const BROKER_PASSWORD_BYTES_MAX: u64 = 65_535;

/// A line of a broker's connection log. Mosquitto 2.0 truncates at 1000 bytes, and 1.6 may truncate
/// slightly above 500. A truncated line must not be trusted.
pub const PRESENCE_LINE_BYTES_MAX: usize = 500;

/// How long a start waits until the broker reports a client. Mosquitto takes a few milliseconds.
pub const PRESENCE_EVIDENCE_WAIT: Duration = Duration::from_secs(2);

/// Checks for silent clients within one `watch_ttl`: watches live an eighth longer at most.
pub const WATCH_TTL_CHECKS: u32 = 8;

/// The longest time between two such checks. A check holds the store's lock while it walks over all
/// watchers.
pub const WATCH_TTL_CHECK_MAX: Duration = Duration::from_secs(60);

/// From this delay of such a check on, the process counts as paused in between. Load delays a timer
/// less.
pub const WATCH_TTL_CHECK_LATE: Duration = Duration::from_secs(1);
