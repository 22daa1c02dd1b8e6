//! An application message: what the broker routes, keeps and sends.

use std::time::Instant;

use bytes::{Bytes, BytesMut};

use crate::limits::MESSAGE_OVERHEAD_BYTES;

/// Quality of service (MQTT 5 section 4.3).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum QoS {
    /// 0: sent once and forgotten.
    #[default]
    AtMostOnce,
    /// 1: repeated until acknowledged by a PUBACK.
    AtLeastOnce,
    /// 2: handed over once, by PUBREC, PUBREL and PUBCOMP.
    ExactlyOnce,
}

impl QoS {
    /// The two bits of the wire; `None` for 3, which is malformed.
    pub(crate) fn from_bits(bits: u8) -> Option<Self> {
        match bits {
            0 => Some(Self::AtMostOnce),
            1 => Some(Self::AtLeastOnce),
            2 => Some(Self::ExactlyOnce),
            _ => None,
        }
    }
}

/// A message on its way out.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Message {
    /// A topic name: UTF-8, not empty, without wildcards and U+0000, at most 65 535 bytes.
    pub topic: Bytes,
    /// The payload. It is kept as it is, so it should not be a slice of a much larger buffer.
    pub payload: Bytes,
    /// Properties as they go over the wire, without their length, as [`PropertiesBuilder`](crate::PropertiesBuilder)
    /// or [`Properties::forwarded`](crate::Properties::forwarded) make them. Topic Alias, Message Expiry Interval and
    /// Subscription Identifier are not among them: the broker writes these.
    pub properties: Bytes,
    /// Highest quality of service it may be sent with.
    pub qos: QoS,
    /// As published: kept as the topic's retained message (an empty payload removes that one).
    pub retain: bool,
    /// When it is too old to be sent. What remains of this goes out as Message Expiry Interval.
    pub expires: Option<Instant>,
}

impl Message {
    /// A message without properties, not retained, that does not expire.
    #[must_use]
    pub fn new(topic: impl Into<Bytes>, payload: impl Into<Bytes>, qos: QoS) -> Self {
        Self {
            topic: topic.into(),
            payload: payload.into(),
            qos,
            ..Self::default()
        }
    }

    /// Bytes that keeping this message is counted with.
    pub(crate) fn cost_bytes(&self) -> usize {
        self.topic.len() + self.payload.len() + self.properties.len() + MESSAGE_OVERHEAD_BYTES
    }

    pub(crate) fn is_expired(&self, now: Instant) -> bool {
        self.expires.is_some_and(|at| at <= now)
    }

    /// The same message in one allocation of its own. A slice of a read buffer would pin the whole buffer for
    /// as long as the message is kept.
    pub(crate) fn detached(&self) -> Self {
        Self {
            qos: self.qos,
            retain: self.retain,
            expires: self.expires,
            ..Self::copied(&self.topic, &self.payload, &self.properties)
        }
    }

    /// A message with a copy of these in one allocation.
    pub(crate) fn copied(topic: &[u8], payload: &[u8], properties: &[u8]) -> Self {
        let mut buffer = BytesMut::with_capacity(topic.len() + payload.len() + properties.len());
        buffer.extend_from_slice(topic);
        buffer.extend_from_slice(payload);
        buffer.extend_from_slice(properties);
        let mut rest = buffer.freeze();
        let topic = rest.split_to(topic.len());
        let payload = rest.split_to(payload.len());
        Self {
            topic,
            payload,
            properties: rest,
            ..Self::default()
        }
    }
}
