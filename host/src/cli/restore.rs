//! `statehouse restore`: creates a data directory from a backup.

use std::path::PathBuf;

use super::output::{Exit, Failure};
use super::snapshot;
use statehouse_core::clock::wall_ms;
use statehouse_offline::{check_backup, restore};

/// Create a data directory from a backup
///
/// Checks every byte of the backup before it writes anything. The data directory must be empty, but
/// for `lost+found` and what an interrupted restore left, or absent. It is locked during the
/// restore; a directory that holds a store or other files is refused and not changed. Then start
/// the store there with `statehouse serve --data DIR`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  statehouse restore backup.statehouse
  statehouse restore backup.statehouse --check
  statehouse restore backup.statehouse --data /var/lib/statehouse-new")]
pub(super) struct Args {
    /// The backup, as `statehouse snapshot` writes it
    file: PathBuf,

    /// Only read the backup, every byte of it, and print its content. Exit code 3 if it is damaged
    #[arg(long)]
    check: bool,

    /// Print the content as a JSON object
    #[arg(long)]
    json: bool,

    /// The data directory to create, or an empty one
    #[arg(
        long,
        value_name = "DIR",
        env = "STATEHOUSE_DATA",
        default_value = "statehouse-data"
    )]
    data: PathBuf,
}

pub(super) fn run(args: &Args) -> Result<Exit, Failure> {
    if args.check {
        snapshot::report("read", &args.file, &check_backup(&args.file)?, args.json)?;
        return Ok(Exit::Done);
    }
    let contents = restore(&args.file, &args.data, wall_ms())?;
    snapshot::report("restored", &args.data, &contents, args.json)?;
    Ok(Exit::Done)
}
