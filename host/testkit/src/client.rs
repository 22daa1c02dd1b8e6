//! A client of a harness, and the messages that it sends.

use super::harness::Harness;
use super::{Answer, Came};
use statehouse_core::request::{Dialect, PREVIEW_TOPIC, REQUEST_TOPIC};

/// A message to the store. Every part of it may be invalid.
#[derive(Clone, Debug)]
pub struct Publish {
    /// The topic.
    pub topic: String,
    /// The payload.
    pub payload: Vec<u8>,
    /// The user properties in order.
    pub user: Vec<(String, String)>,
    /// The QoS: 0, 1 or 2.
    pub qos: u8,
    /// The Response Topic.
    pub response_topic: Option<String>,
    /// The Correlation Data. If they are empty, the harness generates unique ones.
    pub correlation: Option<Vec<u8>>,
    /// The store's time in milliseconds at which the message expires (MQTT 5, section 3.3.2.3.3).
    pub expires_ms: Option<u64>,
}

impl Publish {
    /// Creates the message that a client of this dialect sends when its clock reads `now_ms`.
    pub fn new(dialect: Dialect, client: &str, payload: Vec<u8>, now_ms: u64) -> Self {
        let owned = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        let timestamp = format!("{now_ms:015}:{:05}:client", 0);
        let mut user = vec![owned(dialect.version_property(), &timestamp)];
        if dialect == Dialect::Sdk {
            user.extend([owned("__protVer", "1.0"), owned("__srcId", client)]);
        }
        let topic = match dialect {
            Dialect::Preview => PREVIEW_TOPIC,
            Dialect::Sdk | Dialect::Documents => REQUEST_TOPIC,
        };
        Self {
            topic: topic.into(),
            payload,
            user,
            qos: 1,
            response_topic: Some(format!("clients/{client}/response")),
            correlation: Some(Vec::new()),
            expires_ms: None,
        }
    }
}

/// A client that is about to send one request.
pub struct Client<'a> {
    harness: &'a mut Harness,
    id: String,
    dialect: Dialect,
    timestamp: Option<Option<String>>,
    fencing_token: Option<String>,
    properties: Vec<(String, String)>,
}

impl<'a> Client<'a> {
    pub(super) fn new(harness: &'a mut Harness, id: &str) -> Self {
        Self {
            harness,
            id: id.into(),
            dialect: Dialect::Sdk,
            timestamp: None,
            fencing_token: None,
            properties: Vec::new(),
        }
    }

    /// Sets the dialect. The default is that of the SDKs.
    #[must_use]
    pub fn dialect(mut self, dialect: Dialect) -> Self {
        self.dialect = dialect;
        self
    }

    /// Sets the clock reading, or omits it. The default is the current time.
    #[must_use]
    pub fn timestamp(mut self, timestamp: Option<&str>) -> Self {
        self.timestamp = Some(timestamp.map(str::to_owned));
        self
    }

    /// Adds a fencing token.
    #[must_use]
    pub fn fencing_token(mut self, token: &str) -> Self {
        self.fencing_token = Some(token.into());
        self
    }

    /// Adds a user property.
    #[must_use]
    pub fn property(mut self, name: &str, value: &str) -> Self {
        self.properties.push((name.into(), value.into()));
        self
    }

    /// Sends an array of bulk strings, the form of the published commands, and returns the answer.
    pub fn send<A: AsRef<[u8]>>(self, arguments: &[A]) -> Answer {
        self.send_bytes(array(arguments))
    }

    /// Sends these bytes as the payload, and returns the answer.
    pub fn send_bytes(self, payload: impl Into<Vec<u8>>) -> Answer {
        let now_ms = self.harness.now_ms();
        let mut publish = Publish::new(self.dialect, &self.id, payload.into(), now_ms);
        if let Some(timestamp) = self.timestamp {
            let name = self.dialect.version_property();
            publish.user.retain(|(had, _)| had != name);
            let timestamp = timestamp.map(|value| (name.to_owned(), value));
            publish.user.extend(timestamp);
        }
        let token = self.fencing_token;
        let token = token.map(|value| (self.dialect.fencing_property().to_owned(), value));
        publish.user.extend(token);
        publish.user.extend(self.properties);
        match self.harness.publish(&self.id, publish) {
            Came::Answer(answer) => *answer,
            // The store refuses a request without an answer only if it has no response topic, and
            // this one has a topic.
            other => Answer {
                failure: Some(format!("there is no answer: {other:?}")),
                ..Answer::default()
            },
        }
    }
}

/// Encodes an array of bulk strings.
pub fn array<A: AsRef<[u8]>>(words: &[A]) -> Vec<u8> {
    let mut out = format!("*{}\r\n", words.len()).into_bytes();
    for word in words.iter().map(AsRef::as_ref) {
        out.extend_from_slice(format!("${}\r\n", word.len()).as_bytes());
        out.extend_from_slice(word);
        out.extend_from_slice(b"\r\n");
    }
    out
}
