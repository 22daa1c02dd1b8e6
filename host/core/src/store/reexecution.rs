//! Re-executes a sampled request outside the store: with a candidate in shadow, or on a fresh
//! instance of the policy that answered it.
//!
//! A sample carries everything that the request read and wrote, so re-execution changes nothing in
//! the store. A run that needs something unknown must report that and never guess.

use std::collections::VecDeque;
use std::hash::BuildHasher;
use std::sync::Arc;

use bytes::Bytes;
use hashbrown::DefaultHashBuilder;
use statehouse_mqtt::Properties;

use super::effects::Answer;
use super::entry::{Entry, Key};
use super::read_set::{CapturedReads, KeyRef, Read, Recording, Unrecorded};
use super::remembered::Context;
use super::replay::{NO_QUOTA, Run, run};
use super::state::State;
use super::transaction::Transaction;
use super::write::Write;
use super::{Quota, Store};
use crate::clock::Stamp;
use crate::limits;
use crate::policy::{Failure, Instance, Policy};
use crate::request::{Delivery, Request};
use statehouse_protocol::Peer;
use statehouse_protocol::rights::ClientRights;

/// Selects the requests to re-execute.
#[derive(Default)]
pub(super) struct Sampler {
    /// Requests since the last selected one.
    purity: u32,
    /// When that one was selected.
    purity_ms: u64,
    shadow: u32,
}

impl Sampler {
    /// Selects one of `every` requests for a purity check. At request rates above
    /// [`limits::PURITY_REQUESTS_PER_SECOND_MAX`], the rate of selection stays constant.
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

    /// Selects `per_mille` of 1000 requests for a shadow run.
    pub(super) fn shadow(&mut self, per_mille: u16) -> bool {
        self.shadow += u32::from(per_mille);
        let is_its = self.shadow >= 1000;
        self.shadow -= if is_its { 1000 } else { 0 };
        is_its
    }
}

/// A request that was handled, with everything needed to re-execute it.
pub struct SampledRequest {
    /// The shadow policy to compare, if the request was sampled for it.
    pub candidate: Option<Arc<Policy<Transaction>>>,
    /// Whether to check the policy that answered for hidden state.
    pub for_purity: bool,
    /// The policy that answered.
    pub by: Arc<Policy<Transaction>>,
    /// Why that policy failed at the request, which then changed nothing.
    pub failure: Option<Failure>,
    /// The request payload.
    pub payload: Bytes,
    /// The time, clock and dialect that it was handled with.
    pub context: Context,
    /// The payload of the answer.
    pub answer: Bytes,
    /// The version in the answer.
    pub version: Option<Stamp>,
    /// Its writes.
    pub writes: Vec<Write>,
    pub(super) peer: Peer,
    pub(super) timestamp: Option<Box<str>>,
    pub(super) fencing_token: Option<Box<str>>,
    pub(super) properties: Properties,
    pub(super) delivery: Delivery,
    /// The client's rights, for a candidate that reads other keys.
    pub(super) grants: Option<Arc<dyn ClientRights>>,
    /// The captured reads, or `None` if they were too large.
    pub(super) captured: Option<CapturedReads>,
    /// The fuel limit of a first execution.
    pub(super) fuel_max: u64,
    /// The number of removals before the request.
    pub(super) removals: u64,
}

/// The result of a re-execution.
pub enum Reexecution {
    /// An answer and the staged writes.
    Ran(Answer, Vec<Write>),
    /// The policy failed.
    Failed(Failure),
    /// The policy read these keys, and their entries are not in the sample.
    Asked(Vec<(bool, Key)>),
    /// The result depends on something unknown, for this reason.
    Unknown(&'static str),
}

impl SampledRequest {
    /// The client id, cut if it is long.
    pub fn client(&self) -> &str {
        self.peer.shown()
    }

    /// The memory cost in bytes.
    pub fn cost_bytes(&self) -> u64 {
        let captured = self.captured.as_ref().map_or(0, CapturedReads::cost_bytes);
        let writes = self.writes.iter().map(|write| {
            write.key().len() as u64 + write.entry().map_or(0, Entry::weight_without_key)
        });
        let texts = [
            self.timestamp.as_deref(),
            self.fencing_token.as_deref(),
            // Behind a foreign broker each request has its own copy.
            Some(&*self.peer.client),
        ];
        let texts: usize = texts.into_iter().flatten().map(str::len).sum();
        limits::SAMPLE_OVERHEAD_BYTES
            + (self.payload.len() + self.answer.len() + self.properties.raw().len() + texts) as u64
            + captured
            + writes.sum::<u64>()
    }

    /// Executes the request with another policy, under the fuel limit of a first execution, and
    /// renders a notification of each change. `more` holds entries that an earlier attempt asked
    /// for.
    pub fn execute_by_candidate(
        &self,
        instance: &mut Instance<Transaction>,
        more: &[Read],
    ) -> Reexecution {
        let quota = Quota {
            fuel_max: self.fuel_max,
            ..NO_QUOTA
        };
        self.execute(instance, more, Unrecorded::Collect, quota)
    }

    /// Re-executes the request on another instance of the same policy. Any read outside the sample
    /// is a failure.
    pub fn reexecute(&self, instance: &mut Instance<Transaction>) -> Reexecution {
        self.execute(instance, &[], Unrecorded::Fail, NO_QUOTA)
    }

    fn execute(
        &self,
        instance: &mut Instance<Transaction>,
        more: &[Read],
        unrecorded: Unrecorded,
        quota: Quota,
    ) -> Reexecution {
        let Some(captured) = &self.captured else {
            return Reexecution::Unknown("its captured reads were too large to keep");
        };
        let mut recording = Recording {
            captured: captured.clone(),
            unrecorded,
        };
        recording.captured.reads.extend_from_slice(more);
        let state = State::of_reads(&recording.captured.reads, &self.payload);
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
        let Run {
            answer,
            transaction,
            guessed,
        } = run(
            instance,
            state,
            &self.context,
            &request,
            recording,
            quota,
            unrecorded == Unrecorded::Collect,
        );
        let missing_reads = transaction.missing_reads();
        match answer {
            _ if guessed => Reexecution::Unknown("it needs request data that was not kept"),
            _ if !missing_reads.is_empty() => Reexecution::Asked(missing_reads.to_vec()),
            Err(Failure::Watchdog) => Reexecution::Unknown("the watchdog stopped it"),
            Err(Failure::Machine(_)) => Reexecution::Unknown("the machine lacks a resource for it"),
            Err(failure) => Reexecution::Failed(failure),
            Ok(answer) => Reexecution::Ran(answer, transaction.staged().to_vec()),
        }
    }
}

impl State {
    /// Captured entries in the tables that they were read from.
    pub(super) fn of_reads(reads: &[Read], payload: &[u8]) -> Box<Self> {
        let mut state = Box::<Self>::default();
        for read in reads {
            if let (Some(key), Some(entry)) = (read.key.resolve(payload), &read.entry) {
                let table = match read.hidden {
                    true => &mut state.hidden,
                    false => &mut state.table,
                };
                // An entry from a snapshot has no key of its own.
                table.insert(entry.under(key));
            }
        }
        state
    }
}

/// The most recently removed keys. The earlier entry of a key that is absent now is unknown unless
/// the key was absent ever since, so removals must be remembered.
#[derive(Default)]
pub(super) struct Removals {
    /// All removals so far.
    count: u64,
    /// The hashes of the last ones, since keys may be long. A collision only means that the earlier
    /// entry of a key is taken for unknown.
    last: VecDeque<u64>,
    hasher: DefaultHashBuilder,
}

impl Removals {
    pub(super) fn count(&self) -> u64 {
        self.count
    }

    /// Notes removals. If no shadow run can ask for them, only counts them.
    pub(super) fn note(&mut self, writes: &[Write], is_shadowed: bool) {
        for write in writes.iter().filter(|write| write.entry().is_none()) {
            self.count += 1;
            if !is_shadowed {
                self.last.clear();
                continue;
            }
            if self.last.len() >= limits::RECENT_REMOVALS_MAX {
                self.last.pop_front();
            }
            let hash = self.hash(write.hidden, write.key());
            self.last.push_back(hash);
        }
    }

    /// Whether a key was certainly not removed since `before` removals had happened.
    fn not_removed_since(&self, before: u64, hidden: bool, key: &[u8]) -> bool {
        let Ok(since) = usize::try_from(self.count - before) else {
            return false;
        };
        let hash = self.hash(hidden, key);
        let mut last = self.last.iter().rev().take(since);
        since <= self.last.len() && !last.any(|it| *it == hash)
    }

    fn hash(&self, hidden: bool, key: &[u8]) -> u64 {
        self.hasher.hash_one((hidden, key))
    }
}

impl Store {
    /// The entries of `keys` just before a sampled request, if the current state still determines
    /// them.
    pub fn reads_before(
        &self,
        sampled: &SampledRequest,
        keys: &[(bool, Key)],
    ) -> Option<Vec<Read>> {
        let known = keys.iter().map(|(hidden, key)| {
            let entry = self.state().part(*hidden).get(key);
            let removals = &self.removals;
            let unchanged = match entry {
                Some(entry) => entry.version() <= sampled.context.clock,
                None => removals.not_removed_since(sampled.removals, *hidden, key),
            };
            unchanged.then(|| Read {
                key: KeyRef::Own(key.clone()),
                hidden: *hidden,
                entry: entry.cloned(),
            })
        });
        known.collect()
    }
}

/// Whether two runs wrote the same. The positions of keys and values in the payload are ignored.
pub fn same_writes(one: &[Write], other: &[Write]) -> bool {
    let bare = |write: &Write| Write {
        key_at: None,
        value_at: None,
        ..write.clone()
    };
    one.len() == other.len() && one.iter().zip(other).all(|(a, b)| bare(a) == bare(b))
}

#[cfg(test)]
mod tests {
    use super::super::write::Change;
    use super::*;

    #[test]
    fn key_is_known_to_be_absent_since_its_last_removal() {
        let removal = |key: &'static [u8]| {
            Write::of(Change::Deleted(Key::from_static(key), Stamp::default()))
        };
        let mut removals = Removals::default();
        removals.note(&[removal(b"a")], true);
        removals.note(&[removal(b"b")], true);
        let is_absent =
            |before, hidden, key: &[u8]| removals.not_removed_since(before, hidden, key);
        assert!(!is_absent(0, false, b"a") && !is_absent(1, false, b"b"));
        assert!(is_absent(1, false, b"a") && is_absent(2, false, b"b"));
        assert!(is_absent(0, true, b"a"), "a hidden key is another key");
        removals.note(&[removal(b"c")], false);
        assert!(
            !removals.not_removed_since(2, false, b"a"),
            "it was only counted"
        );
    }
}
