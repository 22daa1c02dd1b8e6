//! A request that was answered and may come again, with all that it takes to answer it as before.

use bytes::Bytes;

use super::capture::Evidence;
use crate::clock::Stamp;
use crate::limits;
use crate::request::{Delivery, Dialect};

/// What tells requests apart (the protocol, section 9); of one session.
pub type Identity = [u8; 16];

/// A request that was answered.
#[derive(Clone, Debug, PartialEq)]
pub struct Remembered {
    /// Its number among all that are remembered.
    pub number: u64,
    /// How it came.
    pub delivery: Delivery,
    /// Its number among the remembered requests of its session.
    pub turn: u64,
    /// What tells it apart.
    pub identity: Identity,
    /// Until when it is remembered at least, in the store's milliseconds.
    pub until_ms: u64,
    /// What it was handled with.
    pub context: Context,
    /// What it saw; none where only its answer is kept.
    pub evidence: Option<Evidence>,
    /// What it was answered.
    pub outcome: Outcome,
}

/// What a handler was given besides the request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Context {
    /// The store's time.
    pub now_ms: u64,
    /// The store's clock before it.
    pub clock: Stamp,
    /// The form of the protocol.
    pub dialect: Dialect,
    /// The digest of the policy.
    pub policy: blake3::Hash,
}

/// What a request was answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The payload.
    pub payload: Kept,
    /// The version that it is about.
    pub version: Option<Stamp>,
    /// Which of the policy's commands it was.
    pub command: Option<u16>,
    /// Whether it put anything.
    pub put: bool,
}

/// A payload, or what proves it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kept {
    /// The bytes.
    Whole(Bytes),
    /// Their BLAKE3.
    Digest(blake3::Hash),
}

impl Kept {
    /// Keeps small ones, and any where nothing else might give it again.
    pub(super) fn new(payload: &Bytes, whole: bool) -> Self {
        if whole || payload.len() <= limits::OUTCOME_INLINE_BYTES_MAX {
            Self::Whole(payload.clone())
        } else {
            Self::Digest(blake3::hash(payload))
        }
    }

    /// What proves it.
    pub fn digest(&self) -> blake3::Hash {
        match self {
            Self::Whole(bytes) => blake3::hash(bytes),
            Self::Digest(digest) => *digest,
        }
    }

    /// Whether this is that payload.
    pub fn is(&self, payload: &[u8]) -> bool {
        match self {
            Self::Whole(bytes) => bytes == payload,
            Self::Digest(digest) => *digest == blake3::hash(payload),
        }
    }
}

impl Remembered {
    /// What keeping it costs, in bytes.
    pub fn cost_bytes(&self) -> u64 {
        let payload = match &self.outcome.payload {
            Kept::Whole(bytes) => bytes.len() as u64,
            Kept::Digest(_) => 0,
        };
        payload
            + self.evidence.as_ref().map_or(0, Evidence::cost_bytes)
            + limits::REMEMBERED_OVERHEAD_BYTES
    }
}
