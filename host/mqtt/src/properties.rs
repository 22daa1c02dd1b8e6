//! The properties of a PUBLISH or a will (MQTT 5 section 2.2.2) as one raw slice.
//!
//! The codec scans the slice once and checks it. It is never decoded into a structure and encoded
//! again, so forwarded properties are the bytes that the client sent.

use std::fmt;
use std::io::Write as _;

use bytes::{Bytes, BytesMut};
use thiserror::Error;

use crate::codec::{self, Reader, Span, property as id};

/// The properties of a received PUBLISH.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Properties {
    pub(crate) raw: Bytes,
    pub(crate) response_topic: Option<Span>,
    pub(crate) correlation_data: Option<Span>,
    pub(crate) content_type: Option<Span>,
    pub(crate) message_expiry_s: Option<u32>,
    pub(crate) payload_is_utf8: bool,
    pub(crate) topic_alias: Option<u16>,
    pub(crate) will_delay_s: u32,
    /// Properties that are not forwarded: Topic Alias, Message Expiry, Will Delay.
    pub(crate) local: [Option<Span>; 2],
}

impl Properties {
    /// Checks raw properties of a PUBLISH, for example from a [`PropertiesBuilder`].
    pub fn parse(raw: impl Into<Bytes>) -> Result<Self, PropertyError> {
        codec::parse(raw.into(), codec::PUBLISH_PROPERTIES)
            .map_err(|fault| PropertyError::Invalid(fault.text))
    }

    /// The Response Topic.
    #[must_use]
    pub fn response_topic(&self) -> Option<&str> {
        self.text(self.response_topic)
    }

    /// The Response Topic as bytes, which are valid UTF-8.
    #[must_use]
    pub fn response_topic_bytes(&self) -> Option<&[u8]> {
        self.response_topic.map(|span| span.of(&self.raw))
    }

    /// The Correlation Data.
    #[must_use]
    pub fn correlation_data(&self) -> Option<&[u8]> {
        self.correlation_data.map(|span| span.of(&self.raw))
    }

    /// The Content Type.
    #[must_use]
    pub fn content_type(&self) -> Option<&str> {
        self.text(self.content_type)
    }

    /// The Message Expiry Interval in seconds, as sent.
    #[must_use]
    pub fn message_expiry_s(&self) -> Option<u32> {
        self.message_expiry_s
    }

    /// Whether the Payload Format Indicator says that the payload is UTF-8.
    #[must_use]
    pub fn payload_is_utf8(&self) -> bool {
        self.payload_is_utf8
    }

    /// The user properties in the order sent, repeated names included.
    pub fn user(&self) -> impl Iterator<Item = (&str, &str)> {
        self.user_bytes().filter_map(|(name, value)| {
            Some((
                std::str::from_utf8(name).ok()?,
                std::str::from_utf8(value).ok()?,
            ))
        })
    }

    /// The user properties as valid UTF-8 bytes. Faster if only few of them are needed.
    pub fn user_bytes(&self) -> impl Iterator<Item = (&[u8], &[u8])> {
        Reader::again(&self.raw).properties().filter_map(|item| {
            let (name, value) = item.ok()?.pair?;
            Some((name.of(&self.raw), value.of(&self.raw)))
        })
    }

    /// The bytes as sent, without their length.
    #[must_use]
    pub fn raw(&self) -> &Bytes {
        &self.raw
    }

    /// The bytes to forward: all but Topic Alias and Message Expiry Interval, which the broker
    /// writes itself. Copies only if one of these is between other properties.
    #[must_use]
    pub fn forwarded(&self) -> Bytes {
        let [first, second] = match self.local {
            [Some(a), Some(b)] if b.start < a.start => [Some(b), Some(a)],
            [None, b] => [b, None],
            spans => spans,
        };
        let Some(a) = first else {
            return self.raw.clone();
        };
        let b = second.unwrap_or(Span {
            start: a.end,
            end: a.end,
        });
        let parts = [
            0..a.start as usize,
            a.end as usize..b.start as usize,
            b.end as usize..self.raw.len(),
        ];
        let mut filled = parts.iter().filter(|part| !part.is_empty());
        match (filled.next(), filled.next()) {
            (None, _) => Bytes::new(),
            (Some(only), None) => self.raw.slice(only.clone()),
            _ => {
                let mut copy = BytesMut::with_capacity(self.raw.len());
                for part in parts {
                    copy.extend_from_slice(&self.raw[part]);
                }
                copy.freeze()
            }
        }
    }

    fn text(&self, span: Option<Span>) -> Option<&str> {
        std::str::from_utf8(span?.of(&self.raw)).ok()
    }
}

/// Why properties could not be built.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum PropertyError {
    /// A string or binary value does not fit its length field of two bytes.
    #[error("a property is longer than 65535 bytes")]
    TooLong,
    /// MQTT strings must not contain U+0000 (section 1.5.4).
    #[error("a property contains the character U+0000")]
    Nul,
    /// A Response Topic must be a topic name.
    #[error("a response topic must not be empty or contain a wildcard")]
    Topic,
    /// A PUBLISH must not have these raw properties.
    #[error("{0}")]
    Invalid(&'static str),
}

/// Writes the raw properties of an outgoing [`Message`](crate::Message), in the order of the calls.
/// Only the user property may be written more than once.
#[derive(Debug, Default)]
pub struct PropertiesBuilder {
    buffer: Vec<u8>,
    error: Option<PropertyError>,
}

impl PropertiesBuilder {
    /// An empty builder.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// An empty builder with room for this many bytes. If all are used, [`finish`](Self::finish)
    /// needs no second allocation.
    #[must_use]
    pub fn with_capacity(bytes: usize) -> Self {
        Self {
            buffer: Vec::with_capacity(bytes),
            error: None,
        }
    }

    /// Declares the payload to be UTF-8 text.
    #[must_use]
    pub fn payload_is_utf8(mut self) -> Self {
        self.buffer.extend_from_slice(&[id::PAYLOAD_FORMAT, 1]);
        self
    }

    /// The Message Expiry Interval in seconds, only for properties that imitate received ones.
    /// Never use it for a message to send: the broker writes the interval.
    #[must_use]
    pub fn message_expiry_s(mut self, seconds: u32) -> Self {
        self.buffer.push(id::MESSAGE_EXPIRY);
        self.buffer.extend_from_slice(&seconds.to_be_bytes());
        self
    }

    /// The Content Type.
    #[must_use]
    pub fn content_type(mut self, value: &str) -> Self {
        self.buffer.push(id::CONTENT_TYPE);
        self.text(value);
        self
    }

    /// The Response Topic.
    #[must_use]
    pub fn response_topic(mut self, value: &str) -> Self {
        if crate::topic::check_name(value.as_bytes()).is_err() {
            self.error.get_or_insert(PropertyError::Topic);
        }
        self.buffer.push(id::RESPONSE_TOPIC);
        self.text(value);
        self
    }

    /// The Correlation Data.
    #[must_use]
    pub fn correlation_data(mut self, value: &[u8]) -> Self {
        self.buffer.push(id::CORRELATION_DATA);
        self.binary(value);
        self
    }

    /// Adds a user property.
    #[must_use]
    pub fn user(mut self, name: &str, value: &str) -> Self {
        self.buffer.push(id::USER_PROPERTY);
        self.text(name);
        self.text(value);
        self
    }

    /// Adds user properties that are encoded already, such as constants. They must be valid.
    #[must_use]
    pub fn encoded(mut self, properties: &[u8]) -> Self {
        self.buffer.extend_from_slice(properties);
        self
    }

    /// Adds a user property whose value is formatted by `Display`.
    #[must_use]
    pub fn user_shown(mut self, name: &str, value: impl fmt::Display) -> Self {
        self.buffer.push(id::USER_PROPERTY);
        self.text(name);
        let length_at = self.buffer.len();
        self.buffer.extend_from_slice(&[0; size_of::<u16>()]);
        // Writing to memory cannot fail.
        _ = write!(self.buffer, "{value}");
        let value = &self.buffer[length_at + 2..];
        if value.contains(&0) {
            self.error.get_or_insert(PropertyError::Nul);
        }
        match u16::try_from(value.len()) {
            Ok(length) => {
                self.buffer[length_at..][..2].copy_from_slice(&length.to_be_bytes());
            }
            Err(_) => _ = self.error.get_or_insert(PropertyError::TooLong),
        }
        self
    }

    /// The bytes for [`Message::properties`](crate::Message::properties).
    pub fn finish(self) -> Result<Bytes, PropertyError> {
        self.error.map_or_else(|| Ok(self.buffer.into()), Err)
    }

    fn text(&mut self, value: &str) {
        if value.as_bytes().contains(&0) {
            self.error.get_or_insert(PropertyError::Nul);
        }
        self.binary(value.as_bytes());
    }

    fn binary(&mut self, value: &[u8]) {
        match u16::try_from(value.len()) {
            Ok(length) => {
                self.buffer.extend_from_slice(&length.to_be_bytes());
                self.buffer.extend_from_slice(value);
            }
            Err(_) => _ = self.error.get_or_insert(PropertyError::TooLong),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn built_properties_round_trip() {
        let built = PropertiesBuilder::with_capacity(64)
            .payload_is_utf8()
            .response_topic("r/1")
            .correlation_data(b"\0\xff")
            .content_type("text/plain")
            .user("k", "")
            .user_shown("k", format_args!("v{}", 7));
        let properties = Properties::parse(built.finish().unwrap()).unwrap();
        assert!(properties.payload_is_utf8());
        assert_eq!(properties.response_topic(), Some("r/1"));
        assert_eq!(properties.correlation_data(), Some(&b"\0\xff"[..]));
        assert_eq!(properties.content_type(), Some("text/plain"));
        assert_eq!(
            properties.user().collect::<Vec<_>>(),
            [("k", ""), ("k", "v7")]
        );
        assert_eq!(&properties.forwarded(), properties.raw());
    }

    #[test]
    fn built_expiry_is_not_forwarded() {
        let built = PropertiesBuilder::new().message_expiry_s(7).user("k", "v");
        let properties = Properties::parse(built.finish().unwrap()).unwrap();
        assert_eq!(properties.message_expiry_s(), Some(7));
        assert_eq!(properties.forwarded().len() + 5, properties.raw().len());
    }

    #[test]
    fn invalid_values_are_errors() {
        use PropertyError::{Nul, TooLong, Topic};
        let long = "x".repeat(65_536);
        let new = PropertiesBuilder::new;
        for (what, builder, error) in [
            ("user", new().user("k", &long), TooLong),
            ("data", new().correlation_data(long.as_bytes()), TooLong),
            ("shown", new().user_shown("k", &long), TooLong),
            ("user", new().user("a\0b", ""), Nul),
            ("shown", new().user_shown("a", '\0'), Nul),
            ("topic", new().response_topic("a/#"), Topic),
        ] {
            assert_eq!(builder.finish(), Err(error), "{what}");
        }
        assert!(
            Properties::parse(&b"\x0b\x01"[..]).is_err(),
            "a client must not send a subscription identifier"
        );
        assert!(Properties::parse(&b"\x08\0\x01+"[..]).is_err());
    }
}
