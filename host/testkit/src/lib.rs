//! What the author of a policy uses: the store itself, without a network, a disk or a clock of its own.
//!
//! What enters: a policy (a component or a core module), requests, and the time, which is a script's. What leaves:
//! answers and everything behind them. It runs the code of `serve` from the PUBLISH to the effects, so what holds
//! here holds there; nothing on the path of a request depends on it.
//!
//! * [`Harness`]: a policy over a store, for a plain `#[test]`.
//! * [`transcript`]: conversations in files, which `statehouse policy test` compares byte for byte.
//! * [`check`]: whether a file is a policy, and what its commands cost.
//! * [`bench`]: what a request costs beside the built-in policy.
//! * [`project`]: a new policy, and how one is built.
//!
//! Every request runs twice: by an instance that has answered all before it, and by a fresh one on the same state.
//! Where the two differ the policy hides state between requests, and a redelivery would be answered otherwise.
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
pub mod conformance;
mod harness;
pub mod limits;
pub mod project;
mod setup;
pub mod transcript;

pub use answer::{Answer, Came, Notification, Reads};
pub use client::array;
pub use client::{Client, Publish};
pub use harness::{Harness, NOW_MS};
pub use setup::{KitError, read_policy};
