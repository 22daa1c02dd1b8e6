//! Application messages, which the broker routes, stores and sends.

use std::time::Instant;

use bytes::{Bytes, BytesMut};

use crate::limits::MESSAGE_OVERHEAD_BYTES;

/// Quality of service (MQTT 5 section 4.3).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum QoS {
    /// 0: sent once without an acknowledgement.
    #[default]
    AtMostOnce,
    /// 1: sent again until acknowledged by a PUBACK.
    AtLeastOnce,
    /// 2: delivered exactly once, by PUBREC, PUBREL and PUBCOMP.
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

/// An outgoing message.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Message {
    /// A topic name: UTF-8, not empty, without wildcards and U+0000, at most 65 535 bytes.
    pub topic: Bytes,
    /// The payload. The broker stores this slice, so it should not be part of a much larger buffer.
    pub payload: Bytes,
    /// Properties as encoded on the wire, without their length, from
    /// [`PropertiesBuilder`](crate::PropertiesBuilder) or
    /// [`Properties::forwarded`](crate::Properties::forwarded). Must not contain Topic Alias,
    /// Message Expiry Interval and Subscription Identifier: the broker writes these.
    pub properties: Bytes,
    /// The highest quality of service for sending it.
    pub qos: QoS,
    /// Whether it becomes the retained message of its topic (an empty payload removes that
    /// message).
    pub retain: bool,
    /// When it expires. The remaining time is sent as Message Expiry Interval.
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

    /// The bytes that this message counts while it is stored.
    pub(crate) fn cost_bytes(&self) -> usize {
        self.topic.len() + self.payload.len() + self.properties.len() + MESSAGE_OVERHEAD_BYTES
    }

    pub(crate) fn is_expired(&self, now: Instant) -> bool {
        self.expires.is_some_and(|at| at <= now)
    }

    /// The same message in one allocation of its own. A slice would pin the whole read buffer while
    /// the message is stored.
    pub(crate) fn detached(&self) -> Self {
        Self {
            qos: self.qos,
            retain: self.retain,
            expires: self.expires,
            ..Self::copied(&self.topic, &self.payload, &self.properties)
        }
    }

    /// A message with a copy of these bytes in one allocation.
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
