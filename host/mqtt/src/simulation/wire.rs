//! A connection without a socket: the packets of one client, through the code that serves sockets.
//!
//! What enters: bytes as one read of a socket gives them. What leaves: the bytes that would be written to it. Time is the
//! system's. No task runs: everything happens in the call.

use std::{
    fmt, io, mem,
    net::Ipv4Addr,
    sync::{Arc, Mutex, PoisonError},
    time::Instant,
};

use bytes::BytesMut;

use crate::{
    Broker, Identity, ReasonCode, codec,
    dispatch::{Dispatch, Turn},
    output::{Direct, Output},
    router::SessionKey,
};

/// A connected client.
pub struct Wire {
    broker: Broker,
    dispatch: Dispatch,
    output: Arc<Output>,
    sink: Arc<Sink>,
    session: SessionKey,
    connection: u64,
}

impl fmt::Debug for Wire {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Wire")
            .field("connection", &self.connection)
            .finish_non_exhaustive()
    }
}

/// The connection is lost.
impl Drop for Wire {
    fn drop(&mut self) {
        self.output.close(|_| {});
        self.broker
            .lock()
            .detach(self.session, self.connection, Instant::now());
    }
}

/// A socket that takes everything.
#[derive(Debug, Default)]
struct Sink(Mutex<Vec<u8>>);

impl Direct for Sink {
    fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        // Bytes cannot be half written.
        let mut sunk = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        sunk.extend_from_slice(bytes);
        Ok(bytes.len())
    }
}

impl Wire {
    /// Connects with the CONNECT that these bytes begin with, and sends the rest.
    ///
    /// # Errors
    /// The reason code that a client would be refused with.
    pub fn connect(broker: &Broker, bytes: &[u8]) -> Result<Self, ReasonCode> {
        let mut bytes = BytesMut::from(bytes);
        let connect = match codec::decode_connect(&mut bytes, broker.limits().connect_bytes_max) {
            Ok(Some(connect)) => connect,
            Ok(None) => return Err(ReasonCode::MALFORMED_PACKET),
            Err(fault) => return Err(fault.violation.reason),
        };
        let sink = Arc::new(Sink::default());
        let output = Output::new(
            broker.limits().output_bytes_high,
            broker.outputs(),
            Some(sink.clone()),
        );
        let output = Arc::new(output);
        let accepted = broker
            .lock()
            .connect(
                connect,
                Identity::anonymous(),
                Ipv4Addr::LOCALHOST.into(),
                &output,
                Instant::now(),
            )
            .map_err(|(reason, _)| reason)?;
        // What a connection's writer does first; from then on others write in its place.
        let connack = output.drain();
        _ = sink.try_write(&connack);
        let mut wire = Self {
            session: accepted.session,
            connection: accepted.origin.connection,
            dispatch: Dispatch::new(
                broker.clone(),
                accepted.session,
                accepted.origin,
                &accepted.account,
                &accepted.limits,
            ),
            broker: broker.clone(),
            output,
            sink,
        };
        wire.send(bytes);
        Ok(wire)
    }

    /// Handles all that is there whole of one read, and writes what comes of it. False once the connection is over.
    pub fn send(&mut self, mut bytes: BytesMut) -> bool {
        loop {
            let now = Instant::now();
            let round = self.broker.rounds().open(now);
            let turn = self.dispatch.turn(&mut bytes, now);
            drop(round);
            match turn {
                Turn::More | Turn::Cut => {}
                Turn::Drained | Turn::Paused => return !self.output.is_closing(),
                // Nobody is here to say who it is.
                Turn::Authenticate | Turn::Over => return false,
            }
        }
    }

    /// What was written since the last call.
    pub fn receive(&mut self) -> Vec<u8> {
        let mut sunk = self.sink.0.lock().unwrap_or_else(PoisonError::into_inner);
        mem::take(&mut *sunk)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Limits, testing};

    #[test]
    fn a_ping_is_answered_where_no_socket_is() {
        let broker = testing::broker(Limits::default());
        let hello = testing::Hello::new("c").bytes();
        let mut wire = Wire::connect(&broker, &hello).ok().unwrap();
        assert_eq!(wire.receive()[0] >> 4, 2, "CONNACK");
        assert!(wire.send(BytesMut::from(&[0xC0, 0, 0xC0, 0][..])));
        assert_eq!(wire.receive(), [0xD0, 0, 0xD0, 0]);
        assert!(!wire.send(BytesMut::from(&[0xE0, 0][..])));
    }

    #[test]
    fn no_connect_is_no_connection() {
        let broker = testing::broker(Limits::default());
        let refused = |bytes: &[u8]| Wire::connect(&broker, bytes).err();
        assert_eq!(refused(&[0x10]), Some(ReasonCode::MALFORMED_PACKET));
        assert!(refused(&[0xC0, 0]).is_some());
    }
}
