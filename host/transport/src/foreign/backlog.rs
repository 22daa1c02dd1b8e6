//! Arrivals from a foreign broker that wait for the store, in order.
//!
//! Its memory is bounded. The broker limits the messages that need a PUBACK. Undeliverable
//! notifications are at most as many as the notifications in the outlet. Only messages at QoS 0
//! have no other limit, so the backlog counts their bytes.

use std::collections::VecDeque;
use std::time::Instant;

use rumqttc::v5::mqttbytes::v5::Publish;

use super::incoming::{ForeignRequest, request_topic};
use crate::{Inbound, Ticket};
use statehouse_access::Authorizer;
use statehouse_config::limits;
use statehouse_core::store::Peer;

/// An arrival that is not handled yet.
pub(super) enum Held {
    /// A message, its receipt unless it is at QoS 0, and when it arrived.
    Message(Publish, Option<u64>, Instant),
    /// An input that the store has not taken yet.
    Input(Input),
}

pub(super) enum Input {
    /// A request, and its receipt unless it is at QoS 0.
    Request(ForeignRequest, Option<u64>),
    /// The connection of this client has ended.
    Disconnected(Peer),
    /// A notification for this key found no subscriber.
    Undeliverable(Peer, Vec<u8>),
}

#[derive(Default)]
pub(super) struct Backlog {
    held: VecDeque<Held>,
    /// The bytes of messages at QoS 0.
    bytes: usize,
}

impl Backlog {
    pub(super) fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    pub(super) fn push(&mut self, held: Held) {
        self.bytes += held.unbounded_bytes();
        self.held.push_back(held);
    }

    /// Takes the oldest arrivals.
    pub(super) fn chunk(&mut self) -> Vec<Held> {
        let chunk = self.held.len().min(limits::BROKER_HELD_CHUNK);
        let chunk: Vec<_> = self.held.drain(..chunk).collect();
        self.bytes -= chunk.iter().map(Held::unbounded_bytes).sum::<usize>();
        chunk
    }

    /// Puts inputs back that the store has not taken, in front of all others.
    pub(super) fn put_back(&mut self, inputs: impl DoubleEndedIterator<Item = Input>) {
        for input in inputs.rev() {
            let held = Held::Input(input);
            self.bytes += held.unbounded_bytes();
            self.held.push_front(held);
        }
    }

    /// Drops the messages of a lost connection. Other inputs stay, because the broker does not
    /// repeat what they were read from.
    pub(super) fn drop_messages(&mut self) {
        self.held.retain(|held| match held {
            Held::Message(..) | Held::Input(Input::Request(..)) => false,
            Held::Input(Input::Disconnected(_) | Input::Undeliverable(..)) => true,
        });
        self.bytes = 0;
    }

    /// Whether a message at QoS 0 can wait here. A request at QoS 0 cannot: its response would only
    /// be the error that it needs QoS 1.
    pub(super) fn has_room_for(&self, publish: &Publish) -> bool {
        request_topic(&publish.topic).is_none()
            && self.bytes + bytes(publish) <= limits::BROKER_HELD_BYTES_MAX
    }

    /// How many arrivals wait, and the bytes of those at QoS 0.
    #[cfg(test)]
    pub(super) fn size(&self) -> (usize, usize) {
        (self.held.len(), self.bytes)
    }
}

impl Held {
    fn unbounded_bytes(&self) -> usize {
        match self {
            Self::Message(publish, None, _) => bytes(publish),
            Self::Input(Input::Request(request, None)) => {
                request.payload_bytes() + limits::BROKER_OUTBOX_OVERHEAD_BYTES
            }
            Self::Message(_, Some(_), _) | Self::Input(_) => 0,
        }
    }
}

fn bytes(publish: &Publish) -> usize {
    publish.size() + limits::BROKER_OUTBOX_OVERHEAD_BYTES
}

impl Input {
    /// Whether the broker waits for the PUBACK of this request.
    pub(super) fn needs_puback(&self) -> bool {
        matches!(self, Self::Request(_, Some(_)))
    }

    pub(super) fn inbound(&self, rules: Option<&Authorizer>) -> Inbound<'_> {
        match self {
            Self::Request(request, receipt) => {
                let grants = rules.map(|it| it.grants_of(&request.peer) as _);
                Inbound::Publish(request.incoming(grants), receipt.map(Ticket::Foreign))
            }
            Self::Disconnected(peer) => Inbound::Disconnected(peer),
            Self::Undeliverable(peer, key) => Inbound::Undeliverable(peer, key),
        }
    }
}
