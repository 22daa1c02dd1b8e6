//! `statehouse del`: deletes a key, or all keys with a prefix.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;

use bytes::Bytes;
use clap::builder::TypedValueParser;
use serde_json::json;
use statehouse_client::{Client, Error, Version};

use super::data;
use super::entries;
use super::output::{Exit, Failure, emit_json, json_bytes, notice};
use super::remote::{Fencing, Remote};

/// Delete a key, or all keys that start with a prefix
///
/// Exit code 1 if the key does not exist, or no key has the prefix. With --prefix, keys are deleted
/// one after the other: a key that is set during the command may remain. If the store refuses to
/// delete some keys, the command deletes the others and ends with exit code 4.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  statehouse del room/temperature
  statehouse del --prefix room/
  statehouse del valve --fencing-token 001696374425000:00001:StateStore")]
pub(super) struct Args {
    /// The key: any bytes but NUL
    #[arg(required_unless_present = "prefix")]
    key: Option<OsString>,

    /// Delete all keys that start with these bytes
    #[arg(long, value_name = "PREFIX", conflicts_with = "key", allow_hyphen_values = true,
          value_parser = clap::builder::OsStringValueParser::new().try_map(not_empty))]
    prefix: Option<OsString>,

    #[command(flatten)]
    fencing: Fencing,

    #[command(flatten)]
    remote: Remote,
}

pub(super) async fn run(args: Args) -> Result<Exit, Failure> {
    let token = args.fencing.token.as_ref();
    if let Some(prefix) = &args.prefix {
        let pattern = entries::pattern_of(prefix);
        let delete = async |client: &Client| delete_all(client, &pattern, token).await;
        let count = args.remote.ask(delete).await?;
        if args.remote.json {
            let prefix = json_bytes(prefix.as_bytes());
            emit_json(&json!({ "prefix": prefix, "deleted": count }))?;
        } else {
            notice(&format!("{} deleted", data::count(count, "key")));
        }
        return Ok(Exit::of(count > 0));
    }
    let key = args.key.as_deref().unwrap_or_default().as_bytes();
    let delete = async |client: &Client| client.del(key, token).await;
    let deleted = args.remote.ask(delete).await?;

    if args.remote.json {
        emit_json(&json!({
            "key": json_bytes(key),
            "deleted": deleted.is_some(),
            "version": deleted.as_ref().map(Version::to_string),
        }))?;
    }
    Ok(Exit::of(deleted.is_some()))
}

/// Deletes all keys that match a pattern, except those that the store refuses to delete. Returns
/// their number.
async fn delete_all(
    client: &Client,
    pattern: &[u8],
    token: Option<&Version>,
) -> Result<u64, Failure> {
    let mut scan = client.scan(pattern);
    let mut count = 0;
    let (mut refused, mut refusal) = (0, None);
    let failed = |error: Failure, count| {
        let count = data::count(count, "key");
        error.with(&format!(
            "{count} deleted before; repeat the command to go on"
        ))
    };
    while let Some(keys) = scan
        .next_page()
        .await
        .map_err(|it| failed(it.into(), count))?
    {
        for keys in keys.chunks(entries::IN_FLIGHT) {
            let delete = |key: &Bytes| {
                let (client, key, token) = (client.clone(), key.clone(), token.cloned());
                tokio::spawn(async move {
                    match client.del(&key, token.as_ref()).await {
                        Err(error @ Error::Refused(_)) => Ok(Err(error)),
                        deleted => deleted.map(Ok),
                    }
                })
            };
            for deleted in entries::in_order(keys.iter().map(delete).collect()).await {
                match deleted.map_err(|error| failed(error, count))? {
                    Ok(deleted) => count += u64::from(deleted.is_some()),
                    Err(error) => {
                        refused += 1;
                        refusal.get_or_insert(error);
                    }
                }
            }
        }
    }
    match refusal {
        None => Ok(count),
        Some(error) => {
            let (count, refused) = (data::count(count, "key"), data::count(refused, "key"));
            let counts = format!("{refused} refused, {count} deleted");
            Err(Failure::from(error).with(&counts))
        }
    }
}

fn not_empty(prefix: OsString) -> Result<OsString, &'static str> {
    match prefix.is_empty() {
        true => {
            Err("an empty prefix would delete every key: name one, or delete what `scan` lists")
        }
        false => Ok(prefix),
    }
}
