//! `statehouse policy`: everything about policies, one file per command.

mod file;
mod keygen;
mod sign;

use std::process::ExitCode;

use super::output;

/// Write, test, sign, ship, compare, swap and roll back policies
///
/// A policy is the WebAssembly module that decides what a command means. A store runs its built-in one unless it is
/// given another, which can happen while it runs.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  statehouse policy keygen gateway                         # gateway.key stays with you, gateway.pub goes to the stores
  statehouse policy sign --key gateway.key rule.wasm -o rule.signed.wasm")]
pub(super) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    Keygen(keygen::Args),
    Sign(sign::Args),
}

pub(super) fn run(args: Args) -> ExitCode {
    match args.command {
        Command::Keygen(args) => output::finish(async { keygen::run(&args) }),
        Command::Sign(args) => output::finish(async { sign::run(&args) }),
    }
}
