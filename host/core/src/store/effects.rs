//! The effects of one step of the store. The caller records them and sends answers and
//! notifications.

use std::sync::Arc;

use bytes::Bytes;

use super::notification::Notification;
use super::read_set::{CapturedReads, Imported, Read};
use super::redelivery::{Renotified, Rerun};
use super::reexecution::SampledRequest;
use super::remembered::Remembered;
use super::transaction::Transaction;
use super::watch::{WatchChange, WatchChanges};
use super::write::Write;
use super::{Exceeded, Key};
use crate::clock::Stamp;
use crate::policy::{Failure, Part, Policy, Repeat};
use statehouse_protocol::Peer;
use statehouse_protocol::rights::Right;

/// The answer to a request whose policy failed (protocol, section 4).
pub const INTERNAL_ERROR: &[u8] = b"-ERR internal error\r\n";

/// Everything that a step did apart from changing the state.
#[derive(Default)]
pub struct Effects {
    /// The answer to the client's request.
    pub answer: Option<Answer>,
    /// Notifications of keys that expired before this step, and of changes that the client of the
    /// request missed. They must be sent before the answer.
    pub expired: Vec<Notification>,
    /// Notifications of the changes of this step, in order.
    pub notifications: Vec<Notification>,
    /// The number of failed policy calls.
    pub failures: u64,
    /// Why the policy call of the request failed, if it did.
    pub failed: Option<Failure>,
    /// The fuel that the request used.
    pub fuel: u64,
    /// The removals of the sweep at the beginning of the step. They must be recorded first.
    pub swept: Option<Swept>,
    /// Changes of watches, if watches are durable. They must be durable before the answer is sent.
    pub watches: Option<Box<WatchChanges>>,
    /// The record of the request. It must be durable before the answer is sent.
    pub handled: Option<Box<Handled>>,
    /// The state that the answer depends on, apart from the request's own record. It holds no reads
    /// that are in that record.
    pub rests_on: RestsOn,
    /// For a redelivery: how its answer was obtained.
    pub repeated: Option<Rerun>,
    /// For a redelivery of a request that an earlier run handled: whether its notifications were
    /// sent again.
    pub renotified: Option<Renotified>,
    /// The first key that the client had no right to.
    pub denied: Option<(Key, Right)>,
    /// The first limit that refused something.
    pub exceeded: Option<Exceeded>,
    /// Set if this failure was one too many, so that the policy must be rolled back.
    pub tripped: Option<Trip>,
    /// A copy of the request for re-execution outside the store.
    pub sampled: Option<Box<SampledRequest>>,
    /// The policy that answered. `None` for a redelivery whose policy is not loaded any more.
    pub by: Option<Arc<Policy<Transaction>>>,
}

/// A policy that must not answer any more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trip {
    /// The part that it answered as.
    pub part: Part,
    /// The reason, as text.
    pub why: String,
}

/// The state that an answer depends on. The answer must not be sent before that state is durable,
/// or a crash could revoke what the client has seen.
#[derive(Debug, Default)]
pub enum RestsOn {
    /// Nothing.
    #[default]
    Nothing,
    /// These keys, visible or hidden. A key may be a range of the request payload.
    Keys(Vec<Read>),
    /// The whole state.
    Everything,
}

/// Keys that expired.
#[derive(Debug)]
pub struct Swept {
    /// The time of the step.
    pub now_ms: u64,
    /// The clock after the step.
    pub clock: Stamp,
    /// The removals.
    pub writes: Vec<Write>,
}

/// A request that changed something, or whose redelivery must get the same answer.
#[derive(Debug)]
pub struct Handled {
    /// The request and its answer.
    pub remembered: Remembered,
    /// Whether a redelivery must get the same answer.
    pub repeatable: bool,
    /// The clock after the request.
    pub clock: Stamp,
    /// Its writes.
    pub writes: Vec<Write>,
}

/// An answer.
#[derive(Debug)]
pub struct Answer {
    /// Its payload.
    pub payload: Bytes,
    /// The version in the answer.
    pub version: Option<Stamp>,
    /// What a redelivery of the request gets.
    pub repeat: Repeat,
    /// The number of the policy's command.
    pub command: Option<u16>,
    /// Whether the request put a visible key.
    pub put: bool,
}

impl Effects {
    pub(super) fn note_watches(&mut self, peer: &Peer, changes: Vec<WatchChange>) {
        let peer = peer.clone();
        self.watches = Some(Box::new(WatchChanges { peer, changes }));
    }
}

impl RestsOn {
    pub(super) fn of(captured: Option<CapturedReads>, watches_durable: bool) -> Self {
        // Pages and quotas depend on the whole table. A watch depends on nothing durable, unless
        // watches are durable: then a client that registers twice could be answered before the
        // first registration is durable.
        let of_nothing = |(_, imported): &(u32, Imported)| {
            match imported {
                Imported::Watched | Imported::Unwatched(_) => !watches_durable,
                // The version may be that of a change which is not durable yet.
                Imported::Followed(_) | Imported::Reached(_) => false,
                // Access rules are not part of the state.
                Imported::Denied(..) => true,
                _ => false,
            }
        };
        match captured {
            Some(captured) if captured.imports.iter().all(of_nothing) => Self::Keys(captured.reads),
            _ => Self::Everything,
        }
    }
}

/// The answer to a request whose policy failed, which changed nothing.
pub(super) fn internal_error() -> Answer {
    Answer {
        payload: Bytes::from_static(INTERNAL_ERROR),
        version: None,
        repeat: Repeat::Same,
        command: None,
        put: false,
    }
}
