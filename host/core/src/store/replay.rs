//! Runs recorded requests again: a redelivery on its captured reads, or any request on a given
//! state with any policy.
//!
//! A run changes nothing and notifies no watchers.

use std::sync::Arc;

use bytes::Bytes;

use super::effects::Answer;
use super::handling::decide;
use super::read_set::{CapturedReads, Recording, Unrecorded};
use super::remembered::{Context, Remembered};
use super::state::State;
use super::transaction::Transaction;
use super::write::Write;
use super::{Peer, Quota};
use crate::clock::Hlc;
use crate::limits;
use crate::log::JournalRoom;
use crate::policy::{Failure, Instance, Policy};
use crate::request::{Delivery, Request};

/// The result of a policy on a recorded request.
#[derive(Debug)]
pub struct Replayed {
    /// Its answer.
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
    mut state: Box<State>,
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
    let hlc = std::mem::replace(&mut state.hlc, Hlc::at(recorded.context.clock));
    let mut instance = Instance::new(policy.clone());
    let (answer, transaction) = run(
        &mut instance,
        state,
        recorded.context.now_ms,
        &request,
        recording,
        quota,
        recorded.by_candidate,
    );
    let writes = match &answer {
        Ok(_) => transaction.staged().to_vec(),
        Err(_) => Vec::new(),
    };
    let guessed = transaction.guessed();
    let mut state = transaction.roll_back();
    state.hlc = hlc;
    (
        state,
        Replayed {
            answer,
            writes,
            guessed,
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
    let mut state = Box::<State>::default();
    state.hlc = Hlc::at(original.context.clock);
    state.place(&captured.reads, request.payload);
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
    run(
        &mut instance,
        state,
        original.context.now_ms,
        &request,
        recording,
        NO_QUOTA,
        false,
    )
}

/// Executes one request. A candidate must declare its command, as in a first execution. The
/// original policy is exempt: an earlier version of the program did not check this.
pub(super) fn run(
    instance: &mut Instance<Transaction>,
    state: Box<State>,
    now_ms: u64,
    request: &Request<'_>,
    recording: Recording,
    quota: Quota,
    by_candidate: bool,
) -> (Result<Answer, Failure>, Box<Transaction>) {
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
    let transaction = call.end();
    let puts = transaction
        .staged()
        .iter()
        .any(|write| write.entry().is_some());
    let answer = answer.map(|(answer, _)| Answer {
        put: puts,
        ..answer
    });
    (answer, transaction)
}
