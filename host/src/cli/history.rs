//! `statehouse history`: prints the recorded changes of a key.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;

use serde_json::{Value as Json, json};

use super::data::{self, Data, Node};
use super::output::{Exit, Failure, emit, emit_either, emit_json, json_bytes, printable};
use super::time::utc;
use statehouse_core::store::Entry;
use statehouse_offline::{Change, History, Past, What};

/// Print the recorded changes of a key, the newest first
///
/// Reads the data directory, on this machine and without a lock, even while a server runs. The
/// server's --history-retention and --history-bytes decide how far back it reaches; the last line
/// reports it. Exit code 1 if nothing is known of the key.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  statehouse history room/temperature
  statehouse history room/temperature --limit 3 --data /var/lib/statehouse
  statehouse history room/temperature --json | jq -r 'select(.event == \"set\") | .value'")]
pub(super) struct Args {
    /// The key: any bytes
    key: OsString,

    /// Print at most this many changes, the latest ones
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..))]
    limit: u32,

    /// Print a JSON object for each change, one per line; bytes that are not UTF-8 as {"base64":
    /// ...}
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    node: Node,

    #[command(flatten)]
    data: Data,
}

pub(super) fn run(args: &Args) -> Result<Exit, Failure> {
    let key = args.key.as_bytes();
    let history = Past::open(&args.data.path)?.history(key, args.limit as usize)?;
    let node = &args.node.name;
    for change in history.changes.iter().rev() {
        let printed = emit_either(
            args.json,
            || in_json(key, change, node),
            || in_words(change, node),
        )?;
        if !printed {
            return Ok(Exit::Done);
        }
    }
    if args.json {
        emit_json(&json!({
            "event": "beginning",
            "key": json_bytes(key),
            "changes": history.count,
            "since": history.since_ms.map(utc),
            "before": history.before.as_ref().map(|entry| json!({
                "version": entry.version().display(node).to_string(),
                "bytes": entry.value().len(),
            })),
        }))?;
    } else {
        emit(beginning(&history, key, node).as_bytes())?;
    }
    Ok(match history.count == 0 && history.before.is_none() {
        true => Exit::Negative,
        false => Exit::Done,
    })
}

fn in_words(change: &Change, node: &str) -> String {
    let event = match &change.what {
        What::Set { .. } => "set",
        What::Deleted => "deleted",
        What::Expired => "expired",
    };
    let version = change.version.display(node).to_string();
    let mut text = format!(
        "{event} {}  {}\n",
        printable(version.as_bytes()),
        utc(change.now_ms)
    );
    let mut line = |name: &str, value: &str| text.push_str(&format!("    {name:<8} {value}\n"));
    if let What::Set { value, bytes, .. } = &change.what {
        let size = data::count(*bytes as u64, "byte");
        line("value", &format!("{size}: {}", data::excerpt(value)));
    }
    if let Some(client) = &change.client {
        line("client", &printable(client.as_bytes()));
    }
    if let Some(user) = &change.user {
        line("user", &printable(user.as_bytes()));
    }
    if let Some(policy) = &change.policy {
        line("policy", &data::policy(policy));
    }
    if let What::Set {
        fence, expires_ms, ..
    } = &change.what
    {
        if let Some(fence) = fence {
            line("fence", &data::fence(fence));
        }
        if let Some(expires_ms) = expires_ms {
            line("expires", &utc(*expires_ms));
        }
    }
    text
}

fn in_json(key: &[u8], change: &Change, node: &str) -> Json {
    let mut object = json!({
        "event": "",
        "key": json_bytes(key),
        "version": change.version.display(node).to_string(),
        "time": utc(change.now_ms),
        "record": change.position.0,
        "client": change.client,
        "user": change.user.as_deref(),
        "policy": change.policy.as_deref().map(data::policy_json),
    });
    match &change.what {
        What::Set {
            value,
            bytes,
            fence,
            expires_ms,
        } => {
            object["event"] = json!("set");
            object["value"] = json_bytes(value);
            object["bytes"] = json!(bytes);
            // `get --as-of` prints the whole value.
            object["truncated"] = json!(value.len() < *bytes);
            let fence = fence.as_ref();
            object["fencing_token"] = json!(fence.map(data::fence_json));
            object["expires"] = json!(expires_ms.map(utc));
        }
        What::Deleted => object["event"] = json!("deleted"),
        What::Expired => object["event"] = json!("expired"),
    }
    object
}

/// How far back the history reaches.
fn beginning(history: &History, key: &[u8], node: &str) -> String {
    let changes = data::count(history.count, "change");
    let since = match history.since_ms {
        None => "since the store began".to_owned(),
        Some(since_ms) => format!("since {}", utc(since_ms)),
    };
    let shown = history.changes.len() as u64;
    let older = match history.count - shown {
        0 => String::new(),
        left => format!(" ({} not shown: --limit)", data::count(left, "older one")),
    };
    let before = match (&history.before, history.since_ms) {
        (Some(entry), _) => format!("; before that {}", value_of(entry, node)),
        (None, Some(_)) => "; earlier changes are not kept".to_owned(),
        (None, None) => String::new(),
    };
    format!("{changes} of {} {since}{older}{before}\n", printable(key))
}

fn value_of(entry: &Entry, node: &str) -> String {
    let version = entry.version().display(node).to_string();
    format!(
        "it held {} of version {}",
        data::count(entry.value().len() as u64, "byte"),
        printable(version.as_bytes())
    )
}
