//! The store for tests of policies: without a network, a disk or a real clock.
//!
//! A test provides a policy (a component or a core module), requests and the time. It receives the
//! answers and all effects. The testkit must run the code of `serve` from the PUBLISH to the
//! effects; otherwise a passed test would say nothing about the server. No code on the path of a
//! request depends on it.
//!
//! * [`Harness`]: a policy over a store, for a plain `#[test]`.
//! * [`transcript`]: conversations in files, which `statehouse policy test` compares byte for byte.
//! * [`check`]: checks whether a file is a policy, and measures its commands.
//! * [`bench`]: measures the cost of requests in comparison with the built-in policy.
//! * [`project`]: creates the project of a new policy.
//!
//! Every request runs twice: on the instance that handled all earlier requests, and on a fresh
//! instance with the same state. If the results differ, the policy has hidden state between
//! requests, and a redelivery would get a different answer.
//!
//! A policy is compiled once: its machine code is kept in `statehouse/code` in the cache directory
//! of this user (`XDG_CACHE_HOME` or `~/.cache`), which only this user may write to.
//!
//! ```no_run
//! use statehouse_testkit::Harness;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let mut it = Harness::load("setpoint.wasm")?;
//! it.at(1_700_000_000_000);
//! it.put("unit", "celsius");
//! let answer = it.client("thermostat").send(&["SET", "setpoint/kitchen", "21"]);
//! assert_eq!(answer.payload, b"+OK\r\n");
//! assert_eq!(answer.writes.len(), 1);
//! assert_eq!(answer.hidden_state, None);
//! it.advance(60_000);
//! assert!(it.client("thermostat").timestamp(None).send(&["GET", "unit"]).fuel < 100_000);
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

mod answer;
pub mod bench;
pub mod check;
mod client;
pub mod compose;
pub mod conformance;
mod harness;
pub mod limits;
pub mod project;
mod setup;
pub mod transcript;

pub use answer::{Answer, Came, Logged, Notification, Passed, Reads};
pub use client::array;
pub use client::{Client, Publish};
pub use harness::{Harness, NOW_MS};
pub use setup::{KitError, read_policy};
pub use statehouse_core::request::Dialect;
pub use statehouse_core::store::{Change, Entry, Key, KeyRef, Quota, Read, Right, Scope, Write};
pub use statehouse_protocol::rights::ClientRights;
