//! Tests the command line: `serve` and its settings, commands that send requests to a store, and
//! commands that read a data directory.
#![allow(missing_docs, clippy::unwrap_used)]

mod backup;
mod bad_input;
mod bench;
mod check;
mod commands;
mod context;
mod data_directory;
mod doctor;
mod everyday;
mod follow;
mod history;
mod installed;
mod lock;
mod log;
mod manual;
mod night;
mod replay;
mod retained;
mod serve;
mod service_manager;
mod settings;
mod threads;
mod watch;

use statehouse_tests::{Ran, Server, run};

/// Runs a command against this server, with bytes on standard input.
fn ask_with(server: &Server, arguments: &[&str], stdin: &[u8]) -> Ran {
    let port = server.port().to_string();
    let (name, rest) = arguments.split_first().unwrap();
    // Options come right after the name, since `--` in the arguments would end them.
    let mut all = vec![*name, "--port", &port];
    all.extend(rest);
    run(&all, stdin)
}

fn ask(server: &Server, arguments: &[&str]) -> Ran {
    ask_with(server, arguments, b"")
}
