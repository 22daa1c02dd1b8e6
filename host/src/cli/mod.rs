//! The command line: one file per command.

mod serve;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// An MQTT 5 state store whose command logic is a WebAssembly component.
#[derive(Parser)]
#[command(name = "statehouse", version, about, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run a state store with its own MQTT 5 broker
    #[command(after_help = "\
Examples:
  statehouse serve
  statehouse serve --listen 127.0.0.1:1884 --policy my-policy.wasm
  STATEHOUSE_LISTEN=127.0.0.1:0 statehouse serve --log json
Every setting can also stand in the file that --config names, under its name with underscores:
  max_keys = 100000
Flags win over environment variables, these over the file.")]
    Serve(crate::config::Flags),
}

/// Runs the program.
pub fn main() -> ExitCode {
    match Cli::parse().command {
        Command::Serve(flags) => serve::run(flags),
    }
}
