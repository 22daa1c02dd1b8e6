//! A host of a cluster: what it does while it follows, and while it leads.
//!
//! * [`log`]: the log of a leadership, as the store and the broker use it.
//! * [`replica`]: the state that a follower rebuilds from the log, and the store that a leader runs
//!   on it.

mod clock_offset;
pub mod log;
pub mod replica;
