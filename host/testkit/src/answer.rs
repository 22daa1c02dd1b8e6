//! The outcome of a request: the answer of the client, and the effects inside the store.

use std::time::Duration;

use serde::Serialize;
use statehouse_core::policy::Batch;
use statehouse_core::request::Dialect;
use statehouse_core::store::{Key, Read, Scope, Write};

/// The outcome of a PUBLISH on a request topic.
#[derive(Debug)]
pub enum Came {
    /// The request is answered.
    Answer(Box<Answer>),
    /// The acknowledgement refuses the request.
    Refused {
        /// The reason code.
        reason: u8,
        /// The Reason String.
        text: &'static str,
    },
    /// The store ends the connection.
    Disconnected {
        /// The reason code.
        reason: u8,
        /// The Reason String.
        text: &'static str,
    },
    /// The request is refused without an acknowledgement, because its QoS is 0.
    Dropped,
}

impl Came {
    /// Whether the policy failed at the request.
    pub fn is_failure(&self) -> bool {
        matches!(self, Self::Answer(answer) if answer.failure.is_some())
    }
}

/// An answer, and all effects of the request.
#[derive(Debug, Default)]
pub struct Answer {
    /// The payload.
    pub payload: Vec<u8>,
    /// The user properties in the order of the packet.
    pub user: Vec<(String, String)>,
    /// The version in the answer, in the form of the protocol.
    pub version: Option<String>,
    /// Whether a redelivery of the request must get the same answer. Otherwise it is handled as a
    /// new request.
    pub same_for_duplicate: bool,
    /// The command, as the policy names it.
    pub command: Option<String>,
    /// The writes of the request, in order.
    pub writes: Vec<Write>,
    /// The reads that the answer depends on.
    pub reads: Reads,
    /// Keys and prefixes that the client watches since this request.
    pub watched: Vec<(Scope, Key)>,
    /// Keys and prefixes that the client no longer watches since this request.
    pub unwatched: Vec<(Scope, Key)>,
    /// The notifications of the request. Those about keys that had
    /// expired before it precede the others.
    pub notifications: Vec<Notification>,
    /// Removals of keys that had expired before the request.
    pub swept: Vec<Write>,
    /// The fuel of the request including its notifications. It is the same on every machine.
    pub fuel: u64,
    /// The time of the request on this machine, including all work of the store.
    pub time: Duration,
    /// Why the policy failed, if it did. If it failed at the request, nothing has changed, and the
    /// payload is `-ERR internal error`. If it failed at a notification about an earlier change,
    /// the built-in policy sent that.
    pub failure: Option<String>,
    /// The lines that the policy logged, in order.
    pub log: Vec<Logged>,
    /// The result of a fresh instance for the same request on the same state, if it differs. The
    /// policy then has hidden state between requests.
    pub hidden_state: Option<String>,
}

/// The effects of time that passes: keys expire, and the policy notifies their watchers.
#[derive(Debug, Default)]
pub struct Passed {
    /// The notifications to watchers.
    pub notifications: Vec<Notification>,
    /// Why the policy failed, for each expiry at which it did.
    pub failures: Vec<String>,
    /// How a fresh instance differed, for each expiry at which it did.
    pub hidden_state: Vec<String>,
    /// The lines that the policy logged, in order.
    pub log: Vec<Logged>,
}

/// A line that the policy logged.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Logged {
    /// `debug`, `info`, `warn` or `error`.
    pub level: &'static str,
    /// The text, not escaped.
    pub text: String,
}

impl Logged {
    /// The lines of a call. If the first ones were lost, the first line says so.
    pub(super) fn of(batch: Batch) -> Vec<Self> {
        let lost = (batch.lost > 0).then(|| Self {
            level: "warn",
            text: match batch.lost {
                1 => "1 line before these is not shown".to_owned(),
                lost => format!("{lost} lines before these are not shown"),
            },
        });
        let lines = batch.lines.into_iter().map(|line| Self {
            level: line.level_name(),
            text: line.text,
        });
        lost.into_iter().chain(lines).collect()
    }
}

/// The reads that an answer depends on.
#[derive(Debug, Default, PartialEq)]
pub enum Reads {
    /// These keys, visible or hidden, with their entries before the request.
    Keys(Vec<Read>),
    /// A page of keys, a quota, or a read set that is too large to capture.
    #[default]
    Anything,
}

/// The notification of one watcher about one change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notification {
    /// The client id of the watcher.
    pub client: String,
    /// The topic of the notification, which is specific to the watcher.
    pub topic: String,
    /// The payload.
    pub payload: Vec<u8>,
    /// The user properties.
    pub user: Vec<(String, String)>,
    /// The dialect of the notification.
    pub dialect: Dialect,
}
