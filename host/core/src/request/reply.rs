//! Replies: where the answer to a request goes, and the MQTT properties of answers and
//! notifications.

use std::time::Instant;

use bytes::Bytes;
use statehouse_mqtt::PropertiesBuilder;

use super::Dialect;
use crate::clock::Stamp;
use crate::trace::{TRACEPARENT, TraceParent};

/// The destination of an answer, and properties that it must contain.
#[derive(Clone, Debug)]
pub struct ReplyTo<'a> {
    /// The Response Topic.
    pub topic: &'a [u8],
    pub(super) correlation_data: &'a [u8],
    pub(super) dialect: Dialect,
    pub(super) protocol_version: bool,
    /// The client's `aio-persistence` property, if present: whether it asks for durability on disk.
    pub persistence: Option<bool>,
    /// The client's `traceparent` property, unparsed.
    pub traceparent: Option<&'a [u8]>,
    /// When the request expires. The answer expires at the same time.
    pub expires: Option<Instant>,
}

impl ReplyTo<'_> {
    /// Identifies the request in the answer.
    pub fn correlation_data(&self) -> &[u8] {
        self.correlation_data
    }

    /// Whether the record of the request must be flushed before the answer is sent.
    pub fn is_urgent(&self) -> bool {
        self.persistence == Some(true)
    }

    /// The MQTT properties of an answer. `persisted` is the durability of its writes, included if
    /// the client asked for it. `policy` is the policy that answered, and `span` the span of the
    /// request.
    pub fn properties(
        &self,
        version: Option<Stamp>,
        node: &str,
        persisted: Option<&str>,
        policy: Option<&str>,
        span: Option<TraceParent>,
    ) -> Bytes {
        let persisted = persisted.filter(|_| self.persistence.is_some());
        let version_property = self.dialect.version_property();
        // With exactly the bytes that it needs, the buffer becomes `Bytes` without a second
        // allocation. Only an unusual version or a span makes it grow.
        let parts = [
            version.map(|_| user_bytes(version_property, Stamp::shown_bytes(node))),
            self.protocol_version.then_some(PROTOCOL_VERSION.len()),
            persisted.map(|it| user_bytes("persisted", it.len())),
            policy.map(|it| user_bytes("policy", it.len())),
        ];
        let more_bytes: usize = parts.iter().flatten().sum();
        let mut properties = self.start(STATUS_OK, more_bytes);
        if let Some(version) = version {
            properties = properties.user_shown(version_property, version.display(node));
        }
        if self.protocol_version {
            properties = properties.encoded(PROTOCOL_VERSION);
        }
        if let Some(persisted) = persisted {
            properties = properties.user("persisted", persisted);
        }
        if let Some(policy) = policy {
            properties = properties.user("policy", policy);
        }
        finish(with_span(properties, span))
    }

    /// The MQTT properties of the answer to an unsupported protocol version.
    pub fn unsupported_version(&self, asked: &str) -> Bytes {
        let properties = self
            .start(STATUS_UNSUPPORTED_VERSION, 0)
            .user("__supProtMajVer", "1")
            .user("__requestProtVer", asked)
            .encoded(PROTOCOL_VERSION);
        finish(properties)
    }

    /// Properties that `more_bytes` will follow.
    fn start(&self, status: &'static [u8], more_bytes: usize) -> PropertiesBuilder {
        let correlation_bytes = 1 + size_of::<u16>() + self.correlation_data.len();
        PropertiesBuilder::with_capacity(correlation_bytes + status.len() + more_bytes)
            .correlation_data(self.correlation_data)
            .encoded(status)
    }
}

/// The user property `__stat` with the value 200.
const STATUS_OK: &[u8] = b"\x26\0\x06__stat\0\x03200";

/// The user property `__stat` with the value 505.
const STATUS_UNSUPPORTED_VERSION: &[u8] = b"\x26\0\x06__stat\0\x03505";

/// The user property `__protVer` with the value 1.0.
const PROTOCOL_VERSION: &[u8] = b"\x26\0\x09__protVer\0\x031.0";

/// The bytes of a user property (MQTT 5, section 2.2.2.2).
fn user_bytes(name: &str, value_bytes: usize) -> usize {
    1 + size_of::<u16>() + name.len() + size_of::<u16>() + value_bytes
}

fn with_span(properties: PropertiesBuilder, span: Option<TraceParent>) -> PropertiesBuilder {
    match span {
        Some(span) => properties.user_shown(TRACEPARENT, span),
        None => properties,
    }
}

/// Every part is from a packet's properties or a short text of ours, so none is too long or
/// contains U+0000. Otherwise the client would get an answer without properties, which it could not
/// match to a request.
fn finish(properties: PropertiesBuilder) -> Bytes {
    properties.finish().unwrap_or_default()
}

/// The MQTT properties of a notification. `span` is the span of the request that caused it.
pub fn notification_properties(
    dialect: Dialect,
    version: Stamp,
    node: &str,
    span: Option<TraceParent>,
) -> Bytes {
    let version = version.display(node);
    let properties = PropertiesBuilder::new().user_shown(dialect.version_property(), version);
    finish(with_span(properties, span))
}

#[cfg(test)]
mod tests {
    use statehouse_mqtt::Properties;

    use super::*;

    #[test]
    fn encoded_properties_are_user_properties() {
        for (encoded, expected) in [
            (STATUS_OK, ("__stat", "200")),
            (STATUS_UNSUPPORTED_VERSION, ("__stat", "505")),
            (PROTOCOL_VERSION, ("__protVer", "1.0")),
        ] {
            let properties = Properties::parse(encoded).unwrap();
            assert_eq!(properties.user().collect::<Vec<_>>(), [expected]);
        }
    }
}
