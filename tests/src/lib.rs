//! The harness of the tests of the whole. What enters: the path of the built `statehouse` binary. What
//! leaves: servers on ports of their own, clients that show every byte, transcripts that are compared byte for
//! byte. It never builds anything, and it shares no code with the server: an encoder tested by itself proves nothing.
//!
//! Everything here panics where something is not as it should be; that is how a test fails.
#![forbid(unsafe_code)]
// A harness fails a test by panicking, so its unwraps are assertions.
#![allow(clippy::unwrap_used)]

pub mod admin;
pub mod attack;
pub mod binary;
pub mod cgroup;
pub mod client;
pub mod command;
pub mod connect;
pub mod dice;
pub mod example;
pub mod histories;
pub mod hlc;
pub mod linearizable;
pub mod lines;
pub mod mosquitto;
pub mod packet;
pub mod policies;
pub mod property;
pub mod proxy;
pub mod resp;
pub mod server;
pub mod store;
pub mod transcript;
pub mod victim;
pub mod websocket;

pub use admin::Admin;
pub use cgroup::Cgroup;
pub use client::{Client, Heard};
pub use command::{Ran, command, run, run_in};
pub use connect::{Connect, Will};
pub use dice::Dice;
pub use hlc::Hlc;
pub use lines::Lines;
pub use mosquitto::Mosquitto;
pub use packet::{Packet, Publish};
pub use property::Property;
pub use proxy::{Fate, Proxy, Way};
pub use server::Server;
pub use store::{Answer, Dialect, Request, Store};
pub use victim::{Latencies, Victim};
