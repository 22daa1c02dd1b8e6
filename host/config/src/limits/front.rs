//! Limits of the front of a cluster host: client streams that are passed on to the leader, and the
//! links between hosts.

use std::time::Duration;

/// Longest name of a host in bytes: a DNS label, so that a host name fits. The replicated log has
/// the same limit.
pub const CLUSTER_HOST_NAME_BYTES_MAX: usize = 63;

/// Handshakes of other hosts in progress at the cluster port. Beyond this limit the address with
/// most of them loses its oldest. Eight hosts fit that each use [`CLUSTER_CONNECTING_MAX`].
pub const CLUSTER_PREFACES_MAX: usize = 512;

/// The time limit for such a handshake at the cluster port: some round trips.
pub const CLUSTER_PREFACE_TIMEOUT: Duration = Duration::from_secs(5);

/// Connections that this host opens to the leader at once. With one millisecond for each, ten
/// thousand waiting clients are passed on in a fraction of a second.
pub const CLUSTER_CONNECTING_MAX: usize = 64;

/// The time limit for a connection to the leader, from TCP to the leader's answer. A .NET client
/// gives up after two seconds, and then its stream is useless.
pub const CLUSTER_CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// How long a client waits for a leader before its connection is closed. A takeover takes some four
/// seconds. A client that waits is spared the pause before its next attempt.
pub const CLUSTER_HOLD: Duration = Duration::from_secs(10);

/// How often a waiting client is checked for having disconnected. Each check costs microseconds,
/// and there may be ten thousand clients.
pub const CLUSTER_HOLD_CHECK: Duration = Duration::from_secs(1);

/// Unread bytes of a client that has closed its connection, among which a DISCONNECT is looked for.
/// Systems receive about as much before a program reads.
pub const CLUSTER_BURST_BYTES_MAX: usize = 64 << 10;

/// The pause after a failed connection to the leader, for all clients together. Without it, ten
/// thousand waiting clients would connect in a loop.
pub const CLUSTER_RETRY: Duration = Duration::from_millis(200);

/// How long a follower does not ask for a connection for all clients again after the leader refused
/// it: the leader may have served too many, or an earlier program may run there.
pub const CLUSTER_STREAMS_RETRY: Duration = Duration::from_secs(60);

/// Bytes that one read of a passed-on stream takes. Only a thread has such a buffer; a stream has
/// one of at most this size while its receiver is slow.
pub const CLUSTER_SPLICE_BYTES: usize = 16 << 10;

/// Bytes of a passed-on stream that may be sent before the other host has read them. A host holds
/// at most this much for a client that reads nothing. With half a millisecond between the hosts, one
/// client can get 64 MB/s.
pub const CLUSTER_WINDOW_BYTES: usize = 32 << 10;

/// Bytes for another host that wait for the socket. Beyond this limit streams wait.
pub const CLUSTER_OUT_BYTES_MAX: usize = 256 << 10;

/// How long the other direction of a passed-on stream may continue after one has ended, so that the
/// last packets arrive. MQTT has no half-closed connections.
pub const CLUSTER_SPLICE_LINGER: Duration = Duration::from_secs(2);

/// How long a client or the leader may take none of the bytes that wait for it: as long as the
/// broker waits for a client.
pub const CLUSTER_WRITE_STALL: Duration = Duration::from_secs(20);

/// How long a TLS or WebSocket handshake of a client that waited for a leader keeps its turn. Half
/// as many as the limit of handshakes have a turn at once, since all such clients together would
/// exceed that limit.
pub const CLUSTER_HANDSHAKE_TURN: Duration = Duration::from_secs(2);

/// How long the leader may leave bytes of a passed-on stream unacknowledged, or leave its receive
/// buffer full. A leader that cannot reach the consensus engine reads nothing, and closes its
/// connections after ten seconds, so this must be longer. A leader that died is usually replaced
/// sooner, which ends the stream too.
pub const CLUSTER_UNACKNOWLEDGED_MAX: Duration = Duration::from_secs(12);

/// When the system probes an idle connection between two hosts, how often, and how many probes may
/// stay unanswered: a machine that lost its power is detected within 12 seconds. All probes must
/// fit [`CLUSTER_UNACKNOWLEDGED_MAX`], since Linux ends the connection after that time even if only
/// one probe was lost.
pub const CLUSTER_KEEPALIVE: (Duration, Duration, u32) =
    (Duration::from_secs(4), Duration::from_secs(2), 3);

/// How often the leader sends a byte over a link.
pub const CLUSTER_LINK_BEAT: Duration = Duration::from_millis(300);

/// A link that is silent for this long is broken: three beats.
pub const CLUSTER_LINK_SILENCE: Duration = Duration::from_millis(900);

/// The pause before a broken link is opened again. Each failure reports a suspicion, which costs a
/// write in the consensus engine.
pub const CLUSTER_LINK_RETRY: Duration = Duration::from_millis(300);

/// How long a handover waits for the link of a follower, since a new leader has none yet.
pub const CLUSTER_LINK_WAIT: Duration = Duration::from_secs(2);

/// Links that the leader serves: far more than a cluster has hosts. A link of a host that lost its
/// power counts until the system detects that.
pub const CLUSTER_LINKS_MAX: usize = 64;
