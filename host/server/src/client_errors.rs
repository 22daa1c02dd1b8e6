//! Log lines about requests that a client builds wrongly, each with its remedy. The audit log has
//! the requests that get no answer.
//!
//! Clients cause these lines, so there is one for each client and mistake in a minute, and a limit
//! for all clients together.

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use statehouse_config::limits;
use statehouse_core::request::Early;
use statehouse_core::store::Mode;
use statehouse_core::{Decision, Outcome};
use statehouse_protocol::Peer;

/// The answer to a SET without `__ts` (the protocol, section 4).
const MISSING_TIMESTAMP: &[u8] = b"-ERR missing timestamp\r\n";

/// Logs the mistakes of clients.
pub(super) struct ClientErrors {
    begun: Instant,
    logged: Mutex<Logged>,
}

/// The lines of this minute, as hashes of client and mistake.
#[derive(Default)]
struct Logged {
    minute: u64,
    lines: HashSet<u64>,
}

impl Default for ClientErrors {
    fn default() -> Self {
        Self {
            begun: Instant::now(),
            logged: Mutex::default(),
        }
    }
}

impl ClientErrors {
    /// Logs the mistake of a request, if it has one.
    pub(super) fn log(&self, peer: &Peer, decision: &Decision<'_>, mode: Mode) {
        let (what, remedy) = match &decision.outcome {
            // The embedded broker passes this refusal to the client and to the audit log. Behind a
            // foreign broker this line is its only trace.
            Outcome::Refused(_, what) if mode == Mode::Foreign => (
                *what,
                "set Response Topic and Correlation Data on each request, since the answer is published with them",
            ),
            Outcome::Answered(_, Early::QosZero) => (
                "a request needs QoS 1: at QoS 0 it cannot be acknowledged",
                "publish it with QoS 1",
            ),
            Outcome::Handled(..) => match &decision.effects.answer {
                Some(answer) if answer.payload == MISSING_TIMESTAMP => (
                    "a SET needs a timestamp",
                    "add the user property __ts with the time of the client, such as 001696374425000:00000:NAME",
                ),
                _ => return,
            },
            _ => return,
        };
        let client = peer.shown();
        if self.may_log(client, what) {
            tracing::warn!(client, "refused a request: {what}; {remedy}");
        }
    }

    fn may_log(&self, client: &str, what: &str) -> bool {
        let minute = self.begun.elapsed().as_secs() / 60;
        let mut hasher = DefaultHasher::new();
        (client, what).hash(&mut hasher);
        // A poisoned lock only means that a thread panicked between two complete updates.
        let mut logged = self.logged.lock().unwrap_or_else(PoisonError::into_inner);
        if logged.minute != minute {
            *logged = Logged {
                minute,
                lines: HashSet::new(),
            };
        }
        logged.lines.len() < limits::CLIENT_ERROR_LINES_PER_MINUTE_MAX
            && logged.lines.insert(hasher.finish())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_limited_by_client_and_in_total() {
        let errors = ClientErrors::default();
        assert!(errors.may_log("a", "x") && !errors.may_log("a", "x"));
        assert!(errors.may_log("a", "y") && errors.may_log("b", "x"));
        let more = (0..1000).filter(|it| errors.may_log(&it.to_string(), "x"));
        assert_eq!(more.count(), limits::CLIENT_ERROR_LINES_PER_MINUTE_MAX - 3);
    }
}
