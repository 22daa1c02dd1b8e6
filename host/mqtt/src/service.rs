//! The embedder's side of the seam: which topics it takes, and what it is told.

use std::{
    hash::{Hash, Hasher},
    sync::Arc,
    time::Instant,
};

use bytes::Bytes;

use crate::{Broker, Identity, Properties, QoS, ReasonCode};

/// The embedder. It takes PUBLISHes of the topics it claims, answers through [`Broker::batch`], and hears of the
/// end of every connection. All methods are called without any lock of the broker held.
pub trait Service: Send + Sync + 'static {
    /// Whose PUBLISH is this? Called for every PUBLISH, so it has to be cheap. The topic name is checked to be UTF-8.
    fn claim(&self, topic: &[u8]) -> Claim;

    /// Requests of one socket read, in the order sent. The service removes those that it takes. It
    /// may leave others, in order, if these have taken long, or if too much of what this connection
    /// asked for waits. The broker passes them again in the connection's next turn, or a moment
    /// later if the service took none. Until then it handles nothing behind them, and soon stops
    /// reading. Every request with a token has to be settled once, now or later
    /// ([`Batch::settle`](crate::Batch::settle)).
    fn requests(&self, broker: &Broker, from: &Origin, requests: &mut Vec<Request>);

    /// The connection has ended: after its last request and before the first one of a connection that took its
    /// session over. Exactly once for each connection that got a CONNACK with success.
    fn gone(&self, broker: &Broker, who: &Origin);

    /// These sessions are no more: expired, or begun afresh by their client. After [`gone`](Self::gone) of their
    /// connections; once for each session. What is known about them can be forgotten.
    fn ended(&self, broker: &Broker, sessions: &[u64]) {
        _ = (broker, sessions);
    }
}

/// What becomes of a PUBLISH.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Claim {
    /// An ordinary message: routed to its subscribers.
    Route,
    /// A request to the service: handed to [`Service::requests`], not routed.
    Take,
    /// Not accepted: answered with this code and Reason String; at QoS 0 dropped and counted.
    Refuse(ReasonCode, &'static str),
}

/// One connection of one client. Numbers of connections and sessions never repeat within a process, nor over restarts
/// where [`Options::run`](crate::Options::run) rises.
#[derive(Debug, Clone)]
pub struct Origin {
    /// The client identifier, proven by the connection.
    pub client: Arc<str>,
    /// The number of the connection.
    pub connection: u64,
    /// The number of the session: the same for as long as it is resumed, over restarts too, and another one once it begins
    /// afresh.
    pub session: u64,
    /// Who the access control found at the other end. The numbers say which connection it is, so this has no part in
    /// comparisons.
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

/// A PUBLISH that the service took. Its bytes are slices of the read buffer: copy what is kept.
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
    /// What to settle it with; none at QoS 0.
    pub token: Option<Token>,
}

/// Names the acknowledgement that a request waits for. It is good for one use; a second one does nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Token {
    pub(crate) session: u32,
    /// The number of the session: a later one may have the same place.
    pub(crate) number: u64,
    pub(crate) connection: u64,
    pub(crate) sequence: u64,
    pub(crate) packet_id: u16,
    pub(crate) exactly_once: bool,
}

/// A service that takes nothing: the broker routes everything.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoService;

impl Service for NoService {
    fn claim(&self, _: &[u8]) -> Claim {
        Claim::Route
    }
    fn requests(&self, _: &Broker, _: &Origin, requests: &mut Vec<Request>) {
        requests.clear();
    }
    fn gone(&self, _: &Broker, _: &Origin) {}
}
