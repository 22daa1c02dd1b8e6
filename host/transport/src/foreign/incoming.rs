//! Converts a PUBLISH from a foreign broker to a request, in the form of the embedded broker's.
//!
//! Refuses a PUBLISH whose properties or response topic break a rule. A payload must never be
//! interpreted here.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use rumqttc::v5::mqttbytes;
use rumqttc::v5::mqttbytes::v5::{Publish, PublishProperties};
use statehouse_mqtt::{Properties, PropertiesBuilder, PropertyError, QoS};

use super::identity;
use statehouse_config::limits;
use statehouse_core::request::{Delivery, Incoming, PREVIEW_TOPIC, REQUEST_TOPIC};
use statehouse_core::store::Peer;
use statehouse_protocol::rights::ClientRights;

/// A request whose properties are valid. The payload may still be invalid.
#[derive(Debug)]
pub(super) struct ForeignRequest {
    topic: &'static str,
    payload: Bytes,
    properties: Properties,
    qos: QoS,
    expires: Option<Instant>,
    pub(super) peer: Peer,
}

/// Why a PUBLISH is not a valid request.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum InvalidRequest {
    /// The Response Topic of this client's request breaks this rule.
    ResponseTopic(Peer, &'static str),
    /// The properties are invalid (MQTT 5 section 1.5.4).
    Malformed,
}

impl ForeignRequest {
    /// Converts a PUBLISH to one of the request topics, which arrived at this time.
    pub(super) fn new(
        topic: &'static str,
        publish: Publish,
        arrived: Instant,
    ) -> Result<Self, InvalidRequest> {
        let sent = publish.properties.unwrap_or_default();
        // The broker has already subtracted the time that the message waited there (MQTT 5 section
        // 3.3.2.3.3). The time that it waits here counts too.
        let expiry = sent.message_expiry_interval;
        let expiry = expiry.map(|seconds| Duration::from_secs(seconds.into()));
        let properties = match convert(&sent) {
            Ok(properties) => properties,
            Err(PropertyError::Topic) => {
                let anonymous = PublishProperties {
                    response_topic: None,
                    ..sent
                };
                let peer = convert(&anonymous).map(|it| identity::peer(&it));
                // The broker should have refused this PUBLISH.
                let rule = "the response topic of a request holds a wildcard";
                return Err(peer.map_or(InvalidRequest::Malformed, |peer| {
                    InvalidRequest::ResponseTopic(peer, rule)
                }));
            }
            Err(_) => return Err(InvalidRequest::Malformed),
        };
        let peer = identity::peer(&properties);
        let response_topic = properties.response_topic().unwrap_or_default();
        // A broker accepts any topic as a property, but may close the connection of a client that
        // publishes to it.
        if response_topic.split('/').count() > limits::BROKER_TOPIC_LEVELS_MAX {
            let rule = "the response topic of a request has more levels than brokers take";
            return Err(InvalidRequest::ResponseTopic(peer, rule));
        }
        Ok(Self {
            topic,
            peer,
            payload: publish.payload,
            properties,
            qos: match publish.qos {
                mqttbytes::QoS::AtMostOnce => QoS::AtMostOnce,
                mqttbytes::QoS::AtLeastOnce => QoS::AtLeastOnce,
                mqttbytes::QoS::ExactlyOnce => QoS::ExactlyOnce,
            },
            expires: expiry.and_then(|expiry| arrived.checked_add(expiry)),
        })
    }

    pub(super) fn payload_bytes(&self) -> usize {
        self.payload.len()
    }

    pub(super) fn incoming(&self, grants: Option<Arc<dyn ClientRights>>) -> Incoming<'_> {
        Incoming {
            topic: self.topic,
            payload: &self.payload,
            properties: &self.properties,
            qos: self.qos,
            // DUP and packet ids are the broker's own and say nothing about the client. So every
            // request may be a redelivery, and only its identity decides.
            delivery: Delivery::new(&self.peer, 0, true),
            expires: self.expires,
            peer: &self.peer,
            grants,
        }
    }
}

/// Returns the request topic that equals `topic`, if there is one.
pub(super) fn request_topic(topic: &[u8]) -> Option<&'static str> {
    let topics = [REQUEST_TOPIC, PREVIEW_TOPIC];
    topics.into_iter().find(|it| it.as_bytes() == topic)
}

fn convert(sent: &PublishProperties) -> Result<Properties, PropertyError> {
    let mut builder = PropertiesBuilder::with_capacity(256);
    if sent.payload_format_indicator == Some(1) {
        builder = builder.payload_is_utf8();
    }
    if let Some(seconds) = sent.message_expiry_interval {
        builder = builder.message_expiry_s(seconds);
    }
    if let Some(content_type) = &sent.content_type {
        builder = builder.content_type(content_type);
    }
    // An empty topic counts as none. Only a foreign broker might let one through.
    if let Some(topic) = sent.response_topic.as_deref().filter(|it| !it.is_empty()) {
        builder = builder.response_topic(topic);
    }
    if let Some(data) = &sent.correlation_data {
        builder = builder.correlation_data(data);
    }
    for (name, value) in &sent.user_properties {
        builder = builder.user(name, value);
    }
    Properties::parse(builder.finish()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn publish(properties: PublishProperties) -> Publish {
        Publish {
            qos: mqttbytes::QoS::AtLeastOnce,
            topic: REQUEST_TOPIC.into(),
            pkid: 7,
            payload: "GET".into(),
            properties: Some(properties),
            ..Publish::default()
        }
    }

    fn request(properties: PublishProperties) -> Result<ForeignRequest, InvalidRequest> {
        ForeignRequest::new(REQUEST_TOPIC, publish(properties), Instant::now())
    }

    #[test]
    fn every_property_of_the_client_is_converted() {
        let now = Instant::now();
        let sent = PublishProperties {
            payload_format_indicator: Some(1),
            message_expiry_interval: Some(9),
            topic_alias: None,
            response_topic: Some("clients/c/answers".into()),
            correlation_data: Some(Bytes::from_static(b"\0\xff")),
            user_properties: vec![("k".into(), "v".into()), ("k".into(), String::new())],
            subscription_identifiers: vec![3],
            content_type: Some("text/plain".into()),
        };
        let request = ForeignRequest::new(REQUEST_TOPIC, publish(sent), now).unwrap();
        let incoming = request.incoming(None);
        let properties = incoming.properties;
        assert!(properties.payload_is_utf8());
        assert_eq!(properties.message_expiry_s(), Some(9));
        assert_eq!(incoming.expires, Some(now + Duration::from_secs(9)));
        assert_eq!(properties.response_topic(), Some("clients/c/answers"));
        assert_eq!(properties.correlation_data().unwrap(), &b"\0\xff"[..]);
        assert_eq!(properties.content_type(), Some("text/plain"));
        assert_eq!(
            properties.user().collect::<Vec<_>>(),
            [("k", "v"), ("k", "")]
        );
        assert_eq!(incoming.peer.known(), Some("c"));
        assert_eq!(incoming.payload, "GET");
        assert_eq!(incoming.qos, QoS::AtLeastOnce);
        let delivery = incoming.delivery;
        assert!(delivery.dup && delivery.packet_id == 0);
        assert_eq!(delivery.session, incoming.peer.session);
        assert_eq!(delivery.connection, incoming.peer.connection);
    }

    #[test]
    fn a_response_topic_with_a_wildcard_is_refused_with_the_client() {
        let sent = PublishProperties {
            response_topic: Some("clients/c/#".into()),
            user_properties: vec![("__srcId".into(), "rude".into())],
            ..PublishProperties::default()
        };
        let Err(InvalidRequest::ResponseTopic(peer, _)) = request(sent) else {
            panic!("the request was accepted");
        };
        assert_eq!(peer.known(), Some("rude"));
    }

    #[test]
    fn a_response_topic_with_too_many_levels_is_refused() {
        let with_levels = |levels| PublishProperties {
            response_topic: Some(["clients", "evil"].join("/") + &"/".repeat(levels - 2)),
            ..PublishProperties::default()
        };
        assert!(request(with_levels(limits::BROKER_TOPIC_LEVELS_MAX)).is_ok());
        let Err(InvalidRequest::ResponseTopic(peer, _)) =
            request(with_levels(limits::BROKER_TOPIC_LEVELS_MAX + 1))
        else {
            panic!("the request was accepted");
        };
        assert_eq!(peer.known(), Some("evil"));
    }

    #[test]
    fn an_empty_response_topic_is_none() {
        let sent = PublishProperties {
            response_topic: Some(String::new()),
            ..PublishProperties::default()
        };
        let request = request(sent).unwrap();
        assert_eq!(request.incoming(None).properties.response_topic(), None);
    }

    #[test]
    fn text_that_mqtt_forbids_is_malformed() {
        let sent = PublishProperties {
            user_properties: vec![("a\0b".into(), String::new())],
            ..PublishProperties::default()
        };
        assert_eq!(request(sent).unwrap_err(), InvalidRequest::Malformed);
    }

    #[test]
    fn only_request_topics_are_recognized() {
        assert_eq!(request_topic(REQUEST_TOPIC.as_bytes()), Some(REQUEST_TOPIC));
        assert_eq!(request_topic(PREVIEW_TOPIC.as_bytes()), Some(PREVIEW_TOPIC));
        assert_eq!(request_topic(b"$SYS/broker/log/N"), None);
    }
}
