//! A client of the store on top of the raw MQTT client: builds requests in each dialect and matches
//! answers to them.
//!
//! The client checks the rules that hold for every answer (protocol, section 2). The test checks
//! the rest.

use std::{
    fmt,
    sync::atomic::{AtomicU64, Ordering},
};

use data_encoding::HEXUPPER;
pub use statehouse_transcript::Dialect;

use crate::{
    client::Client,
    hlc::Hlc,
    packet::{Ack, Packet, Publish, acknowledge, kind},
    property::{self, Property},
    resp,
};

pub const REQUEST_TOPIC: &str = "statestore/v1/FA9AE35F-2F64-47CD-9BFF-08E2B32A0FE8/command/invoke";
/// The topic of requests of the 2023 preview.
pub const PREVIEW_TOPIC: &str = "$services/statestore/_any_/command/invoke/request";
pub const NOTIFICATION_PREFIX: &str = "clients/statestore/v1/FA9AE35F-2F64-47CD-9BFF-08E2B32A0FE8";

/// The topic of notifications of a key to a client.
pub fn notification_topic(client_id: &str, key: &[u8]) -> String {
    format!(
        "{NOTIFICATION_PREFIX}/{}/command/notify/{}",
        hex(client_id.as_bytes()),
        hex(key)
    )
}

/// Upper-case Base 16.
pub fn hex(bytes: &[u8]) -> String {
    HEXUPPER.encode(bytes)
}

fn topic(dialect: Dialect) -> &'static str {
    match dialect {
        Dialect::Preview => PREVIEW_TOPIC,
        Dialect::Sdk | Dialect::Documents => REQUEST_TOPIC,
    }
}

/// The user properties that a client of a dialect sends with every request.
fn request_properties(dialect: Dialect, client_id: &str) -> Vec<(String, String)> {
    let version = match dialect {
        Dialect::Preview => "Timestamp",
        Dialect::Sdk | Dialect::Documents => "__ts",
    };
    let mut out = vec![(version.into(), Hlc::now(0).to_string())];
    if dialect == Dialect::Sdk {
        out.push(("__protVer".into(), "1.0".into()));
        out.push(("__srcId".into(), client_id.into()));
    }
    out
}

/// A request. A test can make each part invalid.
#[derive(Clone, Debug)]
pub struct Request {
    pub topic: String,
    /// Normally a RESP array.
    pub payload: Vec<u8>,
    /// User properties in order.
    pub user: Vec<(String, String)>,
    /// 0, 1 or 2.
    pub qos: u8,
    pub response_topic: Option<String>,
    pub correlation: Option<Vec<u8>>,
    pub expiry_s: Option<u32>,
    pub content_type: Option<String>,
}

impl Request {
    /// With one more user property.
    #[must_use]
    pub fn with(mut self, name: &str, value: impl fmt::Display) -> Request {
        self.user.push((name.into(), value.to_string()));
        self
    }

    /// Without the user properties with this name.
    #[must_use]
    pub fn without(mut self, name: &str) -> Request {
        self.user.retain(|(had, _)| had != name);
        self
    }

    /// The PUBLISH that carries it.
    pub fn publish(&self) -> Publish {
        let mut publish = Publish::new(&self.topic, &self.payload).qos(self.qos);
        publish.properties.extend(
            [
                self.expiry_s.map(Property::MessageExpiry),
                self.content_type.clone().map(Property::ContentType),
                self.response_topic.clone().map(Property::ResponseTopic),
                self.correlation.clone().map(Property::CorrelationData),
            ]
            .into_iter()
            .flatten(),
        );
        let user = self.user.iter().map(|(n, v)| Property::user(n, v));
        publish.properties.extend(user);
        publish
    }
}

/// An answer and the acknowledgement after it.
#[derive(Clone, Debug)]
pub struct Answer {
    /// The PUBLISH with the answer.
    pub publish: Publish,
    /// PUBACK or PUBREC of the request; `None` at QoS 0.
    pub ack: Option<Ack>,
}

impl Answer {
    /// The RESP bytes.
    pub fn payload(&self) -> &[u8] {
        &self.publish.payload
    }

    /// The RESP bytes as escaped text.
    pub fn text(&self) -> String {
        self.payload().escape_ascii().to_string()
    }

    pub fn user(&self) -> Vec<(String, String)> {
        property::users(&self.publish.properties)
    }

    /// The version, from either property that can carry it.
    pub fn version(&self) -> Option<Hlc> {
        version(&self.publish)
    }
}

/// The version of a message, from either property that can carry it.
pub fn version(publish: &Publish) -> Option<Hlc> {
    let version = publish.user("__ts").or(publish.user("Timestamp"));
    version.map(|version| Hlc::parse_padded(version).unwrap())
}

/// A client of the store.
pub struct Store {
    pub client: Client,
    pub id: String,
    /// The dialect of its requests.
    pub dialect: Dialect,
    /// Whether the store is the broker. Then the acknowledgement of a request must follow its
    /// answer.
    pub is_broker: bool,
}

impl Store {
    /// Uses a connected client. Subscribes to `clients/{id}/#`, which matches no notification
    /// topic.
    pub fn new(mut client: Client, id: &str) -> Store {
        let reason = client.subscribe(&format!("clients/{id}/#"), 1);
        assert_eq!(reason, 1, "SUBACK");
        Store::on(client, id)
    }

    /// Like [`Self::new`], for a store behind the client's broker. Subscribes to notifications too,
    /// because such a broker delivers them only to subscribers.
    pub fn behind(mut client: Client, id: &str) -> Store {
        let filter = format!("{}+", notification_topic(id, b""));
        let reason = client.subscribe(&filter, 1);
        assert_eq!(reason, 1, "SUBACK");
        let mut store = Store::new(client, id);
        store.is_broker = false;
        store
    }

    /// Uses a connected client without subscribing.
    pub fn on(client: Client, id: &str) -> Store {
        Store {
            client,
            id: id.into(),
            dialect: Dialect::Sdk,
            is_broker: true,
        }
    }

    pub fn response_topic(&self) -> String {
        format!(
            "clients/{}/services/statestore/_any_/command/invoke/response",
            self.id
        )
    }

    /// Builds a request in this client's dialect, with unique correlation data.
    pub fn request(&mut self, payload: impl Into<Vec<u8>>) -> Request {
        // Unique even across the connections of a session.
        static ASKED: AtomicU64 = AtomicU64::new(1);
        let mut correlation = ASKED.fetch_add(1, Ordering::Relaxed).to_be_bytes().to_vec();
        // Bytes that are no valid text.
        correlation.extend(*b"\xFF\0\r\n/+#\x80");
        Request {
            topic: topic(self.dialect).into(),
            payload: payload.into(),
            user: request_properties(self.dialect, &self.id),
            qos: 1,
            response_topic: Some(self.response_topic()),
            correlation: Some(correlation),
            expiry_s: None,
            content_type: None,
        }
    }

    /// Builds a request with these arguments.
    pub fn command<A: AsRef<[u8]>>(&mut self, arguments: &[A]) -> Request {
        self.request(resp::array(arguments))
    }

    /// Sends a request with these arguments, and waits for answer and acknowledgement.
    pub fn ask<A: AsRef<[u8]>>(&mut self, arguments: &[A]) -> Answer {
        let request = self.command(arguments);
        self.call(&request)
    }

    /// Sends a request, and waits for answer and acknowledgement.
    pub fn call(&mut self, request: &Request) -> Answer {
        self.exchange(request).1
    }

    /// Sends a request again with its packet id, and waits for answer and acknowledgement.
    pub fn redeliver(&mut self, request: &Request, packet_id: u16, dup: bool) -> Answer {
        let mut publish = request.publish();
        (publish.packet_id, publish.dup) = (packet_id, dup);
        self.client.start(publish);
        self.finish(request, packet_id)
    }

    /// Sends a request. Returns its packet id and its answer.
    pub fn exchange(&mut self, request: &Request) -> (u16, Answer) {
        let packet_id = self.client.start(request.publish());
        (packet_id, self.finish(request, packet_id))
    }

    /// Waits for the answer to a request that was sent with this packet id. If the store is the
    /// broker, the acknowledgement must follow the answer, so that an acknowledged client has its
    /// answer.
    pub fn finish(&mut self, request: &Request, packet_id: u16) -> Answer {
        let correlation = request.correlation.clone();
        let shown = &request.payload[..request.payload.len().min(200)];
        let packet = self.client.take(
            &format!("the answer to {}", shown.escape_ascii()),
            |packet| is_answer(packet, correlation.as_deref()),
        );
        let publish = packet.publish();
        let ack_kind = match request.qos {
            0 => return Answer { publish, ack: None },
            1 => kind::PUBACK,
            _ => kind::PUBREC,
        };
        let early = self.client.drain();
        for packet in &early {
            assert!(
                !self.is_broker || packet.kind() != ack_kind || packet.ack().packet_id != packet_id,
                "the acknowledgement came before the answer"
            );
        }
        self.client.put_back(early);
        let ack = self.client.take_ack(ack_kind, packet_id);
        if request.qos == 2 {
            self.client.send(&acknowledge(kind::PUBREL, packet_id));
            self.client.take_ack(kind::PUBCOMP, packet_id);
        }
        Answer {
            publish,
            ack: Some(ack),
        }
    }

    /// SET without options. Returns the version.
    pub fn set(&mut self, key: impl AsRef<[u8]>, value: impl AsRef<[u8]>) -> Hlc {
        let answer = self.ask(&[b"SET", key.as_ref(), value.as_ref()]);
        assert_eq!(answer.text(), "+OK\\r\\n");
        answer.version().unwrap()
    }

    /// GET. Returns the value.
    pub fn get(&mut self, key: impl AsRef<[u8]>) -> Option<Vec<u8>> {
        let answer = self.ask(&[b"GET", key.as_ref()]);
        let payload = answer.payload();
        if payload == b"$-1\r\n" {
            return None;
        }
        let end = payload.windows(2).position(|w| w == b"\r\n").unwrap();
        let value = &payload[end + 2..payload.len() - 2];
        assert_eq!(payload, resp::bulk(value), "not one bulk string");
        Some(value.to_vec())
    }

    /// KEYNOTIFY.
    pub fn watch(&mut self, key: impl AsRef<[u8]>) {
        let answer = self.ask(&[b"KEYNOTIFY", key.as_ref()]);
        assert_eq!(answer.text(), "+OK\\r\\n");
    }

    /// KEYNOTIFY with PREFIX.
    pub fn watch_prefix(&mut self, prefix: impl AsRef<[u8]>) {
        let answer = self.ask(&[b"KEYNOTIFY", prefix.as_ref(), b"PREFIX"]);
        assert_eq!(answer.text(), "+OK\\r\\n");
    }

    pub fn notification(&mut self) -> Publish {
        self.client.take_publish(NOTIFICATION_PREFIX)
    }

    /// Asserts that no other packet arrives. First gets a missing key, so that all effects of
    /// earlier requests have arrived.
    pub fn expect_nothing(&mut self) {
        assert_eq!(self.get("a key that no test sets"), None);
        self.client.expect_nothing();
    }
}

/// Whether a packet is the answer to the request with this correlation data.
pub fn is_answer(packet: &Packet, correlation: Option<&[u8]>) -> bool {
    packet.kind() == kind::PUBLISH
        && correlation.is_some()
        && packet.publish().correlation() == correlation
}
