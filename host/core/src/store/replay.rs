//! Runs recorded requests again: a redelivery on its captured reads, or any request on a given
//! state with any policy.
//!
//! A run changes nothing and notifies no watchers.

use std::sync::Arc;

use bytes::Bytes;

use super::effects::Answer;
use super::handling::decide;
use super::notification::{Recipients, notify_as};
use super::read_set::{CapturedReads, Recording, Unrecorded};
use super::remembered::{Context, Remembered};
use super::state::State;
use super::transaction::Transaction;
use super::write::{Change, Write};
use super::{Peer, Quota};
use crate::clock::Hlc;
use crate::limits;
use crate::log::JournalRoom;
use crate::policy::{Failure, Instance, Policy, fuel};
use crate::request::{Delivery, Request};

/// The result of a policy on a recorded request.
#[derive(Debug)]
pub struct Replayed {
    /// Its answer, or why it failed: a candidate also at a notification of its changes.
    pub answer: Result<Answer, Failure>,
    /// The writes that it would make; empty if it failed.
    pub writes: Vec<Write>,
    /// Whether the policy asked for something that neither the recording nor the state holds.
    pub guessed: bool,
}

/// A recorded request.
pub struct Recorded<'a> {
    /// The client id.
    pub client: &'a str,
    /// The request payload.
    pub payload: &'a Bytes,
    /// The client's timestamp.
    pub timestamp: Option<&'a str>,
    /// The fencing token.
    pub fencing_token: Option<&'a str>,
    /// How it was delivered.
    pub delivery: Delivery,
    /// The time, clock, dialect and policy that it was handled with.
    pub context: &'a Context,
    /// The captured reads, or `None` if they were too large.
    pub captured: Option<&'a CapturedReads>,
    /// Whether a candidate runs it, instead of the policy that handled it.
    pub by_candidate: bool,
}

/// Limits that refuse nothing, because refusals are recorded. The original policy may have used as
/// much fuel as any configuration allows.
pub(super) const NO_QUOTA: Quota = Quota {
    keys_max: u64::MAX,
    bytes_max: u64::MAX,
    client_keys_max: u64::MAX,
    client_bytes_max: u64::MAX,
    key_bytes_max: u64::MAX,
    value_bytes_max: u64::MAX,
    watches_max: u64::MAX,
    watches_per_connection_max: u64::MAX,
    watch_bytes_max: u64::MAX,
    recent_bytes_max: 0,
    unreleased_bytes_max: u64::MAX,
    fuel_max: limits::FUEL_PER_CALL_MAX,
    journal: JournalRoom::Growth,
};

/// Runs a recorded request on a fresh instance. Reads that the recording does not hold are answered
/// from `state`, which must be the state just before the request. The policy may use `fuel_max`, in
/// addition to the fuel for the request's bytes.
pub fn replay(
    policy: &Arc<Policy<Transaction>>,
    fuel_max: u64,
    state: Box<State>,
    recorded: &Recorded<'_>,
) -> (Box<State>, Replayed) {
    let peer = Peer {
        client: recorded.client.into(),
        connection: recorded.delivery.connection,
        session: recorded.delivery.session,
    };
    let properties = statehouse_mqtt::Properties::default();
    let request = Request {
        dialect: recorded.context.dialect,
        payload: recorded.payload,
        timestamp: recorded.timestamp,
        fencing_token: recorded.fencing_token,
        peer: &peer,
        properties: &properties,
        delivery: recorded.delivery,
        grants: None,
    };
    let recording = Recording {
        captured: recorded.captured.cloned().unwrap_or_default(),
        unrecorded: Unrecorded::FromState,
    };
    let quota = Quota {
        fuel_max,
        ..NO_QUOTA
    };
    let hlc = state.hlc;
    let mut instance = Instance::new(policy.clone());
    let ran = run(
        &mut instance,
        state,
        recorded.context,
        &request,
        recording,
        quota,
        recorded.by_candidate,
    );
    let writes = match &ran.answer {
        Ok(_) => ran.transaction.staged().to_vec(),
        Err(_) => Vec::new(),
    };
    let mut state = ran.transaction.roll_back();
    state.hlc = hlc;
    (
        state,
        Replayed {
            answer: ran.answer,
            writes,
            guessed: ran.guessed,
        },
    )
}

/// Re-executes a redelivered request on its captured reads alone. The returned transaction holds
/// the staged changes.
pub(super) fn reexecute(
    policy: &Arc<Policy<Transaction>>,
    original: &Remembered,
    captured: &CapturedReads,
    request: &Request<'_>,
) -> (Result<Answer, Failure>, Box<Transaction>) {
    let state = State::of_reads(&captured.reads, request.payload);
    let request = Request {
        dialect: original.context.dialect,
        grants: None,
        ..*request
    };
    let recording = Recording {
        captured: captured.clone(),
        unrecorded: Unrecorded::Fail,
    };
    // A fresh instance, so that it cannot contain state of another request.
    let mut instance = Instance::new(policy.clone());
    let ran = run(
        &mut instance,
        state,
        &original.context,
        &request,
        recording,
        NO_QUOTA,
        false,
    );
    (ran.answer, ran.transaction)
}

/// The end of one execution.
pub(super) struct Run {
    pub(super) answer: Result<Answer, Failure>,
    /// It holds the staged changes.
    pub(super) transaction: Box<Transaction>,
    /// Whether answer and changes depend on something unknown.
    pub(super) guessed: bool,
}

/// Executes one request. A candidate must declare its command, as in a first execution, and must be
/// able to notify watchers of its changes. The original policy is exempt: an earlier version of the
/// program did not check the command, and whether the keys were watched is not recorded.
pub(super) fn run(
    instance: &mut Instance<Transaction>,
    mut state: Box<State>,
    context: &Context,
    request: &Request<'_>,
    recording: Recording,
    quota: Quota,
    by_candidate: bool,
) -> Run {
    let now_ms = context.now_ms;
    state.hlc = Hlc::at(context.clock);
    let transaction = Transaction::reexecute(state, quota, now_ms, request, recording);
    let mut call = instance.begin(transaction, request.payload.clone());
    let answer = decide(&mut call, request, now_ms).and_then(|decided| {
        if by_candidate {
            call.check_command(decided.0.command)?;
        }
        Ok(decided)
    });
    if let Err(failure) = &answer {
        call.discard(failure);
    }
    let mut transaction = call.end();
    let guessed = transaction.guessed();
    let puts = transaction.staged().iter().any(Write::is_visible_put);
    let mut answer = answer.map(|(answer, _)| Answer {
        put: puts,
        ..answer
    });
    let is_known = !guessed && transaction.missing_reads().is_empty();
    if by_candidate && is_known && answer.is_ok() {
        let rendered;
        (transaction, rendered) = try_notifications(instance, transaction, request, quota);
        if let Err(failure) = rendered {
            answer = Err(failure);
        }
    }
    Run {
        answer,
        transaction,
        guessed,
    }
}

/// Renders each visible change as if the client watched its key, and discards the notifications. A
/// failure does not count if it may be due to something that was not recorded. Each call may use
/// the fuel of a request, because the key may have no watcher. The rest is left out when all calls
/// together have used that much.
fn try_notifications(
    instance: &mut Instance<Transaction>,
    mut transaction: Box<Transaction>,
    request: &Request<'_>,
    quota: Quota,
) -> (Box<Transaction>, Result<(), Failure>) {
    let mut fuel_left = fuel(quota.fuel_max, request.payload.len());
    let changes: Vec<Change> = transaction.changes().cloned().collect();
    for change in changes {
        let to = Recipients::one(request.peer, request.dialect);
        let (rendered, fuel_used);
        (transaction, rendered, fuel_used) = notify_as(instance, transaction, &change, to);
        if let Err(failure) = rendered {
            let result = match transaction.guessed() {
                true => Ok(()),
                false => Err(failure),
            };
            return (transaction, result);
        }
        fuel_left = fuel_left.saturating_sub(fuel_used);
        if fuel_left == 0 {
            break;
        }
    }
    (transaction, Ok(()))
}
