//! Limits of keys, values and watches, and of requests about them.

use std::time::Duration;

use super::GUEST_MEMORY_BYTES_MAX;

/// Entries of a table by command, such as the summary of a replay. Clients choose the names; all
/// further ones share one entry.
pub const REPLAY_COMMANDS_MAX: usize = 64;

/// Arguments of a request that are shown to a person.
pub const REQUEST_WORDS_SHOWN_MAX: usize = 16;

/// How far ahead of `now` a version may be. Clients refuse a later one, and the protocol allows a
/// request's clock this much (protocol, section 5).
pub const SKEW_MS_MAX: u64 = 60_000;

/// The node of a fencing token. With `0:0:`, the shortest rest, it fills an MQTT string (MQTT 5
/// section 1.5.4), so a client can send such a token.
pub const FENCE_NODE_BYTES_MAX: usize = 65_535 - "0:0:".len();

/// Default limit of the watches of one connection (`max_client_watches`). The official clients hold
/// one for each observed key.
pub const WATCHES_PER_CONNECTION_MAX_DEFAULT: u64 = 10_000;

/// Default limit of the watches of all connections (`max_watches`).
pub const WATCHES_MAX_DEFAULT: u64 = 1_000_000;

/// What a watch costs apart from its key: its entries in two indexes, rounded up.
pub const WATCH_OVERHEAD_BYTES: usize = 256;

/// Bytes of a watched prefix. A change examines at most one prefix for each of its key's first
/// bytes, so prefixes of one another cannot make it slow.
pub const WATCH_PREFIX_BYTES_MAX: usize = 1024;

/// Changes that the store remembers for clients that ask for what they missed. A busy gateway makes
/// some hundred a second, so these last for minutes.
pub const RECENT_CHANGES_MAX: usize = 65_536;

/// Their bytes, with those of values that the table holds as well: at most a sixty-fourth of the
/// memory.
pub const RECENT_BYTES_MAX: u64 = 16 << 20;

/// Starts of runs that the store remembers to recognize versions that a crash revoked.
pub const RECENT_STARTS_MAX: usize = 16;

/// Missed changes that one request is sent. They share the fuel of one call until the built-in
/// policy renders the rest.
pub const MISSED_CHANGES_PER_REQUEST_MAX: usize = 128;

/// Bytes of keys and values after which a request is sent no further missed change.
pub const MISSED_BYTES_PER_REQUEST_MAX: u64 = 256 << 10;

/// By default, one client may take this fraction of all queues, subscriptions and watches. Two or
/// three clients cannot exhaust a small memory, and half of the queues still holds the messages of
/// four absent clients.
pub const CLIENT_PARTS_OF_TOTAL: usize = 8;

/// Watches of one connection in bytes: the default number of watches with keys of 500 bytes.
/// Watched keys need not exist, so no other quota counts them. On a small memory it is less, see
/// [`CLIENT_PARTS_OF_TOTAL`].
pub const WATCH_BYTES_PER_CONNECTION_MAX: usize = 8 << 20;

/// Watches of all connections in bytes: at most a sixteenth of the memory.
pub const WATCH_BYTES_MAX: u64 = 512 << 20;

/// Keys that one step removes in a sweep. The step holds the store's lock, and the next one follows
/// at once.
pub const SWEEP_KEYS_PER_STEP_MAX: usize = 256;

/// Watches of the keys of one sweep, after which the sweep takes no further key. Each of them may
/// be a notification, and those of one step are delivered while the broker is locked.
pub const SWEEP_WATCHES_PER_STEP_MAX: usize = 256;

/// Expired keys whose watchers one step notifies again at a start. They share the fuel of one call:
/// a million units for each are enough for an interpreter.
pub const EXPIRIES_NOTIFIED_PER_STEP_MAX: usize = 32;

/// The longest pause between two sweeps, so that a stepped wall clock cannot leave expired keys in
/// the table.
pub const SWEEP_SLEEP_MAX: Duration = Duration::from_millis(50);

/// What an entry counts against `max_bytes` apart from its key, value and fence node: its version
/// and expiry, allocator rounding, its slot, and its places in the index, the order and the expiry
/// list.
pub const ENTRY_OVERHEAD_BYTES: u64 = 128;

/// Upper limit of `max_packet_bytes`: the payload and what a policy makes of it must fit into the
/// policy's memory.
pub const PACKET_BYTES_MAX_MAX: usize = GUEST_MEMORY_BYTES_MAX / 2;

/// What an answer or notification adds to a value in a client's queue: topic, properties, overhead.
pub const ENVELOPE_BYTES: u64 = 4096;

/// Bytes of answers that may wait for delivery while a batch of requests runs, not counting the
/// last answer. A small request can ask for the longest value, and a batch has hundreds of
/// requests. A client that does not read is detected after this much.
pub const BATCH_REPLY_BYTES_MAX: usize = 1 << 20;

/// Bytes that wait for the write-ahead log because of one connection: answers, notifications of its
/// changes, and PUBACKs. Beyond this, the connection is not read from. More than the longest
/// answer, and more than a thousand ordinary ones.
pub const UNRELEASED_BYTES_PER_CLIENT_MAX: usize = 4 << 20;

/// The same for all connections: at most a thirty-second of the memory. Beyond this, only
/// connections that caused little are read from.
pub const UNRELEASED_BYTES_MAX: u64 = 256 << 20;

/// What a connection may always cause, so that it need not wait because others write too fast.
pub const UNRELEASED_BYTES_FREE: usize = 16 << 10;

/// What a waiting answer or notification costs apart from its bytes: its places in the queue, with
/// what is measured of its request, rounded up.
pub const UNRELEASED_OVERHEAD_BYTES: usize = 384;

/// Places for outputs whose memory is kept between two socket reads: those of a usual read.
pub const SPARE_OUTPUTS_MAX: usize = 64;

/// How long the requests of one connection may run before other connections get their turns: some
/// hundred ordinary requests, or some pages of long keys.
pub const REQUESTS_PER_TURN_TIME: Duration = Duration::from_micros(500);

/// Default limit of keys (`max_keys`).
pub const KEYS_MAX_DEFAULT: u64 = 10_000_000;

/// Absolute limit of keys: the table numbers them in four bytes.
pub const KEYS_MAX_MAX: u64 = u32::MAX as u64;

/// Default limit of all keys and values with their overhead (`max_bytes`): most of a small
/// gateway's memory, and at most three eighths of what there is. Queues take an eighth;
/// subscriptions, watches, incomplete large packets and remembered requests take a sixteenth each.
/// That is three quarters together. Retained messages and CONNECTs (some megabytes), and the
/// minimum of each connection, are additional.
pub const BYTES_MAX_DEFAULT: u64 = 512 << 20;

/// By default, one client may own all but one of this many parts of a store (`max_client_keys`,
/// `max_client_bytes`). This hardly limits a store with one writer, and a client that fills its
/// part leaves a quarter to all others.
pub const PARTS_WITH_ONE_FOR_OTHERS: u64 = 4;

/// What an owner counts against `max_bytes` apart from its client id: its sums, spare capacity of
/// the table of owners, an index entry, and allocator overhead of the id.
pub const OWNER_OVERHEAD_BYTES: u64 = 96;

/// Owners that a listing examines before requests get their turn again: some ten nanoseconds each.
pub const OWNERS_PER_TURN: usize = 16 << 10;

/// Keys that a count of locks examines before requests get their turn again: each is read with its
/// value and its owner, some hundred nanoseconds if they are not in a cache.
pub const EXPIRING_KEYS_PER_TURN: usize = 256;

/// Hash tables that the index of owners is divided into, for the reason given at [`INDEX_PARTS`].
/// There are far fewer owners than keys, unless a client writes each key with another client id.
pub const OWNER_INDEX_PARTS: usize = 64;

/// An upper bound of the bytes of a session that are not counted: its structures here and in the
/// broker, a client id, and subscriptions to its own topics. Default limit of sessions
/// (`max_sessions`): these take a thirty-second of the memory.
pub const SESSION_BYTES: usize = 4 << 10;

/// What a connection counts if `max_connections` is derived from the memory: a silent one, without
/// the kernel's part. Connections of this size take three thirty-seconds of the memory.
pub const CONNECTION_BYTES: usize = 6 << 10;

/// Default limit of a key (`max_key_bytes`). A watchable key is hex-encoded in a topic, so it has
/// at most half of MQTT's 65 535 bytes.
pub const KEY_BYTES_MAX_DEFAULT: u64 = 32 << 10;

/// Upper limit of `max_key_bytes`. Above twice this, matching a pattern against one page of such
/// keys would use the fuel of a whole SCAN.
pub const KEY_BYTES_MAX_MAX: u64 = 65_535;

/// Slots in a run of the order of keys. An insertion moves two kilobytes, and ten million keys have
/// some thirty thousand runs.
pub const RUN_SLOTS_MAX: usize = 512;

/// Hash tables that the index of keys is divided into. A single one of ten million keys would move
/// all entries when it grows, while every request waits; a part moves some ten thousand. An empty
/// one costs 32 bytes.
pub const INDEX_PARTS: usize = 1024;

/// Default limit of a value (`max_value_bytes`).
pub const VALUE_BYTES_MAX_DEFAULT: u64 = 1 << 20;
