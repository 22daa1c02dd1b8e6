//! Tests the command line: `serve` and its settings, commands that send requests to a store, and
//! commands that read a data directory.
#![allow(missing_docs, clippy::unwrap_used)]

mod backup;
mod bench;
mod commands;
mod context;
mod data_directory;
mod doctor;
mod everyday;
mod history;
mod lock;
mod log;
mod manual;
mod replay;
mod retained;
mod serve;
mod service_manager;
mod settings;
mod watch;
