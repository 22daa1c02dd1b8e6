//! What a protocol has to do so that a load can be put through it.
//!
//! The generator is the same for every server that it measures, so that a comparison compares the servers. A protocol does
//! no I/O: it writes into a buffer and reads from one.

use super::work::{Reply, Request};

/// What a connection is there for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// It sends requests.
    Asks,
    /// It waits for notifications of one key.
    Watches,
}

/// What came over a connection.
#[derive(Debug)]
pub enum Heard<'a> {
    /// The server is ready for requests.
    Ready,
    /// The answer to a request.
    Answer {
        /// As asked.
        slot: u16,
        /// As asked: a late answer to an earlier request of this slot has another.
        number: u64,
        /// What it says.
        reply: Reply<'a>,
    },
    /// The server has taken over a request; or it has not and says why, and no answer comes.
    Acknowledged {
        /// As asked.
        slot: u16,
        /// Why not.
        refused: Option<String>,
    },
    /// A notification, with the value that was set.
    Told(Option<&'a [u8]>),
    /// A message that is none of these.
    Nonsense,
}

/// Why a connection is of no more use.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Broken {
    /// The server said no before the first request.
    #[error("refused: {0}")]
    Refused(String),
    /// The server ended the connection.
    #[error("connection lost: {0}")]
    Ended(String),
    /// These are not the bytes of a server of this protocol.
    #[error("connection lost: {0}")]
    Malformed(&'static str),
}

/// One side of one connection.
pub trait Protocol: 'static {
    /// Whether a request is acknowledged beside its answer.
    const ACKNOWLEDGES: bool;

    /// Writes what a connection begins with. [`Heard::Ready`] is to follow.
    fn hello(&mut self, out: &mut Vec<u8>);

    /// How many requests the server takes at once. Known once it is ready.
    fn in_flight_max(&self) -> u16;

    /// Writes a request. A slot holds one at a time.
    fn ask(&mut self, slot: u16, number: u64, request: Request, out: &mut Vec<u8>);

    /// Reads all that is there whole, and writes what has to be acknowledged; the bytes read.
    ///
    /// # Errors
    /// Where the connection cannot be used any more.
    fn read(
        &mut self,
        bytes: &[u8],
        out: &mut Vec<u8>,
        hear: impl FnMut(Heard<'_>),
    ) -> Result<usize, Broken>;

    /// Writes a sign of life.
    fn ping(&mut self, out: &mut Vec<u8>);

    /// Writes what a connection ends with.
    fn bye(&mut self, out: &mut Vec<u8>);
}
