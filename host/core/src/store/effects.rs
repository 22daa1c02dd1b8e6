//! What one step of the store did, for whoever writes it down and tells it.

use std::sync::Arc;

use bytes::Bytes;

use super::capture::{Evidence, Imported, Read};
use super::notice::Notice;
use super::observed::Observed;
use super::remembered::Remembered;
use super::repeat::{Rerun, ToldAgain};
use super::transaction::Transaction;
use super::watch::{WatchChange, WatchChanges};
use super::write::Write;
use super::{Exceeded, Key};
use crate::clock::Stamp;
use crate::policy::{Failure, Part, Policy, Repeat};
use statehouse_protocol::Peer;
use statehouse_protocol::rights::Right;

/// The text of an answer whose policy failed (the protocol, section 4).
pub const INTERNAL_ERROR: &[u8] = b"-ERR internal error\r\n";

/// What a step did, beyond the state itself.
#[derive(Default)]
pub struct Effects {
    /// For the client that asked.
    pub answer: Option<Answer>,
    /// For the watchers of what had expired before this step began: they come before the answer.
    pub expired: Vec<Notice>,
    /// For the watchers of what changed, in order.
    pub notices: Vec<Notice>,
    /// How many policy calls failed.
    pub failures: u64,
    /// Why the request's own call failed, if it did.
    pub failed: Option<Failure>,
    /// The fuel that the request burnt.
    pub fuel: u64,
    /// What the sweep at the beginning removed, to be durable first.
    pub swept: Option<Swept>,
    /// What became of watches, where these are kept: to be durable before the answer leaves.
    pub watches: Option<Box<WatchChanges>>,
    /// What is to be durable before the answer leaves.
    pub handled: Option<Handled>,
    /// What the answer rests on, besides what was handled.
    pub rests_on: RestsOn,
    /// Whether the request was a duplicate, and if so whether running it again gave the same.
    pub repeated: Option<Rerun>,
    /// What became of its notifications, where it is of an earlier run and these may not have left.
    pub told_again: Option<ToldAgain>,
    /// The first key that its client had no right to, where there was one.
    pub denied: Option<(Key, Right)>,
    /// The first bound that refused something, where one did.
    pub exceeded: Option<Exceeded>,
    /// Why the policy that answered may not go on, where that was one failure too many.
    pub tripped: Option<Trip>,
    /// The request, to run it again beside the store.
    pub observed: Option<Box<Observed>>,
    /// The policy that answered; none where that of a duplicate is not here any more.
    pub by: Option<Arc<Policy<Transaction>>>,
}

/// A policy that may not go on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trip {
    /// What it answered as.
    pub part: Part,
    /// What it did, in words.
    pub why: String,
}

/// What an answer tells of the state: it may not leave before that is durable.
#[derive(Debug, Default)]
pub enum RestsOn {
    /// Nothing.
    #[default]
    Nothing,
    /// These keys, visible or hidden, and where the payload is the key's.
    Keys(Vec<Read>),
    /// Anything.
    Everything,
}

/// Keys that went because their time was over, or that hold the same with a later deadline.
#[derive(Debug)]
pub struct Swept {
    /// The store's time.
    pub now_ms: u64,
    /// The store's clock after it.
    pub clock: Stamp,
    /// The removals, or the entries.
    pub writes: Vec<Write>,
}

/// A request that changed something, or whose answer a redelivery is owed.
#[derive(Debug)]
pub struct Handled {
    /// The request and its answer.
    pub remembered: Remembered,
    /// Whether a redelivery is owed that answer.
    pub owed: bool,
    /// The store's clock after it.
    pub clock: Stamp,
    /// What it wrote.
    pub writes: Vec<Write>,
}

/// An answer.
#[derive(Debug)]
pub struct Answer {
    /// Its payload.
    pub payload: Bytes,
    /// The version it is about.
    pub version: Option<Stamp>,
    /// What a redelivery of the request is owed.
    pub repeat: Repeat,
    /// Which of the policy's commands it was.
    pub command: Option<u16>,
    /// Whether the request put anything.
    pub put: bool,
}

impl Effects {
    pub(super) fn note_watches(&mut self, peer: &Peer, changes: Vec<WatchChange>) {
        let peer = peer.clone();
        self.watches = Some(Box::new(WatchChanges { peer, changes }));
    }
}

impl RestsOn {
    pub(super) fn of(evidence: Option<Evidence>, watches_kept: bool) -> Self {
        // Pages and quotas are about the whole table; a watch is about nothing that is on disk, unless it is kept: who
        // registers again may be answered before the first time is.
        let of_nothing = |(_, imported): &(u32, Imported)| {
            match imported {
                Imported::Watched | Imported::Unwatched(_) => !watches_kept,
                // Rules are no part of the state.
                Imported::Denied(..) => true,
                _ => false,
            }
        };
        match evidence {
            Some(evidence) if evidence.imports.iter().all(of_nothing) => Self::Keys(evidence.reads),
            _ => Self::Everything,
        }
    }
}

/// The answer to a request whose policy failed.
pub(super) fn internal_error() -> Answer {
    Answer {
        payload: Bytes::from_static(INTERNAL_ERROR),
        version: None,
        // It changed nothing, so it may well run again.
        repeat: Repeat::Free,
        command: None,
        put: false,
    }
}
