//! `statehouse export`: writes keys as JSON lines, which `statehouse import` reads.

use std::ffi::OsString;
use std::io::{self, IsTerminal};
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

use serde_json::{Map, Value as Json};
use statehouse_client::{Client, Error};

use super::data;
use super::entries::{self, Entry, Parts};
use super::output::{Exit, Failure, emit, json_bytes, notice, printable};
use super::progress::Progress;
use super::remote::Remote;

/// How long the broker keeps the session of an interrupted export.
const INTERRUPTION: Duration = Duration::from_secs(60);

/// Write keys and values as JSON, one object per line
///
/// Each line has `key`, `value` and `version`, and `expires_ms` (milliseconds since 1970) and
/// `fence` if the key has them. Bytes that are not UTF-8 are written as {"base64": ...}. Keys are
/// in byte order. The keys are read one after the other: use `statehouse snapshot` for a consistent
/// copy.
///
/// If the connection fails, the error names the --after with which the export continues.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  statehouse export > all.jsonl
  statehouse export 'plant/*' | gzip > plant.jsonl.gz
  statehouse export --after plant/7 >> all.jsonl        # continues after an error
  statehouse export | jq -r 'select(.expires_ms) | .key'")]
pub(super) struct Args {
    /// A glob: * any bytes, ? one byte, [a-z] and [!a-z] one byte of a set, \ escapes the next byte
    #[arg(default_value = "*")]
    pattern: OsString,

    /// Write only keys that come after this one in byte order
    #[arg(long, value_name = "KEY")]
    after: Option<OsString>,

    #[command(flatten)]
    remote: Remote,
}

pub(super) async fn run(args: Args) -> Result<Exit, Failure> {
    let export = async |client: &Client| export(client, &args).await;
    let count = args.remote.ask_for(INTERRUPTION, export).await?;
    notice(&format!("{} written", data::count(count, "key")));
    Ok(Exit::Done)
}

/// Writes all keys. Returns their number.
async fn export(client: &Client, args: &Args) -> Result<u64, Failure> {
    let mut scan = client.scan(args.pattern.as_bytes());
    let mut parts = Parts::Both;
    let mut last = args.after.as_ref().map(|key| key.as_bytes().to_vec());
    let mut count = 0;
    // Keys that are printed on the terminal show the progress themselves.
    let mut progress = (!io::stdout().is_terminal()).then(Progress::new);
    while let Some(mut keys) = scan
        .next_page()
        .await
        .map_err(|error| resumable(error.into(), count, last.as_deref()))?
    {
        keys.retain(|key| last.as_ref().is_none_or(|last| key[..] > last[..]));
        if parts == Parts::Both
            && let Some(key) = keys.first()
            && let Err(Error::Refused(why)) = client.meta(key).await
        {
            notice(&format!(
                "this store does not tell when keys expire, so expiries and fencing tokens are left out: {why}"
            ));
            parts = Parts::Value;
        }
        let entries = entries::read(client, &keys, parts).await;
        let mut out = Vec::new();
        for entry in entries.map_err(|it| resumable(it, count, last.as_deref()))? {
            out.extend(line(&entry).to_string().into_bytes());
            out.push(b'\n');
            last = Some(entry.key.to_vec());
        }
        count += out.iter().filter(|byte| **byte == b'\n').count() as u64;
        if !emit(&out)? {
            break;
        }
        if let Some(progress) = &mut progress {
            progress.text(|| format!("{} written", data::count(count, "key")));
        }
    }
    Ok(count)
}

fn resumable(error: Failure, count: u64, last: Option<&[u8]>) -> Failure {
    match last {
        None => error,
        Some(key) => error.with(&format!(
            "{} written; continue with --after '{}'",
            data::count(count, "key"),
            printable(key)
        )),
    }
}

fn line(entry: &Entry) -> Json {
    let mut object = Map::new();
    object.insert("key".into(), json_bytes(&entry.key));
    if let Some(value) = &entry.value {
        object.insert("value".into(), json_bytes(&value.bytes));
        object.insert("version".into(), value.version.to_string().into());
    }
    if let Some(meta) = &entry.meta {
        if let Some(expires_ms) = meta.expires_ms {
            object.insert("expires_ms".into(), expires_ms.into());
        }
        if let Some(fence) = &meta.fence {
            object.insert("fence".into(), fence.to_string().into());
        }
    }
    Json::Object(object)
}
