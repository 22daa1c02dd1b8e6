//! What is left after `kill -9`, through the real binary: writes, answers, sessions. Clients are raw ones, so that
//! a test decides about packet ids and DUP; the official client is killed under in `official/restart.rs`.
#![allow(missing_docs, clippy::unwrap_used)]

mod directories;
mod disk_full;
mod disk_room;
mod duplicates;
mod earlier;
mod exchanges;
mod histories;
mod living;
mod modes;
mod pipeline;
mod reads;
mod resumed;
mod sessions;
