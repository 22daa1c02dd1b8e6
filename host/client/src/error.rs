//! The errors of a request.

/// The text of [`Error::Rejected`] if the broker delivered the request to no store.
pub(crate) const NO_STORE: &str = "no state store is subscribed to requests";

/// Why a request has no result.
///
/// A request that failed with [`Rejected`](Self::Rejected),
/// [`QuotaExceeded`](Self::QuotaExceeded) or [`Invalid`](Self::Invalid) did not reach the store. If
/// the connection was lost meanwhile, an earlier transmission may have taken effect all the same.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The store answered `-ERR` with this text (the protocol, section 4).
    #[error("the store refused: {0}")]
    Refused(String),
    /// The broker acknowledged the request with a reason code of 0x80 or above (MQTT 5 section
    /// 3.4.2.1), delivered it to no store, or did not grant a subscription.
    #[error("the broker rejected the request: {0}")]
    Rejected(String),
    /// As [`Rejected`](Self::Rejected), with the reason code 0x97: a limit of the broker, such as
    /// that of the requests per second, or its disk is full. A later request may succeed.
    #[error("the broker rejected the request: {0}")]
    QuotaExceeded(String),
    /// The broker refused the client: its password, its rights or its client id. The text gives the
    /// reason. If the request was already sent, it may have taken effect.
    #[error("{0}")]
    Denied(String),
    /// There was no connection in time. The text gives the reason. If the request was already sent,
    /// it may have taken effect.
    #[error("{0}")]
    Transport(String),
    /// The client has ended and does not connect again: it was closed, another client took over its
    /// session, or its tokio runtime has ended. The text gives the reason. If the request was
    /// already sent, it may have taken effect.
    #[error("{0}")]
    Closed(String),
    /// There was no response within the timeout, although a connection existed. It is unknown
    /// whether the request took effect.
    #[error("no answer from a state store within {} ms", .0.as_millis())]
    Timeout(std::time::Duration),
    /// The response does not follow the protocol. The request may have taken effect.
    #[error("the response does not follow the state store protocol: {0}")]
    Protocol(String),
    /// The arguments cannot be sent as a request.
    #[error("{0}")]
    Invalid(String),
}

impl Error {
    /// Whether the broker delivered the request to no store. A store that restarts behind a foreign
    /// broker subscribes again later.
    #[must_use]
    pub fn is_without_store(&self) -> bool {
        matches!(self, Self::Rejected(why) if why == NO_STORE)
    }
}
