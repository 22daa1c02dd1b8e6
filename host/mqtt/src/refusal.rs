//! Counts what the broker refuses and reports it.
//!
//! Every refusal is counted by what was refused and by its reason code. Refusals that the access
//! control did not decide are also reported to it. Hostile clients can provoke any number of
//! refusals, so nothing that a client chose may be stored here.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError},
};

use crate::{Access, ReasonCode, admission::OF_CREDENTIALS};

/// What a client was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Refused {
    /// A connection; reported by CONNACK, or not at all if the client does not use MQTT.
    Connect,
    /// Staying connected; reported by DISCONNECT, in MQTT 3.1.1 not at all.
    Connection,
    /// A PUBLISH; reported by PUBACK or PUBREC, or not at all at QoS 0 and in MQTT 3.1.1.
    Publish,
    /// A subscription to one filter; reported by SUBACK.
    Subscribe,
}

impl Refused {
    /// The name in metrics and logs.
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

/// A refusal by a limit, by the standard, or by a claim of the service.
#[derive(Debug, Clone, Copy)]
pub struct Refusal<'a> {
    /// What was refused.
    pub what: Refused,
    /// The reason code of MQTT 5, which is sent to the client if its version has one.
    pub reason: ReasonCode,
    /// The Reason String, if there is one.
    pub text: Option<&'a str>,
    /// The client's address; only known if it is not connected.
    pub peer: Option<SocketAddr>,
    /// Whether the access control has admitted the client.
    pub is_admitted: bool,
    /// The client identifier; empty if it is unknown.
    pub client: &'a str,
    /// The user, if it is known.
    pub user: Option<&'a str>,
}

impl<'a> Refusal<'a> {
    /// A CONNECT that was refused before the access control has decided about it.
    pub(crate) fn of_connect(reason: ReasonCode, text: &'a str, peer: SocketAddr) -> Self {
        Self {
            what: Refused::Connect,
            reason,
            text: Some(text),
            peer: Some(peer),
            is_admitted: false,
            client: "",
            user: None,
        }
    }

    /// Whether the broker refused the credentials of a client: they have expired, they are of
    /// another identity than before, or the access control did not decide in time.
    #[must_use]
    pub fn is_of_credentials(&self) -> bool {
        self.text.is_some_and(|it| OF_CREDENTIALS.contains(&it))
    }
}

/// How often something was refused for a reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RefusalCount {
    /// What was refused.
    pub what: Refused,
    /// The reason code of MQTT 5.
    pub reason: ReasonCode,
    /// The number of refusals since the start.
    pub count: u64,
}

pub(crate) struct Refusals {
    access: Arc<dyn Access>,
    /// Keys are few: a reason code is one byte.
    counts: Mutex<BTreeMap<(Refused, ReasonCode), u64>>,
}

impl Refusals {
    pub(crate) fn new(access: Arc<dyn Access>) -> Self {
        Self {
            access,
            counts: Mutex::default(),
        }
    }

    /// Counts a refusal of the access control or the service, which knows more about it and logs
    /// it.
    pub(crate) fn count(&self, what: Refused, reason: ReasonCode) {
        // Code under this lock cannot panic.
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        *counts.entry((what, reason)).or_default() += 1;
    }

    /// Counts a refusal of the broker and reports it to the access control.
    pub(crate) fn report(&self, refusal: &Refusal<'_>) {
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
