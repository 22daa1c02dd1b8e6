//! `statehouse man`: writes manual pages from the help texts.

use std::fs;
use std::path::PathBuf;

use clap::Command;

use super::output::{Exit, Failure};

/// Write a manual page for each command into a directory
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  statehouse man /usr/local/share/man/man1 && man statehouse-serve")]
pub(super) struct Args {
    /// The directory; it is created if it does not exist
    directory: PathBuf,
}

pub(super) fn run(args: &Args, program: Command) -> Result<Exit, Failure> {
    let failed = |error| {
        let directory = args.directory.display();
        Failure::usage(format!(
            "cannot write manual pages into {directory}: {error}"
        ))
    };
    fs::create_dir_all(&args.directory).map_err(failed)?;
    clap_mangen::generate_to(program, &args.directory).map_err(failed)?;
    Ok(Exit::Done)
}
