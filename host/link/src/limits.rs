//! Every limit of a link, with its unit in the name and its reason. Values that differ between
//! users are in [`Options`](crate::Options).

use std::time::Duration;

/// Shortest keep alive. rumqttc panics below 5 s.
pub const KEEP_ALIVE_MIN: Duration = Duration::from_secs(5);

/// Longest keep alive. MQTT encodes seconds in 16 bits.
pub const KEEP_ALIVE_MAX: Duration = Duration::from_secs(65_535);

/// Addresses of a name that are asked before an attempt to connect. A cluster has a few hosts.
pub(crate) const ADDRESSES_MAX: usize = 4;

/// How long an address may take to accept a TCP connection if the name has others: at most this,
/// and half of the time limit of an attempt. Otherwise a silent address would leave no time for one
/// that accepts.
pub(crate) const PROBE_TIME: Duration = Duration::from_secs(1);

/// If one address of a name refuses connections and another is silent, every so many attempts one
/// waits for the silent one, which may only be slow.
pub(crate) const REFUSED_ATTEMPTS: usize = 4;

/// How long the resolver may take to list the addresses of a name, before rumqttc asks it too.
pub(crate) const RESOLVE_TIME: Duration = Duration::from_secs(1);

/// How long the owner may take to say where the next connection goes. It reads a few files, but its
/// thread may be missing: if the system starts none, tokio queues the work.
pub(crate) const PLACE_TIME: Duration = Duration::from_secs(2);

/// How long a link that must end waits until its DISCONNECT is sent.
pub const CLOSE_WAIT: Duration = Duration::from_secs(1);

/// Pause after the broker refused the client. Attempts with a wrong password count against all
/// clients of the same address.
pub(crate) const REFUSED_PAUSE: Duration = Duration::from_secs(5);

/// Pause after another connection took over the session, if the owner takes it back: the other side
/// can subscribe and leave its mark meanwhile.
pub(crate) const TAKEOVER_PAUSE: Duration = Duration::from_secs(3);

/// A connection counts as stable after this time since the broker answered its SUBSCRIBE, or after
/// the PUBACK of a message that [proves](crate::Message::proves_connection) it. Only then the next
/// loss is followed by the shortest pause: a broker may close each connection after the SUBACK.
pub const STABLE_AFTER: Duration = Duration::from_secs(5);

/// How long no payload is sent that is as long as one that the broker refused as too large. The
/// operator may raise the limit of the broker, and a further attempt costs one connection.
pub(crate) const REFUSED_SIZE_TIME: Duration = Duration::from_secs(60);

/// Places in rumqttc's channel in addition to those of messages and PUBACKs: for the SUBSCRIBE, the
/// UNSUBSCRIBEs, the DISCONNECT, and some messages that are not stored. If the channel is full all
/// the same, stored messages follow when a place is free.
pub(crate) const CHANNEL_SPARE: usize = 8;

/// Removed messages in the queue of unsent ones, in addition to twice the number of messages. Above
/// it they are taken out, so that this costs little per message.
pub(crate) const UNSENT_REMOVED_MAX: usize = 64;

/// Largest file with certificates. The roots of a whole system take a quarter of it.
pub(crate) const PEM_FILE_BYTES_MAX: u64 = 1 << 20;

/// Connections that a message may have ended before it is sent alone. A restart of the broker ends
/// one.
pub(crate) const SUSPECT_AFTER: u8 = 3;

/// Connections that ended without a reason before a message is removed. During the last ones it was
/// sent alone. The number is high so that a broker that keeps crashing does not cost messages too
/// soon. A DISCONNECT with a reason that blames a message counts at once.
pub(crate) const GIVE_UP_AFTER: u8 = 8;
