//! The format of durable state changes.
//!
//! A batch encodes changes of sessions and retained messages. The embedder stores it as one opaque
//! record. Its first byte is the format version.
//!
//! Every change must be an absolute write (message 7 of session 5 *is* this, or is removed). So
//! replaying a change over a later state is harmless: the changes after it overwrite it.
//!
//! Decoding accepts any bytes. It returns a batch or an error, and never allocates
//! memory because of a claimed length alone.

mod decode;
mod encode;
#[cfg(test)]
mod tests;

use std::borrow::Cow;

pub(crate) use decode::Decoder;
pub(crate) use encode::Encoder;
use statehouse_protocol::SessionId;
use thiserror::Error;

use crate::{Message, QoS, ReasonCode, clock::Clock, codec::Will, router::Subscription};

/// The first byte of every batch.
const FORMAT: u8 = 1;

/// Why changes could not be applied: this broker has not written them.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{text}, {rest_bytes} bytes before the end of the changes")]
pub struct CorruptChanges {
    pub(crate) text: &'static str,
    pub(crate) rest_bytes: usize,
}

/// One change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Change<'a> {
    Session(SessionId, Part<'a>),
    /// The topic has this retained message.
    Retained {
        message: Content<'a>,
        from: Option<&'a str>,
    },
    /// The topic has no retained message.
    RetainedRemoved(&'a [u8]),
}

/// A change of one session. It is ignored if the session does not exist, because the session has
/// ended since.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Part<'a> {
    /// The session begins, with a connection.
    Begin {
        client: &'a str,
        expiry_s: u32,
        will: Option<RecordedWill<'a>>,
    },
    /// The session is resumed by a connection.
    Attach {
        expiry_s: u32,
        will: Option<RecordedWill<'a>>,
    },
    /// The session belongs to this user. Also recorded for sessions that are not durable.
    Owner(&'a str),
    Expiry(u32),
    /// The will was sent or discarded.
    NoWill,
    /// The session has no connection since this wall time, in milliseconds.
    Detach(u64),
    End,
    Subscribe {
        filter: &'a [u8],
        subscription: Subscription,
        /// Whether retained messages are still to be sent for it.
        retained_pending: bool,
    },
    /// The filter has no subscription.
    Unsubscribe(&'a [u8]),
    /// A queued message.
    Message {
        number: u64,
        content: Content<'a>,
        subscription_ids: Cow<'a, [u32]>,
        shared: Option<Sharing<'a>>,
    },
    /// The message was sent under this identifier.
    Sent {
        number: u64,
        packet_id: u16,
    },
    /// The message's PUBREC was received: only its identifier remains.
    Released {
        number: u64,
        packet_id: u16,
    },
    /// The message with this number was acknowledged, or will never be sent.
    Removed(u64),
    /// The answer to a QoS 2 PUBLISH of the client.
    Received {
        packet_id: u16,
        reason: ReasonCode,
    },
    /// The client's PUBREL with this packet identifier was received.
    Completed(u16),
}

impl Part<'_> {
    /// The first byte of its encoding.
    #[inline]
    fn tag(&self) -> u8 {
        match self {
            Self::Begin { .. } => tag::BEGIN,
            Self::Attach { .. } => tag::ATTACH,
            Self::Owner(_) => tag::OWNER,
            Self::Expiry(_) => tag::EXPIRY,
            Self::NoWill => tag::NO_WILL,
            Self::Detach(_) => tag::DETACH,
            Self::End => tag::END,
            Self::Subscribe { .. } => tag::SUBSCRIBE,
            Self::Unsubscribe(_) => tag::UNSUBSCRIBE,
            Self::Message { shared: None, .. } => tag::MESSAGE,
            Self::Message { .. } => tag::SHARED_MESSAGE,
            Self::Sent { .. } => tag::SENT,
            Self::Released { .. } => tag::RELEASED,
            Self::Removed(_) => tag::REMOVED,
            Self::Received { .. } => tag::RECEIVED,
            Self::Completed(_) => tag::COMPLETED,
        }
    }
}

/// A message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Content<'a> {
    pub(crate) qos: QoS,
    pub(crate) retain: bool,
    /// Wall time.
    pub(crate) expires_ms: Option<u64>,
    /// None: the bytes of the previous message in this batch, which went to several sessions.
    pub(crate) bytes: Option<ContentBytes<'a>>,
}

/// Topic, payload and properties.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ContentBytes<'a> {
    pub(crate) topic: &'a [u8],
    pub(crate) payload: &'a [u8],
    pub(crate) properties: &'a [u8],
}

/// The shared subscription through which a session got a message, and how the message was
/// published.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sharing<'a> {
    pub(crate) filter: &'a [u8],
    pub(crate) qos: QoS,
    pub(crate) retain: bool,
}

/// A will.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RecordedWill<'a> {
    pub(crate) content: Content<'a>,
    pub(crate) delay_s: u32,
    pub(crate) expiry_s: Option<u32>,
}

impl<'a> Content<'a> {
    pub(crate) fn new(message: &'a Message, clock: &Clock) -> Self {
        Self {
            qos: message.qos,
            retain: message.retain,
            expires_ms: message.expires.map(|at| clock.wall_ms(at)),
            bytes: Some(ContentBytes {
                topic: &message.topic,
                payload: &message.payload,
                properties: &message.properties,
            }),
        }
    }
}

impl<'a> RecordedWill<'a> {
    pub(crate) fn new(will: &'a Will, clock: &Clock) -> Self {
        Self {
            content: Content::new(&will.message, clock),
            delay_s: will.delay_s,
            expiry_s: will.expiry_s,
        }
    }
}

mod tag {
    pub(super) const BEGIN: u8 = 1;
    pub(super) const ATTACH: u8 = 2;
    pub(super) const EXPIRY: u8 = 3;
    pub(super) const NO_WILL: u8 = 4;
    pub(super) const DETACH: u8 = 5;
    pub(super) const END: u8 = 6;
    pub(super) const SUBSCRIBE: u8 = 7;
    pub(super) const UNSUBSCRIBE: u8 = 8;
    pub(super) const MESSAGE: u8 = 9;
    pub(super) const SENT: u8 = 10;
    pub(super) const RELEASED: u8 = 11;
    pub(super) const REMOVED: u8 = 12;
    pub(super) const RECEIVED: u8 = 13;
    pub(super) const COMPLETED: u8 = 14;
    /// A message followed by its `Sharing`.
    pub(super) const SHARED_MESSAGE: u8 = 15;
    pub(super) const OWNER: u8 = 16;
    pub(super) const RETAINED: u8 = 32;
    pub(super) const RETAINED_REMOVED: u8 = 33;
}

// Bits of the byte before a message; the two lowest are its QoS.
const RETAIN: u8 = 4;
const EXPIRES: u8 = 8;
const SAME_BYTES: u8 = 16;

// Bits of the byte before a subscription; the two lowest are its QoS.
const NO_LOCAL: u8 = 4;
const AS_PUBLISHED: u8 = 8;
const HAS_ID: u8 = 16;
const RETAINED_PENDING: u8 = 32;
