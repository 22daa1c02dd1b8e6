//! The change of a key, as it is staged, applied, recorded and sent to watchers.

use super::entry::{Entry, Key};
use crate::clock::Stamp;
use crate::policy;

/// A change of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// The key was set to this entry.
    Set(Entry),
    /// The key was deleted. The version is a fresh stamp above that of its entry.
    Deleted(Key, Stamp),
    /// The key expired.
    Expired(Key, Stamp),
}

/// A change with its position in the request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Write {
    /// The change.
    pub change: Change,
    /// Whether the key is hidden. Hidden keys have no watchers, so their removals have no version.
    pub hidden: bool,
    /// Position of the key in the payload, if it lies there.
    pub key_at: Option<u32>,
    /// Position of the value in the payload, if it lies there.
    pub value_at: Option<u32>,
}

impl Change {
    /// The key.
    pub fn key(&self) -> &[u8] {
        match self {
            Self::Set(entry) => entry.key(),
            Self::Deleted(key, _) | Self::Expired(key, _) => key,
        }
    }

    /// The new entry; `None` if the key is removed.
    pub fn entry(&self) -> Option<&Entry> {
        match self {
            Self::Set(entry) => Some(entry),
            Self::Deleted(..) | Self::Expired(..) => None,
        }
    }

    /// The new value; empty if the key is removed.
    pub fn value(&self) -> &[u8] {
        self.entry().map_or(b"", Entry::value)
    }

    /// The version of the change.
    pub fn version(&self) -> Stamp {
        match self {
            Self::Set(entry) => entry.version(),
            Self::Deleted(_, version) | Self::Expired(_, version) => *version,
        }
    }

    /// The event that watchers are notified of.
    pub fn event(&self) -> policy::Event {
        match self {
            Self::Set(_) => policy::Event::Set,
            Self::Deleted(..) => policy::Event::Deleted,
            Self::Expired(..) => policy::Event::Expired,
        }
    }
}

impl Write {
    /// A change of a visible key that is not part of any payload.
    pub fn of(change: Change) -> Self {
        Self {
            change,
            hidden: false,
            key_at: None,
            value_at: None,
        }
    }

    /// The key.
    pub fn key(&self) -> &[u8] {
        self.change.key()
    }

    /// The new entry; `None` if the key is removed.
    pub fn entry(&self) -> Option<&Entry> {
        self.change.entry()
    }

    /// Whether it stores a value that clients see.
    pub(super) fn is_visible_put(&self) -> bool {
        !self.hidden && self.entry().is_some()
    }

    /// Whether the key was removed because it expired.
    pub fn expired(&self) -> bool {
        matches!(self.change, Change::Expired(..))
    }

    /// The version of the change.
    pub fn version(&self) -> Stamp {
        self.change.version()
    }
}
