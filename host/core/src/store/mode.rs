//! Which broker clients are connected to. This determines which of their state is durable.

use statehouse_protocol::SessionId;

/// Which broker clients are connected to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// This process is the broker. Its sessions are durable, and watches end with the connection.
    #[default]
    Embedded,
    /// Another process is the broker. Its sessions are unknown, and clients stay connected to it
    /// while this process is down, so watches are durable.
    Foreign,
}

/// Set in the session numbers of a foreign broker's clients, never in those of the embedded broker.
const FOREIGN: u64 = 1 << 63;

impl Mode {
    /// The mode that a session number belongs to.
    pub fn of_session(session: SessionId) -> Self {
        match session.0 & FOREIGN {
            0 => Self::Embedded,
            _ => Self::Foreign,
        }
    }

    /// The session number of a client behind a foreign broker, derived from a digest of its
    /// identity.
    pub fn foreign_session(digest: u64) -> SessionId {
        SessionId(digest | FOREIGN)
    }
}
