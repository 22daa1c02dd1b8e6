//! The one writer: turns an event into effects.
//!
//! What enters: a request, the end of a connection or session, or the time for a sweep, each with `now`.
//! What leaves: the answer, the notifications, and what has to be durable before either leaves the host.
//! Time is an argument and there is no I/O, so that the same code runs in production, in tests and in a
//! replay.
//!
//! Architecture invariant: the store knows nothing of a transport, and nothing of what commands mean.

mod capture;
mod duplicates;
mod effects;
mod entry;
mod expiry;
mod index;
mod mode;
mod notice;
mod observed;
mod order;
mod owners;
mod quota;
mod remembered;
mod repeat;
mod replay;
mod rights;
mod slots;
mod state;
mod step;
mod table;
mod telling;
mod transaction;
mod watch;
mod write;

pub use capture::{Evidence, Imported, KeyRef, Property, Read};
pub use duplicates::{Duplicates, Retention};
pub use effects::INTERNAL_ERROR;
pub use effects::{Answer, Effects, Handled, RestsOn, Swept, Trip};
pub use entry::{Entry, Key};
pub use mode::Mode;
pub use notice::Notice;
pub use observed::{Again, Observed, same_writes};
pub use owners::Owners;
pub(crate) use owners::{NOBODY, Owner};
pub use quota::{Exceeded, Quota};
pub use remembered::{Context, Identity, Kept, Outcome, Remembered};
pub use repeat::{Rerun, ToldAgain};
pub use replay::{Recorded, Replayed, replay};
pub use state::State;
pub use statehouse_protocol::Peer;
pub use statehouse_protocol::rights::Right;
pub use step::{Event, Store, Supervision};
pub use table::Table;
pub use transaction::Transaction;
pub use watch::{WatchChange, WatchChanges, Watches};
pub use write::{Change, Write};
