//! The connection behind a request.

use alloc::sync::Arc;

use crate::{ConnectionId, SessionId};

/// The client id of requests that operators send through the admin API. No other client can have
/// it, so history and owners of keys name operators reliably.
pub const OPERATOR_CLIENT: &str = "$operator";

/// Bytes of a client id that log lines and lists show: a whole id of the embedded broker. Behind a
/// foreign broker an id is a claim that may fill an MQTT string.
const SHOWN_BYTES_MAX: usize = 1024;

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

    /// The client id for a log line or a list, cut if it is long.
    pub fn shown(&self) -> &str {
        &self.client[..self.client.floor_char_boundary(SHOWN_BYTES_MAX)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression: clients of a foreign broker could fill the log with long ids.
    #[test]
    fn long_client_id_is_cut_between_characters() {
        let shown = |client: &str| Peer::numbered(client, 1).shown().len();
        assert_eq!((shown(""), shown("press-4")), (0, 7));
        let longest = "k".repeat(SHOWN_BYTES_MAX);
        assert_eq!(shown(&longest), SHOWN_BYTES_MAX);
        // Three bytes each.
        let longer = "€".repeat(SHOWN_BYTES_MAX);
        assert_eq!(shown(&longer), SHOWN_BYTES_MAX - SHOWN_BYTES_MAX % 3);
    }
}
