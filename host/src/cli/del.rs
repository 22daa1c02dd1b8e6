//! `statehouse del`: deletes a key.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;

use serde_json::json;
use statehouse_client::Version;

use super::output::{Exit, Failure, emit_json, json_bytes};
use super::remote::Remote;

/// Delete a key
///
/// Exit code 1 if the key does not exist.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  statehouse del room/temperature
  statehouse del valve --fencing-token 001696374425000:00001:StateStore")]
pub(super) struct Args {
    /// The key: any bytes
    key: OsString,

    /// The fencing token: the version of the lock that protects the key
    #[arg(long, value_name = "VERSION")]
    fencing_token: Option<Version>,

    #[command(flatten)]
    remote: Remote,
}

pub(super) async fn run(args: Args) -> Result<Exit, Failure> {
    let client = args.remote.connect().await?;
    let key = args.key.as_bytes();
    let deleted = client.del(key, args.fencing_token.as_ref()).await?;
    client.close().await;

    if args.remote.json {
        emit_json(&json!({
            "key": json_bytes(key),
            "deleted": deleted.is_some(),
            "version": deleted.as_ref().map(Version::to_string),
        }))?;
    }
    Ok(match deleted {
        Some(_) => Exit::Done,
        None => Exit::Negative,
    })
}
