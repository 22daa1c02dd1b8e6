//! The seam between the store and the world of MQTT.
//!
//! What enters: [`Inbound`], from an embedded broker or a foreign one. What leaves: [`Outbound`].
//! Neither side knows the other's types: the store sees no socket, a transport no key.

pub mod embedded;
pub mod foreign;

use std::time::Duration;

use statehouse_mqtt::{Message, ReasonCode, Token};

use crate::limits;
use statehouse_core::request::Incoming;
use statehouse_core::store::Peer;

/// A request's promise of a PUBACK, kept once. Each transport gives out its own kind, and gets only that back.
#[derive(Clone, Copy, Debug)]
pub enum Ticket {
    /// Of the embedded broker.
    Embedded(Token),
    /// The number of the receipt, behind a foreign broker.
    Foreign(u64),
}

/// What a transport brings.
pub enum Inbound<'a> {
    /// A PUBLISH on a request topic, and how to acknowledge it (not at QoS 0).
    Publish(Incoming<'a>, Option<Ticket>),
    /// A connection ended, and all of its watches with it.
    Gone(&'a Peer),
    /// A notification for this key found nobody who subscribed to it: that one watch ends.
    Unheard(&'a Peer, &'a [u8]),
    /// Sessions ended, by their numbers.
    Ended(&'a [u64]),
}

/// What a transport is to do.
#[derive(Debug)]
pub enum Outbound {
    /// Publish the answer to a request (named where it is acknowledged) to whoever subscribed.
    Answer(Message, Option<Ticket>),
    /// The same, and acknowledge the request: nothing comes between.
    Reply(Message, Ticket),
    /// Give a notification to one connection and nobody else; the request that led to it is named where there is one.
    Notify(Peer, Message, Option<Ticket>),
    /// Acknowledge a request, after all that came before.
    Settle(Ticket, ReasonCode, Option<&'static str>),
    /// End a connection that broke a rule.
    Kick(Peer, ReasonCode, &'static str),
}

impl Outbound {
    /// What keeping it costs, but for what it shares with others of its step.
    pub(crate) fn own_bytes(&self) -> usize {
        let topic = self.message().map_or(0, |message| message.topic.len());
        limits::UNRELEASED_OVERHEAD_BYTES + topic
    }

    /// Payload and properties, unless they are those that were counted last.
    pub(crate) fn shared_bytes(&self, last: &mut *const u8) -> usize {
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
            Self::Answer(message, _) | Self::Reply(message, _) | Self::Notify(_, message, _) => {
                Some(message)
            }
            Self::Settle(..) | Self::Kick(..) => None,
        }
    }
}

/// Takes what a transport brings: one call per socket read, in order.
pub trait Intake: Send + Sync {
    /// Handles a batch. What it leads to comes back through [`Transport::deliver`].
    fn take(&self, batch: &mut dyn Iterator<Item = Inbound<'_>>) {
        self.take_within(Duration::MAX, batch);
    }

    /// The same, but it leaves the rest of the batch in the iterator once that has taken about so long. What follows a
    /// request that ended its connection is never left.
    fn take_within(&self, time_max: Duration, batch: &mut dyn Iterator<Item = Inbound<'_>>);

    /// The same for requests of one connection, for as long as a turn of it may take. It also leaves what comes behind some
    /// answers of ordinary size, and everything while too much of what this connection asked for waits for the journal.
    fn take_some(&self, connection: u64, batch: &mut dyn Iterator<Item = Inbound<'_>>) {
        let _ = connection;
        self.take_within(limits::REQUESTS_PER_TURN_TIME, batch);
    }
}

/// Carries things out.
pub trait Transport: Send + Sync {
    /// Carries out everything that `ready` fills into an empty list, batch by batch, until that stays empty. One
    /// delivery runs at a time, so that clients see everything in the order it was decided.
    fn deliver(&self, ready: &mut dyn FnMut(&mut Vec<Outbound>));

    /// What its connection to a foreign broker can be judged by, where it has one.
    fn figures(&self) -> Option<foreign::Figures> {
        None
    }
}
