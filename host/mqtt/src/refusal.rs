//! What the broker refuses.
//!
//! In come refusals with the reason code that the client is told, as many as hostile clients care to provoke. Out go a count
//! of all of them by what was refused and why, and word to the access control of those that it has not decided itself. It
//! holds nothing that a client chose.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError},
};

use crate::{Access, ReasonCode};

/// What a client was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Refused {
    /// To be connected: CONNACK says so, or nothing where the peer does not speak MQTT 5.
    Connect,
    /// To stay connected: DISCONNECT says so.
    Connection,
    /// To publish: PUBACK or PUBREC says so, or nothing at QoS 0.
    Publish,
    /// To subscribe to one filter: SUBACK says so.
    Subscribe,
}

impl Refused {
    /// In one word.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Connect => "connect",
            Self::Connection => "connection",
            Self::Publish => "publish",
            Self::Subscribe => "subscribe",
        }
    }
}

/// A refusal of the broker's own: by a bound, by the standard, or by what the service claims.
#[derive(Debug, Clone, Copy)]
pub struct Refusal<'a> {
    /// What was refused.
    pub what: Refused,
    /// The code that the client is told, where it is told any.
    pub reason: ReasonCode,
    /// The Reason String, where there is one.
    pub text: Option<&'a str>,
    /// Where the client is; known of those that are not connected.
    pub peer: Option<SocketAddr>,
    /// The client identifier; empty where none was said.
    pub client: &'a str,
    /// The user, where one was said or found.
    pub user: Option<&'a str>,
}

/// How often something was refused for a reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RefusalCount {
    /// What was refused.
    pub what: Refused,
    /// The code that the client was told.
    pub reason: ReasonCode,
    /// How often, since the start.
    pub count: u64,
}

/// Counts and tells.
pub(crate) struct Refusals {
    access: Arc<dyn Access>,
    /// Reason codes are bytes, so there are few.
    counts: Mutex<BTreeMap<(Refused, ReasonCode), u64>>,
}

impl Refusals {
    pub(crate) fn new(access: Arc<dyn Access>) -> Self {
        Self {
            access,
            counts: Mutex::default(),
        }
    }

    /// One that the access control has decided, or the service: it knows more of it.
    pub(crate) fn count(&self, what: Refused, reason: ReasonCode) {
        // Counting does not panic.
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        *counts.entry((what, reason)).or_default() += 1;
    }

    /// One of the broker's own.
    pub(crate) fn tell(&self, refusal: &Refusal<'_>) {
        self.count(refusal.what, refusal.reason);
        self.access.refused(refusal);
    }

    pub(crate) fn counts(&self) -> Vec<RefusalCount> {
        let counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let counts = counts.iter();
        counts
            .map(|(&(what, reason), &count)| RefusalCount {
                what,
                reason,
                count,
            })
            .collect()
    }
}
