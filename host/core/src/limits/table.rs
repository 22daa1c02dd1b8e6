//! Bounds of keys, values and watches, and of a request about them.

use std::time::Duration;

use super::GUEST_MEMORY_BYTES_MAX;

/// How far ahead of `now` a version may lie: clients refuse a later one, and the protocol allows a
/// request's clock this much (the protocol, section 5).
pub const SKEW_MS_MAX: u64 = 60_000;

/// Default bound of watches of one connection (`max_client_watches`). The official clients hold one per observed key.
pub const WATCHES_PER_CONNECTION_MAX_DEFAULT: u64 = 10_000;

/// Default bound of watches of all connections (`max_watches`).
pub const WATCHES_MAX_DEFAULT: u64 = 1_000_000;

/// What a watch costs besides its key: the two indexes that hold it, rounded up.
pub const WATCH_OVERHEAD_BYTES: usize = 256;

/// What of all queues, subscriptions and watches one client may take by default, as a part: little memory is not taken by two
/// or three, and half of the queues still holds what comes for four clients that are away.
pub const CLIENT_PARTS_OF_TOTAL: usize = 8;

/// Watches of one connection in bytes: all it may have, with keys of 500 bytes. Watched keys need
/// not exist, so no other quota sees them. Where memory is little it is less, see [`CLIENT_PARTS_OF_TOTAL`].
pub const WATCH_BYTES_PER_CONNECTION_MAX: usize = 8 << 20;

/// Watches of all connections in bytes: never more than a sixteenth of the memory either.
pub const WATCH_BYTES_MAX: u64 = 512 << 20;

/// Keys that one step removes in a sweep: it holds the store's lock, and the next step follows at once.
pub const SWEEP_KEYS_PER_STEP_MAX: usize = 256;

/// Expired keys that are told of again in one step at a start. All of them share the fuel of one call: a million units for
/// each are enough for an interpreter.
pub const EXPIRIES_NOTIFIED_PER_STEP_MAX: usize = 32;

/// The longest a sweep waits before it looks again, so that a stepped wall clock cannot leave keys lying.
pub const SWEEP_SLEEP_MAX: Duration = Duration::from_millis(50);

/// What an entry counts against `max_bytes` besides its key, value and fence's node: its version and expiry, what the
/// allocator rounds up, its slot, and its places in the index, in the order and among those that expire.
pub const ENTRY_OVERHEAD_BYTES: u64 = 128;

/// The longest packet that can be configured: its payload and what a policy makes of it have to fit
/// into the policy's memory.
pub const PACKET_BYTES_MAX_MAX: usize = GUEST_MEMORY_BYTES_MAX / 2;

/// What an answer or notification adds to a value in a client's queue: topic, properties, overhead.
pub const ENVELOPE_BYTES: u64 = 4096;

/// Answers that may wait for delivery while a batch of requests runs, in bytes, but for the last one. One small request can
/// ask for the longest value, and a batch has hundreds. A client that does not read is seen after so much.
pub const BATCH_REPLY_BYTES_MAX: usize = 1 << 20;

/// What waits for the journal of what one connection asked for, in bytes: answers, notifications of its changes, and PUBACKs. A
/// connection beyond it is not read from. More than the longest answer, and more than a thousand ordinary ones.
pub const UNRELEASED_BYTES_PER_CLIENT_MAX: usize = 4 << 20;

/// The same of all connections, in bytes: never more than a thirty-second part of the memory either. Beyond it only connections
/// that caused little are read from.
pub const UNRELEASED_BYTES_MAX: u64 = 256 << 20;

/// What a connection may always cause: it is not to wait because others write too fast.
pub const UNRELEASED_BYTES_FREE: usize = 16 << 10;

/// What an answer or notification that waits costs beside its bytes: its places in the queue, rounded up.
pub const UNRELEASED_OVERHEAD_BYTES: usize = 256;

/// How long the requests of one connection may run before other connections get their turns: some hundred ordinary requests,
/// or some pages of long keys.
pub const REQUESTS_PER_TURN_TIME: Duration = Duration::from_micros(500);

/// Default bound of keys (`max_keys`).
pub const KEYS_MAX_DEFAULT: u64 = 10_000_000;

/// Keys that there are never more of, whatever is configured: the table numbers them in four bytes.
pub const KEYS_MAX_MAX: u64 = u32::MAX as u64;

/// Default bound of all keys and values with their overhead (`max_bytes`): most of a small gateway's memory, and by
/// default never more than three eighths of what there is. With queues (an eighth), subscriptions, watches, large packets that
/// are not whole and remembered requests (a sixteenth each) that is three quarters of it; some megabytes of retained messages
/// and CONNECTs, and what each connection may have in any case, come on top.
pub const BYTES_MAX_DEFAULT: u64 = 512 << 20;

/// The keys of one client may by default be all but one of so many parts of a store (`max_client_keys`, `max_client_bytes`): a
/// store with one writer is hardly bound by that, and whoever fills his part leaves a quarter to all others.
pub const PARTS_WITH_ONE_FOR_OTHERS: u64 = 4;

/// What a client that owns keys counts against `max_bytes` besides its id: its sums, the room that their table keeps to grow, a
/// place in the index, and what the allocator takes for the id.
pub const OWNER_OVERHEAD_BYTES: u64 = 96;

/// Owners that are looked at before requests get their turn again: some ten nanoseconds each.
pub const OWNERS_PER_LOOK: usize = 16 << 10;

/// Tables that the index of owners is divided into, for the reason that [`INDEX_PARTS`] has. There are far fewer owners than keys,
/// but for somebody who writes each key by another client id.
pub const OWNER_INDEX_PARTS: usize = 64;

/// Most bytes of a session that are not counted for it: its structures here and in the broker, a
/// client id, and subscriptions to its own topics. Default bound of sessions (`max_sessions`):
/// these take a thirty-second of the memory.
pub const SESSION_BYTES: usize = 4 << 10;

/// Default bound of a key (`max_key_bytes`): a watchable one, in hex within a topic, is at most half
/// of MQTT's 65 535 bytes.
pub const KEY_BYTES_MAX_DEFAULT: u64 = 32 << 10;

/// What `max_key_bytes` may be raised to. Above twice this, matching a pattern against one page of
/// such keys would use up the fuel of a SCAN.
pub const KEY_BYTES_MAX_MAX: u64 = 65_535;

/// Slots in a run of the order of keys: putting one in the middle moves two kilobytes, and of ten million keys there are
/// some thirty thousand runs.
pub const RUN_SLOTS_MAX: usize = 512;

/// Tables that the index of keys is divided into. One of ten million keys that grows moves the places of them all, while every
/// request waits; a part of it some ten thousands. Each costs 32 bytes while it is empty.
pub const INDEX_PARTS: usize = 1024;

/// Default bound of a value (`max_value_bytes`).
pub const VALUE_BYTES_MAX_DEFAULT: u64 = 1 << 20;
