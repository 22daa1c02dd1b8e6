//! Delays the report of a session's end until the embedder has processed the end of all its
//! connections.

use std::collections::HashMap;

use statehouse_protocol::SessionId;

/// Connections whose end the embedder has not processed yet, by session number.
#[derive(Debug, Default)]
pub(super) struct SessionEnds {
    present: HashMap<SessionId, Connections>,
    ended: Vec<SessionId>,
}

#[derive(Debug, Default)]
struct Connections {
    open: usize,
    session_ended: bool,
}

impl SessionEnds {
    /// A connection of the session begins.
    pub(super) fn connection_begins(&mut self, session: SessionId) {
        self.present.entry(session).or_default().open += 1;
    }

    /// The embedder was notified that a connection of the session has ended.
    pub(super) fn disconnect_reported(&mut self, session: SessionId) {
        let Some(connections) = self.present.get_mut(&session) else {
            return;
        };
        connections.open -= 1;
        if connections.open == 0 {
            if connections.session_ended {
                self.ended.push(session);
            }
            self.present.remove(&session);
        }
    }

    /// The session has ended.
    pub(super) fn session_ended(&mut self, session: SessionId) {
        match self.present.get_mut(&session) {
            Some(connections) => connections.session_ended = true,
            None => self.ended.push(session),
        }
    }

    /// Takes the ended sessions that may be reported: the embedder knows of the end of all their
    /// connections.
    pub(super) fn take_ended(&mut self) -> Vec<SessionId> {
        std::mem::take(&mut self.ended)
    }
}
