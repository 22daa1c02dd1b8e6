//! All limits of the standard policy, with units and reasons.

/// Maximum length of a notification topic: that of an MQTT string (MQTT 5, section 1.5.4).
pub(crate) const TOPIC_BYTES_MAX: usize = 65_535;

/// Maximum length of a SCAN pattern from its first special byte on. The host compares the part
/// before it, which is most of a typical pattern. A pattern of this length compiles within the fuel
/// of one call for any content.
pub(crate) const PATTERN_BYTES_MAX: usize = 4096;

/// Maximum number of elements between the first and the last `*` of a pattern: the states of an
/// automaton in one 64-bit word, so that matching takes one step per byte of a key.
pub(crate) const FLOATING_ELEMENTS_MAX: usize = 63;

/// Keys requested at once. The cursor can stop only between pages, so a reply may exceed its limit
/// by this many.
pub(crate) const SCAN_PAGE_KEYS: u32 = 32;

/// Maximum number of pages that one SCAN requests; with [`SCAN_PAGE_KEYS`] it examines at most 1024
/// keys.
pub(crate) const SCAN_PAGES_MAX: usize = 32;

/// Bytes of keys after which a SCAN requests no further page. The last page may add 64 KiB. At
/// about 20 units of fuel per byte, that stays within the 4 million of one call (at most 2.9
/// million in the worst measured cases).
pub(crate) const SCAN_EXAMINED_BYTES: usize = 32 * 1024;
