//! A request that was handled, with all that it takes to run it again beside the store: by a candidate in shadow, or on
//! a fresh instance of the same policy.
//!
//! What enters: what one request saw, was answered and wrote. What leaves: what another run makes of that. It changes
//! nothing, and what nobody knows it does not guess.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;
use statehouse_mqtt::Properties;

use super::Quota;
use super::capture::{Beyond, Evidence, KeyRef, Read, Script};
use super::effects::Answer;
use super::entry::{Entry, Key};
use super::remembered::Context;
use super::replay::{NO_QUOTA, run};
use super::state::State;
use super::transaction::Transaction;
use super::write::Write;
use crate::clock::{Hlc, Stamp};
use crate::limits;
use crate::policy::{Failure, Instance, Policy};
use crate::request::{Delivery, Request};
use statehouse_protocol::Peer;
use statehouse_protocol::rights::ClientRights;

/// Which requests are the ones that run again.
#[derive(Default)]
pub(super) struct Turns {
    /// Requests since the last one whose turn it was.
    purity: u32,
    /// When that was.
    purity_ms: u64,
    shadow: u32,
}

impl Turns {
    /// Whether it is the turn of this one, on a fresh instance, where it is of one of `every`.
    pub(super) fn purity(&mut self, every: u32, now_ms: u64) -> bool {
        self.purity = self.purity.saturating_add(1);
        let pause = u64::from(every) * 1000 / limits::PURITY_REQUESTS_PER_SECOND_MAX;
        let is_its =
            every > 0 && self.purity >= every && now_ms.saturating_sub(self.purity_ms) >= pause;
        if is_its {
            (self.purity, self.purity_ms) = (0, now_ms);
        }
        is_its
    }

    /// Whether it is the turn of this one, by a candidate that sees so many of a thousand.
    pub(super) fn shadow(&mut self, per_mille: u16) -> bool {
        self.shadow += u32::from(per_mille);
        let is_its = self.shadow >= 1000;
        self.shadow -= if is_its { 1000 } else { 0 };
        is_its
    }
}

/// A request that was handled.
pub struct Observed {
    /// Who is to be compared, where it is this request's turn.
    pub candidate: Option<Arc<Policy<Transaction>>>,
    /// Whether the policy that answered is to be tried for hidden state.
    pub for_purity: bool,
    /// The policy that answered.
    pub by: Arc<Policy<Transaction>>,
    /// The command.
    pub payload: Bytes,
    /// What it was handled with.
    pub context: Context,
    /// Its answer.
    pub answer: Bytes,
    /// The version that it was about.
    pub version: Option<Stamp>,
    /// What it wrote.
    pub writes: Vec<Write>,
    pub(super) peer: Peer,
    pub(super) timestamp: Option<Box<str>>,
    pub(super) fencing_token: Option<Box<str>>,
    pub(super) properties: Properties,
    pub(super) delivery: Delivery,
    /// What its client may do, for a candidate that asks for other keys.
    pub(super) grants: Option<Arc<dyn ClientRights>>,
    /// What it saw; none where that was too much to keep.
    pub(super) evidence: Option<Evidence>,
    /// What a call may burn that runs for the first time.
    pub(super) fuel_max: u64,
    /// Keys that were removed before it.
    pub(super) removals: u64,
}

/// What another run came to.
pub enum Again {
    /// An outcome.
    Ran(Answer, Vec<Write>),
    /// It failed.
    Failed(Failure),
    /// It read keys of which nobody has said what they held.
    Asked(Vec<(bool, Key)>),
    /// It rests on what nobody knows.
    Unknown(&'static str),
}

impl Observed {
    /// Whose it was.
    pub fn client(&self) -> &str {
        &self.peer.client
    }

    /// What it takes to hold it, in bytes.
    pub fn cost_bytes(&self) -> u64 {
        let evidence = self.evidence.as_ref().map_or(0, Evidence::cost_bytes);
        let writes = self.writes.iter().map(|write| {
            write.key().len() as u64 + write.entry().map_or(0, Entry::weight_without_key)
        });
        limits::OBSERVED_OVERHEAD_BYTES
            + (self.payload.len() + self.answer.len() + self.properties.raw().len()) as u64
            + evidence
            + writes.sum::<u64>()
    }

    /// Runs it by another policy, which may burn what it could if it were the one that answers. `told` are keys that it asked
    /// for before.
    pub fn by_candidate(&self, instance: &mut Instance<Transaction>, told: &[Read]) -> Again {
        let quota = Quota {
            fuel_max: self.fuel_max,
            ..NO_QUOTA
        };
        self.again(instance, told, Beyond::Parts, quota)
    }

    /// Runs it on another instance of the same policy, which may ask nothing new.
    pub fn by_itself(&self, instance: &mut Instance<Transaction>) -> Again {
        self.again(instance, &[], Beyond::Nothing, NO_QUOTA)
    }

    fn again(
        &self,
        instance: &mut Instance<Transaction>,
        told: &[Read],
        beyond: Beyond,
        quota: Quota,
    ) -> Again {
        let Some(evidence) = &self.evidence else {
            return Again::Unknown("what it saw was too much to keep");
        };
        let mut script = Script {
            evidence: evidence.clone(),
            beyond,
        };
        script.evidence.reads.extend_from_slice(told);
        let mut state = Box::<State>::default();
        state.hlc = Hlc::at(self.context.clock);
        state.place(&script.evidence.reads, &self.payload);
        let request = Request {
            dialect: self.context.dialect,
            payload: &self.payload,
            timestamp: self.timestamp.as_deref(),
            fencing_token: self.fencing_token.as_deref(),
            peer: &self.peer,
            properties: &self.properties,
            delivery: self.delivery,
            grants: self.grants.as_ref(),
        };
        let (answer, transaction) = run(
            instance,
            state,
            self.context.now_ms,
            &request,
            script,
            quota,
        );
        let (guessed, wanted) = (transaction.guessed(), transaction.wanted());
        match answer {
            _ if guessed => Again::Unknown("it asks what nobody kept of the request"),
            _ if !wanted.is_empty() => Again::Asked(wanted.to_vec()),
            Err(Failure::Watchdog) => Again::Unknown("the machine was too slow for it"),
            Err(failure) => Again::Failed(failure),
            Ok(answer) => Again::Ran(answer, transaction.staged().to_vec()),
        }
    }
}

impl State {
    /// Puts what was read where it was read from.
    pub(super) fn place(&mut self, reads: &[Read], payload: &[u8]) {
        for read in reads {
            if let (Some(key), Some(entry)) = (read.key.resolve(payload), &read.entry) {
                let table = match read.hidden {
                    true => &mut self.hidden,
                    false => &mut self.table,
                };
                // Out of a snapshot an entry comes without its key.
                table.insert(entry.under(key));
            }
        }
    }
}

/// The last keys that were removed: of one that is absent, nobody can say what it held when a request came unless it
/// was absent ever since.
#[derive(Default)]
pub(super) struct Removals {
    /// All so far.
    count: u64,
    last: VecDeque<(bool, Key)>,
}

impl Removals {
    pub(super) fn count(&self) -> u64 {
        self.count
    }

    /// Takes down what was removed. Where nobody will ask, only that something was.
    pub(super) fn note(&mut self, writes: &[Write], recalled: bool) {
        for write in writes.iter().filter(|write| write.entry().is_none()) {
            self.count += 1;
            if !recalled {
                self.last.clear();
                continue;
            }
            if self.last.len() >= limits::RECENT_REMOVALS_MAX {
                self.last.pop_front();
            }
            let key = Key::copy_from_slice(write.key());
            self.last.push_back((write.hidden, key));
        }
    }

    /// Whether a key was certainly not removed since there had been `before` removals.
    fn spared(&self, before: u64, hidden: bool, key: &[u8]) -> bool {
        let Ok(since) = usize::try_from(self.count - before) else {
            return false;
        };
        since <= self.last.len()
            && !self
                .last
                .iter()
                .rev()
                .take(since)
                .any(|(h, k)| *h == hidden && k == key)
    }
}

/// What keys held when an observed request began, if the state can still tell.
pub(super) fn recall(
    state: &State,
    removals: &Removals,
    observed: &Observed,
    keys: &[(bool, Key)],
) -> Option<Vec<Read>> {
    let known = keys.iter().map(|(hidden, key)| {
        let table = match hidden {
            true => &state.hidden,
            false => &state.table,
        };
        let entry = table.get(key);
        let unchanged = match entry {
            Some(entry) => entry.version() <= observed.context.clock,
            None => removals.spared(observed.removals, *hidden, key),
        };
        unchanged.then(|| Read {
            key: KeyRef::Own(key.clone()),
            hidden: *hidden,
            entry: entry.cloned(),
        })
    });
    known.collect()
}

/// Whether two runs wrote the same; where in the request a key or value stands does not matter.
pub fn same_writes(one: &[Write], other: &[Write]) -> bool {
    let bare = |write: &Write| Write {
        key_at: None,
        value_at: None,
        ..write.clone()
    };
    one.len() == other.len() && one.iter().zip(other).all(|(a, b)| bare(a) == bare(b))
}
