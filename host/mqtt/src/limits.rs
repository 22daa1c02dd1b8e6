//! Every bound of the broker, with its unit in the name and the reason for its value.
//!
//! Nothing that a client sends can take memory or time beyond these.

use std::{ops::Range, time::Duration};

/// The bounds of one broker. The defaults fit a gateway with some hundred clients; an embedder may set others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Sockets at once, those that have not sent their CONNECT included. One more is closed at accept.
    pub connections_max: usize,
    /// Sessions at once, connected or not. A new one over it takes the place of the oldest one that is absent and empty;
    /// without such a session it is refused with CONNACK 0x97.
    pub sessions_max: usize,
    /// From accept to a whole CONNECT packet and what the access control says of it. Slow links need a second; nobody
    /// needs ten.
    pub connect_timeout: Duration,
    /// CONNECTs at once of which the access control has not decided yet; one more is refused with 0x89. Each holds its
    /// packet in memory, and each checked password some megabytes and a processor for a while: who comes back a second
    /// later waits no longer than in a longer queue.
    pub admissions_max: usize,
    /// Length of a CONNECT packet: client id, credentials and a will. Applies before we know anything about the peer.
    pub connect_bytes_max: usize,
    /// CONNECTs of all peers together of which some bytes have come, in bytes: more large ones than a fleet with tokens sends in
    /// the same moment. Small ones are not counted. One more is closed.
    pub connect_bytes_total_max: usize,
    /// Length of any other packet, told in CONNACK. Values of 1 MiB with their envelope fit. Never above
    /// 268 435 455, which no packet can have and some clients refuse to read.
    pub packet_bytes_max: usize,
    /// Packets of all clients together of which some bytes have come, in bytes. Small ones are not counted. A client that
    /// would need more is disconnected with 0x97.
    pub packet_bytes_total_max: usize,
    /// Length of a client identifier. MQTT asks for 23; some clients put whole paths into it.
    pub client_id_bytes_max: usize,
    /// QoS 1 and 2 PUBLISHes of one client without our answer, told in CONNACK as Receive Maximum.
    pub receive_max: u16,
    /// QoS 1 and 2 messages to one client without its answer: the lesser of this and its Receive Maximum.
    pub in_flight_max: u16,
    /// Topic aliases of one client, told in CONNACK. Each holds a topic name for as long as the connection.
    pub topic_alias_max: u16,
    /// Levels of a topic name or filter. The router recurses once per level.
    pub topic_levels_max: usize,
    /// Subscriptions of one session. One more is answered 0x97 in the SUBACK.
    pub subscriptions_per_session_max: usize,
    /// What the subscriptions of one session may cost the router, in bytes: a thousand ordinary filters, or a hundred
    /// long ones. One more is answered 0x97.
    pub subscription_bytes_per_session_max: usize,
    /// The same over all sessions, since they last without a connection. Not counted are the first 4 KiB of each client for
    /// topics of its own.
    pub subscription_bytes_total_max: usize,
    /// Shared subscriptions of one session. Each may bring it a copy of its own of one message, where all its others
    /// together bring one, so that this is by how much a client can have a message multiplied. One more is answered 0x97.
    pub shared_subscriptions_per_session_max: usize,
    /// Wills, packet ids of unfinished QoS 2 exchanges and topic aliases of all clients, in bytes: they last without a
    /// connection, but for the aliases. Beyond it, or beyond an owner's share, a CONNECT with a will is refused with 0x97, a
    /// QoS 2 PUBLISH with PUBREC 0x97, and a client that sets one more alias is disconnected with 0x97.
    pub state_bytes_total_max: usize,
    /// Topic aliases of one connection, in bytes: the longest topic name, and all other aliases with names of two kilobytes.
    /// One more disconnects with 0x97.
    pub alias_bytes_max: usize,
    /// Filters in one SUBSCRIBE or UNSUBSCRIBE: bounds the time that one packet holds the broker.
    pub filters_per_packet_max: usize,
    /// Messages that wait for one client or for its acknowledgement, in bytes. A connected client over it is
    /// disconnected with 0x97, an offline session drops the newest.
    pub queue_bytes_max: usize,
    /// The same over all sessions. What is already encoded for a socket comes on top. Absent clients together may use half
    /// of it.
    pub queue_bytes_total_max: usize,
    /// What a connected client may always have waiting, whatever others hold: room for answers and acknowledgements
    /// on their way, so that a client that keeps up is not cut off because others do not.
    pub queue_bytes_reserve: usize,
    /// Encoded output of one connection above which messages stay in the queue and the reader stops reading.
    /// Large enough that a socket buffer is always filled by one write.
    pub output_bytes_high: usize,
    /// Encoded output of all connections, in bytes, but for connections with at most 8 KiB of it. Over it messages of more than
    /// that stay in the queues, and a connection with more output that takes none of it for two seconds is closed. One packet
    /// may exceed it.
    pub output_bytes_total_max: usize,
    /// A write without any progress for this long ends the connection.
    pub write_stall: Duration,
    /// For the last packets (DISCONNECT) of a connection that the broker closes, and then for the peer to close.
    pub close_timeout: Duration,
    /// Retained messages.
    pub retained_max: usize,
    /// Retained messages in bytes. Stays below `queue_bytes_max`, so that a new subscriber to `#` can be handed
    /// all of them without being cut off for its full queue.
    pub retained_bytes_max: usize,
    /// Session Expiry Interval in seconds; a client that asks for more (or for ever) is told this in CONNACK.
    pub session_expiry_max_s: u32,
    /// Will Delay Interval in seconds; more is cut to this. It may not outlive the session anyway.
    pub will_delay_max_s: u32,
    /// Keep Alive in seconds; a client that asks for more, or for none, is told this in CONNACK (Server Keep
    /// Alive). Frees the place of a peer that vanished without closing its socket. 0: no bound.
    pub keep_alive_max_s: u16,
    /// PUBLISHes that one client may send in a second, and as many at once; one more is refused with 0x97. 0: no bound, since
    /// only the embedder knows what its clients have to say.
    pub publishes_per_second_max: u32,
    /// The same of all clients together, of what is not refused for another reason. Without a bound for each client the loudest
    /// may take all. 0: no bound.
    pub publishes_per_second_total_max: u32,
    /// Packets of one connection handled before others get their turn at the broker's lock.
    pub packets_per_turn_max: usize,
    /// Bytes asked of the socket in one read, at most; see `READ_BYTES_MIN`.
    pub read_bytes: usize,
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
            filters_per_packet_max: 64,
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
            will_delay_max_s: 24 * 3600,
            keep_alive_max_s: 1200,
            publishes_per_second_max: 0,
            publishes_per_second_total_max: 0,
            packets_per_turn_max: 256,
            read_bytes: 16 << 10,
        }
    }
}

/// Work of one connection before other connections get their turn, in units of roughly a tenth of a microsecond: a quarter
/// of a millisecond. A full turn of ordinary messages to one subscriber each stays below it. One packet may exceed it once.
pub(crate) const WORK_PER_TURN_MAX: u64 = 2500;

/// Sessions that are looked at in one hold of the lock, where each takes some tens of nanoseconds.
pub(crate) const SESSIONS_PER_HOLD_MAX: usize = 1024;

/// How long a thread that works through all sessions leaves the lock to others after each hold: a lock that is taken again at
/// once would rarely be theirs.
pub(crate) const PAUSE_BETWEEN_HOLDS: Duration = Duration::from_micros(250);

/// What the operations of a turn cost, in the units of [`WORK_PER_TURN_MAX`]. Estimates are enough: they only decide
/// where a turn ends.
pub(crate) mod work {
    /// A packet of any kind: its bytes are decoded, and its session is found.
    pub(crate) const PACKET: u64 = 1;

    /// A PUBLISH to route, beside the nodes and sessions that it visits.
    pub(crate) const PUBLISH: u64 = 2;

    /// A node of the router's tree.
    pub(crate) const NODE: u64 = 1;

    /// A member of a shared subscription that is considered for a message.
    pub(crate) const GROUP_MEMBER: u64 = 1;

    /// A filter that is subscribed to, unsubscribed from, or checked again: rules are evaluated and tables change.
    pub(crate) const SUBSCRIPTION: u64 = 20;

    /// A retained topic that a search looks at.
    pub(crate) const RETAINED_LOOK: u64 = 4;

    /// A message that goes into the output or the queue of a session; long payloads are copied.
    pub(crate) fn delivery(payload_bytes: usize) -> u64 {
        5 + payload_bytes as u64 / 1024
    }
}

/// Members of a shared subscription that one message asks at most, of those who are connected and of the others: a group of
/// thousands whose members all have full queues must not be searched for each message. The next message asks the next ones.
pub(crate) const GROUP_MEMBERS_ASKED_MAX: usize = 64;

/// What a message costs beside its bytes when it is kept: the structures around it, rounded up, so that a
/// flood of empty messages is bounded as well.
pub(crate) const MESSAGE_OVERHEAD_BYTES: usize = 256;

/// One owner, a user or an address, may hold at most so many times what is free of a kind of memory: three quarters of it
/// alone, and the more owners there are the less each.
pub(crate) const SHARE_OF_FREE: usize = 3;

/// Sessions that every owner may have as long as there is room at all.
pub(crate) const SESSIONS_FLOOR: usize = 16;

/// What of subscriptions every owner may hold as long as there is room at all, in bytes: some hundred ordinary ones.
pub(crate) const SUBSCRIPTION_BYTES_FLOOR: usize = 64 << 10;

/// Retained messages that every owner may have as long as there is room at all, and their bytes.
pub(crate) const RETAINED_FLOOR: usize = 64;
pub(crate) const RETAINED_BYTES_FLOOR: usize = 64 << 10;

/// Topics that begin with this and a client id are that client's own: responses go there (Azure IoT Operations).
pub(crate) const OWN_TOPICS: &[u8] = b"clients/";

/// Subscriptions of a client to its own topics that need no room among those of all clients, in bytes: one filter with a
/// wildcard, or eight without. So a client that may connect can be answered.
pub(crate) const OWN_SUBSCRIPTION_BYTES: usize = 4 << 10;

/// Sessions of the same owner are looked for among so many that could be evicted: some microseconds.
pub(crate) const EVICTION_LOOKS: usize = 64;

/// What of wills, QoS 2 packet ids and topic aliases every owner may hold as long as there is room at all: one will of any
/// size that a CONNECT can have.
pub(crate) const STATE_BYTES_FLOOR: usize = 128 << 10;

/// What a topic alias costs beside its name: its entry in the table and an allocation, rounded up.
pub(crate) const ALIAS_OVERHEAD_BYTES: usize = 128;

/// Entries that an empty queue or table of one client may keep allocated. More is given back, or each client could pin what
/// its longest queue took.
pub(crate) const SPARE_ENTRIES_MAX: usize = 64;

/// The Remaining Length ends here (section 1.5.5: four bytes of seven bits), so no packet is larger than about this.
pub(crate) const PACKET_BYTES_MAX: u32 = 268_435_455;

/// Bytes asked of a socket first, and of one that sends little: some requests of ordinary size. A silent connection keeps
/// a buffer of this size.
pub(crate) const READ_BYTES_MIN: usize = 1 << 10;

/// A buffer that grew beyond this is given back to the allocator once it is empty.
pub(crate) const IDLE_BUFFER_BYTES_MAX: usize = 32 << 10;

/// Encoded output of one connection that is not counted in the total, in bytes: some tens of ordinary messages, and of ten
/// thousand connections eighty megabytes.
pub(crate) const OUTPUT_BYTES_FREE: usize = 8 << 10;

/// How often a connection looks whether the total has room for a large message again.
pub(crate) const OUTPUT_TOTAL_LOOK: Duration = Duration::from_millis(50);

/// How long a write may make no progress while the total is used up and this connection holds a part of it.
pub(crate) const WRITE_STALL_OVER_TOTAL: Duration = Duration::from_secs(2);

/// How often a write that makes no progress looks whether it has become too long.
pub(crate) const WRITE_STALL_LOOK: Duration = Duration::from_millis(500);

/// A read buffer beyond that of which no more than one of so many parts is in use is copied into a small one: a copy of at most
/// so much for all that came.
pub(crate) const BUFFER_PARTS_IN_USE: usize = 8;

/// Of a packet that is not whole, what may have come before its buffer counts as one of those of large packets: more than
/// an ordinary request, and of ten thousand connections some forty megabytes.
pub(crate) const ARRIVING_BYTES_FREE: usize = 4 << 10;

/// One PUBLISH more is decided while what waits for its client is at most this part of `queue_bytes_max`. The rest is for the
/// answers to requests that were taken together, and for messages of others.
pub(crate) const QUEUE_PARTS_FOR_ANSWERS: usize = 2;

/// What a connection that is paused keeps of packets that wait: more than a thousand small requests with the acknowledgements
/// between them. Nothing is read beyond it, but for the rest of one packet.
pub(crate) const PAUSED_BYTES_MAX: usize = 1 << 20;

/// How long a paused connection waits at most before it looks whether it may go on: the room that it waits for may be of
/// others, or in the service.
pub(crate) const PAUSE_LOOK: Duration = Duration::from_millis(20);

/// The pause of a client that waits for a delayed acknowledgement: Linux delays by 40 ms to 200 ms.
pub(crate) const DELAYED_ACK: Range<Duration> =
    Duration::from_millis(30)..Duration::from_millis(400);

/// Reads that are acknowledged at once after the first such pause. One that happened for another reason costs as many system
/// calls of some tenths of a microsecond.
pub(crate) const QUICK_ACKS_MIN: u32 = 64;

/// The same after many of them: a client that needs it pauses once in so many requests.
pub(crate) const QUICK_ACKS_MAX: u32 = 1 << 16;

/// Reason Strings are cut to this: they are for people, and fit any sensible Maximum Packet Size.
pub(crate) const REASON_TEXT_BYTES_MAX: usize = 256;

/// What a session takes in an image beside its subscriptions, its messages and its will, rounded up.
pub(crate) const SESSION_OVERHEAD_BYTES: usize = 256;

/// What a subscription costs beside its filter: its entries in the session and in the router, rounded up.
pub(crate) const SUBSCRIPTION_OVERHEAD_BYTES: usize = 256;

/// What a node of the router's tree costs: a hash table with one entry, and its level, rounded up.
pub(crate) const ROUTER_NODE_BYTES: usize = 768;

/// What a group of a shared subscription costs beside its filter: its entry in the router and its list of members, rounded
/// up.
pub(crate) const GROUP_BYTES: usize = 512;

/// How often a full queue is searched for expired messages: a flood of messages must not search it for each.
pub(crate) const EXPIRED_SEARCH_PERIOD: Duration = Duration::from_secs(1);

/// Subscription Identifiers end before this (section 3.8.2.1.2).
pub(crate) const SUBSCRIPTION_ID_OVER: u32 = PACKET_BYTES_MAX + 1;

/// Changes are appended once there are so many bytes, also within one hold of the lock, so that a record is about this
/// plus what one packet can change: messages up to `queue_bytes_max`, and some ten bytes for each session that it goes to.
pub(crate) const BATCH_BYTES: usize = 1 << 20;

/// After a start wills wait at least this long: their clients could not come back while the broker was away, and
/// official clients reconnect within a few seconds.
pub(crate) const WILL_GRACE: Duration = Duration::from_secs(10);

/// How long a connection pauses at most while the log is behind: longer than a snapshot of a small store takes on a slow
/// card, and shorter than clients wait for their acknowledgements.
pub(crate) const BRAKE_TIME_MAX: Duration = Duration::from_secs(10);

/// How often a connection that pauses looks again: first soon, since a fast disk catches up within milliseconds …
pub(crate) const BRAKE_PAUSE_MIN: Duration = Duration::from_millis(2);

/// … and then seldom, so that thousands that pause take no time from those that read.
pub(crate) const BRAKE_PAUSE_MAX: Duration = Duration::from_millis(200);

/// How often the wall clock is read. A step of it, which a gateway without a battery sees after each start, makes what is
/// recorded wrong for no longer than this.
pub(crate) const WALL_CLOCK_LOOK: Duration = Duration::from_secs(1);

/// Sockets that one thread writes to before it wakes their tasks instead: the answers of one flush go out at once, and
/// one change with ten thousand watchers is shared between the threads there are.
pub(crate) const DIRECT_WRITES_MAX: usize = 64;

/// How long a connection that has answers lets others have their turns before all of them are written: longer than it takes
/// to handle the requests of some ten sockets, and far less than anybody's network takes.
pub(crate) const ROUND_TIME_MAX: Duration = Duration::from_micros(200);

/// After so many rounds in which nobody else was ready only one of so many waits again: a client by itself gains nothing from
/// the wait, and it costs some microseconds. Few enough that a rising load is seen within a millisecond.
pub(crate) const SINGLE_OUTPUT_ROUNDS: u32 = 16;
