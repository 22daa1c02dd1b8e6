//! Bounds of what brings policies into a running store: signatures, orders over MQTT, the drop directory.

use std::time::Duration;

/// The section of a module with its signatures: room for some fifty of them, so that checking them all against all
/// keys takes less than a second.
pub const SIGNATURE_SECTION_BYTES_MAX: usize = 4 << 10;

/// Keys that a store trusts: each is tried on each signature.
pub const TRUSTED_KEYS_MAX: usize = 64;

/// A file with a key: PEM is the longest form, with some hundred bytes.
pub const KEY_FILE_BYTES_MAX: u64 = 4 << 10;

/// An order over MQTT: its list of chunks is nearly all of it.
pub const ORDER_BYTES_MAX: usize = 128 << 10;

/// Stores that one order names: the longest names fit into an order with the longest list of chunks.
pub const ORDER_STORES_MAX: usize = 128;

/// Chunks of one order: the largest policy in pieces of 64 KiB.
pub const ORDER_CHUNKS_MAX: usize = 1024;

/// A chunk: small beside a packet, so that no client waits behind one.
pub const CHUNK_BYTES_MAX: usize = 256 << 10;

/// How long the chunks of an order may take. Until then they take memory.
pub const ORDER_TIMEOUT: Duration = Duration::from_secs(600);

/// How often it is looked whether they took longer.
pub const ORDER_CHECK_INTERVAL: Duration = Duration::from_secs(30);

/// How often the drop directory is looked at.
pub const DROP_POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Policies in it that are looked at.
pub const DROP_FILES_MAX: usize = 64;

/// What stands beside a policy there: a line with its name, its version and its digest, or why it was refused.
pub const DROP_STATUS_BYTES_MAX: u64 = 4 << 10;

/// Entries of it that are looked at, whatever their names.
pub const DROP_ENTRIES_MAX: usize = 4096;
