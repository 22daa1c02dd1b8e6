//! One message to a foreign broker, stored until its PUBACK.
//!
//! Converts a response or a notification of the store to a PUBLISH, each time that it is sent. A
//! message that has expired must not be sent.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Weak};
use std::time::Instant;

use bytes::Bytes;
use data_encoding::HEXUPPER_PERMISSIVE;
use rumqttc::v5::mqttbytes::QoS;
use rumqttc::v5::mqttbytes::v5::{Publish, PublishProperties};
use statehouse_mqtt::{Message, Properties, PropertiesBuilder};

use statehouse_config::limits;
use statehouse_core::store::{INTERNAL_ERROR, Peer};
use statehouse_protocol::Shown;

/// User properties with the version of a value. An error has no version.
const VERSIONS: [&str; 2] = ["__ts", "Timestamp"];

/// A message to be published.
#[derive(Debug)]
pub struct Outgoing {
    /// Of a notification. Before `message`, so that it is dropped first: see
    /// [`Weights::shared_body`].
    _body: Option<Arc<Body>>,
    _weight: Weight,
    pub(super) message: Message,
    pub(super) to: Recipient,
}

#[derive(Debug)]
pub(super) enum Recipient {
    /// The client that sent the request.
    Requester,
    /// The client that watches a key.
    Watcher(Peer),
    /// Another run with the store's client id, for which a mark is left.
    OtherRun,
}

impl Outgoing {
    /// Whether this response looks the same to a client as the other one.
    pub(super) fn is_same(&self, other: &Message) -> bool {
        let message = &self.message;
        message.topic == other.topic
            && message.properties == other.properties
            && message.payload == other.payload
    }

    /// The topic for a string field of a log line, cut if it is long.
    pub(super) fn shown_topic(&self) -> String {
        Shown::cut(&self.message.topic, limits::BROKER_LOG_TOPIC_BYTES_MAX).to_string()
    }

    /// The watched key of a notification: the last level of its topic, in Base 16 (section 1 of the
    /// protocol). None if the policy uses other topics.
    pub(super) fn watched_key(&self) -> Option<Vec<u8>> {
        let mut levels = self.message.topic.rsplit(|byte| *byte == b'/');
        HEXUPPER_PERMISSIVE.decode(levels.next()?).ok()
    }
}

impl statehouse_link::Message for Outgoing {
    fn publish(&self) -> Option<Publish> {
        let message = &self.message;
        let left = message
            .expires
            .map(|at| at.saturating_duration_since(Instant::now()));
        if left.is_some_and(|left| left.is_zero()) {
            return None;
        }
        // This program wrote the properties, so they parse.
        let properties = Properties::parse(message.properties.clone()).unwrap_or_default();
        let properties = PublishProperties {
            payload_format_indicator: properties.payload_is_utf8().then_some(1),
            // Whole seconds, rounded up: a message with an expiry of 0 s would never arrive.
            message_expiry_interval: left
                .map(|left| u32::try_from(left.as_millis().div_ceil(1000)).unwrap_or(u32::MAX)),
            correlation_data: properties.correlation_data().map(Bytes::copy_from_slice),
            content_type: properties.content_type().map(str::to_owned),
            user_properties: properties
                .user()
                .map(|(name, value)| (name.to_owned(), value.to_owned()))
                .collect(),
            ..PublishProperties::default()
        };
        Some(Publish {
            dup: false,
            qos: QoS::AtLeastOnce,
            retain: message.retain,
            topic: message.topic.clone(),
            pkid: 0,
            payload: message.payload.clone(),
            properties: Some(properties),
        })
    }

    fn too_large(self, bytes: usize, bytes_max: usize) -> Option<Self> {
        let topic = self.shown_topic();
        let is_response = matches!(self.to, Recipient::Requester);
        let what = match is_response {
            true => "response: its client gets an error instead",
            false => "notification: it is lost",
        };
        tracing::error!(
            topic,
            bytes,
            bytes_max,
            "the broker takes no packet as large as this {what}. Raise the broker's maximum packet size (max_packet_size, message_size_limit), or lower max_value_bytes"
        );
        if !is_response {
            return None;
        }
        Some(Self {
            message: internal_error(self.message),
            ..self
        })
    }

    fn proves_connection(&self) -> bool {
        // A mark is published at each connection, and another run may take over all the same.
        !matches!(self.to, Recipient::OtherRun)
    }
}

/// Replaces a response by an error without a version.
fn internal_error(message: Message) -> Message {
    let properties = Properties::parse(message.properties.clone()).unwrap_or_default();
    let mut builder = PropertiesBuilder::new();
    if let Some(data) = properties.correlation_data() {
        builder = builder.correlation_data(data);
    }
    for (name, value) in properties.user() {
        if !VERSIONS.contains(&name) {
            builder = builder.user(name, value);
        }
    }
    Message {
        payload: Bytes::from_static(INTERNAL_ERROR),
        // Cannot fail: each part was in valid properties before.
        properties: builder.finish().unwrap_or_default(),
        ..message
    }
}

/// Counts the bytes of all messages.
#[derive(Debug, Default)]
pub(super) struct Weights {
    sum: Arc<AtomicUsize>,
    /// The body of the last notification.
    last: Weak<Body>,
}

impl Weights {
    /// The bytes of all messages that exist.
    pub(super) fn bytes(&self) -> usize {
        self.sum.load(Relaxed)
    }

    pub(super) fn weigh(&mut self, message: Message, to: Recipient) -> Outgoing {
        let own = message.topic.len() + limits::BROKER_OUTBOX_OVERHEAD_BYTES;
        let (own, body) = match &to {
            Recipient::Watcher(_) => (own, Some(self.shared_body(&message))),
            Recipient::Requester | Recipient::OtherRun => (own + body_bytes(&message), None),
        };
        Outgoing {
            _body: body,
            _weight: Weight::new(own, &self.sum),
            message,
            to,
        }
    }

    /// The body of a notification. If the last one has the same bytes in memory, because both are
    /// about one change, they share it.
    fn shared_body(&mut self, message: &Message) -> Arc<Body> {
        // A notification drops its part of the body before its payload, and never replaces its
        // payload. So while the body exists, nothing else is at its addresses.
        let last = self.last.upgrade();
        let last = last.filter(|last| last.place == place(message));
        let body = last.unwrap_or_else(|| {
            Arc::new(Body {
                place: place(message),
                _weight: Weight::new(body_bytes(message), &self.sum),
            })
        });
        self.last = Arc::downgrade(&body);
        body
    }
}

fn body_bytes(message: &Message) -> usize {
    message.payload.len() + message.properties.len()
}

/// The payload and the properties of one or several messages.
#[derive(Debug)]
struct Body {
    place: Place,
    _weight: Weight,
}

/// The addresses and lengths of a payload and of properties.
type Place = [(usize, usize); 2];

fn place(message: &Message) -> Place {
    [&message.payload, &message.properties].map(|it| (it.as_ptr().addr(), it.len()))
}

/// A part of a sum, subtracted when it is dropped.
#[derive(Debug)]
struct Weight {
    bytes: usize,
    sum: Arc<AtomicUsize>,
}

impl Weight {
    fn new(bytes: usize, sum: &Arc<AtomicUsize>) -> Self {
        sum.fetch_add(bytes, Relaxed);
        Self {
            bytes,
            sum: Arc::clone(sum),
        }
    }
}

impl Drop for Weight {
    fn drop(&mut self) {
        self.sum.fetch_sub(self.bytes, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use statehouse_link::Message as _;

    use super::*;

    fn answer(payload: &'static str, expires: Option<Instant>) -> (Outgoing, Weights) {
        let properties = PropertiesBuilder::new()
            .correlation_data(b"\x00\xff")
            .user("__stat", "200")
            .user("__ts", "1:2:n")
            .user("__protVer", "1.0");
        let message = Message {
            topic: "clients/c/answers".into(),
            payload: payload.into(),
            properties: properties.finish().unwrap(),
            expires,
            ..Message::default()
        };
        let mut weights = Weights::default();
        (weights.weigh(message, Recipient::Requester), weights)
    }

    #[test]
    fn logged_topic_is_text_and_cut() {
        let (mut answer, _) = answer("+OK\r\n", None);
        answer.message.topic = "clients/Wärme/\n".into();
        assert_eq!(answer.shown_topic(), "clients/Wärme/\n");
        answer.message.topic = "ä".repeat(30_000).into();
        let cut = "ä".repeat(limits::BROKER_LOG_TOPIC_BYTES_MAX / 2) + "…";
        assert_eq!(answer.shown_topic(), cut);
    }

    #[test]
    fn a_response_carries_the_payload_and_properties_of_the_store() {
        let in_a_moment = Instant::now() + Duration::from_millis(1500);
        let (answer, _) = answer("+OK\r\n", Some(in_a_moment));
        let publish = answer.publish().unwrap();
        assert_eq!(publish.topic, "clients/c/answers");
        assert_eq!(publish.payload, "+OK\r\n");
        assert_eq!((publish.qos, publish.pkid), (QoS::AtLeastOnce, 0));
        let properties = publish.properties.unwrap();
        assert_eq!(properties.message_expiry_interval, Some(2));
        assert_eq!(properties.correlation_data.unwrap(), &b"\x00\xff"[..]);
        let names: Vec<_> = properties.user_properties.iter().map(|it| &*it.0).collect();
        assert_eq!(names, ["__stat", "__ts", "__protVer"]);
    }

    #[test]
    fn an_expired_response_is_not_sent() {
        let (answer, _) = answer("+OK\r\n", Some(Instant::now()));
        assert!(answer.publish().is_none());
    }

    #[test]
    fn a_response_that_is_too_large_becomes_an_error() {
        let (answer, weights) = answer("a long value", None);
        let before = weights.bytes();
        let error = answer.too_large(100, 50).unwrap();
        assert_eq!(weights.bytes(), before, "the weight stays the same");
        let publish = error.publish().unwrap();
        assert_eq!(publish.payload, INTERNAL_ERROR);
        let properties = publish.properties.unwrap();
        assert_eq!(properties.correlation_data.unwrap(), &b"\x00\xff"[..]);
        let names: Vec<_> = properties.user_properties.iter().map(|it| &*it.0).collect();
        assert_eq!(names, ["__stat", "__protVer"]);
        drop(error);
        assert_eq!(weights.bytes(), 0);
    }

    #[test]
    fn a_notification_names_the_key_in_its_topic() {
        let key = |topic: &str| {
            let message = Message {
                topic: topic.to_owned().into(),
                ..Message::default()
            };
            let outgoing = Weights::default().weigh(message, Recipient::OtherRun);
            outgoing.watched_key()
        };
        assert_eq!(key("a/command/notify/00FF6b"), Some(b"\x00\xffk".to_vec()));
        assert_eq!(key("a/notify/0"), None);
        assert_eq!(key("a/notify/key"), None);
    }

    #[test]
    fn notifications_of_one_change_share_their_payload() {
        let mut weights = Weights::default();
        let payload = Bytes::from(vec![0_u8; 1000]);
        let notify = |weights: &mut Weights, payload: &Bytes| {
            let message = Message {
                payload: payload.clone(),
                ..Message::default()
            };
            weights.weigh(message, Recipient::Watcher(Peer::numbered("watcher", 1)))
        };
        let own = limits::BROKER_OUTBOX_OVERHEAD_BYTES;
        let first = notify(&mut weights, &payload);
        let second = notify(&mut weights, &payload);
        assert_eq!(weights.bytes(), 1000 + 2 * own);
        drop(first);
        assert_eq!(weights.bytes(), 1000 + own, "the second one needs it");
        // The same bytes in other memory.
        let other = notify(&mut weights, &Bytes::from(vec![0_u8; 1000]));
        assert_eq!(weights.bytes(), 2 * (1000 + own));
        drop((second, other));
        assert_eq!(weights.bytes(), 0);
        let again = notify(&mut weights, &payload);
        assert_eq!(weights.bytes(), 1000 + own);
        drop(again);
    }
}
