//! A recorded request, run once more: one that came again on what it saw, or any against the state at its
//! place, by any policy.
//!
//! What enters: state, lent, and what was recorded of the request. What leaves: what the policy answers now, and
//! would write. It stores nothing and tells nobody.

use std::sync::Arc;

use bytes::Bytes;

use super::capture::{Beyond, Evidence, Script};
use super::effects::Answer;
use super::remembered::{Context, Remembered};
use super::state::State;
use super::step::decide;
use super::transaction::Transaction;
use super::write::Write;
use super::{Peer, Quota};
use crate::clock::Hlc;
use crate::limits;
use crate::policy::{Failure, Instance, Policy};
use crate::request::{Delivery, Request};

/// What a policy makes of a recorded request.
#[derive(Debug)]
pub struct Replayed {
    /// Its answer.
    pub answer: Result<Answer, Failure>,
    /// What it would write; nothing where it failed.
    pub writes: Vec<Write>,
    /// Whether it asked what neither the recording nor the state can answer.
    pub guessed: bool,
}

/// What was recorded of a request.
pub struct Recorded<'a> {
    /// Whose it was.
    pub client: &'a str,
    /// The command.
    pub payload: &'a Bytes,
    /// The client's clock.
    pub timestamp: Option<&'a str>,
    /// The fencing token.
    pub fencing_token: Option<&'a str>,
    /// How it came.
    pub delivery: Delivery,
    /// What it was handled with.
    pub context: &'a Context,
    /// What it saw; none where that was too much to keep.
    pub evidence: Option<&'a Evidence>,
}

/// Bounds that refuse nothing: what was refused is recorded. The policy that handled a request may have burnt what any bound
/// allows; another one has what it would have if it answered.
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
    unreleased_bytes_max: u64::MAX,
    fuel_max: limits::FUEL_PER_CALL_MAX,
    journal_full: false,
};

/// Runs a recorded request on a fresh instance. What the recorded run asked is answered as it was then,
/// any other question about the table from `state`, which must be the one just before the request. The policy may burn
/// `fuel_max`, beside the part for the request's bytes.
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
    let script = Script {
        evidence: recorded.evidence.cloned().unwrap_or_default(),
        beyond: Beyond::State,
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
        script,
        quota,
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

/// Runs a request that came again, on nothing but what it saw the first time. With its answer what it would change.
pub(super) fn again(
    policy: &Arc<Policy<Transaction>>,
    original: &Remembered,
    evidence: &Evidence,
    request: &Request<'_>,
) -> (Result<Answer, Failure>, Transaction) {
    let mut state = Box::<State>::default();
    state.hlc = Hlc::at(original.context.clock);
    state.place(&evidence.reads, request.payload);
    let request = Request {
        dialect: original.context.dialect,
        grants: None,
        ..*request
    };
    let script = Script {
        evidence: evidence.clone(),
        beyond: Beyond::Nothing,
    };
    // One of its own, in which nothing can be left from another request.
    let mut instance = Instance::new(policy.clone());
    run(
        &mut instance,
        state,
        original.context.now_ms,
        &request,
        script,
        NO_QUOTA,
    )
}

/// One run.
pub(super) fn run(
    instance: &mut Instance<Transaction>,
    state: Box<State>,
    now_ms: u64,
    request: &Request<'_>,
    script: Script,
    quota: Quota,
) -> (Result<Answer, Failure>, Transaction) {
    let transaction = Transaction::again(state, quota, now_ms, request, script);
    let mut call = instance.begin(transaction, request.payload.clone());
    let answer = decide(&mut call, request, now_ms);
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
