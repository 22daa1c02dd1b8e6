//! Finds the users of sessions in recorded changes, for tools that read a log.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use statehouse_protocol::SessionId;

use crate::change::{Change, CorruptChanges, Decoder, Part};

/// The users of sessions, according to the changes so far. Takes no more memory than its input.
#[derive(Debug, Default)]
pub struct SessionUsers {
    /// Sessions that are not durable stay here, because no change records their end. Their numbers
    /// never repeat.
    users: HashMap<SessionId, Arc<str>>,
    names: HashSet<Arc<str>>,
}

impl SessionUsers {
    /// Applies one batch of changes or one piece of a snapshot.
    pub fn apply(&mut self, changes: &[u8]) -> Result<(), CorruptChanges> {
        for change in Decoder::new(changes)? {
            match change? {
                Change::Session(session, Part::Owner(user)) => {
                    let name = self.names.get(user).cloned().unwrap_or_else(|| user.into());
                    self.names.insert(name.clone());
                    self.users.insert(session, name);
                }
                Change::Session(session, Part::Begin { .. } | Part::End) => {
                    self.users.remove(&session);
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// The user of a session; `None` if its client is anonymous, or no change names its user.
    #[must_use]
    pub fn user(&self, session: SessionId) -> Option<&Arc<str>> {
        self.users.get(&session)
    }
}
