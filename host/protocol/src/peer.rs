//! The connection behind a request.

use alloc::sync::Arc;

/// A connection: the client id and a number that no other connection of this process has.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Peer {
    /// The client id, as the transport knows it; empty where it does not.
    pub client: Arc<str>,
    /// The connection's number.
    pub connection: u64,
    /// The number of its session.
    pub session: u64,
}

impl Peer {
    /// The client id, where the transport knows it.
    pub fn known(&self) -> Option<&str> {
        (!self.client.is_empty()).then_some(&*self.client)
    }
}
