//! The interface of the embedder: which topics it claims, and which events it receives.

use std::{
    hash::{Hash, Hasher},
    sync::Arc,
    time::Instant,
};

use bytes::Bytes;
use statehouse_protocol::{ConnectionId, SessionId};

use crate::{Broker, Identity, Properties, QoS, ReasonCode};

/// The embedder of a broker.
///
/// It claims topics, receives their PUBLISHes as requests, answers through [`Broker::batch`], and
/// is notified when connections and sessions end. The broker holds no lock when it calls these
/// methods.
pub trait Service: Send + Sync + 'static {
    /// Decides about a PUBLISH by its topic name, which is valid UTF-8. Called for every PUBLISH,
    /// so it must be fast.
    fn claim(&self, topic: &[u8]) -> Claim;

    /// Handles requests of one socket read, in the order in which the client sent them.
    ///
    /// The service removes the requests that it takes from the vector. It may leave the others, in
    /// order, if these took long or if too many requests of this connection are pending. The broker
    /// passes them again in the connection's next turn, or a moment later if the service took none.
    /// Until then it handles no packet behind them, and soon stops reading.
    ///
    /// Every request with a token must be acknowledged exactly once, now or later
    /// ([`Batch::acknowledge`](crate::Batch::acknowledge)).
    fn requests(&self, broker: &Broker, from: &Origin, requests: &mut Vec<Request>);

    /// A connection has ended. Called after its last request, and before the first request of a
    /// connection that took its session over. Called exactly once for each connection that got a
    /// CONNACK with success.
    fn disconnected(&self, broker: &Broker, origin: &Origin);

    /// These sessions have ended: they expired, or their client began a new session. Called once
    /// for each session, after [`disconnected`](Self::disconnected) of its connections. The service
    /// can drop its state of them.
    fn sessions_ended(&self, broker: &Broker, sessions: &[SessionId]) {
        _ = (broker, sessions);
    }
}

/// The decision about a PUBLISH.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Claim {
    /// An ordinary message: routed to its subscribers.
    Route,
    /// A request to the service: handed to [`Service::requests`], not routed. Refused, if it comes
    /// from a client of MQTT 3.1.1, because it has no properties that say how to answer it.
    Take,
    /// Refused with this code and Reason String; at QoS 0 dropped and counted.
    Refuse(ReasonCode, &'static str),
}

/// One connection of one client. Numbers of connections and sessions never repeat within a process,
/// nor over restarts if [`Options::run`](crate::Options::run) increases.
#[derive(Debug, Clone)]
pub struct Origin {
    /// The client identifier, proven by the connection.
    pub client: Arc<str>,
    /// The number of the connection.
    pub connection: ConnectionId,
    /// The number of the session. A resumed session keeps it, even over restarts; a new session
    /// gets another one.
    pub session: SessionId,
    /// The client's identity, as the access control determined it. Comparisons ignore it, since the
    /// numbers identify the connection.
    pub identity: Arc<Identity>,
}

impl PartialEq for Origin {
    fn eq(&self, other: &Self) -> bool {
        (self.connection, self.session, &self.client)
            == (other.connection, other.session, &other.client)
    }
}

impl Eq for Origin {}

impl Hash for Origin {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.connection, self.session, &self.client).hash(state);
    }
}

/// A PUBLISH that the service took. Its bytes are slices of the read buffer: copy those that are
/// stored.
#[derive(Debug, Clone)]
pub struct Request {
    /// The topic name, checked to be UTF-8.
    pub topic: Bytes,
    /// The payload.
    pub payload: Bytes,
    /// The properties, checked.
    pub properties: Properties,
    /// The quality of service it was sent with.
    pub qos: QoS,
    /// The DUP flag as sent.
    pub dup: bool,
    /// The packet identifier; 0 at QoS 0.
    pub packet_id: u16,
    /// When its Message Expiry Interval ends.
    pub expires: Option<Instant>,
    /// Identifies the acknowledgement ([`Batch::acknowledge`](crate::Batch::acknowledge)); none at
    /// QoS 0.
    pub token: Option<Token>,
}

/// Identifies the pending acknowledgement of a request. It can be used once; a second use has no
/// effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Token {
    pub(crate) session: u32,
    /// Distinguishes this session from a later one with the same key.
    pub(crate) number: SessionId,
    pub(crate) connection: ConnectionId,
    pub(crate) sequence: u64,
    pub(crate) packet_id: u16,
    pub(crate) exactly_once: bool,
}

/// A service that claims nothing: the broker routes everything.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoService;

impl Service for NoService {
    fn claim(&self, _: &[u8]) -> Claim {
        Claim::Route
    }
    fn requests(&self, _: &Broker, _: &Origin, requests: &mut Vec<Request>) {
        requests.clear();
    }
    fn disconnected(&self, _: &Broker, _: &Origin) {}
}
