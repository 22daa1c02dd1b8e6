//! The result of a transcript.

use std::time::Duration;

use serde::Serialize;

use crate::Logged;

/// The result of a transcript.
#[derive(Debug, Default)]
pub struct Report {
    /// The number of requests.
    pub requests: u64,
    /// The lines that differ from the received messages.
    pub different: Vec<Difference>,
    /// The requests and expiries that a fresh instance handles differently.
    pub hidden: Vec<Hidden>,
    /// The requests and expiries at which the policy failed. No line of a transcript can expect a
    /// failure.
    pub failed: Vec<Failed>,
    /// The lines that the policy logged, as far as they fit.
    pub logged: Vec<LoggedAt>,
    /// The corrected text. The lines about failed requests are not changed.
    pub corrected: String,
    /// The number of lines of the corrected text that are new or changed.
    pub written: u64,
}

impl Report {
    /// Whether there are no differences, no failures and no hidden state.
    pub fn is_well(&self) -> bool {
        self.different.is_empty() && self.failed.is_empty() && self.hidden.is_empty()
    }
}

/// A line that differs from the received message.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Difference {
    /// The number of the line, from 1.
    pub line: usize,
    /// The text of the line.
    pub says: String,
    /// The correct line, or why the line cannot hold.
    pub came: String,
}

/// A request, or the expiry of keys, that a fresh instance handles differently.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Hidden {
    /// The number of the line, from 1.
    pub line: usize,
    /// The text of the line.
    pub request: String,
    /// The difference.
    pub what: String,
}

/// A request, or the expiry of keys, at which the policy failed.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Failed {
    /// The number of the line, from 1.
    pub line: usize,
    /// The text of the line.
    pub request: String,
    /// The cause.
    pub why: String,
}

/// A line that the policy logged.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct LoggedAt {
    /// The number of the line of the request, from 1.
    pub line: usize,
    /// What the policy logged.
    #[serde(flatten)]
    pub logged: Logged,
}

/// The cost of one request of a transcript.
#[derive(Debug, PartialEq, Eq)]
pub struct Cost {
    /// The first word of the request, in upper case.
    pub verb: String,
    /// The fuel of the request.
    pub fuel: u64,
    /// The time of the request, including all work of the store.
    pub time: Duration,
    /// Why the policy failed, if it did.
    pub failure: Option<String>,
}
