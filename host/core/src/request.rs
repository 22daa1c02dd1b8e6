//! Parses a PUBLISH into a request: dialect, properties, response topic.
//!
//! It never reads the payload: only the policy does.

mod reply;

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use statehouse_mqtt::{Properties, QoS, ReasonCode};

use crate::Outcome;
use crate::store::Peer;
pub use reply::{ReplyTo, notification_properties};
use statehouse_protocol::rights::ClientRights;
pub use statehouse_protocol::topics::{
    ADMIN_TOPICS, BROKER_TOPICS, NOTIFICATION_TOPICS, PREVIEW_TOPIC, REQUEST_TOPIC, client_id_of,
    notification_topic,
};
use statehouse_protocol::{ConnectionId, SessionId};

/// The answer to a request at QoS 0 (protocol, section 1).
pub const QOS_ZERO_ANSWER: &[u8] = b"-ERR syntax error\r\n";

/// The forms of the protocol that clients use (protocol, section 2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Dialect {
    /// The form that the official client libraries parse.
    Sdk,
    /// The form in the published article.
    Documents,
    /// The 2023 preview.
    Preview,
}

impl Dialect {
    /// The user property of versions, in both directions.
    pub fn version_property(self) -> &'static str {
        match self {
            Self::Sdk | Self::Documents => "__ts",
            Self::Preview => "Timestamp",
        }
    }

    /// The user property of fencing tokens.
    pub fn fencing_property(self) -> &'static str {
        match self {
            Self::Sdk | Self::Documents => "__ft",
            Self::Preview => "FencingToken",
        }
    }
}

/// How a request was delivered. Distinguishes a redelivery from a new request (protocol, section
/// 9).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Delivery {
    /// The session number. It is unique, even across restarts.
    pub session: SessionId,
    /// The connection number. It is unique, even across restarts.
    pub connection: ConnectionId,
    /// The packet identifier.
    pub packet_id: u16,
    /// The DUP flag.
    pub dup: bool,
}

impl Delivery {
    /// The delivery of a packet over this connection.
    pub fn new(peer: &Peer, packet_id: u16, dup: bool) -> Self {
        Self {
            session: peer.session,
            connection: peer.connection,
            packet_id,
            dup,
        }
    }
}

/// A request for a policy.
#[derive(Clone, Copy)]
pub struct Request<'a> {
    /// The dialect of the client.
    pub dialect: Dialect,
    /// The payload.
    pub payload: &'a Bytes,
    /// The client's timestamp, unparsed.
    pub timestamp: Option<&'a str>,
    /// The fencing token, unparsed.
    pub fencing_token: Option<&'a str>,
    /// The connection of the client.
    pub peer: &'a Peer,
    /// All properties, for policies.
    pub properties: &'a Properties,
    /// How it was delivered.
    pub delivery: Delivery,
    /// The rights of the client; everything is allowed if there are none.
    pub grants: Option<&'a Arc<dyn ClientRights>>,
}

/// Answers that need no policy, because they concern the message and not the command.
#[derive(Debug, PartialEq, Eq)]
pub enum Early<'a> {
    /// `__protVer` has a major version other than 1.
    UnsupportedVersion(&'a str),
    /// QoS 0: the request cannot be acknowledged, so it is not executed.
    QosZero,
}

/// A PUBLISH from a transport.
pub struct Incoming<'a> {
    /// The topic, one of the two request topics.
    pub topic: &'a str,
    /// The payload.
    pub payload: &'a Bytes,
    /// The properties.
    pub properties: &'a Properties,
    /// The QoS.
    pub qos: QoS,
    /// How it was delivered.
    pub delivery: Delivery,
    /// When it expires.
    pub expires: Option<Instant>,
    /// The connection of the client.
    pub peer: &'a Peer,
    /// The rights of the client; everything is allowed if there are none.
    pub grants: Option<Arc<dyn ClientRights>>,
}

impl<'a> Incoming<'a> {
    /// A first delivery at QoS 1 on the current request topic, from a client with all rights.
    pub fn new(peer: &'a Peer, payload: &'a Bytes, properties: &'a Properties) -> Self {
        Self {
            topic: REQUEST_TOPIC,
            payload,
            properties,
            qos: QoS::AtLeastOnce,
            delivery: Delivery::new(peer, 0, false),
            expires: None,
            peer,
            grants: None,
        }
    }
}

/// Parses a PUBLISH on a request topic. `forced` overrides the dialect on the current topic. A
/// request for the policy is returned as [`Outcome::Handled`].
pub fn parse<'a>(incoming: &'a Incoming<'a>, forced: Option<Dialect>) -> Outcome<'a> {
    let properties = incoming.properties;
    let response_topic = properties.response_topic_bytes();
    if response_topic.is_some_and(is_reserved) {
        return Outcome::Disconnected(
            ReasonCode::TOPIC_NAME_INVALID,
            "the response topic of a request is reserved for the state store or the broker",
        );
    }
    let (topic, correlation_data) = match (response_topic, properties.correlation_data()) {
        (Some(topic), Some(correlation_data)) => (topic, correlation_data),
        (None, Some(_)) => return refuse("a request needs a Response Topic"),
        (Some(_), None) => return refuse("a request needs Correlation Data"),
        (None, None) => return refuse("a request needs a Response Topic and Correlation Data"),
    };

    let mut fields = Fields::default();
    for (name, value) in properties.user_bytes() {
        fields.note(name, value);
    }
    let dialect = if incoming.topic == PREVIEW_TOPIC {
        Dialect::Preview
    } else {
        forced.unwrap_or(match fields.protocol_version {
            Some(_) => Dialect::Sdk,
            None => Dialect::Documents,
        })
    };
    let reply_to = ReplyTo {
        topic,
        correlation_data,
        dialect,
        protocol_version: fields.protocol_version.is_some(),
        persistence: fields.persistence.map(|asked| asked == b"true"),
        traceparent: fields.traceparent,
        expires: incoming.expires,
    };
    if let Some(version) = fields.protocol_version
        && version != b"1"
        && !version.starts_with(b"1.")
    {
        return Outcome::Answered(reply_to, Early::UnsupportedVersion(text(version)));
    }
    if incoming.qos == QoS::AtMostOnce {
        return Outcome::Answered(reply_to, Early::QosZero);
    }
    let (timestamp, fencing_token) = match dialect {
        Dialect::Preview => (fields.preview_timestamp, fields.preview_fencing_token),
        Dialect::Sdk | Dialect::Documents => (fields.timestamp, fields.fencing_token),
    };
    let request = Request {
        dialect,
        payload: incoming.payload,
        timestamp: timestamp.map(text),
        fencing_token: fencing_token.map(text),
        peer: incoming.peer,
        properties,
        delivery: incoming.delivery,
        grants: incoming.grants.as_ref(),
    };
    Outcome::Handled(request, reply_to)
}

/// Whether a response on this topic would look like a message that only the store or a broker
/// sends. The codec has checked that it is a topic name: not empty, and without wildcards.
fn is_reserved(response_topic: &[u8]) -> bool {
    [REQUEST_TOPIC, PREVIEW_TOPIC]
        .iter()
        .any(|topic| response_topic == topic.as_bytes())
        || [NOTIFICATION_TOPICS, ADMIN_TOPICS, BROKER_TOPICS]
            .iter()
            .any(|prefix| response_topic.starts_with(prefix.as_bytes()))
}

/// The codec has checked that this is UTF-8.
fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap_or_default()
}

fn refuse(text: &'static str) -> Outcome<'static> {
    Outcome::Refused(ReasonCode::IMPLEMENTATION_SPECIFIC_ERROR, text)
}

/// The user properties of the protocol. If one is repeated, the first counts.
#[derive(Default)]
struct Fields<'a> {
    protocol_version: Option<&'a [u8]>,
    timestamp: Option<&'a [u8]>,
    fencing_token: Option<&'a [u8]>,
    preview_timestamp: Option<&'a [u8]>,
    preview_fencing_token: Option<&'a [u8]>,
    persistence: Option<&'a [u8]>,
    traceparent: Option<&'a [u8]>,
}

impl<'a> Fields<'a> {
    fn note(&mut self, name: &[u8], value: &'a [u8]) {
        let field = match name {
            b"__protVer" => &mut self.protocol_version,
            b"__ts" => &mut self.timestamp,
            b"__ft" => &mut self.fencing_token,
            b"Timestamp" => &mut self.preview_timestamp,
            b"FencingToken" => &mut self.preview_fencing_token,
            b"aio-persistence" => &mut self.persistence,
            b"traceparent" => &mut self.traceparent,
            _ => return,
        };
        field.get_or_insert(value);
    }
}

/// The bytes that identify a request across redeliveries: client id, response topic, correlation
/// data, payload, timestamp and fencing token (protocol, section 9).
pub fn identity(
    client: &str,
    payload: &[u8],
    properties: &Properties,
    timestamp: Option<&str>,
    fencing_token: Option<&str>,
) -> Vec<u8> {
    let correlation_data = properties.correlation_data();
    let parts = [
        Some(client.as_bytes()),
        properties.response_topic_bytes(),
        correlation_data,
        Some(payload),
        timestamp.map(str::as_bytes),
        fencing_token.map(str::as_bytes),
    ];
    let bytes = parts.iter().flatten().map(|part| part.len());
    let mut whole = Vec::with_capacity(bytes.sum::<usize>() + size_of::<u64>() * parts.len());
    for part in parts {
        // Lengths make the encoding injective. An absent part differs from an empty one.
        let length = part.map_or(u64::MAX, |part| part.len() as u64);
        whole.extend_from_slice(&length.to_le_bytes());
        whole.extend_from_slice(part.unwrap_or_default());
    }
    whole
}

#[cfg(test)]
mod tests {
    use statehouse_mqtt::PropertiesBuilder;

    use super::*;

    const SDK: &[(&str, &str)] = &[("__protVer", "1.0"), ("__ts", "1:2:a"), ("__ft", "3:4:b")];

    fn properties(
        response_topic: Option<&str>,
        correlation_data: Option<&[u8]>,
        user: &[(&str, &str)],
    ) -> Properties {
        let mut builder = PropertiesBuilder::new();
        if let Some(topic) = response_topic {
            builder = builder.response_topic(topic);
        }
        if let Some(data) = correlation_data {
            builder = builder.correlation_data(data);
        }
        for (name, value) in user {
            builder = builder.user(name, value);
        }
        Properties::parse(builder.finish().unwrap()).unwrap()
    }

    fn whole(user: &[(&str, &str)]) -> Properties {
        properties(Some("answers/here"), Some(b"7"), user)
    }

    /// Parses a PUBLISH with these properties and passes the result to `check`.
    fn check(
        topic: &str,
        qos: QoS,
        properties: &Properties,
        forced: Option<Dialect>,
        check: impl FnOnce(Outcome<'_>),
    ) {
        let peer = Peer::numbered("c", 1);
        let payload = Bytes::new();
        let incoming = Incoming {
            topic,
            qos,
            ..Incoming::new(&peer, &payload, properties)
        };
        check(parse(&incoming, forced));
    }

    #[test]
    fn topic_and_property_select_the_dialect() {
        for (topic, user, forced, dialect) in [
            (REQUEST_TOPIC, SDK, None, Dialect::Sdk),
            (REQUEST_TOPIC, &[][..], None, Dialect::Documents),
            (
                REQUEST_TOPIC,
                SDK,
                Some(Dialect::Documents),
                Dialect::Documents,
            ),
            (REQUEST_TOPIC, &[], Some(Dialect::Sdk), Dialect::Sdk),
            (PREVIEW_TOPIC, SDK, Some(Dialect::Sdk), Dialect::Preview),
        ] {
            let has_dialect = |parsed: Outcome<'_>| match parsed {
                Outcome::Handled(request, _) => assert_eq!(request.dialect, dialect),
                _ => panic!("not a request"),
            };
            check(topic, QoS::AtLeastOnce, &whole(user), forced, has_dialect);
        }
    }

    #[test]
    fn first_property_of_the_dialect_counts() {
        let user = [
            ("Timestamp", "p"),
            ("__ts", "first"),
            ("__ts", "second"),
            ("FencingToken", "q"),
            ("__ft", "r"),
            ("__invId", "ignored"),
        ];
        for (topic, expected) in [(REQUEST_TOPIC, ("first", "r")), (PREVIEW_TOPIC, ("p", "q"))] {
            let has_values = |parsed: Outcome<'_>| match parsed {
                Outcome::Handled(request, _) => {
                    assert_eq!(request.timestamp, Some(expected.0));
                    assert_eq!(request.fencing_token, Some(expected.1));
                }
                _ => panic!("not a request"),
            };
            check(topic, QoS::ExactlyOnce, &whole(&user), None, has_values);
        }
    }

    #[test]
    fn missing_properties_are_named() {
        for (topic, data, missing) in [
            (None, Some(&b"1"[..]), "a Response Topic"),
            (Some("a"), None, "Correlation Data"),
            (None, None, "a Response Topic and Correlation Data"),
        ] {
            let properties = properties(topic, data, SDK);
            let is_refused = |parsed: Outcome<'_>| match parsed {
                Outcome::Refused(reason, text) => {
                    assert_eq!(reason.0, 0x83);
                    assert_eq!(text, format!("a request needs {missing}"));
                }
                _ => panic!("not refused"),
            };
            let qos = QoS::AtLeastOnce;
            check(REQUEST_TOPIC, qos, &properties, None, is_refused);
        }
    }

    #[test]
    fn reserved_response_topics_disconnect() {
        let notification = format!("{NOTIFICATION_TOPICS}/AB/command/notify/CD");
        let status = format!("{ADMIN_TOPICS}policies");
        for topic in [
            REQUEST_TOPIC,
            PREVIEW_TOPIC,
            NOTIFICATION_TOPICS,
            &notification,
            &status,
            "$SYS/broker/uptime",
        ] {
            let properties = properties(Some(topic), Some(b"1"), &[]);
            let disconnects = |parsed: Outcome<'_>| match parsed {
                Outcome::Disconnected(reason, _) => assert_eq!(reason.0, 0x90, "{topic}"),
                _ => panic!("{topic} was accepted"),
            };
            let qos = QoS::AtMostOnce;
            check(REQUEST_TOPIC, qos, &properties, None, disconnects);
        }
    }

    #[test]
    fn other_versions_and_qos_zero_need_no_policy() {
        let unsupported = |version| Some(Early::UnsupportedVersion(version));
        for (version, qos, early) in [
            ("2.0", QoS::AtLeastOnce, unsupported("2.0")),
            ("10.0", QoS::AtLeastOnce, unsupported("10.0")),
            ("", QoS::AtLeastOnce, unsupported("")),
            ("1.7", QoS::AtMostOnce, Some(Early::QosZero)),
            ("1.7", QoS::AtLeastOnce, None),
        ] {
            let properties = whole(&[("__protVer", version)]);
            let is_early = |parsed: Outcome<'_>| match parsed {
                Outcome::Answered(_, found) => assert_eq!(Some(found), early, "{version}"),
                Outcome::Handled(..) => assert_eq!(early, None, "{version}"),
                _ => panic!("{version} was refused"),
            };
            check(REQUEST_TOPIC, qos, &properties, None, is_early);
        }
    }

    #[test]
    fn identity_depends_on_every_part() {
        let here = properties(Some("answers/here"), Some(b"7"), &[]);
        let there = properties(Some("answers/there"), Some(b"7"), &[]);
        let eighth = properties(Some("answers/here"), Some(b"8"), &[]);
        let (ts, ft) = (Some("1:2:a"), Some("3:4:b"));
        let base = identity("c", b"GET", &here, ts, ft);
        assert_eq!(base, identity("c", b"GET", &here, ts, ft));
        for other in [
            identity("d", b"GET", &here, ts, ft),
            identity("c", b"SET", &here, ts, ft),
            identity("c", b"GET", &here, ts, None),
            identity("c", b"GET", &here, None, ft),
            identity("c", b"GET", &here, ft, ts),
            identity("c", b"GET", &there, ts, ft),
            identity("c", b"GET", &eighth, ts, ft),
            // The same bytes, divided differently.
            identity("cG", b"ET", &here, ts, ft),
        ] {
            assert_ne!(base, other);
        }
    }
}
