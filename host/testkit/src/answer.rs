//! What becomes of a request, as its client sees it and as only the store does.

use std::time::Duration;

use statehouse_core::policy::Repeat;
use statehouse_core::request::Dialect;
use statehouse_core::store::{Key, Read, Write};

/// What becomes of a PUBLISH on a request topic.
#[derive(Debug)]
pub enum Came {
    /// It is answered.
    Answer(Box<Answer>),
    /// It is refused by its acknowledgement.
    Refused {
        /// The reason code.
        reason: u8,
        /// The Reason String.
        text: &'static str,
    },
    /// Its connection is ended.
    Disconnected {
        /// The reason code.
        reason: u8,
        /// The Reason String.
        text: &'static str,
    },
    /// It is dropped: there is nobody to tell.
    Dropped,
}

/// An answer, and everything behind it.
#[derive(Debug, Default)]
pub struct Answer {
    /// The payload.
    pub payload: Vec<u8>,
    /// The user properties in the order of the wire.
    pub user: Vec<(String, String)>,
    /// The version it is about, as it goes over the wire.
    pub version: Option<String>,
    /// Whether a redelivery of the request is owed this answer. Where it is not, it runs anew.
    pub same_for_duplicate: bool,
    /// Which of the policy's commands it was, by the policy's own word.
    pub command: Option<String>,
    /// What the request wrote, in order.
    pub writes: Vec<Write>,
    /// What the answer rests on.
    pub reads: Reads,
    /// Keys that the client watches since this request.
    pub watched: Vec<Key>,
    /// Keys that it watches no more.
    pub unwatched: Vec<Key>,
    /// What watchers are told, those of keys that had expired before the request first.
    pub notifications: Vec<Notification>,
    /// Removals of keys whose time was over before the request.
    pub swept: Vec<Write>,
    /// The fuel that it burnt, telling the watchers included: the same on every machine.
    pub fuel: u64,
    /// The time that it took here, all of the store's work included.
    pub time: Duration,
    /// Why the policy failed, if it did: nothing has changed then, and the payload says `-ERR internal error`.
    pub failure: Option<String>,
    /// What a fresh instance made of the same request on the same state, where that is something else: the policy
    /// keeps something between requests.
    pub hidden_state: Option<String>,
}

/// What an answer rests on.
#[derive(Debug, Default, PartialEq)]
pub enum Reads {
    /// These keys, visible or hidden, and what they held before the request.
    Keys(Vec<Read>),
    /// A page of keys, a quota, or more than is worth keeping.
    #[default]
    Anything,
}

/// What one watcher is told of one change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notification {
    /// The client id of the watcher.
    pub client: String,
    /// The topic, which is the watcher's own.
    pub topic: String,
    /// The payload.
    pub payload: Vec<u8>,
    /// The user properties.
    pub user: Vec<(String, String)>,
    /// How it is told.
    pub dialect: Dialect,
}

pub(super) fn is_same(repeat: Repeat) -> bool {
    matches!(repeat, Repeat::Same)
}
