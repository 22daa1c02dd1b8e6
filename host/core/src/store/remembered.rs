//! A request that was answered, with everything needed to answer its redelivery identically.

use bytes::Bytes;

use super::read_set::CapturedReads;
use crate::clock::Stamp;
use crate::limits;
use crate::request::{Delivery, Dialect};

/// Distinguishes the requests of one session (protocol, section 9).
pub type Identity = [u8; 16];

/// A request that was answered and may be redelivered.
#[derive(Clone, Debug, PartialEq)]
pub struct Remembered {
    /// Its number among all remembered requests.
    pub number: u64,
    /// How it was delivered.
    pub delivery: Delivery,
    /// Its number among the remembered requests of its session.
    pub turn: u64,
    /// Its identity.
    pub identity: Identity,
    /// The time until which it is retained at least, in milliseconds.
    pub until_ms: u64,
    /// The time, clock, dialect and policy that it was handled with.
    pub context: Context,
    /// The captured reads, or `None` if only the answer is stored.
    pub captured: Option<CapturedReads>,
    /// The answer.
    pub outcome: Outcome,
}

/// The inputs of the policy apart from the request and the state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Context {
    /// The time in milliseconds.
    pub now_ms: u64,
    /// The clock before the request.
    pub clock: Stamp,
    /// The dialect of the protocol.
    pub dialect: Dialect,
    /// The digest of the policy.
    pub policy: blake3::Hash,
}

/// The answer to a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The payload.
    pub payload: StoredPayload,
    /// The version in the answer.
    pub version: Option<Stamp>,
    /// The number of the policy's command.
    pub command: Option<u16>,
    /// Whether the request put a visible key. Version 0.1.0 counted hidden keys, too.
    pub put: bool,
}

/// A stored payload, or its digest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StoredPayload {
    /// The bytes.
    Whole(Bytes),
    /// The BLAKE3 digest of the bytes.
    Digest(blake3::Hash),
}

impl StoredPayload {
    /// Stores the payload if it is small, or if `whole` says that re-execution might not reproduce
    /// it.
    pub(super) fn new(payload: &Bytes, whole: bool) -> Self {
        if whole || payload.len() <= limits::OUTCOME_INLINE_BYTES_MAX {
            Self::Whole(payload.clone())
        } else {
            Self::Digest(blake3::hash(payload))
        }
    }

    /// The digest of the payload.
    pub fn digest(&self) -> blake3::Hash {
        match self {
            Self::Whole(bytes) => blake3::hash(bytes),
            Self::Digest(digest) => *digest,
        }
    }

    /// Whether `payload` is the stored one.
    pub fn is(&self, payload: &[u8]) -> bool {
        match self {
            Self::Whole(bytes) => bytes == payload,
            Self::Digest(digest) => *digest == blake3::hash(payload),
        }
    }
}

impl Remembered {
    /// The memory cost in bytes.
    pub fn cost_bytes(&self) -> u64 {
        let payload = match &self.outcome.payload {
            StoredPayload::Whole(bytes) => bytes.len() as u64,
            StoredPayload::Digest(_) => 0,
        };
        payload
            + self.captured.as_ref().map_or(0, CapturedReads::cost_bytes)
            + limits::REMEMBERED_OVERHEAD_BYTES
    }
}
