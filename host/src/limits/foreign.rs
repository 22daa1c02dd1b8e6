//! Bounds of a store behind a foreign broker: the link and presence.

use std::time::Duration;

/// Default bound of requests that a foreign broker may have sent and not seen acknowledged (`broker_window`): twice
/// what fills Mosquitto's own default, and 128 MiB of the longest packets.
pub const BROKER_WINDOW_DEFAULT: u16 = 64;

/// What `broker_window` may be raised to: a gateway has no memory for more of the longest packets.
pub const BROKER_WINDOW_MAX: u16 = 4096;

/// Default of `broker_keep_alive`: a connection that went half open is given up after twice this.
pub const BROKER_KEEP_ALIVE_MS_DEFAULT: u64 = 15_000;

/// How long a foreign broker keeps the store's session, with the requests that come meanwhile, while the store is away:
/// a day covers a reboot and a repair. Requests that carry an expiry end sooner.
pub const BROKER_SESSION_EXPIRY: Duration = Duration::from_secs(86_400);

/// The same where nobody will have the client id again, since it is kept nowhere: a lost connection comes back within this,
/// and what a run leaves behind takes requests for no longer.
pub const BROKER_SESSION_EXPIRY_UNKEPT: Duration = Duration::from_secs(300);

/// How long a connection to a foreign broker may take, from TCP to CONNACK.
pub const BROKER_CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// First and longest pause between attempts to connect to a foreign broker.
pub const BROKER_PAUSES: (Duration, Duration) =
    (Duration::from_millis(100), Duration::from_secs(5));

/// Answers and notifications on their way to a foreign broker, where it allows as many: more than fills any loopback.
pub const BROKER_IN_FLIGHT_MAX: u16 = 1024;

/// Answers and notifications that a foreign broker has not taken, above which no further request runs. Requests wait at
/// the broker then, as it gets no PUBACK for them.
pub const BROKER_OUTBOX_HOLD: usize = 16 << 10;

/// The same in bytes.
pub const BROKER_OUTBOX_BYTES_HOLD: usize = 64 << 20;

/// Notifications beyond this are lost: with [`BROKER_OUTBOX_OVERHEAD_BYTES`] some of 100 bytes for each of 800 000 watches, since
/// a single change may be told to all. Only keys that expire while the broker is away get here.
pub const BROKER_OUTBOX_BYTES_MAX: usize = 512 << 20;

/// What an answer or notification costs beside its bytes: its place in the ledger and its PUBLISH, rounded up.
pub const BROKER_OUTBOX_OVERHEAD_BYTES: usize = 512;

/// Levels of a response topic: Mosquitto takes 200, other brokers fewer, and it closes the connection of a client that
/// publishes to more.
pub const BROKER_TOPIC_LEVELS_MAX: usize = 128;

/// Messages that are looked at before it is looked again whether the outbox is full.
pub const BROKER_HELD_CHUNK: usize = 64;

/// Messages at QoS 0 that wait for the outbox, in bytes: the broker's Receive Maximum does not bound them. They tell of
/// clients that come and go, some hundred bytes each.
pub const BROKER_HELD_BYTES_MAX: usize = 8 << 20;

/// Answers remembered as those that the broker closes the connection for, in hashes: one for each request that can come
/// again.
pub const BROKER_HOPELESS_MAX: usize = BROKER_WINDOW_MAX as usize;

/// What a log line shows of a topic that a client chose.
pub const BROKER_LOG_TOPIC_BYTES_MAX: usize = 256;

/// The shortest between two log lines that clients can bring about at will; what is left out is counted.
pub const BROKER_LOG_PAUSE: Duration = Duration::from_secs(10);

/// How often a stopping store looks whether the broker has taken what is decided.
pub const BROKER_DRAIN_POLL: Duration = Duration::from_millis(5);

/// The store's client id at a foreign broker: what every broker takes.
pub const BROKER_CLIENT_ID_BYTES_MAX: usize = 256;

/// A file with a password: MQTT carries 65 535 bytes of one.
pub const BROKER_PASSWORD_BYTES_MAX: u64 = 65_535;

/// A line of a broker's connection log. Mosquitto 2.0 cuts at 1000 bytes and 1.6 may cut at some more than 500, and
/// what was cut is not to be believed.
pub const PRESENCE_LINE_BYTES_MAX: usize = 500;

/// How long a start waits for the broker to tell of a client. Mosquitto does it in a few milliseconds.
pub const PRESENCE_EVIDENCE_WAIT: Duration = Duration::from_secs(2);

/// How often within `watch_ttl` it is looked who was silent: watches live an eighth longer at most.
pub const WATCH_TTL_CHECKS: u32 = 8;

/// The longest time between these looks. One takes the store's lock for a walk over all who watch.
pub const WATCH_TTL_CHECK_MAX: Duration = Duration::from_secs(60);
