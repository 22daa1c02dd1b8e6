//! A host for tests: a table, a clock and watches in memory, native only.
//!
//! A [`Table`] does what `wit/policy.wit` says of the host, without I/O, durability or duplicates: time is
//! what a test says it is. [`Table::call`] runs a policy over it and gives the bytes of the answer;
//! [`Transaction`] is the [`Host`](crate::Host) that the policy sees. [`cases`] runs transcripts, over a
//! `Table` or over anything else that can answer requests, such as a real host.
//!
//! Breaking the contract (a span outside of the payload, an observed time beyond the skew) panics here,
//! where it is a trap in production.

pub mod cases;
mod clock;
mod table;
mod transaction;

pub use clock::receive;
pub use table::{Answer, Delivery, Right, Table, Tabled};
pub use transaction::Transaction;
