//! `statehouse man`: writes manual pages from the help texts.

use std::path::{Path, PathBuf};
use std::{fs, io};

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
    let mut program = program.disable_help_subcommand(true);
    program.build();
    write_pages(&program, &args.directory).map_err(failed)?;
    Ok(Exit::Done)
}

/// Writes the pages of a command and of its subcommands.
fn write_pages(command: &Command, directory: &Path) -> io::Result<()> {
    for subcommand in command.get_subcommands().filter(|it| !it.is_hide_set()) {
        write_pages(subcommand, directory)?;
    }
    let page = clap_mangen::Man::new(command.clone());
    let mut text = Vec::new();
    page.render(&mut text)?;
    fs::write(directory.join(page.get_filename()), with_lines(&text))
}

/// Keeps the lines of the examples, which roff would fill and justify.
fn with_lines(page: &[u8]) -> String {
    let page = String::from_utf8_lossy(page);
    let Some((head, examples)) = page.split_once(".SH EXTRA\n") else {
        return page.into_owned();
    };
    let (examples, tail) = match examples.find("\n.SH ") {
        Some(end) => examples.split_at(end + 1),
        None => (examples, ""),
    };
    let end = if examples.ends_with('\n') { "" } else { "\n" };
    format!("{head}.SH EXAMPLES\n.nf\n{examples}{end}.fi\n{tail}")
}
