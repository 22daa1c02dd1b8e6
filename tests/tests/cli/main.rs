//! The command line: `serve` and its settings, the commands that ask a store over the network, and those that look
//! into its data directory.
#![allow(missing_docs, clippy::unwrap_used)]

mod backup;
mod bench;
mod commands;
mod doctor;
mod history;
mod lock;
mod log;
mod looking;
mod manual;
mod replay;
mod retained;
mod serve;
mod service_manager;
mod settings;
mod watch;
