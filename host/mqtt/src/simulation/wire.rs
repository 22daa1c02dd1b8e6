//! A connection without a socket, through the code that serves sockets.
//!
//! Bytes go in as one read of a socket would return them; the bytes that would be written to it
//! are returned. Uses the system's time and no tasks: everything happens in the call.

use std::{
    fmt, io, mem,
    net::Ipv4Addr,
    sync::{Arc, Mutex, PoisonError},
    time::Instant,
};

use bytes::BytesMut;
use statehouse_protocol::ConnectionId;

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
    connection: ConnectionId,
}

impl fmt::Debug for Wire {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Wire")
            .field("connection", &self.connection)
            .finish_non_exhaustive()
    }
}

/// Ends the connection without DISCONNECT.
impl Drop for Wire {
    fn drop(&mut self) {
        self.output.close(|_| {});
        self.broker
            .lock()
            .detach(self.session, self.connection, Instant::now());
    }
}

/// A socket that takes every byte.
#[derive(Debug, Default)]
struct Sink(Mutex<Vec<u8>>);

impl Direct for Sink {
    fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        // Appending bytes cannot panic half way.
        let mut written = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        written.extend_from_slice(bytes);
        Ok(bytes.len())
    }
}

impl Wire {
    /// Connects with the CONNECT at the beginning of these bytes, and sends the rest.
    ///
    /// # Errors
    /// The reason code that the broker refuses the client with.
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
        // Take the writer's first step; from then on other threads write in its place.
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

    /// Handles all complete packets of one read, and writes the output. Returns false once the
    /// connection is over.
    pub fn send(&mut self, mut bytes: BytesMut) -> bool {
        loop {
            let now = Instant::now();
            let round = self.broker.write_batching().open(now);
            let turn = self.dispatch.turn(&mut bytes, now);
            drop(round);
            match turn {
                Turn::More | Turn::Cut => {}
                Turn::Drained | Turn::Paused => return !self.output.is_closing(),
                // Re-authentication is not supported here.
                Turn::Authenticate | Turn::Over => return false,
            }
        }
    }

    /// The bytes written since the last call.
    pub fn receive(&mut self) -> Vec<u8> {
        let mut written = self.sink.0.lock().unwrap_or_else(PoisonError::into_inner);
        mem::take(&mut *written)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Limits, testing};

    #[test]
    fn ping_without_a_socket_is_answered() {
        let broker = testing::broker(Limits::default());
        let hello = testing::Hello::new("c").bytes();
        let mut wire = Wire::connect(&broker, &hello).ok().unwrap();
        assert_eq!(wire.receive()[0] >> 4, 2, "CONNACK");
        assert!(wire.send(BytesMut::from(&[0xC0, 0, 0xC0, 0][..])));
        assert_eq!(wire.receive(), [0xD0, 0, 0xD0, 0]);
        assert!(!wire.send(BytesMut::from(&[0xE0, 0][..])));
    }

    #[test]
    fn first_packet_other_than_connect_is_refused() {
        let broker = testing::broker(Limits::default());
        let refused = |bytes: &[u8]| Wire::connect(&broker, bytes).err();
        assert_eq!(refused(&[0x10]), Some(ReasonCode::MALFORMED_PACKET));
        assert!(refused(&[0xC0, 0]).is_some());
    }
}
