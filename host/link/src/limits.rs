//! Every bound of a link, with its unit in the name and its reason. What its users differ in is among the options.

use std::time::Duration;

/// Shortest keep alive: rumqttc panics below 5 s.
pub const KEEP_ALIVE_MIN: Duration = Duration::from_secs(5);

/// Longest keep alive: MQTT counts seconds in 16 bits.
pub const KEEP_ALIVE_MAX: Duration = Duration::from_secs(65_535);

/// How long a link that was asked to end waits for its DISCONNECT to leave.
pub const CLOSE_WAIT: Duration = Duration::from_secs(1);

/// Places in rumqttc's channel besides those of messages and of PUBACKs: for the SUBSCRIBE, the DISCONNECT, and some
/// messages that nobody keeps. Where it is full nevertheless, what is kept follows when a place is free.
pub(crate) const CHANNEL_SPARE: usize = 8;

/// Files with certificates: the roots of a whole system have a quarter of it.
pub(crate) const PEM_FILE_BYTES_MAX: u64 = 1 << 20;

/// Connections that a message may have ended, before it is sent alone: a broker that restarts ends one.
pub(crate) const SUSPECT_AFTER: u8 = 3;

/// Connections that ended without a word of the broker, the last ones with nothing else in flight, before a message is
/// given up: a broker that cannot keep running should not cost messages so soon. One that says DISCONNECT ends the doubt
/// at once.
pub(crate) const GIVE_UP_AFTER: u8 = 8;
