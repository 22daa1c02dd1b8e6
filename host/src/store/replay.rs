//! A recorded request, run once more against the state that it saw, by any policy.
//!
//! What enters: the state at that place, lent, and what was recorded of the request. What leaves: the state as
//! it was, and what this policy answers and would write. It stores nothing and tells nobody.

use std::sync::Arc;

use bytes::Bytes;

use super::capture::{Evidence, Script};
use super::duplicates::Context;
use super::step::{Answer, decide};
use super::transaction::{State, Transaction, Write};
use super::{Peer, Quota};
use crate::clock::Hlc;
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

/// Bounds that refuse nothing: what was refused is recorded.
const NO_QUOTA: Quota = Quota {
    keys_max: u64::MAX,
    bytes_max: u64::MAX,
    key_bytes_max: u64::MAX,
    value_bytes_max: u64::MAX,
    journal_full: false,
};

/// Runs a recorded request on a fresh instance. What the recorded run asked is answered as it was then,
/// any other question about the table from `state`, which must be the one just before the request.
pub fn replay(
    policy: &Arc<Policy<Transaction>>,
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
    };
    let script = Script {
        evidence: recorded.evidence.cloned().unwrap_or_default(),
        lenient: true,
    };
    let now_ms = recorded.context.now_ms;
    let hlc = std::mem::replace(&mut state.hlc, Hlc::at(recorded.context.clock));
    let transaction = Transaction::again(state, NO_QUOTA, now_ms, &request, script);
    let mut instance = Instance::new(policy.clone());
    let mut call = instance.begin(transaction, recorded.payload.clone());
    let answer = decide(&mut call, &request, now_ms).map(|(answer, _)| answer);
    let transaction = call.end();
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
