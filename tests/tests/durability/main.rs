//! Tests of what survives `kill -9` of the real binary: writes, answers, sessions. Every
//! acknowledged or observed state must survive.
//!
//! The clients are raw ones, so that a test controls packet ids and DUP. `official/restart.rs`
//! kills the server under the official client.
#![allow(missing_docs, clippy::unwrap_used)]

mod clock_steps;
mod directories;
mod disk_full;
mod disk_room;
mod duplicates;
mod earlier;
mod exchanges;
mod flash;
mod histories;
mod modes;
mod pipeline;
mod power;
mod reads;
mod released;
mod resumed;
mod retention;
mod sessions;
mod stopping;
