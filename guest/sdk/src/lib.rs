//! The SDK for policy authors.
//!
//! A policy is the command logic of a Statehouse state store: a WebAssembly component that turns
//! the payload of one request into table operations and one reply. Its contract is
//! `wit/policy.wit`. This crate is that contract in Rust, with the parts that every policy needs.
//!
//! * [`Policy`] is the trait that an author implements, and [`export!`] turns it into a component.
//! * [`Host`] is the interface to the host; [`Imports`] implements it in a component.
//! * [`resp`] parses and writes RESP3, [`hlc`] parses and writes HLC timestamps.
//! * [`testing`] (native only) has a table, a clock and watches, so that plain `cargo test` tests a
//!   policy, from code or from transcripts.
//!
//! A policy that counts in a key, and its test:
//!
//! ```
//! use statehouse_policy::{
//!     Access, Body, Bytes, Change, Dialect, Fault, Frame, Host, Info, Notification, Outcome, Policy,
//!     Repeat, Request, Span, resp, testing::Table,
//! };
//!
//! /// `TALLY key`: adds a stroke to the value of a key; returns the number of strokes.
//! struct Tally;
//!
//! impl Tally {
//!     fn stroke(host: &mut impl Host, key: &Bytes) -> Result<u64, Fault> {
//!         host.head(key, Access::Write)?;
//!         let mut strokes = host.load(key, 0, 1000)?.unwrap_or_default();
//!         strokes.push(b'|');
//!         let count = strokes.len() as u64;
//!         host.put(key, &Bytes::Owned(strokes), None, None, None)?;
//!         Ok(count)
//!     }
//! }
//!
//! impl Policy for Tally {
//!     fn describe() -> Info {
//!         Info { name: "tally".into(), version: "1.0.0".into(), commands: vec!["TALLY".into()] }
//!     }
//!
//!     fn configure(_options: &[(String, String)]) -> Result<Self, String> {
//!         Ok(Self)
//!     }
//!
//!     fn route(&self, payload: &[u8]) -> Option<Span> {
//!         resp::parse(payload).ok()?.span(1)
//!     }
//!
//!     fn handle(&self, host: &mut impl Host, request: &Request) -> Outcome {
//!         let key = match resp::parse(&request.payload) {
//!             Ok(arguments) if arguments.count() == 2 => arguments.bytes(1),
//!             _ => None,
//!         };
//!         let mut head = Vec::new();
//!         match key.map(|key| Self::stroke(host, &key)) {
//!             Some(Ok(count)) => resp::push_head(&mut head, b':', count),
//!             Some(Err(_)) => resp::push_error(&mut head, "no"),
//!             None => resp::push_error(&mut head, "syntax error"),
//!         }
//!         let reply = Frame { head, body: Body::None };
//!         Outcome { reply, version: None, repeat: Repeat::Same, command: Some(0) }
//!     }
//!
//!     fn notify(&self, _change: &Change, _dialect: Dialect) -> Notification {
//!         unreachable!("no command of this policy watches anything")
//!     }
//! }
//!
//! statehouse_policy::export!(Tally);
//!
//! # fn main() {
//! let mut table = Table::new(1_700_000_000_000);
//! let request = Request {
//!     payload: resp::request(&[b"TALLY", b"beers"]),
//!     dialect: Dialect::Sdk,
//!     timestamp: None,
//!     fencing_token: None,
//!     client: None,
//!     now: 1_700_000_000_000,
//! };
//! assert_eq!(table.call(&Tally, &request).bytes, b":1\r\n");
//! assert_eq!(table.call(&Tally, &request).bytes, b":2\r\n");
//! # }
//! ```
//!
//! A panic ends the call, and the host rolls back its writes. The exported component reports
//! message, file and line of the panic to the host's log.
//!
//! A policy must do no I/O and must not use time or randomness of its own. There is no WASI, and
//! all input arrives in the request or through [`Host`].

#![deny(unsafe_code)]

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
