//! What can go wrong with a request. Enters: what the broker, the store or the caller did. Leaves:
//! one enum whose texts are for people. It never carries a panic.

/// Why a request has no result.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The store answered `-ERR`; the text is the store's (the protocol, section 4).
    #[error("the store refused: {0}")]
    Refused(String),
    /// The broker acknowledged the request with a reason code of 0x80 or above (MQTT 5 section
    /// 3.4.2.1), or did not grant a subscription: the request did not reach the store.
    #[error("the broker rejected the request: {0}")]
    Rejected(String),
    /// No connection, or none in time; the text says why.
    #[error("{0}")]
    Transport(String),
    /// Connected, but no answer within the timeout. Whether the request took effect is not known.
    #[error("no answer from a state store within {} ms", .0.as_millis())]
    Timeout(std::time::Duration),
    /// The answer is not one that a state store gives.
    #[error("the answer is not one of a state store: {0}")]
    Protocol(String),
    /// The arguments cannot be sent as a request.
    #[error("{0}")]
    Invalid(String),
}
