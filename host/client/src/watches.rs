//! The watches of a session: the readers of each key and prefix. One reader can have several of
//! these.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;

use crate::inbox::Inbox;
use crate::watch::Watched;

/// The readers of each watched key and prefix.
#[derive(Debug, Default)]
pub(crate) struct Watches {
    keys: HashMap<Bytes, Vec<Arc<Inbox>>>,
    prefixes: HashMap<Bytes, Vec<Arc<Inbox>>>,
}

impl Watches {
    fn like(&self, watched: &Watched) -> &HashMap<Bytes, Vec<Arc<Inbox>>> {
        match watched {
            Watched::Key(_) => &self.keys,
            Watched::Prefix(_) => &self.prefixes,
        }
    }

    pub(crate) fn like_mut(&mut self, watched: &Watched) -> &mut HashMap<Bytes, Vec<Arc<Inbox>>> {
        match watched {
            Watched::Key(_) => &mut self.keys,
            Watched::Prefix(_) => &mut self.prefixes,
        }
    }

    pub(crate) fn contains(&self, watched: &Watched) -> bool {
        self.like(watched).contains_key(watched.bytes())
    }

    /// The readers of a change of this key.
    pub(crate) fn of<'a>(&'a self, key: &'a [u8]) -> impl Iterator<Item = &'a Arc<Inbox>> {
        let exact = self.keys.get(key).into_iter();
        let prefixes = self.prefixes.iter();
        let covering = prefixes.filter(|(prefix, _)| key.starts_with(prefix));
        exact.chain(covering.map(|(_, readers)| readers)).flatten()
    }

    /// Whether this is a reader of its keys and prefixes.
    pub(crate) fn has(&self, inbox: &Arc<Inbox>) -> bool {
        let watched = inbox.watched().first();
        let readers = watched.and_then(|it| self.like(it).get(it.bytes()));
        readers.is_some_and(|it| it.iter().any(|other| Arc::ptr_eq(other, inbox)))
    }

    /// All readers, once for each of their keys and prefixes.
    pub(crate) fn all_readers(&self) -> impl Iterator<Item = &Arc<Inbox>> {
        self.keys.values().chain(self.prefixes.values()).flatten()
    }

    /// All readers, each once.
    pub(crate) fn inboxes(&self) -> Vec<Arc<Inbox>> {
        let mut inboxes: Vec<_> = self.all_readers().cloned().collect();
        inboxes.sort_unstable_by_key(Arc::as_ptr);
        inboxes.dedup_by(|one, other| Arc::ptr_eq(one, other));
        inboxes
    }
}
