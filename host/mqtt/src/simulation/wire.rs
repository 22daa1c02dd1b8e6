//! A connection without a socket, through the code that serves sockets.
//!
//! Bytes go in as one read of a socket would return them; the bytes that would be written to it
//! are returned. Uses the broker's time and no tasks: everything happens in the call.

use std::{
    io, mem,
    net::Ipv4Addr,
    sync::{Arc, Mutex, PoisonError},
};

use bytes::BytesMut;
use statehouse_protocol::{ConnectionId, SessionId};

use crate::{
    Broker, Identity, ReasonCode, codec,
    connection::Attached,
    dispatch::{Dispatch, Turn},
    output::{Direct, Output},
};

/// A connected client. Dropping it ends the connection without DISCONNECT.
///
/// The fields are dropped in this order, as a connection's task does it.
pub struct Wire {
    dispatch: Dispatch,
    attached: Attached,
    /// Bytes that are no complete packet yet, or wait for their turn.
    inbox: BytesMut,
    /// The output of the connection that this one took over.
    previous: Option<Arc<Output>>,
    socket: Arc<dyn Direct>,
    /// What a [`Buffer`] has taken, if the client brought no socket.
    buffer: Option<Arc<Buffer>>,
}

#[derive(Debug, Default)]
struct Buffer(Mutex<Vec<u8>>);

impl Direct for Buffer {
    fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        // Appending bytes cannot panic half way.
        let mut written = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        written.extend_from_slice(bytes);
        Ok(bytes.len())
    }
}

impl Wire {
    /// Connects with the CONNECT at the beginning of these bytes, and sends the rest. Fails with
    /// the reason code with which the broker refuses the client.
    pub fn connect(broker: &Broker, bytes: &[u8]) -> Result<Self, ReasonCode> {
        let buffer = Arc::new(Buffer::default());
        let mut wire = Self::connect_to(broker, bytes, buffer.clone())?;
        wire.buffer = Some(buffer);
        Ok(wire)
    }

    /// Like [`Wire::connect`], and writes to this socket, which must take every byte.
    pub fn connect_to(
        broker: &Broker,
        bytes: &[u8],
        socket: Arc<dyn Direct>,
    ) -> Result<Self, ReasonCode> {
        let mut bytes = BytesMut::from(bytes);
        let connect = match codec::decode_connect(&mut bytes, broker.limits().connect_bytes_max) {
            Ok(Some(connect)) => connect,
            Ok(None) => return Err(ReasonCode::MALFORMED_PACKET),
            Err(fault) => return Err(fault.violation.reason),
        };
        // Every client has a user, so that every run covers recording it.
        let identity = Arc::new(Identity {
            user: Some(connect.client_id.clone()),
            ..Identity::default()
        });
        let output = Arc::new(Output::new(
            broker.limits().output_bytes_high,
            broker.outputs(),
            Some(socket.clone()),
        ));
        let accepted = broker
            .lock()
            .connect(
                connect,
                identity,
                (Ipv4Addr::LOCALHOST, 49_152).into(),
                &output,
                broker.now(),
            )
            .map_err(|(reason, _)| reason)?;
        let attached = Attached {
            broker: broker.clone(),
            session: accepted.session,
            origin: accepted.origin.clone(),
            output,
            read_bytes_max: accepted.limits.read_bytes,
        };
        let mut wire = Self {
            dispatch: Dispatch::new(broker.clone(), &accepted),
            attached,
            inbox: BytesMut::new(),
            previous: accepted.previous,
            socket,
            buffer: None,
        };
        // Take the writer's first step; from then on other threads write in its place.
        wire.write();
        wire.send(bytes);
        Ok(wire)
    }

    /// Handles all complete packets, with these bytes as the result of one read, and writes the
    /// output. Returns false once the connection is over.
    ///
    /// A connection that took over another one handles nothing before that one has ended.
    pub fn send(&mut self, bytes: BytesMut) -> bool {
        self.inbox.unsplit(bytes);
        if self.previous.as_ref().is_some_and(|it| !it.has_ended()) {
            return !self.is_closing();
        }
        let broker = self.attached.broker.clone();
        loop {
            let now = broker.now();
            let round = broker.write_batching().open(now);
            let turn = self.dispatch.turn(&mut self.inbox, now);
            drop(round);
            match turn {
                Turn::More | Turn::Cut => {}
                Turn::Drained | Turn::Paused => return !self.is_closing(),
                // Re-authentication is not supported here.
                Turn::Authenticate | Turn::Over => return false,
            }
        }
    }

    /// Takes the writer's step: writes what may be written, and lets the session fill the room.
    pub fn write(&mut self) {
        let Attached {
            broker,
            session,
            origin,
            output,
            ..
        } = &self.attached;
        loop {
            let mut chunk = output.drain();
            if chunk.is_empty() {
                return;
            }
            _ = self.socket.try_write(&chunk);
            if output.written(&mut chunk) {
                let mut core = broker.lock();
                if core.is_open(*session, origin.connection) {
                    core.pump(*session, broker.now());
                }
            }
        }
    }

    /// Whether the broker ends this connection: it was taken over or broke a rule.
    #[must_use]
    pub fn is_closing(&self) -> bool {
        self.attached.output.is_closing()
    }

    /// The number of the session.
    #[must_use]
    pub fn session(&self) -> SessionId {
        self.attached.origin.session
    }

    /// The number of the connection.
    #[must_use]
    pub fn connection(&self) -> ConnectionId {
        self.attached.origin.connection
    }

    /// The bytes written since the last call, unless the client brought its own socket.
    pub fn receive(&mut self) -> Vec<u8> {
        let Some(buffer) = &self.buffer else {
            return Vec::new();
        };
        let mut written = buffer.0.lock().unwrap_or_else(PoisonError::into_inner);
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
        assert!(wire.send(BytesMut::from(&[0xC0, 0, 0xC0][..])));
        assert_eq!(wire.receive(), [0xD0, 0]);
        assert!(wire.send(BytesMut::from(&[0][..])));
        assert_eq!(wire.receive(), [0xD0, 0]);
        assert!(!wire.send(BytesMut::from(&[0xE0, 0][..])));
    }

    #[test]
    fn first_packet_other_than_connect_is_refused() {
        let broker = testing::broker(Limits::default());
        let refused = |bytes: &[u8]| Wire::connect(&broker, bytes).err();
        assert_eq!(refused(&[0x10]), Some(ReasonCode::MALFORMED_PACKET));
        assert!(refused(&[0xC0, 0]).is_some());
    }

    #[test]
    fn a_takeover_waits_for_the_end_of_the_other_connection() {
        let broker = testing::broker(Limits::default());
        let hello = testing::Hello::new("c").bytes();
        let first = Wire::connect(&broker, &hello).ok().unwrap();
        let mut second = Wire::connect(&broker, &hello).ok().unwrap();
        assert!(first.is_closing());
        assert_eq!(second.receive()[0] >> 4, 2, "CONNACK");
        assert!(second.send(BytesMut::from(&[0xC0, 0][..])));
        assert!(second.receive().is_empty());
        drop(first);
        assert!(second.send(BytesMut::new()));
        assert_eq!(second.receive(), [0xD0, 0]);
    }
}
