//! The state of a host of a cluster, while it follows and while it leads.
//!
//! * [`clock_offset`]: how far the clock of a follower is ahead of its leader's.
//! * [`history`]: a copy of the log in the data directory, for the commands that read one.
//! * [`log`]: the log of a leadership, as the store and the broker use it.
//! * [`modules`]: brings the policies that the log names to this host.
//! * [`replica`]: the state that a follower rebuilds from the log, and the store that a leader runs
//!   on it.

pub mod clock_offset;
pub mod history;
pub mod log;
pub mod modules;
pub mod replica;
