//! The boundary between the store and MQTT.
//!
//! A transport passes [`Inbound`] to the store, from the embedded or from a foreign broker, and
//! carries out [`Outbound`]. The store must not know sockets, and a transport must not know keys.
#![forbid(unsafe_code)]

pub mod embedded;
pub mod foreign;

use statehouse_mqtt::{Message, ReasonCode, Token};
use statehouse_protocol::{ConnectionId, SessionId};

use statehouse_config::limits;
use statehouse_core::request::Incoming;
use statehouse_core::store::Peer;

/// Identifies a request that must be acknowledged, exactly once. Each transport issues its own
/// kind, and must receive only that kind back.
#[derive(Clone, Copy, Debug)]
pub enum Ticket {
    /// Of the embedded broker.
    Embedded(Token),
    /// The number of the receipt, behind a foreign broker.
    Foreign(u64),
    /// Of a request of this process itself. The server takes its response out of the outputs, so
    /// only notifications that it caused reach a transport.
    Own(u64),
}

/// An input of a transport.
pub enum Inbound<'a> {
    /// A PUBLISH on a request topic, with its ticket above QoS 0.
    Publish(Incoming<'a>, Option<Ticket>),
    /// A connection ended, and its watches with it.
    Disconnected(&'a Peer),
    /// A notification for this key could not be delivered. That watch ends.
    Undeliverable(&'a Peer, &'a [u8]),
    /// Sessions ended.
    SessionsEnded(&'a [SessionId]),
}

/// An output that a transport must send.
#[derive(Debug)]
pub enum Outbound {
    /// Publish the response to all subscribers. The ticket names the request.
    Response(Message, Option<Ticket>),
    /// Publish the response and acknowledge its request directly afterwards.
    AcknowledgedResponse(Message, Ticket),
    /// Send a notification to this connection only. The ticket names the request that caused it, if
    /// one did.
    Notification(Peer, Message, Option<Ticket>),
    /// Acknowledge a request, after all earlier outputs.
    Acknowledge(Ticket, ReasonCode, Option<&'static str>),
    /// Close a connection that violated a rule.
    Disconnect(Peer, ReasonCode, &'static str),
}

impl Outbound {
    /// The memory of a waiting output, without the parts that it may share with others.
    pub fn own_bytes(&self) -> usize {
        let topic = self.message().map_or(0, |message| message.topic.len());
        limits::UNRELEASED_OVERHEAD_BYTES + topic
    }

    /// The bytes of payload and properties, unless they were counted last. `last` is the address of
    /// the payload that was counted last.
    pub fn shared_bytes(&self, last: &mut *const u8) -> usize {
        match self.message() {
            Some(message) if message.payload.as_ptr() != *last => {
                *last = message.payload.as_ptr();
                message.payload.len() + message.properties.len()
            }
            _ => 0,
        }
    }

    fn message(&self) -> Option<&Message> {
        match self {
            Self::Response(message, _)
            | Self::AcknowledgedResponse(message, _)
            | Self::Notification(_, message, _) => Some(message),
            Self::Acknowledge(..) | Self::Disconnect(..) => None,
        }
    }
}

/// Takes the inputs of a transport: one call per socket read, in order.
pub trait Intake: Send + Sync {
    /// Handles a batch. Its outputs are sent through [`Transport::deliver`].
    fn take(&self, batch: &mut dyn Iterator<Item = Inbound<'_>>);

    /// Like [`take`](Self::take), but leaves the rest of the batch in the iterator while too many
    /// outputs of all connections wait for the log. The caller must pass the rest after outputs
    /// were delivered.
    fn take_with_room(&self, batch: &mut dyn Iterator<Item = Inbound<'_>>) {
        self.take(batch);
    }

    /// Announces the payloads of requests of a session that are about to be passed to
    /// [`take_some`](Self::take_some), so that what they need can be loaded together.
    fn announce(&self, _session: SessionId, _payloads: &mut dyn Iterator<Item = &[u8]>) {}

    /// Handles requests of one connection, for at most one turn. Leaves the rest in the iterator
    /// after some bytes of responses, and while too many outputs that this connection caused wait
    /// for the log. Inputs after a request that ended its connection are never left over.
    fn take_some(&self, _connection: ConnectionId, batch: &mut dyn Iterator<Item = Inbound<'_>>) {
        self.take(batch);
    }
}

/// Sends outputs.
pub trait Transport: Send + Sync {
    /// Sends everything that `ready` moves into an empty list, batch by batch, until that stays
    /// empty. One delivery must run at a time, so that clients see outputs in the order in which
    /// they were decided.
    fn deliver(&self, ready: &mut dyn FnMut(&mut Vec<Outbound>));

    /// The state of the connection to a foreign broker, if there is one.
    fn figures(&self) -> Option<foreign::Figures> {
        None
    }
}
