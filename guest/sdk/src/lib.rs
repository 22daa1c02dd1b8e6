#![doc = include_str!("../README.md")]
//!
//! # Parts
//!
//! * [`Policy`] is the trait that an author implements, and [`export!`] turns it into a component.
//! * [`Host`] is the interface to the host; [`Imports`] implements it in a component.
//! * [`resp`] parses and writes RESP3, [`hlc`] parses and writes HLC timestamps.
//! * [`testing`] (native only) has a table, a clock and watches, so that plain `cargo test` tests a
//!   policy, from code or from transcripts.
//!
//! A panic ends the call, and the host rolls back its writes. The exported component reports
//! message, file and line of the panic to the host's log.
//!
//! A policy must do no I/O and must not use time or randomness of its own. There is no WASI, and
//! all input arrives in the request or through [`Host`].
//!
//! # Example
//!
//! This is `examples/tally.rs`:
//!
//! ```
#![doc = include_str!("../examples/tally.rs")]
//! ```

#![deny(unsafe_code)]
// `cargo test -p statehouse-policy --example tally` runs the test of the example.
#![allow(clippy::test_attr_in_doctest)]

#[cfg(any(target_arch = "wasm32", test))]
#[doc(hidden)]
pub mod arena;
#[doc(hidden)]
pub mod bindings;
mod export;
pub mod hlc;
mod host;
pub mod limits;
#[cfg(any(target_arch = "wasm32", test))]
#[doc(hidden)]
pub mod panics;
mod policy;
pub mod resp;
#[cfg(not(target_arch = "wasm32"))]
pub mod testing;

pub use bindings::statehouse::policy::follow::{Reached, Scope};
pub use bindings::statehouse::policy::log::Level;
pub use bindings::statehouse::policy::types::{
    Access, Body, Bytes, Change, Dialect, Entry, Event, Fault, Frame, Hlc, Info, Notification,
    Outcome, Page, Repeat, Request, Span, Stamp,
};
pub use host::{Host, Imports};
pub use policy::Policy;
