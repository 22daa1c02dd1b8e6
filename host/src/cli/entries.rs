//! Reads the entries of many keys at once.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::time::{Duration, Instant};

use bytes::Bytes;
use serde_json::{Value as Json, json};
use statehouse_client::{Client, Error, Meta, Value, Version};
use statehouse_protocol::pattern;
use tokio::task::JoinHandle;

use super::output::{Failure, json_bytes, printable};
use super::time::utc;

/// Requests in flight, which keeps a store busy over a link with a long delay.
pub(super) const IN_FLIGHT: usize = 64;

/// The part of the timeout of a request that a batch of them may take. The next one may be slower.
const BATCH_SHARE: u32 = 4;

/// Attempts to read the value and the description of the same version of a key that changes.
/// Value and description are asked for together, and mostly handled together.
const ATTEMPTS: usize = 100;

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

impl Entry {
    /// Key, value and version in JSON.
    pub(super) fn in_json(&self) -> Json {
        let mut object = json!({ "key": json_bytes(&self.key) });
        if let Some(value) = &self.value {
            object["value"] = json_bytes(&value.bytes);
            object["version"] = json!(value.version.to_string());
        }
        object
    }
}

/// A key whose entry could not be read.
pub(super) struct Unread {
    pub(super) key: Bytes,
    pub(super) failure: Failure,
    /// Whether it is a failure of this key, so that a repetition fails again.
    pub(super) is_of_key: bool,
}

/// Reads entries in batches. All requests of a batch are sent at once, and the responses share the
/// link, so the batches must be small enough for its speed and for the size of the values.
pub(super) struct Window<'a> {
    client: &'a Client,
    /// How many keys the next batch has.
    keys: usize,
}

impl<'a> Window<'a> {
    pub(super) fn new(client: &'a Client) -> Self {
        Self { client, keys: 1 }
    }

    /// The entries of the first of these keys, in order, without those that do not exist any more.
    /// Removes the keys that it has read from the list.
    pub(super) async fn read(
        &mut self,
        keys: &mut &[Bytes],
        parts: Parts,
    ) -> Result<Vec<Entry>, Failure> {
        match self.read_front(keys, parts).await {
            (entries, None) => Ok(entries),
            (_, Some(unread)) => Err(unread.failure),
        }
    }

    /// Like [`read`](Self::read): the entries before the first key that cannot be read, and that
    /// key.
    pub(super) async fn read_front(
        &mut self,
        keys: &mut &[Bytes],
        parts: Parts,
    ) -> (Vec<Entry>, Option<Unread>) {
        let (front, rest) = keys.split_at(self.keys.min(keys.len()));
        *keys = rest;
        let begun = Instant::now();
        let read = read_front(self.client, front, parts).await;
        let next = next_batch(front.len(), begun.elapsed(), self.client.timeout());
        // A fast batch at the end of a page says nothing about a larger one.
        if front.len() == self.keys || next <= front.len() {
            self.keys = next;
        }
        read
    }
}

/// The number of requests of the next batch, after a batch of `count` took this time.
fn next_batch(count: usize, took: Duration, timeout: Duration) -> usize {
    let aim = timeout / BATCH_SHARE;
    let next = if took > aim {
        count / 2
    } else if took <= aim / 2 {
        count * 2
    } else {
        count
    };
    next.clamp(1, IN_FLIGHT)
}

/// The entries of these keys before the first key that cannot be read, and that key.
async fn read_front(client: &Client, keys: &[Bytes], parts: Parts) -> (Vec<Entry>, Option<Unread>) {
    let mut entries = Vec::with_capacity(keys.len());
    let read = |key: &Bytes| {
        let (client, key) = (client.clone(), key.clone());
        tokio::spawn(async move { Ok::<_, Failure>(read_one(client, key, parts).await) })
    };
    let results = in_order(keys.iter().map(read).collect()).await;
    for (key, result) in keys.iter().zip(results) {
        match result {
            Ok(Ok(entry)) => entries.extend(entry),
            Ok(Err(unread)) => return (entries, Some(unread)),
            Err(failure) => {
                let unread = Unread {
                    key: key.clone(),
                    failure,
                    is_of_key: false,
                };
                return (entries, Some(unread));
            }
        }
    }
    (entries, None)
}

/// The results of tasks, in the order in which they were started.
pub(super) async fn in_order<T, E>(tasks: Vec<JoinHandle<Result<T, E>>>) -> Vec<Result<T, Failure>>
where
    Failure: From<E>,
{
    let mut results = Vec::with_capacity(tasks.len());
    for task in tasks {
        results.push(match task.await {
            Ok(result) => result.map_err(Failure::from),
            Err(error) => Err(Failure::transport(format!("a request failed: {error}"))),
        });
    }
    results
}

async fn read_one(client: Client, key: Bytes, parts: Parts) -> Result<Option<Entry>, Unread> {
    for _ in 0..ATTEMPTS {
        let value = async {
            match parts {
                Parts::Meta => Ok(None),
                Parts::Value | Parts::Both => client.get(&key).await,
            }
        };
        let meta = async {
            match parts {
                Parts::Value => Ok(None),
                Parts::Meta | Parts::Both => client.meta(&key).await,
            }
        };
        let (value, meta) = tokio::try_join!(value, meta).map_err(|error| unread(&key, error))?;
        let is_gone = value.is_none() && parts != Parts::Meta;
        if is_gone || meta.is_none() && parts != Parts::Value {
            return Ok(None);
        }
        let versions = value.as_ref().zip(meta.as_ref());
        if versions.is_none_or(|(value, meta)| value.version == meta.version) {
            return Ok(Some(Entry { key, value, meta }));
        }
    }
    let failure = Failure::transport(format!(
        "the key {} changes too fast to read its value and its expiry together. Repeat the command",
        printable(&key)
    ));
    Err(Unread {
        key,
        failure,
        is_of_key: false,
    })
}

/// The failure to read this key. Its text names the key if the response is about the key.
fn unread(key: &Bytes, error: Error) -> Unread {
    let is_of_key = matches!(error, Error::Refused(_) | Error::Protocol(_));
    let failure = Failure::from(error);
    Unread {
        key: key.clone(),
        failure: match is_of_key {
            true => failure.with(&format!("The key is {}", printable(key))),
            false => failure,
        },
        is_of_key,
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression: 64 values of 1 MiB were requested at once, also over a link of 1 MB/s.
    #[test]
    fn batches_take_a_quarter_of_the_timeout() {
        let timeout = Duration::from_secs(5);
        let sizes = |per_request: Duration| {
            let mut count = 1;
            let mut sizes = vec![count];
            for _ in 0..9 {
                let took = per_request * u32::try_from(count).unwrap();
                count = next_batch(count, took, timeout);
                sizes.push(count);
            }
            sizes
        };
        let fast = sizes(Duration::from_millis(1));
        assert_eq!(fast, [1, 2, 4, 8, 16, 32, 64, 64, 64, 64]);
        assert_eq!(sizes(Duration::from_secs(1)), [1; 10]);
        let middle = sizes(Duration::from_millis(100));
        assert_eq!(middle, [1, 2, 4, 8, 8, 8, 8, 8, 8, 8]);
        // Larger values follow smaller ones.
        let next = next_batch(64, Duration::from_secs(4), timeout);
        assert_eq!(next, 32);
    }
}
