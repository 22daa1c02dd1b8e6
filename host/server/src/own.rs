//! Requests of this process itself, which operators send through the admin API.
//!
//! Such a request takes the way of a client's: policy, limits, record, response gate. So history,
//! replay, watches and quotas treat it alike. Its response is taken out of the outputs on their way
//! to the transport, and no subscriber gets it.
//!
//! One request at a time is without a response, also if its operator has disconnected. So operators
//! cannot pile up requests in front of a slow disk.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use statehouse_mqtt::{Message, Properties, PropertiesBuilder, ReasonCode};
use statehouse_protocol::rights::{ClientRights, Right};
use statehouse_protocol::{ConnectionId, OPERATOR_CLIENT, SessionId};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

use super::Server;
use statehouse_config::limits;
use statehouse_core::clock::Stamp;
use statehouse_core::request::Incoming;
use statehouse_core::store::Peer;
use statehouse_transport::{Inbound, Intake, Outbound, Ticket, Transport};

/// The topic of responses. Nothing is published to it.
const RESPONSE_TOPIC: &str = "clients/$operator/responses";

/// A request of an operator.
pub struct OwnRequest<'a> {
    /// The command.
    pub payload: Bytes,
    /// The fencing token, unparsed.
    pub fence: Option<&'a str>,
    /// The user; none for an operator without a name.
    pub user: Option<&'a str>,
    /// The session, which no other request has.
    pub session: SessionId,
    /// Its only connection.
    pub connection: ConnectionId,
    /// Bytes that no other request has.
    pub correlation: &'a [u8],
}

/// The response to a request of an operator.
#[derive(Debug, PartialEq, Eq)]
pub struct OwnResponse {
    /// What the policy answered.
    pub payload: Bytes,
    /// The version that the policy gave.
    pub version: Option<String>,
}

/// Why a request of an operator has no response.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OwnError {
    /// Another one waits for the disk.
    #[error("another change by an operator waits for the disk: try again later")]
    Busy,
    /// A part of the request is invalid.
    #[error("{0}")]
    Invalid(String),
    /// The store is stopping.
    #[error("the store is stopping, so that nothing was changed: try again when it runs")]
    Stopping,
    /// The request was refused before a policy saw it.
    #[error("the store refused the request: {0}")]
    Refused(String),
    /// The response did not leave in time.
    #[error(
        "the disk is too slow, or the store is stopping: read the key again, since the change may have been made"
    )]
    Unknown,
}

/// The turn of the one request.
pub struct Turn {
    _permit: OwnedSemaphorePermit,
}

type Outcome = Result<Message, (ReasonCode, Option<&'static str>)>;

/// The requests that wait for a response.
pub(super) struct OwnRequests {
    turns: Arc<Semaphore>,
    waiting: Mutex<Waiting>,
    /// The number of waiting requests, since deliveries look at it often.
    count: AtomicUsize,
}

#[derive(Default)]
struct Waiting {
    next: u64,
    requests: HashMap<u64, (oneshot::Sender<Outcome>, Turn)>,
}

impl Default for OwnRequests {
    fn default() -> Self {
        Self {
            turns: Arc::new(Semaphore::new(1)),
            waiting: Mutex::default(),
            count: AtomicUsize::new(0),
        }
    }
}

impl OwnRequests {
    fn begin(&self, turn: Turn) -> (u64, oneshot::Receiver<Outcome>) {
        let (sender, receiver) = oneshot::channel();
        let mut waiting = self.lock();
        let number = waiting.next;
        waiting.next += 1;
        waiting.requests.insert(number, (sender, turn));
        self.count.store(waiting.requests.len(), Ordering::Release);
        (number, receiver)
    }

    fn end(&self, number: u64, outcome: Outcome) {
        let mut waiting = self.lock();
        let ended = waiting.requests.remove(&number);
        self.count.store(waiting.requests.len(), Ordering::Release);
        if let Some((sender, _turn)) = ended {
            // The operator may have disconnected.
            _ = sender.send(outcome);
        }
    }

    /// Takes the responses to own requests out of outputs. Notifications that these requests caused
    /// stay.
    fn take(&self, out: &mut Vec<Outbound>) {
        // An own request is counted before its output is queued, so this sees it.
        if self.count.load(Ordering::Acquire) == 0 {
            return;
        }
        let is_own = |it: &mut Outbound| {
            matches!(
                it,
                Outbound::Response(_, Some(Ticket::Own(_)))
                    | Outbound::AcknowledgedResponse(_, Ticket::Own(_))
                    | Outbound::Acknowledge(Ticket::Own(_), ..)
            )
        };
        for own in out.extract_if(.., is_own) {
            match own {
                Outbound::Response(message, Some(Ticket::Own(number)))
                | Outbound::AcknowledgedResponse(message, Ticket::Own(number)) => {
                    self.end(number, Ok(message));
                }
                // A request without a response was refused. After a response this does nothing.
                Outbound::Acknowledge(Ticket::Own(number), reason, text) => {
                    self.end(number, Err((reason, text)));
                }
                _ => {}
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        // The code under this lock does not panic.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Delivers through a transport, without the responses to own requests.
pub(super) struct WithoutOwn<'a> {
    pub(super) transport: &'a dyn Transport,
    pub(super) own: &'a OwnRequests,
}

impl Transport for WithoutOwn<'_> {
    fn deliver(&self, ready: &mut dyn FnMut(&mut Vec<Outbound>)) {
        self.transport.deliver(&mut |out| {
            loop {
                ready(out);
                if out.is_empty() {
                    return;
                }
                self.own.take(out);
                // The transport takes an empty list for the end.
                if !out.is_empty() {
                    return;
                }
            }
        });
    }
}

/// The rights of an operator whose role has allowed the request.
struct OperatorRights {
    user: Option<Box<str>>,
}

impl ClientRights for OperatorRights {
    fn user(&self) -> Option<&str> {
        self.user.as_deref()
    }

    fn may_be_answered_at(&self, _: &[u8]) -> bool {
        true
    }

    fn allow(&self, _: &[u8], _: Right) -> bool {
        true
    }

    fn patterns(&self, _: Right) -> usize {
        0
    }

    fn seal(&self, key: &[u8]) -> Vec<u8> {
        key.to_vec()
    }

    fn unseal(&self, sealed: &[u8]) -> Option<Vec<u8>> {
        Some(sealed.to_vec())
    }
}

impl OwnRequest<'_> {
    fn properties(&self, now_ms: u64) -> Result<Properties, String> {
        let version = Stamp {
            wall: now_ms,
            counter: 0,
        };
        let mut properties = PropertiesBuilder::new()
            .response_topic(RESPONSE_TOPIC)
            .correlation_data(self.correlation)
            .user("__protVer", "1.0")
            .user_shown("__ts", version.display(OPERATOR_CLIENT))
            // The answer says that a change was made, so it must not be lost.
            .user("aio-persistence", "true");
        if let Some(fence) = self.fence {
            properties = properties.user("__ft", fence);
        }
        let properties = properties.finish().map_err(|error| error.to_string())?;
        Properties::parse(properties).map_err(|error| format!("{error:?}"))
    }
}

impl Server {
    /// Waits for the turn of an own request. Fails with [`OwnError::Busy`] if the request before
    /// has no response in time.
    pub async fn own_turn(&self) -> Result<Turn, OwnError> {
        let waiting = self.own.turns.clone().acquire_owned();
        match tokio::time::timeout(limits::ADMIN_EDIT_WAIT, waiting).await {
            Ok(Ok(permit)) => Ok(Turn { _permit: permit }),
            _ => Err(OwnError::Busy),
        }
    }

    /// Handles a request of an operator, and waits until its response may leave.
    pub async fn answer_own(
        &self,
        turn: Turn,
        request: &OwnRequest<'_>,
    ) -> Result<OwnResponse, OwnError> {
        if self.stopped.load(Ordering::Relaxed) {
            return Err(OwnError::Stopping);
        }
        let response = self.take_own(turn, request)?;
        let outcome = tokio::time::timeout(limits::ADMIN_EDIT_WAIT, response).await;
        match outcome {
            Ok(Ok(Ok(message))) => Ok(OwnResponse::of(message)),
            Ok(Ok(Err((reason, text)))) => {
                let text = text.map_or_else(|| reason.to_string(), str::to_owned);
                Err(OwnError::Refused(text))
            }
            Ok(Err(_)) | Err(_) => Err(OwnError::Unknown),
        }
    }

    /// Handles a request, and ends its session, which never sends it again.
    fn take_own(
        &self,
        turn: Turn,
        request: &OwnRequest<'_>,
    ) -> Result<oneshot::Receiver<Outcome>, OwnError> {
        let properties = request
            .properties(self.now_ms())
            .map_err(OwnError::Invalid)?;
        let peer = Peer {
            client: OPERATOR_CLIENT.into(),
            connection: request.connection,
            session: request.session,
        };
        let rights: Arc<dyn ClientRights> = Arc::new(OperatorRights {
            user: request.user.map(Into::into),
        });
        let incoming = Incoming {
            grants: Some(rights),
            ..Incoming::new(&peer, &request.payload, &properties)
        };
        let (number, response) = self.own.begin(turn);
        let session = [request.session];
        let batch = [
            Inbound::Publish(incoming, Some(Ticket::Own(number))),
            Inbound::SessionsEnded(&session),
        ];
        self.take(&mut batch.into_iter());
        Ok(response)
    }
}

impl OwnResponse {
    fn of(message: Message) -> Self {
        let properties = Properties::parse(message.properties).unwrap_or_default();
        let mut versions = properties.user();
        let version = versions.find(|(name, _)| ["__ts", "Timestamp"].contains(name));
        Self {
            payload: message.payload,
            version: version.map(|(_, version)| version.to_owned()),
        }
    }
}
