//! Watches: typed events about the changes of one key, or of all keys with a prefix.

use std::collections::HashSet;
use std::sync::Arc;

use bytes::Bytes;

use crate::client::Client;
use crate::error::Error;
use crate::inbox::Inbox;
use crate::resp::{self, Malformed, RespValue};
use crate::version::Version;

/// A change of a watched key.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum WatchEvent {
    /// The key was set.
    Set {
        /// The key.
        key: Bytes,
        /// Its new value.
        value: Bytes,
        /// The version of that value.
        version: Version,
    },
    /// The key was deleted or expired.
    Deleted {
        /// The key.
        key: Bytes,
        /// A version above that of the deleted value.
        version: Version,
    },
    /// Changes before this point may be missing. A GET returns the current value. After a
    /// reconnect, a Statehouse store sends the changes since the last one that arrived, so that
    /// there is no gap while it knows them. A watch of keys only, without a version, that has not
    /// reported a change yet always reports a gap then.
    Gap(GapCause),
}

/// Why changes may be missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum GapCause {
    /// The connection was lost, and the store does not know what changed since. The watch is
    /// registered again.
    Reconnected,
    /// The reader was too slow, so that its buffer was full, or the store has forgotten the changes
    /// that the reader still misses.
    Overflow,
}

/// What a watch covers, for [`Client::watch_many`].
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Watched {
    /// One key.
    Key(Bytes),
    /// All keys that start with these bytes; all keys of the store if there are none. This is an
    /// extension of Statehouse.
    Prefix(Bytes),
}

impl Watched {
    /// The key or prefix.
    #[must_use]
    pub fn bytes(&self) -> &Bytes {
        match self {
            Self::Key(bytes) | Self::Prefix(bytes) => bytes,
        }
    }

    /// These without the equal ones, and without those that another one covers.
    pub(crate) fn without_covered(all: impl IntoIterator<Item = Self>) -> Vec<Self> {
        let mut all: Vec<Self> = all.into_iter().collect();
        let is_prefix = |one: &&Self| matches!(one, Self::Prefix(_));
        let prefixes = all.iter().filter(is_prefix).map(Self::bytes).cloned();
        let mut prefixes: Vec<Bytes> = prefixes.collect();
        prefixes.sort_unstable();
        // In this order, a prefix is followed by those that it covers.
        prefixes.dedup_by(|later, earlier| later.starts_with(earlier));
        let mut seen = HashSet::new();
        all.retain(|one| {
            let bytes = one.bytes();
            let up_to = prefixes.partition_point(|prefix| prefix <= bytes);
            let covering = prefixes[..up_to].last();
            let covering = covering.filter(|prefix| bytes.starts_with(prefix));
            let is_covered = covering.is_some_and(|prefix| *one != Self::Prefix(prefix.clone()));
            !is_covered && seen.insert(bytes.clone())
        });
        all
    }

    /// The request that registers the watch at the store.
    pub(crate) fn begin(&self) -> Bytes {
        match self {
            Self::Key(key) => resp::command(&[b"KEYNOTIFY", key]),
            Self::Prefix(prefix) => resp::command(&[b"KEYNOTIFY", prefix, b"PREFIX"]),
        }
    }

    /// The request that sends the changes since a version first.
    pub(crate) fn begin_from(&self, version: &Version) -> Bytes {
        let from = version.to_string();
        let from = [b"FROM", from.as_bytes()];
        match self {
            Self::Key(key) => resp::command(&[b"KEYNOTIFY", key, from[0], from[1]]),
            Self::Prefix(prefix) => {
                resp::command(&[b"KEYNOTIFY", prefix, b"PREFIX", from[0], from[1]])
            }
        }
    }

    /// The request that ends it.
    pub(crate) fn stop(&self) -> Bytes {
        match self {
            Self::Key(key) => resp::command(&[b"KEYNOTIFY", key, b"STOP"]),
            Self::Prefix(prefix) => resp::command(&[b"KEYNOTIFY", prefix, b"PREFIX", b"STOP"]),
        }
    }
}

/// The changes of one key, from [`Client::watch`], of all keys with a prefix, from
/// [`Client::watch_prefix`], or of several keys and prefixes, from [`Client::watch_many`]. The
/// watch ends when this is dropped.
#[derive(Debug)]
pub struct Watch {
    client: Client,
    inbox: Arc<Inbox>,
}

impl Watch {
    /// Adds the watch to the session. It is not yet registered with the store. The inbox has at
    /// least one key or prefix. Also returns the number of the connection that must register it.
    pub(crate) fn new(client: Client, inbox: Inbox) -> (Self, u64) {
        let inbox = Arc::new(inbox);
        let epoch = client.session().add_watch(&inbox);
        (Self { client, inbox }, epoch)
    }

    /// The watched key or prefix, or the first one of several.
    #[must_use]
    pub fn key(&self) -> &[u8] {
        let first = self.watched().first();
        first.map_or(&[][..], |watched| &watched.bytes()[..])
    }

    /// The watched keys and prefixes, without those that another one covers.
    #[must_use]
    pub fn watched(&self) -> &[Watched] {
        self.inbox.watched()
    }

    pub(crate) fn inbox(&self) -> &Arc<Inbox> {
        &self.inbox
    }

    /// Waits for the next event. Dropping the future loses no event. A lost connection is no event:
    /// see [`Client::disconnected`].
    ///
    /// # Errors
    /// [`Error::Protocol`] for an unreadable notification; the watch continues. Any other error
    /// ends the watch: the client was closed, or the store refused to register the watch after a
    /// reconnect.
    pub async fn next(&mut self) -> Result<WatchEvent, Error> {
        self.inbox.next().await
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.client.session().remove_watch(&self.inbox);
    }
}

/// Parses the payload of a notification (the protocol, section 8).
pub(crate) fn event(key: &[u8], payload: &[u8], version: Version) -> Result<WatchEvent, Malformed> {
    let unknown = Malformed("an unknown notification");
    let RespValue::Array(items) = resp::parse(payload)? else {
        return Err(Malformed("a notification that is not an array"));
    };
    let Some(words) = resp::bulks(items) else {
        return Err(unknown);
    };
    let key = Bytes::copy_from_slice(key);
    let bytes: Vec<&[u8]> = words.iter().map(|word| &**word).collect();
    match bytes[..] {
        [b"NOTIFY", b"SET", b"VALUE", _] => Ok(WatchEvent::Set {
            key,
            value: words[3].clone(),
            version,
        }),
        [b"NOTIFY", b"DELETE"] => Ok(WatchEvent::Deleted { key, version }),
        _ => Err(unknown),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn version() -> Version {
        Version::new(1, 2, "n").unwrap()
    }

    #[test]
    fn notifications() {
        assert_eq!(
            event(
                b"k",
                b"*4\r\n$6\r\nNOTIFY\r\n$3\r\nSET\r\n$5\r\nVALUE\r\n$3\r\nabc\r\n",
                version()
            ),
            Ok(WatchEvent::Set {
                key: Bytes::from_static(b"k"),
                value: Bytes::from_static(b"abc"),
                version: version()
            })
        );
        assert_eq!(
            event(b"k", b"*2\r\n$6\r\nNOTIFY\r\n$6\r\nDELETE\r\n", version()),
            Ok(WatchEvent::Deleted {
                key: Bytes::from_static(b"k"),
                version: version()
            })
        );
    }

    #[test]
    fn covered_keys_and_prefixes_are_left_out() {
        let key = |key: &'static str| Watched::Key(key.into());
        let prefix = |prefix: &'static str| Watched::Prefix(prefix.into());
        let all = [
            key("a"),
            key("bb"),
            prefix("bbb"),
            key("a"),
            prefix("b"),
            key("bc"),
            prefix("bd"),
            prefix("a/"),
        ];
        let kept = Watched::without_covered(all);
        assert_eq!(kept, [key("a"), prefix("b"), prefix("a/")]);
    }

    #[test]
    fn invalid_notifications_are_rejected() {
        for payload in [
            &b"+OK\r\n"[..],
            b"*2\r\n$6\r\nNOTIFY\r\n$3\r\nDEL\r\n",
            b"*3\r\n$6\r\nNOTIFY\r\n$3\r\nSET\r\n$5\r\nVALUE\r\n",
            b"*2\r\n$6\r\nnotify\r\n$6\r\nDELETE\r\n",
            b"*1\r\n*0\r\n",
        ] {
            assert!(event(b"k", payload, version()).is_err());
        }
    }
}
