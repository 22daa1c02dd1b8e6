//! `statehouse get`: the value of a key, as it is or as it was.

use std::ffi::OsString;
use std::io::{self, IsTerminal};
use std::os::unix::ffi::OsStrExt;

use serde_json::json;

use super::data::{Data, Node};
use super::output::{Exit, Failure, emit, emit_json, json_bytes, printable};
use super::remote::Remote;
use super::time;
use statehouse_core::clock::Stamp;
use statehouse_core::clock::wall_ms;
use statehouse_offline::{AsOf, Moment, Past};

/// Print the value of a key
///
/// The bytes go to stdout as they are; a newline follows only on a terminal. Exit code 1 where
/// there is no such key.
///
/// With --as-of no server is asked: the data directory itself is read, on this machine, without a lock, also
/// beside a running server. It reaches as far back as `statehouse history` does.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  statehouse get room/temperature
  statehouse get firmware > firmware.bin
  statehouse get room/temperature --json
  statehouse get no-such-key || echo \"there is none\"
  statehouse get room/temperature --as-of 2026-11-21T03:00:00Z
  statehouse get room/temperature --as-of 10m
  statehouse get room/temperature --as-of 001696374425000:00001:StateStore")]
pub(super) struct Args {
    /// The key: any bytes
    key: OsString,

    /// Print the version on a line of its own, before the value
    #[arg(long)]
    with_version: bool,

    #[command(flatten)]
    remote: Remote,

    /// The value as it was with this version, or at this time: a version as --with-version prints it, a time
    /// such as 2026-11-21T03:00:00Z, or how long ago, such as 10m
    #[arg(long, value_name = "VERSION|TIME", value_parser = moment, help_heading = "The past")]
    as_of: Option<Moment>,

    #[command(flatten, next_help_heading = "The past")]
    data: Data,

    #[command(flatten, next_help_heading = "The past")]
    node: Node,
}

pub(super) async fn run(args: Args) -> Result<Exit, Failure> {
    let key = args.key.as_bytes();
    let value = match args.as_of {
        Some(moment) => as_of(&args, key, moment)?,
        None => {
            let client = args.remote.connect().await?;
            let value = client.get(key).await?;
            client.close().await;
            value.map(|value| (value.bytes.to_vec(), value.version.to_string()))
        }
    };

    if args.remote.json {
        let stored = value.as_ref();
        emit_json(&json!({
            "key": json_bytes(key),
            "value": stored.map(|(bytes, _)| json_bytes(bytes)),
            "version": stored.map(|(_, version)| version),
        }))?;
    }
    let Some((bytes, version)) = value else {
        return Ok(Exit::Negative);
    };
    if !args.remote.json {
        let mut out = Vec::with_capacity(bytes.len() + 1);
        if args.with_version {
            out.extend(format!("{version}\n").into_bytes());
        }
        out.extend(&bytes);
        if io::stdout().is_terminal() {
            out.push(b'\n');
        }
        emit(&out)?;
    }
    Ok(Exit::Done)
}

/// What the key was at a moment: its value and its version.
fn as_of(args: &Args, key: &[u8], moment: Moment) -> Result<Option<(Vec<u8>, String)>, Failure> {
    if let Moment::Time(ms) = moment
        && ms > wall_ms()
    {
        return Err(Failure::usage(format!(
            "{} is still to come",
            time::utc(ms)
        )));
    }
    let node = &args.node.name;
    match Past::open(&args.data.path)?.as_of(key, moment)? {
        AsOf::Value(entry) => {
            let version = entry.version().display(node).to_string();
            Ok(Some((entry.value().to_vec(), version)))
        }
        AsOf::Absent => Ok(None),
        AsOf::TooOld { since_ms } => Err(Failure::usage(format!(
            "what the key was then is not kept any more: the history in {} reaches back to {}. Ask for a later time, or look into an older backup; `serve --history-retention` and `--history-bytes` say how much is kept",
            args.data.path.display(),
            time::utc(since_ms)
        ))),
        AsOf::NotYet(last) => Err(Failure::usage(format!(
            "no version as late as that was given: the last one in {} is {}",
            args.data.path.display(),
            printable(last.display(node).to_string().as_bytes())
        ))),
    }
}

/// Reads what --as-of names. The node of a version does not matter: a store gives no version twice.
fn moment(text: &str) -> Result<Moment, String> {
    let mut parts = text.splitn(3, ':');
    let (wall, counter) = (parts.next().unwrap_or_default(), parts.next());
    let digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    if let Some(counter) = counter
        // Anything shorter is a time of day without its date.
        && wall.len() >= WALL_DIGITS_MIN
        && digits(wall)
        && digits(counter)
        && let (Ok(wall), Ok(counter)) = (wall.parse(), counter.parse())
    {
        return Ok(Moment::Version(Stamp { wall, counter }));
    }
    time::parse(text, wall_ms()).map(Moment::Time).ok_or_else(|| {
        "write a version such as 001696374425000:00001:StateStore, a time such as 2026-11-21T03:00:00Z, or how long ago, such as 10m".to_owned()
    })
}

/// Milliseconds since 1970 have had more digits than this since January 1970.
const WALL_DIGITS_MIN: usize = 10;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_and_times_are_told_apart() {
        let version = |wall, counter| Ok(Moment::Version(Stamp { wall, counter }));
        assert_eq!(
            moment("001696374425000:00001:StateStore"),
            version(1_696_374_425_000, 1)
        );
        assert_eq!(moment("1696374425000:1"), version(1_696_374_425_000, 1));
        assert_eq!(moment("1696374425000:1:a:b"), version(1_696_374_425_000, 1));
        assert_eq!(moment("1970-01-01T00:00:01Z"), Ok(Moment::Time(1000)));
        assert!(matches!(moment("10m"), Ok(Moment::Time(_))));
        for wrong in [
            "12:30",
            "12:30:15",
            "1696374425000",
            "1696374425000:x",
            "",
            ":",
            "soon",
        ] {
            assert!(moment(wrong).is_err(), "{wrong}");
        }
    }
}
