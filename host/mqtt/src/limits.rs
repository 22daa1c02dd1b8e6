//! The limits of the broker. Each has its unit in the name and the reason for its value in its
//! comment.
//!
//! Nothing that a client sends may use memory or time beyond these limits.

use std::{ops::Range, time::Duration};

/// The configurable limits of one broker. The defaults fit a gateway with some hundred clients.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Sockets at once, including those that have not sent their CONNECT. Further ones are closed
    /// at accept.
    pub connections_max: usize,
    /// Sessions at once, connected or not. A new session above the limit evicts the oldest
    /// disconnected and empty one. Without such a session it is refused with CONNACK 0x97.
    pub sessions_max: usize,
    /// Time from accept until the CONNECT is complete and the access control has decided. Slow
    /// links need a second; no client needs ten.
    pub connect_timeout: Duration,
    /// CONNECTs at once that the access control has not decided; further ones are refused with
    /// 0x89. Each holds its packet in memory, and each password check takes some megabytes and a
    /// processor for a while. A client that retries a second later waits no longer than in a longer
    /// queue.
    pub admissions_max: usize,
    /// Size of a CONNECT packet: client id, credentials and a will. Applies before the client is
    /// known.
    pub connect_bytes_max: usize,
    /// Bytes of incomplete CONNECTs of all clients together; a connection that exceeds it is
    /// closed. Larger than a fleet with tokens sends at the same moment. Small CONNECTs are not
    /// counted.
    pub connect_bytes_total_max: usize,
    /// Size of any other packet, sent in CONNACK. Values of 1 MiB with their envelope fit. Must not
    /// exceed 268 435 455, the largest possible packet: some clients refuse to read more.
    pub packet_bytes_max: usize,
    /// Bytes of incomplete packets of all clients together. Small packets are not counted. If a
    /// client would exceed it, clients without progress for 30 seconds are disconnected with 0x97,
    /// or else this client.
    pub packet_bytes_total_max: usize,
    /// Length of a client identifier. MQTT requires support for 23 bytes; some clients use whole
    /// paths.
    pub client_id_bytes_max: usize,
    /// QoS 1 and 2 PUBLISHes of one client that the broker has not acknowledged, sent in CONNACK as
    /// Receive Maximum. Further ones of a client of MQTT 3.1.1 wait.
    pub receive_max: u16,
    /// QoS 1 and 2 messages to one client that it has not acknowledged: the lesser of this and its
    /// Receive Maximum.
    pub in_flight_max: u16,
    /// Topic aliases of one client, sent in CONNACK. Each holds a topic name for as long as the
    /// connection.
    pub topic_alias_max: u16,
    /// Levels of a topic name or filter. The router recurses once per level.
    pub topic_levels_max: usize,
    /// Subscriptions of one session. Further ones get 0x97 in the SUBACK.
    pub subscriptions_per_session_max: usize,
    /// Bytes that the subscriptions of one session use in the router: a thousand ordinary filters,
    /// or a hundred long ones. Further ones get 0x97.
    pub subscription_bytes_per_session_max: usize,
    /// Bytes that the subscriptions of all sessions use in the router, since they outlive
    /// connections. The first 4 KiB of each client for its own topics are not counted.
    pub subscription_bytes_total_max: usize,
    /// Shared subscriptions of one session; further ones get 0x97. A session may receive one copy
    /// of a message for each of them, but only one for all its other subscriptions. So this bounds
    /// how often a client can have a message multiplied.
    pub shared_subscriptions_per_session_max: usize,
    /// Bytes of wills, packet ids of unfinished QoS 2 exchanges and topic aliases of all clients.
    /// All but the aliases outlive connections.
    ///
    /// Above it, or above the owner's quota, a CONNECT with a will is refused with 0x97, and a QoS
    /// 2 PUBLISH gets PUBREC 0x97. A client that sets a further alias is disconnected with 0x97.
    pub state_bytes_total_max: usize,
    /// Bytes of the topic aliases of one connection: the longest topic name, and all other aliases
    /// with names of two kilobytes. A client that exceeds it is disconnected with 0x97.
    pub alias_bytes_max: usize,
    /// Filters in one SUBSCRIBE or UNSUBSCRIBE: bounds the memory of a decoded packet. Clients that
    /// restore their subscriptions send hundreds in one packet.
    pub filters_per_packet_max: usize,
    /// Bytes of messages that wait for one client or for its acknowledgement. A connected client
    /// above it is disconnected with 0x97; an offline session drops the newest message.
    pub queue_bytes_max: usize,
    /// Bytes of waiting messages of all sessions. Encoded output of sockets is not included.
    /// Disconnected clients together may use half of it.
    pub queue_bytes_total_max: usize,
    /// Bytes that a connected client may always queue, regardless of other clients: room for
    /// answers and acknowledgements on their way. Within it, a client that keeps up is not
    /// disconnected because others do not. A larger message needs room in the total.
    pub queue_bytes_reserve: usize,
    /// Bytes of encoded output of one connection above which messages stay in the queue and the
    /// reader stops reading. Large enough that one write always fills a socket buffer.
    pub output_bytes_high: usize,
    /// Bytes of encoded output of all connections, without connections that have at most 8 KiB.
    ///
    /// Above it, messages larger than that stay in the queues. A connection with more output is
    /// closed if it takes none of it for two seconds. One packet may exceed the limit.
    pub output_bytes_total_max: usize,
    /// A write without any progress for this long ends the connection.
    pub write_stall: Duration,
    /// Time to send the last packets (DISCONNECT) when the broker closes a connection, and then
    /// again for the client to close.
    pub close_timeout: Duration,
    /// Retained messages.
    pub retained_max: usize,
    /// Bytes of retained messages. Must stay below `queue_bytes_max`, so that a new subscriber to
    /// `#` can get all of them without being disconnected for a full queue.
    pub retained_bytes_max: usize,
    /// Session Expiry Interval in seconds; a client that requests more (or no expiry) gets this in
    /// CONNACK. A client of MQTT 3.1.1 without a clean session gets it too.
    pub session_expiry_max_s: u32,
    /// Keep Alive in seconds; a client that requests more, or none, gets this in CONNACK (Server
    /// Keep Alive). Detects clients that vanished without closing their socket. 0: no limit. Not
    /// for clients of MQTT 3.1.1.
    pub keep_alive_max_s: u16,
    /// PUBLISHes of one client per second, and as many in one burst; further ones are refused with
    /// 0x97. 0: no limit, since only the embedder knows how much its clients publish.
    pub publishes_per_second_max: u32,
    /// PUBLISHes of all clients together per second, not counting those refused for another reason.
    /// Without a limit for each client one client may use up all of it. 0: no limit.
    pub publishes_per_second_total_max: u32,
    /// Packets of one connection handled before other connections get the broker's lock.
    pub packets_per_turn_max: usize,
    /// Maximum bytes requested from the socket in one read; see `READ_BYTES_MIN`.
    pub read_bytes: usize,
}

impl Limits {
    /// These limits, but none on the state that a restart restores.
    pub(crate) fn without_limits_of_state(&self) -> Self {
        Self {
            sessions_max: usize::MAX,
            session_expiry_max_s: u32::MAX,
            topic_levels_max: usize::MAX,
            subscriptions_per_session_max: usize::MAX,
            subscription_bytes_per_session_max: usize::MAX,
            subscription_bytes_total_max: usize::MAX,
            shared_subscriptions_per_session_max: usize::MAX,
            state_bytes_total_max: usize::MAX,
            queue_bytes_max: usize::MAX,
            queue_bytes_total_max: usize::MAX,
            retained_max: usize::MAX,
            retained_bytes_max: usize::MAX,
            ..self.clone()
        }
    }

    /// Bytes of waiting packets that a paused connection keeps. Above it nothing is read except the
    /// rest of one packet.
    pub(crate) fn paused_bytes_max(&self) -> usize {
        (self.packet_bytes_total_max / PARTS_PER_PAUSED).clamp(PAUSED_BYTES_MIN, PAUSED_BYTES_MAX)
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections_max: 10_000,
            sessions_max: 20_000,
            connect_timeout: Duration::from_secs(10),
            admissions_max: 256,
            connect_bytes_max: 64 << 10,
            connect_bytes_total_max: 8 << 20,
            packet_bytes_max: 2 << 20,
            packet_bytes_total_max: 512 << 20,
            client_id_bytes_max: 1024,
            receive_max: 1024,
            in_flight_max: 1024,
            topic_alias_max: 32,
            topic_levels_max: 64,
            subscriptions_per_session_max: 1024,
            subscription_bytes_per_session_max: 8 << 20,
            subscription_bytes_total_max: 256 << 20,
            shared_subscriptions_per_session_max: 64,
            state_bytes_total_max: 256 << 20,
            alias_bytes_max: 128 << 10,
            filters_per_packet_max: 1024,
            queue_bytes_max: 16 << 20,
            queue_bytes_total_max: 512 << 20,
            queue_bytes_reserve: 64 << 10,
            output_bytes_high: 256 << 10,
            output_bytes_total_max: 128 << 20,
            write_stall: Duration::from_secs(20),
            close_timeout: Duration::from_secs(2),
            retained_max: 16_384,
            retained_bytes_max: 8 << 20,
            session_expiry_max_s: 7 * 24 * 3600,
            keep_alive_max_s: 1200,
            publishes_per_second_max: 0,
            publishes_per_second_total_max: 0,
            packets_per_turn_max: 256,
            read_bytes: 16 << 10,
        }
    }
}

/// Work of one connection before other connections get their turn, in units of roughly a tenth of a
/// microsecond: a quarter of a millisecond. A full turn of ordinary messages to one subscriber each
/// stays below it. One packet may exceed it once.
pub(crate) const WORK_PER_TURN_MAX: u64 = 2500;

/// How long a connection has at least for its CONNECT if others need its place: some round trips
/// over a slow link.
pub(crate) const ARRIVAL_TIME_MIN: Duration = Duration::from_secs(1);

/// How often the wall clock is read for credentials that expire. Timers stand still while the machine
/// is suspended.
pub(crate) const EXPIRY_CHECK_INTERVAL: Duration = Duration::from_secs(30);

/// Sessions examined while the lock is held once, at some tens of nanoseconds each.
pub(crate) const SESSIONS_PER_HOLD_MAX: usize = 1024;

/// How long a thread that walks all sessions releases the lock between two holds. Without a pause
/// other threads would rarely get it.
pub(crate) const PAUSE_BETWEEN_HOLDS: Duration = Duration::from_micros(250);

/// The cost of the operations of a turn, in the units of [`WORK_PER_TURN_MAX`]. Estimates are
/// enough: they only decide where a turn ends.
pub(crate) mod work {
    /// A packet of any kind: decoding it and finding its session.
    pub(crate) const PACKET: u64 = 1;

    /// A PUBLISH to route, in addition to the nodes and sessions that it visits.
    pub(crate) const PUBLISH: u64 = 2;

    /// A node of the router's tree.
    pub(crate) const NODE: u64 = 1;

    /// A member of a shared subscription that is considered for a message.
    pub(crate) const GROUP_MEMBER: u64 = 1;

    /// A filter that is subscribed to, unsubscribed from, or checked again: rules are evaluated and
    /// tables change.
    pub(crate) const SUBSCRIPTION: u64 = 20;

    /// A queued message that is checked against changed rules.
    pub(crate) const QUEUED_EXAMINED: u64 = 1;

    /// A retained topic that a search examines.
    pub(crate) const RETAINED_EXAMINED: u64 = 4;

    /// A message that is added to the output or the queue of a session; long payloads are copied.
    pub(crate) fn delivery(payload_bytes: usize) -> u64 {
        5 + payload_bytes as u64 / 1024
    }
}

/// Filters of one SUBSCRIBE or UNSUBSCRIBE that are handled without a look at the work of the turn:
/// bounds the time that one packet holds the broker's lock.
pub(crate) const FILTERS_PER_STEP: usize = 64;

/// Members of a shared subscription tried for one message, separately among the connected and the
/// disconnected ones. Otherwise a group of thousands with full queues would be searched for each
/// message. The next message tries the next members.
pub(crate) const GROUP_MEMBERS_ASKED_MAX: usize = 64;

/// The cost of storing a message in addition to its bytes: the structures around it, rounded up. It
/// bounds a flood of empty messages as well.
pub(crate) const MESSAGE_OVERHEAD_BYTES: usize = 256;

/// One owner, a user or an address, may hold at most this many times the free memory of a kind. A
/// single owner can use three quarters; each of several owners can use less.
pub(crate) const SHARE_OF_FREE: usize = 3;

/// Sessions that every owner may have while there is room at all.
pub(crate) const SESSIONS_FLOOR: usize = 16;

/// Bytes of subscriptions that every owner may hold while there is room at all: some hundred
/// ordinary ones.
pub(crate) const SUBSCRIPTION_BYTES_FLOOR: usize = 64 << 10;

/// Retained messages that every owner may have while there is room at all, and their bytes.
pub(crate) const RETAINED_FLOOR: usize = 64;
pub(crate) const RETAINED_BYTES_FLOOR: usize = 64 << 10;

/// Topics that begin with this and a client id belong to that client: responses go there (Azure IoT
/// Operations).
pub(crate) const OWN_TOPICS: &[u8] = b"clients/";

/// Bytes of subscriptions of a client to its own topics that do not count in the total: one filter
/// with a wildcard, or eight without. So every client that may connect can receive answers.
pub(crate) const OWN_SUBSCRIPTION_BYTES: usize = 4 << 10;

/// Eviction candidates examined to find a session of the same owner: some microseconds.
pub(crate) const EVICTION_CANDIDATES_MAX: usize = 64;

/// Bytes of wills, QoS 2 packet ids and topic aliases that every owner may hold while there is room
/// at all: one will of the maximum size of a CONNECT.
pub(crate) const STATE_BYTES_FLOOR: usize = 128 << 10;

/// The cost of a topic alias in addition to its name: its entry in the table and an allocation,
/// rounded up.
pub(crate) const ALIAS_OVERHEAD_BYTES: usize = 128;

/// Entries that an empty queue or table of one client may keep allocated. Without this limit each
/// client could pin the memory of its longest queue.
pub(crate) const SPARE_ENTRIES_MAX: usize = 64;

/// The maximum Remaining Length (section 1.5.5: four bytes of seven bits), so no packet is much
/// larger.
pub(crate) const PACKET_BYTES_MAX: u32 = 268_435_455;

/// The size of the first read, and of reads from a connection that sends little: some requests of
/// ordinary size. A silent connection keeps a buffer of this size.
pub(crate) const READ_BYTES_MIN: usize = 1 << 10;

/// An empty buffer larger than this is returned to the allocator.
pub(crate) const IDLE_BUFFER_BYTES_MAX: usize = 32 << 10;

/// Bytes of encoded output of one connection that do not count in the total: some tens of ordinary
/// messages. Ten thousand connections can hold eighty megabytes of it.
pub(crate) const OUTPUT_BYTES_FREE: usize = 8 << 10;

/// How often a connection checks whether the total has room for a large message again.
pub(crate) const OUTPUT_TOTAL_RETRY_INTERVAL: Duration = Duration::from_millis(50);

/// How long a write may make no progress while the total is used up and this connection holds a
/// part of it.
pub(crate) const WRITE_STALL_OVER_TOTAL: Duration = Duration::from_secs(2);

/// How often a write without progress checks whether it has waited too long.
pub(crate) const WRITE_STALL_CHECK_INTERVAL: Duration = Duration::from_millis(500);

/// Time to read what has arrived from a client after a write to it failed. A reset makes the socket
/// readable at once; a client that does not read its output may be silent.
pub(crate) const READ_AFTER_FAILURE_MAX: Duration = Duration::from_millis(100);

/// A large read buffer is copied into a small one when at most one part in this many is in use. So
/// copies add at most this fraction of the received bytes.
pub(crate) const BUFFER_PARTS_IN_USE: usize = 8;

/// Received bytes of an incomplete packet above which its buffer counts as large: more than an
/// ordinary request. Ten thousand connections can hold some forty megabytes below it.
pub(crate) const ARRIVING_BYTES_FREE: usize = 4 << 10;

/// A further PUBLISH is handled while the client's queue uses at most this part of
/// `queue_bytes_max`. The rest is for the answers to requests that were handed over together, and
/// for messages of other clients.
pub(crate) const QUEUE_PARTS_FOR_ANSWERS: usize = 2;

/// The least that [`Limits::paused_bytes_max`] may be: more than a thousand small requests with the
/// acknowledgements between them.
const PAUSED_BYTES_MIN: usize = 1 << 20;

/// The most that it may be: several of the largest packets.
const PAUSED_BYTES_MAX: usize = 8 << 20;

/// The part of `packet_bytes_total_max` that it is between these.
const PARTS_PER_PAUSED: usize = 16;

/// Received bytes of an incomplete packet that count as a sign of life. A client can send no
/// PINGREQ within a large packet.
pub(crate) const SIGN_OF_LIFE_BYTES: usize = 1 << 10;

/// How long a connection must make no progress with its large packet before it is ended for others:
/// longer than the broker itself may not read from it ([`BRAKE_TIME_MAX`], and the wait for a
/// lease).
pub(crate) const STALLED_PACKET_TIME: Duration = Duration::from_secs(30);

/// How long a connection whose keep alive has passed waits for a packet that is in its socket.
pub(crate) const LATE_PACKET_WAIT: Duration = Duration::from_millis(10);

/// Maximum wait of a paused connection before it checks whether it can continue: the room that it
/// waits for may depend on other connections or the service.
pub(crate) const PAUSE_CHECK_INTERVAL: Duration = Duration::from_millis(20);

/// The pause of a client that waits for a delayed acknowledgement: Linux delays by 40 ms to 200 ms.
pub(crate) const DELAYED_ACK: Range<Duration> =
    Duration::from_millis(30)..Duration::from_millis(400);

/// Reads that are acknowledged at once after the first such pause. A pause for another reason costs
/// as many system calls of some tenths of a microsecond.
pub(crate) const QUICK_ACKS_MIN: u32 = 64;

/// The same after many pauses: a client with Nagle's algorithm pauses once in this many requests.
pub(crate) const QUICK_ACKS_MAX: u32 = 1 << 16;

/// Maximum length of a Reason String: it is for people, and fits any sensible Maximum Packet Size.
pub(crate) const REASON_TEXT_BYTES_MAX: usize = 256;

/// The size of a session in an image in addition to its subscriptions, messages and will, rounded
/// up.
pub(crate) const SESSION_OVERHEAD_BYTES: usize = 256;

/// How far ahead of time repeated PUBLISHes may use a rate limit. A client repeats no more than its
/// Receive Maximum, which it usually filled in the seconds before.
pub(crate) const REPETITIONS_AHEAD_MAX: Duration = Duration::from_secs(10);

/// The least number of rate limits of clients at which those that are not needed any more are
/// removed.
pub(crate) const RATE_LIMITS_CLEARED_AT_MIN: usize = 1024;

/// The cost of a subscription in addition to its filter: its entries in the session and in the
/// router, rounded up.
pub(crate) const SUBSCRIPTION_OVERHEAD_BYTES: usize = 256;

/// The cost of a node of the router's tree: a hash table with one entry, and its level, rounded up.
pub(crate) const ROUTER_NODE_BYTES: usize = 768;

/// The cost of a shared subscription's group in addition to its filter: its entry in the router and
/// its list of members, rounded up.
pub(crate) const GROUP_BYTES: usize = 512;

/// How often a queue that is full or of a disconnected client, or the full table of retained
/// messages, is searched for expired messages. A flood of messages must not search it for each.
pub(crate) const EXPIRED_SEARCH_PERIOD: Duration = Duration::from_secs(1);

/// One above the largest Subscription Identifier (section 3.8.2.1.2).
pub(crate) const SUBSCRIPTION_ID_OVER: u32 = PACKET_BYTES_MAX + 1;

/// Changes are appended once they have this many bytes, even while the lock is held. So a record is
/// at most about this plus the changes of one packet: messages up to `queue_bytes_max`, and some
/// ten bytes for each receiving session.
pub(crate) const BATCH_BYTES: usize = 1 << 20;

/// Minimum delay of wills after a start: clients could not reconnect while the broker was down, and
/// official clients reconnect within a few seconds.
pub(crate) const WILL_GRACE: Duration = Duration::from_secs(10);

/// Maximum pause of a connection while the log is behind. Longer than a snapshot of a small store
/// takes on a slow card, and shorter than clients wait for their acknowledgements.
pub(crate) const BRAKE_TIME_MAX: Duration = Duration::from_secs(10);

/// Maximum wait of a connection for the lease of its host. Hosts change within seconds, so a longer
/// wait means that the cluster's log is unreachable. Clients close silent connections anyway.
pub(crate) const LEASE_WAIT_MAX: Duration = Duration::from_secs(10);

/// First interval at which a paused connection checks the log: short, since a fast disk catches up
/// within milliseconds.
pub(crate) const BRAKE_PAUSE_MIN: Duration = Duration::from_millis(2);

/// Last interval: long, so that thousands of paused connections take no time from those that read.
pub(crate) const BRAKE_PAUSE_MAX: Duration = Duration::from_millis(200);

/// The time between two log lines about connections that cannot be accepted.
pub(crate) const ACCEPT_LOG_PAUSE: Duration = Duration::from_secs(60);

/// How often the wall clock is read. A gateway without a battery sees its clock step after each
/// start; recorded times are wrong for at most this long.
pub(crate) const WALL_CLOCK_LOOK: Duration = Duration::from_secs(1);

/// Sockets that one thread writes to before it wakes their tasks instead. The answers of one flush
/// are sent at once, but one change with ten thousand watchers is shared between all threads.
pub(crate) const DIRECT_WRITES_MAX: usize = 64;

/// How long a connection with answers lets other connections have their turns before all answers
/// are written. Longer than handling the requests of some ten sockets, and far shorter than a
/// network round trip.
pub(crate) const WRITE_BATCH_TIME_MAX: Duration = Duration::from_micros(200);

/// After this many write batches without another ready connection, only one in this many waits
/// again. A single client gains nothing from the wait, which costs some microseconds. Small enough
/// to detect a rising load within a millisecond.
pub(crate) const SINGLE_OUTPUT_BATCHES: u32 = 16;
