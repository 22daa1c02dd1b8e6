//! `statehouse get`: the value of a key.

use std::ffi::OsString;
use std::io::{self, IsTerminal};
use std::os::unix::ffi::OsStrExt;

use serde_json::json;

use super::output::{Exit, Failure, emit, emit_json, json_bytes};
use super::remote::Remote;

/// Print the value of a key
///
/// The bytes go to stdout as they are; a newline follows only on a terminal. Exit code 1 where
/// there is no such key.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  statehouse get room/temperature
  statehouse get firmware > firmware.bin
  statehouse get room/temperature --json
  statehouse get no-such-key || echo \"there is none\"")]
pub(super) struct Args {
    /// The key: any bytes
    key: OsString,

    /// Print the version on a line of its own, before the value
    #[arg(long)]
    with_version: bool,

    #[command(flatten)]
    remote: Remote,
}

pub(super) async fn run(args: Args) -> Result<Exit, Failure> {
    let client = args.remote.connect().await?;
    let key = args.key.as_bytes();
    let value = client.get(key).await?;
    client.close().await;

    if args.remote.json {
        let stored = value.as_ref();
        emit_json(&json!({
            "key": json_bytes(key),
            "value": stored.map(|value| json_bytes(&value.bytes)),
            "version": stored.map(|value| value.version.to_string()),
        }))?;
    }
    let Some(value) = value else {
        return Ok(Exit::Negative);
    };
    if !args.remote.json {
        let mut out = Vec::with_capacity(value.bytes.len() + 1);
        if args.with_version {
            out.extend(format!("{}\n", value.version).into_bytes());
        }
        out.extend(&value.bytes);
        if io::stdout().is_terminal() {
            out.push(b'\n');
        }
        emit(&out)?;
    }
    Ok(Exit::Done)
}
