//! `statehouse vdel`: deletes a key if it has a given value.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;

use serde_json::json;
use statehouse_client::{Client, VdelResult, Version};

use super::output::{Exit, Failure, emit_json, json_bytes, notice, printable};
use super::remote::{Fencing, Remote};
use super::set;

/// Delete a key if it has this value
///
/// Exit code 1 if it has another value, or does not exist.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  statehouse vdel leader \"$HOSTNAME\"
  statehouse vdel leader \"$HOSTNAME\" --json
  statehouse vdel firmware - < firmware.bin")]
pub(super) struct Args {
    /// The key: any bytes but NUL
    key: OsString,

    /// The expected value: any bytes but NUL. Any bytes are read from stdin if it is `-`
    #[arg(allow_negative_numbers = true)]
    value: OsString,

    #[command(flatten)]
    fencing: Fencing,

    #[command(flatten)]
    remote: Remote,
}

pub(super) async fn run(args: Args) -> Result<Exit, Failure> {
    let key = args.key.as_bytes();
    let value = set::bytes_of(Some(args.value))?;
    let token = args.fencing.token.as_ref();
    let vdel = async |client: &Client| client.vdel(key, &value, token).await;
    let result = args.remote.ask(vdel).await?;

    let (deleted, version) = match &result {
        VdelResult::Deleted(version) => (true, Some(version)),
        VdelResult::Different(version) => (false, Some(version)),
        VdelResult::Missing => (false, None),
    };
    if args.remote.json {
        emit_json(&json!({
            "key": json_bytes(key),
            "deleted": deleted,
            "version": version.map(Version::to_string),
        }))?;
    } else if let VdelResult::Different(version) = &result {
        notice(&format!(
            "not deleted: {} has another value, of version {version}",
            printable(key)
        ));
    }
    Ok(Exit::of(deleted))
}
