//! The client that wrote a version of a key.

use std::sync::Arc;

use statehouse_core::clock::Stamp;
use statehouse_core::store::Entry;
use statehouse_wal::{Base, LogPosition, Sink};

use super::{KeyEvent, KeyReader};
use crate::{Past, PastError};

/// The client that wrote a key last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Writer {
    /// The client id.
    pub client: String,
    /// Its user, as in [`Change::user`](super::Change::user). `None` also if the history does not
    /// reach back to the write.
    pub user: Option<Arc<str>>,
    /// Whether the client holds the key as a lock: the value is its client id, and expires.
    pub is_holder: bool,
}

impl Past {
    /// The writer of this version of a key; `None` if no snapshot and no record names it.
    pub fn writer(&self, key: &[u8], version: Stamp) -> Result<Option<Writer>, PastError> {
        let read = |base| {
            let until = LogPosition::END;
            Writer::read(key, version, |sink| self.read(base, until, sink).map(drop))
        };
        let mut found = read(Base::Newest)?;
        if matches!(found, Some((_, false))) {
            // Only the record of a write names its user.
            found = read(Base::Oldest)?.or(found);
        }
        Ok(found.map(|(writer, _)| writer))
    }
}

impl Writer {
    /// Finds the writer of a version in the blocks and records that `reading` delivers, and whether
    /// a record names it. A snapshot names no users.
    pub(super) fn read<E>(
        key: &[u8],
        version: Stamp,
        reading: impl FnOnce(&mut dyn Sink) -> Result<(), E>,
    ) -> Result<Option<(Self, bool)>, E> {
        let mut writer = None;
        let mut visit = |event: KeyEvent<'_>| match event {
            KeyEvent::Reset => writer = None,
            KeyEvent::SnapshotEntry(entry, client) => {
                let found = client.map(|client| (Self::new(&entry, client, None), false));
                writer = found.filter(|_| entry.version() == version);
            }
            KeyEvent::Written(write, origin) => {
                if let (Some(entry), Some(client)) = (write.entry(), origin.client)
                    && entry.version() == version
                {
                    writer = Some((Self::new(entry, client, origin.user), true));
                }
            }
            KeyEvent::SnapshotEnd { .. }
            | KeyEvent::RecordEnd { .. }
            | KeyEvent::Deadline { .. }
            | KeyEvent::Gap(_) => {}
        };
        reading(&mut KeyReader::of(key, &mut visit))?;
        Ok(writer)
    }

    fn new(entry: &Entry, client: &str, user: Option<&Arc<str>>) -> Self {
        Self {
            client: client.to_owned(),
            user: user.cloned(),
            is_holder: entry.expires_ms().is_some() && entry.value() == client.as_bytes(),
        }
    }
}
