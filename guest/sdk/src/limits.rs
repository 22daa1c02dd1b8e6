//! Every bound of this crate, with its unit and its reason.

/// The longest payload that is looked at: what an MQTT packet can carry (MQTT 5, section 1.5.5). It also
/// keeps every position in a payload within the 32 bits of a [`Span`](crate::Span).
pub const PAYLOAD_BYTES_MAX: usize = 268_435_455;

/// Arguments of a request whose place is kept; later ones are checked and counted only. The longest
/// command of the protocol, `SET key value NEX expected PX ms`, has seven.
pub const ARGUMENTS_KEPT: usize = 8;

/// Arguments of a request that are checked to be well formed. A request with more is refused
/// without this check. Each check takes some hundred units of fuel, and a payload may hold hundreds
/// of thousands of arguments.
pub const ARGUMENTS_CHECKED_MAX: usize = 1024;

/// How far a version may run ahead of the store's time, in milliseconds. A `put` whose `observed` is
/// further ahead is a trap; a client that is further ahead is told that its clock is wrong.
pub const SKEW_MS_MAX: u64 = 60_000;

/// A version's counter stays below this: clients in .NET read 32 bits with a sign.
pub const COUNTER_END: u32 = i32::MAX as u32;

/// The room for what one call allocates: most payloads and a page of a SCAN fit. What does not is allocated
/// elsewhere. An instance touches only as much of it as its largest call needed.
#[cfg(any(target_arch = "wasm32", test))]
pub(crate) const ARENA_BYTES: usize = 64 * 1024;
