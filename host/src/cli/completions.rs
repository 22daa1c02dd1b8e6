//! `statehouse completions`: prints shell completions of commands and flags.

use clap::Command;
use clap_complete::Shell;

use super::output::{Exit, Failure, emit};

/// Print the completions of a shell
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  statehouse completions bash > /etc/bash_completion.d/statehouse
  statehouse completions zsh > ~/.zfunc/_statehouse
  statehouse completions fish > ~/.config/fish/completions/statehouse.fish")]
pub(super) struct Args {
    /// The shell
    shell: Shell,
}

pub(super) fn run(args: &Args, mut program: Command) -> Result<Exit, Failure> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut program, "statehouse", &mut script);
    emit(&script)?;
    Ok(Exit::Done)
}
