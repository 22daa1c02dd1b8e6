//! The limits of the host for one request. They must be those of `host/core/src/limits/`, or a test
//! accepts a policy that fails in a store.

/// Maximum bytes of the keys of one page, apart from its first key.
pub(super) const PAGE_BYTES_MAX: usize = 64 * 1024;

/// Maximum keys of one page.
pub(super) const PAGE_KEYS_MAX: u32 = 1024;

/// Maximum length of a cursor: that of the longest key.
pub(super) const CURSOR_BYTES_MAX: usize = 65_535;

/// Missed changes that one request is sent.
pub(super) const MISSED_CHANGES_MAX: usize = 128;

/// Writes that one request may stage.
pub(super) const WRITES_MAX: usize = 64;

/// Changes of watches that one request may stage.
pub(super) const WATCH_CHANGES_MAX: usize = 64;

/// Keys that one request may have open as hidden ones.
pub(super) const HIDDEN_KEYS_MAX: usize = 64;

/// Bytes of a watched prefix.
pub(super) const WATCH_PREFIX_BYTES_MAX: usize = 1024;

/// Bytes of one draw of random bytes.
pub(super) const RANDOM_BYTES_MAX: u32 = 1024;

/// Bytes of the node of a fence. With `0:0:`, the shortest rest, it fills an MQTT string.
pub(super) const FENCE_NODE_BYTES_MAX: usize = 65_535 - "0:0:".len();
