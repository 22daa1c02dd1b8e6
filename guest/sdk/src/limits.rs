//! All limits of this crate, with units and reasons.

/// Maximum length of a payload: that of an MQTT packet (MQTT 5, section 1.5.5). It also keeps every
/// position in a payload within the 32 bits of a [`Span`](crate::Span).
pub const PAYLOAD_BYTES_MAX: usize = 268_435_455;

/// Arguments of a request whose spans are kept; later ones are only checked and counted. The
/// longest command of the protocol, `SET key value NEX expected PX ms`, has seven.
pub const ARGUMENTS_KEPT: usize = 8;

/// Arguments of a request that are checked to be well formed. A request with more is refused
/// without this check. Each check takes some hundred units of fuel, and a payload may hold hundreds
/// of thousands of arguments.
pub const ARGUMENTS_CHECKED_MAX: usize = 1024;

/// How far a version may be ahead of the store's time, in milliseconds. A `put` whose `observed` is
/// further ahead traps. A request that is further ahead is answered with an error about its clock.
pub const SKEW_MS_MAX: u64 = 60_000;

/// The exclusive upper bound of a version's counter: clients in .NET parse signed 32-bit numbers.
pub const COUNTER_END: u32 = i32::MAX as u32;

/// Size of the arena for one call: most payloads and a page of a SCAN fit. Other blocks are
/// allocated elsewhere. An instance touches only as much of the arena as its largest call needed.
#[cfg(any(target_arch = "wasm32", test))]
pub(crate) const ARENA_BYTES: usize = 64 * 1024;
