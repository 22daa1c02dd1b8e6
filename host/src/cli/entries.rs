//! Reads the entries of many keys at once.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

use bytes::Bytes;
use serde_json::{Value as Json, json};
use statehouse_client::{Client, Error, Meta, Value, Version};
use statehouse_protocol::pattern;
use tokio::task::JoinHandle;

use super::output::Failure;
use super::time::utc;

/// Requests in flight, which keeps a store busy over a slow link.
pub(super) const IN_FLIGHT: usize = 64;

/// Attempts to read the value and the description of the same version of a key that changes.
const ATTEMPTS: usize = 5;

/// The parts of an entry to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Parts {
    Value,
    Meta,
    Both,
}

/// An entry, with the parts that were asked for.
pub(super) struct Entry {
    pub(super) key: Bytes,
    pub(super) value: Option<Value>,
    pub(super) meta: Option<Meta>,
}

/// The entries of these keys, in order, without those that do not exist any more.
pub(super) async fn read(
    client: &Client,
    keys: &[Bytes],
    parts: Parts,
) -> Result<Vec<Entry>, Failure> {
    let mut entries = Vec::with_capacity(keys.len());
    for keys in keys.chunks(IN_FLIGHT) {
        let read = |key: &Bytes| tokio::spawn(read_one(client.clone(), key.clone(), parts));
        for entry in in_order(keys.iter().map(read).collect()).await {
            entries.extend(entry?);
        }
    }
    Ok(entries)
}

/// The results of tasks, in the order in which they were started.
pub(super) async fn in_order<T>(
    tasks: Vec<JoinHandle<Result<T, Error>>>,
) -> Vec<Result<T, Failure>> {
    let mut results = Vec::with_capacity(tasks.len());
    for task in tasks {
        results.push(match task.await {
            Ok(result) => result.map_err(Failure::from),
            Err(error) => Err(Failure::transport(format!("a request failed: {error}"))),
        });
    }
    results
}

async fn read_one(client: Client, key: Bytes, parts: Parts) -> Result<Option<Entry>, Error> {
    let mut attempt = 0;
    loop {
        attempt += 1;
        let value = match parts {
            Parts::Meta => None,
            Parts::Value | Parts::Both => client.get(&key).await?,
        };
        if value.is_none() && parts != Parts::Meta {
            return Ok(None);
        }
        let meta = match parts {
            Parts::Value => None,
            Parts::Meta | Parts::Both => match client.meta(&key).await? {
                None => return Ok(None),
                meta => meta,
            },
        };
        let versions = value.as_ref().zip(meta.as_ref());
        let differ = versions.is_some_and(|(value, meta)| value.version != meta.version);
        if !differ || attempt == ATTEMPTS {
            return Ok(Some(Entry { key, value, meta }));
        }
    }
}

/// The pattern of all keys that start with `prefix`.
pub(super) fn pattern_of(prefix: &OsStr) -> Vec<u8> {
    let mut pattern = Vec::new();
    pattern::escape(&mut pattern, prefix.as_bytes());
    pattern.push(b'*');
    pattern
}

/// Adds the description of a key to a JSON object.
pub(super) fn add_meta(object: &mut Json, meta: &Meta) {
    object["version"] = json!(meta.version.to_string());
    object["bytes"] = json!(meta.bytes);
    object["expires"] = json!(meta.expires_ms.map(utc));
    object["ttl_ms"] = json!(meta.ttl.map(|ttl| ttl.as_millis() as u64));
    object["fencing_token"] = json!(meta.fence.as_ref().map(Version::to_string));
}

/// A duration as --ttl takes it: in ms below 10 s, else in s.
pub(super) fn duration(duration: Duration) -> String {
    match duration.as_millis() {
        ms @ ..10_000 => format!("{ms}ms"),
        ms => format!("{}s", ms / 1000),
    }
}
