//! Limits of the ways to ship policies into a running store: signatures, orders over MQTT, the drop
//! directory.

use std::time::Duration;

/// The section of a module with its signatures: room for some fifty of them. Checking all of them
/// against all keys takes less than a second.
pub const SIGNATURE_SECTION_BYTES_MAX: usize = 4 << 10;

/// Keys that a store trusts: each signature is checked against each key.
pub const TRUSTED_KEYS_MAX: usize = 64;

/// A file with a key: PEM is the longest form, with some hundred bytes.
pub const KEY_FILE_BYTES_MAX: u64 = 4 << 10;

/// An order over MQTT: mostly its list of chunks.
pub const ORDER_BYTES_MAX: usize = 128 << 10;

/// Stores that one order names: the longest names fit into an order with the longest list of
/// chunks.
pub const ORDER_STORES_MAX: usize = 128;

/// Chunks of one order: the largest policy in chunks of 64 KiB.
pub const ORDER_CHUNKS_MAX: usize = 1024;

/// A chunk: smaller than a packet, so that no client waits long for one.
pub const CHUNK_BYTES_MAX: usize = 256 << 10;

/// The time limit for the chunks of an order, which take memory until then.
pub const ORDER_TIMEOUT: Duration = Duration::from_secs(600);

/// How often the time limit of an order is checked.
pub const ORDER_CHECK_INTERVAL: Duration = Duration::from_secs(30);

/// How often the drop directory is read.
pub const DROP_POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Policies in the drop directory that are handled: as many as the store remembers to have handled.
pub const DROP_FILES_MAX: usize = statehouse_core::limits::DELIVERED_FILES_MAX;

/// The status file of a policy: a line with its name, version and digest, or the reason of a
/// refusal.
pub const DROP_STATUS_BYTES_MAX: u64 = 4 << 10;

/// Entries of the drop directory that are read, of any name.
pub const DROP_ENTRIES_MAX: usize = 4096;
