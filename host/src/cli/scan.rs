//! `statehouse scan`: lists the keys that match a pattern.

use std::ffi::OsString;
use std::io::{self, IsTerminal};
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

use serde_json::json;

use super::output::{Exit, Failure, emit, json_bytes, printable};
use super::remote::Remote;

/// How long the broker keeps the session of an interrupted scan.
const SCAN_INTERRUPTION: Duration = Duration::from_secs(30);

/// List the keys that match a pattern
///
/// One key per line. On a terminal, unprintable characters are escaped; otherwise the bytes are
/// unchanged, so keys that contain a newline need -0 or --json. Exit code 1 if no key matches.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  statehouse scan
  statehouse scan 'room/*'
  statehouse scan 'sensor-[0-9]?'
  statehouse scan -0 'old/*' | xargs -0 -n 1 statehouse del")]
pub(super) struct Args {
    /// A glob: * any bytes, ? one byte, [a-z] and [!a-z] one byte of a set, \ escapes the next byte
    #[arg(default_value = "*")]
    pattern: OsString,

    /// End keys with NUL instead of a newline
    #[arg(short = '0', long, conflicts_with = "json")]
    null: bool,

    #[command(flatten)]
    remote: Remote,
}

pub(super) async fn run(args: Args) -> Result<Exit, Failure> {
    let client = args.remote.connect_for(SCAN_INTERRUPTION).await?;
    let escape = !args.null && io::stdout().is_terminal();
    let mut scan = client.scan(args.pattern.as_bytes());
    let mut exit = Exit::Negative;
    while let Some(keys) = scan.next_page().await? {
        let mut out = Vec::new();
        for key in &keys {
            exit = Exit::Done;
            if args.remote.json {
                out.extend(json!({ "key": json_bytes(key) }).to_string().into_bytes());
            } else if escape {
                out.extend(printable(key).into_bytes());
            } else {
                out.extend(key);
            }
            out.push(if args.null { 0 } else { b'\n' });
        }
        if !emit(&out)? {
            break;
        }
    }
    client.close().await;
    Ok(exit)
}
