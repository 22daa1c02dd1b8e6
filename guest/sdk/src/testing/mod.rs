//! A host for tests: a table, a clock and watches in memory, native only.
//!
//! A [`Table`] behaves as `wit/policy.wit` requires of the host, but without I/O, durability or
//! deduplication; the test sets the time. [`Table::call`] executes a request by a policy and
//! returns the bytes of the response. [`Transaction`] is the [`Host`](crate::Host) that the policy
//! uses. [`cases`] runs transcripts, over a `Table` or over any other store such as a real host.
//!
//! A breach of the contract (a span outside of the payload, an observed time too far ahead, more
//! writes than one request may stage) panics here; in production it traps.

pub mod cases;
mod clock;
mod limits;
mod table;
mod transaction;

pub use clock::receive;
pub use table::{Answer, Delivery, Right, Table, Tabled};
pub use transaction::Transaction;
