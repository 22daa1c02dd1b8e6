//! `statehouse get`: prints the current or a past value of a key.

use std::ffi::OsString;
use std::io::{self, IsTerminal};
use std::os::unix::ffi::OsStrExt;

use hyper::Method;
use serde_json::json;

use super::data::Node;
use super::entries::{add_meta, duration};
use super::output::{Exit, Failure, emit, emit_json, json_bytes, notice, printable};
use super::remote::Remote;
use super::store::{Found, Place};
use super::time;
use crate::{past, percent};
use statehouse_core::clock::Stamp;
use statehouse_core::clock::wall_ms;
use statehouse_offline::{Moment, Past};

/// Print the value of a key
///
/// Writes the bytes unchanged to stdout; a newline follows only on a terminal. Exit code 1 if the
/// key does not exist.
///
/// With --as-of it reads the data directory, on this machine and without a lock, even while a
/// server runs. With --as-of and --admin it asks the admin API of a store on another machine. It
/// reaches as far back as `statehouse history`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  statehouse get room/temperature
  statehouse get firmware > firmware.bin
  statehouse get room/temperature --json
  statehouse get room/temperature --meta
  statehouse get no-such-key || echo \"not found\"
  statehouse get room/temperature --as-of 2026-11-21T03:00:00Z
  statehouse get room/temperature --as-of 10m
  statehouse get room/temperature --as-of 001696374425000:00001:StateStore")]
pub(super) struct Args {
    /// The key: any bytes
    key: OsString,

    /// Print the version on a line of its own, before the value
    #[arg(long)]
    with_version: bool,

    /// Print the version, the length, the expiry and the fencing token instead of the value
    #[arg(long, conflicts_with_all = ["with_version", "as_of"])]
    meta: bool,

    #[command(flatten)]
    remote: Remote,

    /// The value at this version or time: a version as --with-version prints it, a time such as
    /// 2026-11-21T03:00:00Z, or how long ago, such as 10m
    #[arg(long, value_name = "VERSION|TIME", value_parser = past::moment, help_heading = "The past")]
    as_of: Option<Moment>,

    #[command(flatten)]
    place: Place,

    #[command(flatten, next_help_heading = "The past")]
    node: Node,
}

pub(super) async fn run(args: Args) -> Result<Exit, Failure> {
    let key = args.key.as_bytes();
    if args.meta {
        return meta(&args, key).await;
    }
    let value = match args.as_of {
        Some(moment) => as_of(&args, key, moment).await?,
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
        if !args.remote.json {
            let when = match args.as_of {
                Some(_) => "did not exist then",
                None => "does not exist",
            };
            notice(&format!("{} {when}", printable(key)));
        }
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

/// Prints what the store knows of the key apart from its value.
async fn meta(args: &Args, key: &[u8]) -> Result<Exit, Failure> {
    let client = args.remote.connect().await?;
    let meta = client.meta(key).await?;
    client.close().await;
    let Some(meta) = meta else {
        if args.remote.json {
            emit_json(&json!({ "key": json_bytes(key), "version": null }))?;
        } else {
            notice(&format!("{} does not exist", printable(key)));
        }
        return Ok(Exit::Negative);
    };
    if args.remote.json {
        let mut object = json!({ "key": json_bytes(key) });
        add_meta(&mut object, &meta);
        emit_json(&object)?;
        return Ok(Exit::Done);
    }
    let mut text = format!("version  {}\nbytes    {}\n", meta.version, meta.bytes);
    if let (Some(expires_ms), Some(ttl)) = (meta.expires_ms, meta.ttl) {
        let (at, left) = (time::utc(expires_ms), duration(ttl));
        text.push_str(&format!("expires  {at}, in {left}\n"));
    }
    if let Some(fence) = &meta.fence {
        text.push_str(&format!(
            "fence    {}\n",
            printable(fence.to_string().as_bytes())
        ));
    }
    emit(text.as_bytes())?;
    Ok(Exit::Done)
}

/// The value and version of the key at a moment.
async fn as_of(
    args: &Args,
    key: &[u8],
    moment: Moment,
) -> Result<Option<(Vec<u8>, String)>, Failure> {
    if let Moment::Time(ms) = moment
        && ms > wall_ms()
    {
        return Err(Failure::usage(format!(
            "{} is still to come",
            time::utc(ms)
        )));
    }
    let target = &args.remote.target;
    let found = (args.place).find(target.context.as_deref(), &target.credentials)?;
    let answer = match found {
        Found::Data(data) => {
            let found = Past::open(&data)?.as_of(key, moment)?;
            past::as_of(key, found, &args.node.name).map_err(Failure::usage)?
        }
        Found::Admin(asked) => {
            let moment = match moment {
                Moment::Version(Stamp { wall, counter }) => format!("{wall}:{counter}"),
                Moment::Time(ms) => time::utc(ms),
            };
            let path = format!("/v1/value?key={}&as_of={moment}", percent::encode(key));
            asked.send(Method::GET, &path, Vec::new()).await?
        }
    };
    let version = answer["version"].as_str().unwrap_or_default().to_owned();
    Ok(past::bytes_of(&answer["value"]).map(|bytes| (bytes, version)))
}
