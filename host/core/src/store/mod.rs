//! The single writer of the state: turns an input into effects.
//!
//! An input is a request, the end of a connection or session, or a sweep, each with the time.
//! Effects are the answer, the notifications, and records that must be durable before either is
//! sent. Time is an argument and there is no I/O, so the same code runs in production, in tests and
//! in a replay.
//!
//! Invariant: the store must not depend on a transport, nor on the meaning of commands.

mod arena;
mod compact_table;
mod duplicates;
mod effects;
mod entry;
mod expiry;
mod handling;
mod index;
mod listing;
mod mode;
mod notification;
mod notifier;
mod order;
mod owners;
mod quota;
mod read_set;
mod recent;
mod redelivery;
mod reexecution;
mod remembered;
mod replay;
mod rights;
mod state;
mod step;
mod table;
mod transaction;
mod watch;
mod write;

pub use duplicates::{Duplicates, Retention};
pub use effects::INTERNAL_ERROR;
pub use effects::{Answer, Effects, Handled, RestsOn, Swept, Trip};
pub use entry::{Entry, Key};
pub use expiry::NewDeadline;
pub use listing::{Listed, after, behind};
pub use mode::Mode;
pub use notification::Notification;
pub use owners::Owners;
pub(crate) use owners::{NO_OWNER, Owner};
pub use quota::{Exceeded, Quota};
pub use read_set::{CapturedReads, Imported, KeyRef, Property, Read};
pub use redelivery::{Renotified, Rerun};
pub use reexecution::{Reexecution, SampledRequest, same_writes};
pub use remembered::{Context, Identity, Outcome, Remembered, StoredPayload};
pub use replay::{Recorded, Replayed, replay};
pub use state::{ExpiryPlace, State};
pub use statehouse_protocol::rights::Right;
pub use statehouse_protocol::{ConnectionId, Peer, SessionId};
pub use step::{Store, Supervision};
pub use table::Table;
pub use transaction::Transaction;
pub use watch::{Scope, WatchChange, WatchChanges, Watches};
pub use write::{Change, Write};
