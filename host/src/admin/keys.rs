//! Keys for operators: lists of keys, one key, and its change.

use std::ops::Bound;

use data_encoding::BASE64URL_NOPAD;
use hyper::{StatusCode, Uri};
use serde_json::{Value as Json, json};

use super::Sources;
use super::answer::{Answer, Refusal, json};
use super::query::{bad, bytes, key, number, value};
use crate::past::{fence_json, json_bytes};
use statehouse_config::limits;
use statehouse_core::log::LogPosition;
use statehouse_core::store::{self, Listed};
use statehouse_files::blocking;
use statehouse_server::{KeyView, Read, Server};

/// A list of keys. The delimiter is optional.
pub(super) async fn list(sources: &Sources, uri: &Uri) -> Result<Answer, Refusal> {
    let (prefix, delimiter) = (bytes(uri, "prefix")?, bytes(uri, "delimiter")?);
    if delimiter.len() > limits::ADMIN_DELIMITER_BYTES_MAX {
        let max = limits::ADMIN_DELIMITER_BYTES_MAX;
        return Err(bad(format!("`delimiter` has at most {max} bytes")));
    }
    // An empty list would have no `next`, like one that is complete.
    let limit = number(uri, "limit", 100, 1..=limits::ADMIN_KEYS_MAX)?;
    let start = match value(uri, "after")? {
        None => Bound::Included(prefix.clone()),
        Some(cursor) => decode_cursor(&prefix, &delimiter, &cursor)
            .ok_or_else(|| bad("`after` must be `next` of the list before"))?,
    };
    sources.check_lease().await?;
    let server = &sources.server;
    let looking = {
        let (server, prefix, delimiter) = (server.clone(), prefix.clone(), delimiter.clone());
        move || {
            let read = server.list_keys(&prefix, &delimiter, start, limit);
            (read, server.node())
        }
    };
    // On a thread that may block, since a list takes the lock of the store again and again.
    let (Read { found, position }, node) = blocking::run("admin", looking).await?;
    let is_full = found.len() == limit;
    let mut left = limits::ADMIN_KEYS_BYTES_MAX;
    let mut entries = Vec::with_capacity(found.len());
    let mut last = None;
    for listed in &found {
        let document = listed_json(listed, &node);
        let bytes = document.to_string().len();
        if bytes > left && last.is_some() {
            break;
        }
        left = left.saturating_sub(bytes);
        entries.push(document);
        last = Some(listed.name());
    }
    let is_cut = entries.len() < found.len();
    let next = last.filter(|_| is_full || is_cut).map(encode_cursor);
    durable(server, position).await?;
    let listed = json!({ "entries": entries, "next": next });
    Ok(json(StatusCode::OK, &listed))
}

fn listed_json(listed: &Listed, node: &str) -> Json {
    match listed {
        Listed::Key(entry) => json!({
            "kind": "key",
            "key": json_bytes(entry.key()),
            "version": entry.version().display(node).to_string(),
            "expires_ms": entry.expires_ms(),
            "bytes": entry.value().len(),
        }),
        Listed::Group { name, keys } => json!({
            "kind": "prefix",
            "name": json_bytes(name),
            "keys": keys,
        }),
    }
}

/// Where a list continues behind this name. A cursor is text, also if the keys are not.
fn encode_cursor(name: &[u8]) -> String {
    // Behind a name that is too long, keys that begin like it are left out.
    let kept = name.get(..limits::ADMIN_CURSOR_KEY_BYTES_MAX);
    let is_cut = kept.is_some_and(|it| it.len() < name.len());
    let mark = if is_cut { "b" } else { "a" };
    format!("{mark}{}", BASE64URL_NOPAD.encode(kept.unwrap_or(name)))
}

fn decode_cursor(prefix: &[u8], delimiter: &[u8], cursor: &[u8]) -> Option<Bound<Vec<u8>>> {
    let (mark, name) = cursor.split_first()?;
    let name = BASE64URL_NOPAD.decode(name).ok()?;
    match mark {
        b'a' => Some(store::after(prefix, delimiter, &name)),
        b'b' => Some(store::behind(&name)),
        _ => None,
    }
}

/// One key.
pub(super) async fn one(sources: &Sources, uri: &Uri) -> Result<Answer, Refusal> {
    let key = key(uri)?;
    sources.check_lease().await?;
    let server = &sources.server;
    let Read { found, position } = server.key(&key);
    durable(server, position).await?;
    let found = found.ok_or_else(absent)?;
    Ok(json(StatusCode::OK, &key_json(&found, &server.node())))
}

/// The refusal of a request for a key that does not exist.
pub(super) fn absent() -> Refusal {
    let error = "there is no such key, or it has expired";
    Refusal::new(StatusCode::NOT_FOUND, error)
}

fn key_json(key: &KeyView, node: &str) -> Json {
    let entry = &key.entry;
    let value = start_of(entry.value());
    json!({
        "key": json_bytes(entry.key()),
        "value": json_bytes(value),
        "bytes": entry.value().len(),
        "truncated": value.len() < entry.value().len(),
        "version": entry.version().display(node).to_string(),
        "expires_ms": entry.expires_ms(),
        "fencing_token": entry.fence().as_ref().map(fence_json),
        "client": key.writer,
        "watches": key.watches,
    })
}

/// As much of a value as fits into an answer. Text stays text.
fn start_of(value: &[u8]) -> &[u8] {
    let max = limits::ADMIN_VALUE_BYTES_MAX.min(value.len());
    match str::from_utf8(value) {
        Ok(text) => &value[..text.floor_char_boundary(max)],
        Err(_) => &value[..max],
    }
}

/// Waits until what was read is durable, so that a crash cannot revoke it.
pub(super) async fn durable(server: &Server, position: LogPosition) -> Result<(), Refusal> {
    if !server.reach(position).await {
        let error = "the latest changes were not durable in time: the disk is too slow, or the store is stopping";
        return Err(Refusal::new(StatusCode::SERVICE_UNAVAILABLE, error));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_continues_behind_its_name() {
        let decoded = |name: &[u8]| {
            let cursor = encode_cursor(name);
            let is_plain = |it: u8| it.is_ascii_graphic() && it != b'%' && it != b'&';
            assert!(cursor.bytes().all(is_plain), "{cursor}");
            decode_cursor(b"", b"/", cursor.as_bytes()).unwrap()
        };
        assert_eq!(decoded(b"k\xff"), Bound::Excluded(b"k\xff".to_vec()));
        assert_eq!(decoded(b"a/"), Bound::Included(b"a0".to_vec()));
        // A cursor must fit into the head of a request, so a longer name is skipped with its like.
        let max = limits::ADMIN_CURSOR_KEY_BYTES_MAX;
        let longest = vec![b'k'; max];
        assert_eq!(decoded(&longest), Bound::Excluded(longest.clone()));
        let longer = [&longest[..], b"x"].concat();
        assert!(2 * encode_cursor(&longer).len() < limits::ADMIN_HEADER_BYTES_MAX);
        let mut behind = longest;
        behind[max - 1] = b'l';
        assert_eq!(decoded(&longer), Bound::Included(behind));
        for wrong in [&b""[..], b"x", b"c", b"a?", b"a%"] {
            assert_eq!(decode_cursor(b"", b"/", wrong), None, "{wrong:?}");
        }
    }

    #[test]
    fn long_values_are_cut_and_text_stays_text() {
        let max = limits::ADMIN_VALUE_BYTES_MAX;
        let text = format!("{}{}", "x".repeat(max - 1), "ü".repeat(9));
        assert_eq!(start_of(text.as_bytes()).len(), max - 1);
        assert_eq!(start_of(&vec![0xFF; max + 1]).len(), max);
        assert_eq!(start_of(b"short"), b"short");
    }
}
