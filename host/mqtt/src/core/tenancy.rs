//! When the embedder hears that a session is no more: after the end of its last connection.

use std::collections::HashMap;

/// Connections that the embedder was not told the end of, by session.
#[derive(Debug, Default)]
pub(super) struct Tenancies {
    present: HashMap<u64, Tenancy>,
    ended: Vec<u64>,
}

#[derive(Debug, Default)]
struct Tenancy {
    connections: usize,
    ended: bool,
}

impl Tenancies {
    /// A connection of the session begins.
    pub(super) fn enter(&mut self, session: u64) {
        self.present.entry(session).or_default().connections += 1;
    }

    /// The embedder was told that a connection of the session has ended.
    pub(super) fn leave(&mut self, session: u64) {
        let Some(tenancy) = self.present.get_mut(&session) else {
            return;
        };
        tenancy.connections -= 1;
        if tenancy.connections == 0 {
            if tenancy.ended {
                self.ended.push(session);
            }
            self.present.remove(&session);
        }
    }

    /// The session is no more.
    pub(super) fn end(&mut self, session: u64) {
        match self.present.get_mut(&session) {
            Some(tenancy) => tenancy.ended = true,
            None => self.ended.push(session),
        }
    }

    /// Sessions that are no more and whose connections have all been told of.
    pub(super) fn take_ended(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.ended)
    }
}
