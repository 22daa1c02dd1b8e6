//! Every bound of the standard policy, with its unit and its reason.

/// The longest notification topic: what an MQTT string can be (MQTT 5, section 1.5.4).
pub(crate) const TOPIC_BYTES_MAX: usize = 65_535;

/// A SCAN pattern from its first special byte on. What is before it, and most patterns, the host compares;
/// this much is read within the fuel of one call, whatever it holds.
pub(crate) const PATTERN_BYTES_MAX: usize = 4096;

/// Elements of a pattern between its first and its last `*`: the states of an automaton that is one
/// 64-bit word, so that a key is matched in one step per byte whatever the pattern.
pub(crate) const FLOATING_ELEMENTS_MAX: usize = 63;

/// Keys asked for at once: the cursor can only stop between pages, so this is also by how far a reply may
/// pass its bound.
pub(crate) const SCAN_PAGE_KEYS: u32 = 32;

/// Pages asked for by one SCAN; with [`SCAN_PAGE_KEYS`] at most 1024 keys are examined.
pub(crate) const SCAN_PAGES_MAX: usize = 32;

/// Bytes of keys after which a SCAN asks for no further page. The last page may bring 64 KiB more: at some
/// 20 units of fuel for a byte, that is within the 4 million of one call (at most 2.9 million in the
/// worst cases measured).
pub(crate) const SCAN_EXAMINED_BYTES: usize = 32 * 1024;
