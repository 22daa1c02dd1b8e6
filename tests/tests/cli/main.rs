//! The command line: `serve` and its settings, and the commands that ask a store over the network.
#![allow(missing_docs, clippy::unwrap_used)]

mod commands;
mod lock;
mod serve;
mod settings;
mod watch;
