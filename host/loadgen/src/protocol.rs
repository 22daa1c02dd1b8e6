//! The interface between the load generator and the protocol of a server.
//!
//! The generator is the same for every server, so a comparison compares only the servers. A
//! protocol must do no I/O: it encodes into a buffer and decodes from one.

use super::work::{Reply, Request};

/// The role of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Sends requests.
    Asks,
    /// Receives notifications of one key.
    Watches,
}

/// A message from the server.
#[derive(Debug)]
pub enum Received<'a> {
    /// The server is ready for requests.
    Ready,
    /// The answer to a request.
    Answer {
        /// The slot of the request.
        slot: u16,
        /// The number of the request. A late answer to an earlier request of the slot has another
        /// number.
        number: u64,
        /// The decoded answer.
        reply: Reply<'a>,
    },
    /// The acknowledgement of a request.
    Acknowledged {
        /// The slot of the request.
        slot: u16,
        /// Why the server refused the request, if it did. No answer follows then.
        refused: Option<String>,
    },
    /// A notification, with the value that was set.
    Notification(Option<&'a [u8]>),
    /// Any other message.
    Unknown,
}

/// Why a connection cannot be used any more.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Broken {
    /// The server refused the connection before the first request.
    #[error("refused: {0}")]
    Refused(String),
    /// The server ended the connection.
    #[error("connection lost: {0}")]
    Ended(String),
    /// The bytes are not valid in this protocol.
    #[error("connection lost: {0}")]
    Malformed(&'static str),
}

/// The client side of one connection.
pub trait Protocol: 'static {
    /// Whether the server acknowledges a request in addition to its answer.
    const ACKNOWLEDGES: bool;

    /// Writes the first bytes of a connection. [`Received::Ready`] must follow.
    fn hello(&mut self, out: &mut Vec<u8>);

    /// How many requests in flight the server accepts. Known once the server is ready.
    fn in_flight_max(&self) -> u16;

    /// Writes a request. A slot has at most one request at a time.
    fn ask(&mut self, slot: u16, number: u64, request: Request, out: &mut Vec<u8>);

    /// Decodes all complete messages, passes them to `receive` and writes acknowledgements. Returns
    /// the number of bytes that were consumed. Fails if the connection cannot be used any more.
    fn read(
        &mut self,
        bytes: &[u8],
        out: &mut Vec<u8>,
        receive: impl FnMut(Received<'_>),
    ) -> Result<usize, Broken>;

    /// Writes a keep-alive message.
    fn ping(&mut self, out: &mut Vec<u8>);

    /// Writes the last bytes of a connection.
    fn bye(&mut self, out: &mut Vec<u8>);
}
