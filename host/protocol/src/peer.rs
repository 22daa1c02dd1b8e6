//! The connection behind a request.

use alloc::sync::Arc;

use crate::{ConnectionId, SessionId};

/// The client id of requests that operators send through the admin API. No other client can have
/// it, so history and owners of keys name operators reliably.
pub const OPERATOR_CLIENT: &str = "$operator";

/// A connection: the client id and a connection number that is unique in this process.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Peer {
    /// The client id; empty if the transport does not know it.
    pub client: Arc<str>,
    /// The connection number.
    pub connection: ConnectionId,
    /// The session number.
    pub session: SessionId,
}

impl Peer {
    /// A client whose connection and session have the same number.
    pub fn numbered(client: &str, number: u64) -> Self {
        Self {
            client: client.into(),
            connection: ConnectionId(number),
            session: SessionId(number),
        }
    }

    /// The client id, if the transport knows it.
    pub fn known(&self) -> Option<&str> {
        (!self.client.is_empty()).then_some(&*self.client)
    }
}
