//! The history of a key, and its value at a moment, as JSON.

use serde_json::{Value as Json, json};

use super::{fence_json, json_bytes, policy_json};
use crate::time::utc;
use statehouse_offline::{AsOf, Change, History, What};
use statehouse_protocol::Shown;

fn change(key: &[u8], it: &Change, node: &str) -> Json {
    let mut object = json!({
        "event": "",
        "key": json_bytes(key),
        "version": it.version.display(node).to_string(),
        "time": utc(it.now_ms),
        "record": it.position.0,
        "client": it.client,
        "user": it.user.as_deref(),
        "policy": it.policy.as_deref().map(policy_json),
    });
    match &it.what {
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
            object["fencing_token"] = json!(fence.map(fence_json));
            object["expires"] = json!(expires_ms.map(utc));
        }
        What::Deleted => object["event"] = json!("deleted"),
        What::Expired => object["event"] = json!("expired"),
    }
    object
}

/// The changes of a key, the newest first, as many as fit into `bytes_max`, and how far back its
/// history reaches.
pub(crate) fn history(key: &[u8], history: &History, node: &str, bytes_max: usize) -> Json {
    let mut bytes = 0;
    let changes = history.changes.iter().rev();
    let changes = changes.map(|it| change(key, it, node)).take_while(|it| {
        bytes += it.to_string().len();
        bytes <= bytes_max
    });
    json!({
        "changes": changes.collect::<Vec<_>>(),
        "beginning": beginning(key, history, node),
    })
}

/// How far back the history of a key reaches.
fn beginning(key: &[u8], history: &History, node: &str) -> Json {
    json!({
        "event": "beginning",
        "key": json_bytes(key),
        "changes": history.count,
        "since": history.since_ms.map(utc),
        "before": history.before.as_ref().map(|entry| json!({
            "version": entry.version().display(node).to_string(),
            "bytes": entry.value().len(),
        })),
        // Whether the key certainly did not exist, if there is no entry.
        "absent_before": history.absent_before,
        // Why earlier changes are missing, if not because of their age.
        "damage": history.damage,
    })
}

/// The value and the version of a key at a moment, both null if there was none; or why that is not
/// known.
pub(crate) fn as_of(key: &[u8], found: AsOf, node: &str) -> Result<Json, String> {
    let entry = match found {
        AsOf::Value(entry) => Some(entry),
        AsOf::Absent => None,
        AsOf::TooOld {
            since_ms,
            damage: Some(damage),
        } => {
            return Err(format!(
                "the value at that time cannot be read: {damage}. The history after that reaches back to {}. Give a later time, or read an older backup",
                utc(since_ms)
            ));
        }
        AsOf::TooOld { since_ms, .. } => {
            return Err(format!(
                "the value at that time is not kept any more: the history reaches back to {}. Give a later time, or read an older backup; `serve --history-retention` and `--history-bytes` set how much is kept",
                utc(since_ms)
            ));
        }
        AsOf::NotYet(last) => {
            let last = last.display(node).to_string();
            return Err(format!(
                "no version as late as that was assigned: the last one is {}",
                Shown::whole(last.as_bytes()).on_one_line()
            ));
        }
    };
    Ok(json!({
        "key": json_bytes(key),
        "value": entry.as_ref().map(|it| json_bytes(it.value())),
        "version": entry.map(|it| it.version().display(node).to_string()),
    }))
}
