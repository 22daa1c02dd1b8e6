//! What a request does to a key.
//!
//! What enters: an entry, or a key whose entry goes. What leaves: the same change to whoever applies it, journals it or
//! tells of it.

use super::entry::{Entry, Key};
use crate::clock::Stamp;
use crate::policy;

/// What becomes of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// It holds this from now on.
    Set(Entry),
    /// It was deleted. The version is a fresh stamp above that of its entry.
    Deleted(Key, Stamp),
    /// Its time was over.
    Expired(Key, Stamp),
}

/// A change as it is staged, committed and journalled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Write {
    /// What becomes of the key.
    pub change: Change,
    /// Whether it is a policy's own. Nobody watches those, so that their removals have no version.
    pub hidden: bool,
    /// Where the key stands in the payload, if it does.
    pub key_at: Option<u32>,
    /// Where the value stands in it.
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

    /// What it holds from now on; none where it is removed.
    pub fn entry(&self) -> Option<&Entry> {
        match self {
            Self::Set(entry) => Some(entry),
            Self::Deleted(..) | Self::Expired(..) => None,
        }
    }

    /// The new value; empty where the key is removed.
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

    /// What its watchers hear that happened.
    pub fn event(&self) -> policy::Event {
        match self {
            Self::Set(_) => policy::Event::Set,
            Self::Deleted(..) => policy::Event::Deleted,
            Self::Expired(..) => policy::Event::Expired,
        }
    }
}

impl Write {
    /// A change of a visible key that stands nowhere in a payload.
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

    /// What it holds from now on; none where it is removed.
    pub fn entry(&self) -> Option<&Entry> {
        self.change.entry()
    }

    /// Whether the key went because its time was over.
    pub fn expired(&self) -> bool {
        matches!(self.change, Change::Expired(..))
    }

    /// The version of the change.
    pub fn version(&self) -> Stamp {
        self.change.version()
    }
}
