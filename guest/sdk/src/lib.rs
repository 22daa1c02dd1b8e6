//! What the author of a policy uses.
//!
//! A policy is the command logic of a Statehouse state store: a WebAssembly component that turns the
//! payload of one request into table operations and one reply. Its contract is `wit/policy.wit`; this
//! crate is that contract in Rust, with the parts that every policy would otherwise write again.
//!
//! * [`Policy`] is what an author implements, and [`export!`] makes a component of it.
//! * [`Host`] is what a policy may ask for; [`Imports`] is the real one.
//! * [`resp`] reads and writes RESP3, [`hlc`] reads and writes clock readings.
//! * [`testing`] (native only) is a table, a clock and watches, so that a policy is tested by plain
//!   `cargo test`, from code or from transcripts.
//!
//! What enters: the bytes of a request. What leaves: an [`Outcome`]. What never happens here: I/O, time,
//! randomness; there is no WASI, and all that a policy sees comes through a request or [`Host`].

#![deny(unsafe_code)]

#[doc(hidden)]
pub mod bindings;
mod export;
pub mod hlc;
mod host;
pub mod limits;
mod policy;
pub mod resp;
#[cfg(not(target_arch = "wasm32"))]
pub mod testing;

pub use bindings::statehouse::policy::log::Level;
pub use bindings::statehouse::policy::types::{
    Access, Body, Bytes, Change, Dialect, Entry, Event, Fault, Frame, Hlc, Info, Notification,
    Outcome, Page, Repeat, Request, Span, Stamp,
};
pub use host::{Host, Imports};
pub use policy::Policy;
