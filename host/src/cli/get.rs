//! `statehouse get`: prints the current or a past value of a key.

use std::ffi::OsString;
use std::io::{self, IsTerminal};
use std::os::unix::ffi::OsStrExt;

use hyper::Method;
use serde_json::{Value as Json, json};
use statehouse_client::{Meta, Version};

use super::data::{self, Node};
use super::entries::{add_meta, duration};
use super::output::{Exit, Failure, emit, emit_json, json_bytes, notice, printable};
use super::remote::Remote;
use super::store::{Found, Place};
use super::time;
use crate::past::{self, Given};
use statehouse_config::percent;
use statehouse_core::clock::Stamp;
use statehouse_offline::{Moment, Past, Writer};

/// Print the value of a key
///
/// Writes the bytes unchanged to stdout; a newline follows only on a terminal. Exit code 1 if the
/// key does not exist.
///
/// With --as-of it reads the data directory, on this machine and without a lock, even while a
/// server runs. With --as-of and --admin it asks the admin API of a store on another machine. It
/// reaches as far back as `statehouse history`.
///
/// With --meta it asks the server, and looks for the writer in the data directory or asks the admin
/// API. If the directory is not on this machine, or the history does not contain this version of
/// the key, the lines `writer` and `holder` are missing; `statehouse lock NAME --status` names the
/// holder of a lock without either.
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
    /// The key: any bytes but NUL
    key: OsString,

    /// Print the version on a line of its own, before the value
    #[arg(long)]
    with_version: bool,

    /// Print the version, the length, the expiry and the fencing token instead of the value. Then
    /// the client that wrote the key last and its user, and the holder of a lock: a value that is
    /// the client id of its writer, and expires
    #[arg(long, conflicts_with_all = ["with_version", "as_of"])]
    meta: bool,

    #[command(flatten)]
    remote: Remote,

    /// The value at this version or time: a version as --with-version prints it, a time such as
    /// 2026-11-21T03:00:00Z, or how long ago by the store's time, such as 10m
    #[arg(long, value_name = "VERSION|TIME", value_parser = past::moment, help_heading = "The past")]
    as_of: Option<Given<Moment>>,

    #[command(flatten)]
    place: Place,

    #[command(flatten, next_help_heading = "The past")]
    node: Node,
}

pub(super) async fn run(mut args: Args) -> Result<Exit, Failure> {
    args.remote.heed(&args.place);
    let key = args.key.as_bytes();
    if args.meta {
        return meta(&args, key).await;
    }
    let value = match args.as_of {
        Some(moment) => as_of(&args, key, moment).await?,
        None => {
            let value = args.remote.read(async |it| it.get(key).await).await?;
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
        return Ok(Exit::of(value.is_some()));
    }
    let Some((bytes, version)) = value else {
        let when = match args.as_of {
            Some(_) => "did not exist then",
            None => "does not exist",
        };
        notice(&format!("{} {when}", printable(key)));
        return Ok(Exit::Negative);
    };
    let mut out = Vec::with_capacity(bytes.len() + 1);
    if args.with_version {
        out.extend(format!("{version}\n").into_bytes());
    }
    out.extend(&bytes);
    if io::stdout().is_terminal() {
        out.push(b'\n');
    }
    emit(&out)?;
    Ok(Exit::Done)
}

/// Prints what the store knows of the key apart from its value.
async fn meta(args: &Args, key: &[u8]) -> Result<Exit, Failure> {
    let found = match args.remote.find(&args.place) {
        // The options name the store twice.
        Err(failure) if args.place.is_given() && args.remote.has_context() => return Err(failure),
        found => found.ok(),
    };
    let meta = args.remote.read(async |it| it.meta(key).await).await?;
    let Some(meta) = meta else {
        if args.remote.json {
            emit_json(&json!({ "key": json_bytes(key), "version": null }))?;
        } else {
            notice(&format!("{} does not exist", printable(key)));
        }
        return Ok(Exit::Negative);
    };
    let writer = match found {
        Some(found) => writer(args, found, key, &meta.version).await,
        None => None,
    };
    if args.remote.json {
        let mut object = json!({ "key": json_bytes(key) });
        add_meta(&mut object, &meta);
        let writer = writer.as_ref();
        object["writer"] = json!(writer.map(|it| json!({
            "client": it.client,
            "user": it.user.as_deref(),
        })));
        object["holder"] = json!(writer.filter(|it| it.is_holder).map(|it| &it.client));
        emit_json(&object)?;
    } else {
        emit(in_words(&meta, writer.as_ref()).as_bytes())?;
    }
    Ok(Exit::Done)
}

/// The writer of this version, if the data directory of the store is on this machine, or its admin
/// API answers. A directory of another store does not contain the version.
async fn writer(args: &Args, found: Found, key: &[u8], version: &Version) -> Option<Writer> {
    let found = match found {
        Found::Data(path) if path.is_dir() => {
            let version = Stamp {
                wall: version.wall_ms(),
                counter: version.counter(),
            };
            let found = Past::open(&path).and_then(|past| past.writer(key, version));
            found.map_err(|error| error.to_string())
        }
        Found::Data(_) => return None,
        Found::Admin(mut asked) => {
            asked.timeout = Some(args.remote.timeout());
            let path = format!("/v1/history?key={}&limit=1", percent::encode(key));
            let answer = asked.send(Method::GET, &path, Vec::new()).await;
            let found = answer.map(|it| writer_in(&it["changes"][0], version));
            found.map_err(|failure| failure.message().to_owned())
        }
    };
    found.unwrap_or_else(|error| {
        notice(&format!("the last writer is not shown: {error}"));
        None
    })
}

/// The writer in the last change of a key, if that gave it this version.
fn writer_in(change: &Json, version: &Version) -> Option<Writer> {
    let client = change["client"].as_str()?;
    let is_same = change["version"].as_str() == Some(&*version.to_string());
    is_same.then(|| Writer {
        client: client.to_owned(),
        user: change["user"].as_str().map(Into::into),
        is_holder: change["expires"].is_string() && change["value"].as_str() == Some(client),
    })
}

fn in_words(meta: &Meta, writer: Option<&Writer>) -> String {
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
    if let Some(writer) = writer {
        let client = printable(writer.client.as_bytes());
        if writer.is_holder {
            text.push_str(&format!("holder   {client}\n"));
        }
        let user = writer.user.as_deref().map(|it| printable(it.as_bytes()));
        let user = user.map_or(String::new(), |it| format!(", user {it}"));
        text.push_str(&format!("writer   {client}{user}\n"));
    }
    text
}

/// The value and version of the key at a moment.
async fn as_of(
    args: &Args,
    key: &[u8],
    given: Given<Moment>,
) -> Result<Option<(Vec<u8>, String)>, Failure> {
    let text = text_of(given);
    let answer = match args.remote.find(&args.place)? {
        Found::Data(data) => {
            let past = Past::open(&data)?;
            let Some(moment) = given.within(&past)? else {
                return Err(Failure::usage(format!("{text} is still to come")));
            };
            // A version after the end of the log is refused.
            if let Moment::Time(ms) = moment {
                data::notice_end(&past, ms)?;
            }
            let found = past.as_of(key, moment)?;
            past::as_of(key, found, &args.node.name).map_err(Failure::usage)?
        }
        Found::Admin(asked) => {
            let path = format!("/v1/value?key={}&as_of={text}", percent::encode(key));
            let answer = asked.send(Method::GET, &path, Vec::new()).await;
            answer.map_err(Failure::of_question)?
        }
    };
    let version = answer["version"].as_str().unwrap_or_default().to_owned();
    Ok(past::bytes_of(&answer["value"]).map(|bytes| (bytes, version)))
}

/// A moment as [`past::moment`] reads it.
fn text_of(given: Given<Moment>) -> String {
    match given {
        // A shorter number is not taken for the wall of a version.
        Given::Exactly(Moment::Version(Stamp { wall, counter })) => format!("{wall:015}:{counter}"),
        Given::Exactly(Moment::Time(ms)) => time::utc(ms),
        Given::Ago(ms) => format!("{ms}ms"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression: the admin API refused a version of a gateway whose clock began in 1970.
    #[test]
    fn moments_are_sent_as_they_are_read() {
        let version = |wall| Given::Exactly(Moment::Version(Stamp { wall, counter: 7 }));
        let time = |ms| Given::Exactly(Moment::Time(ms));
        for given in [
            version(0),
            version(123_456),
            version(1_696_374_425_000),
            version(u64::MAX),
            time(0),
            time(1_696_374_425_123),
            Given::Ago(600_000),
        ] {
            assert_eq!(past::moment(&text_of(given)), Ok(given));
        }
    }
}
