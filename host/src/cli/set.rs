//! `statehouse set`: sets a key to a value.

use std::ffi::{OsStr, OsString};
use std::io::{self, Read};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::time::Duration;

use serde_json::json;
use statehouse_client::{Client, Condition, PACKET_BYTES_MAX, SetOptions, Version, parse_duration};

use super::output::{Exit, Failure, emit, emit_json, json_bytes, notice, printable};
use super::remote::{Fencing, Remote};

/// Set a key to a value
///
/// Exit code 1 if --nx, --nex or --if-version prevents it.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  statehouse set room/temperature 21.5
  statehouse set room/temperature 21.5 --ttl 10s
  statehouse set firmware < firmware.bin
  statehouse set leader \"$HOSTNAME\" --nx || echo \"another host leads\"
  statehouse set counter 8 --if-version \"$(statehouse get counter --with-version | head -1)\"
  statehouse set valve open --fencing-token 001696374425000:00001:StateStore")]
pub(super) struct Args {
    /// The key: any bytes but NUL
    key: OsString,

    /// The value: any bytes but NUL. Any bytes are read from stdin if it is absent or `-`
    #[arg(allow_negative_numbers = true)]
    value: Option<OsString>,

    /// Only if the key does not exist
    #[arg(long, conflicts_with = "nex")]
    nx: bool,

    /// Only if the key does not exist or has this value
    #[arg(long)]
    nex: bool,

    /// Only if the key has this version, as --with-version prints it
    #[arg(long, value_name = "VERSION", conflicts_with_all = ["nx", "nex"])]
    if_version: Option<Version>,

    /// Delete the key after this many milliseconds
    #[arg(long, value_name = "MS", conflicts_with = "ttl",
          value_parser = clap::value_parser!(u64).range(1..=i64::MAX.unsigned_abs()))]
    px: Option<u64>,

    /// Delete the key after this time, such as 500ms, 10s, 5m or 1h
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    ttl: Option<Duration>,

    #[command(flatten)]
    fencing: Fencing,

    /// Print the version that was assigned to the value
    #[arg(long)]
    with_version: bool,

    #[command(flatten)]
    remote: Remote,
}

pub(super) async fn run(args: Args) -> Result<Exit, Failure> {
    let key = args.key.as_bytes();
    let value = bytes_of(args.value)?;
    let options = SetOptions {
        condition: match (args.nx, args.nex, args.if_version) {
            (true, ..) => Condition::IfAbsent,
            (_, true, _) => Condition::IfAbsentOrEqual,
            (.., Some(version)) => Condition::IfVersion(version),
            _ => Condition::Always,
        },
        expiry: args.px.map(Duration::from_millis).or(args.ttl),
        fencing_token: args.fencing.token,
    };
    let set = async |client: &Client| client.set(key, value, options).await;
    let set = args.remote.ask(set).await?;

    let version = set.version.as_ref().map(Version::to_string);
    if args.remote.json {
        emit_json(&json!({
            "key": json_bytes(key),
            "applied": set.applied,
            "version": version,
        }))?;
    } else if set.applied {
        if let Some(version) = version.filter(|_| args.with_version) {
            emit(format!("{version}\n").as_bytes())?;
        }
    } else {
        let key = printable(key);
        notice(&match version {
            Some(version) => format!("not applied: {key} has a value of version {version}"),
            None => format!("not applied: {key} does not exist"),
        });
    }
    Ok(Exit::of(set.applied))
}

/// The bytes of this value, or those on stdin if it is absent or `-`.
pub(super) fn bytes_of(value: Option<OsString>) -> Result<Vec<u8>, Failure> {
    match value {
        Some(value) if value != OsStr::new("-") => Ok(value.into_vec()),
        _ => from_stdin(),
    }
}

fn from_stdin() -> Result<Vec<u8>, Failure> {
    let mut value = Vec::new();
    // One byte over the limit shows that the value is too long, without reading all of it.
    let read_max = PACKET_BYTES_MAX as u64 + 1;
    io::stdin()
        .lock()
        .take(read_max)
        .read_to_end(&mut value)
        .map_err(|error| Failure::usage(format!("cannot read the value from stdin: {error}")))?;
    if value.len() > PACKET_BYTES_MAX {
        return Err(Failure::usage(format!(
            "the value on stdin is longer than {PACKET_BYTES_MAX} bytes, the most that can be sent"
        )));
    }
    Ok(value)
}
