//! The one writer: turns an event into effects.
//!
//! What enters: a request, the end of a connection, or the time for a sweep, each with `now`. What
//! leaves: the answer and the notifications. Time is an argument and there is no I/O, so that the
//! same code runs in production, in tests and in a replay.
//!
//! Architecture invariant: the store knows nothing of a transport, and nothing of what commands mean.

mod expiry;
mod quota;
mod step;
mod table;
mod transaction;
mod watch;

pub use quota::Quota;
pub use step::{Answer, Effects, Event, Notice, Store};
pub use table::{Entry, Key, Table};
pub use transaction::{Change, State, Transaction};
pub use watch::{Peer, Watches};
