//! Knows what was committed and what clients were answered, and finds contradictions.

use std::collections::BTreeMap;

use super::store::{State, Write};
use crate::{Assembler, Chain, Frame, Head, Id, LogPosition, Transaction, chain, records};

#[derive(Debug, Default)]
pub(super) struct Ledger {
    order: (u64, u64),
    writers: BTreeMap<u64, Id>,
    seq: u64,
    chain: Option<Chain>,
    assembler: Assembler,
    committed: Vec<Vec<u8>>,
    state: State,
    /// The state right after the first frame of each epoch.
    at_epoch: BTreeMap<u64, State>,
    /// The largest version per key in an answer.
    answered: BTreeMap<u8, u64>,
    /// The epoch of the leader that decided last.
    deciding: u64,
    /// The id of the newest complete snapshot.
    named: u64,
    pub(super) violation: Option<String>,
    pub(super) joins: u64,
    pub(super) snapshots: u64,
    /// Writes that were refused because there was no room.
    pub(super) refused: u64,
    pub(super) takeovers: u64,
    pub(super) renewals: u64,
    pub(super) writes: u64,
    pub(super) reads: u64,
    pub(super) parts: u64,
}

impl Ledger {
    pub(super) fn violated(&mut self, what: String) {
        self.violation.get_or_insert(what);
    }

    fn check(&mut self, holds: bool, what: impl FnOnce() -> String) {
        if !holds {
            self.violated(what());
        }
    }

    /// A transaction was applied.
    pub(super) fn applied(&mut self, transaction: &Transaction) {
        let Some((_, head)) = transaction
            .puts
            .iter()
            .find(|(key, _)| key.ends_with(b"/head"))
        else {
            return;
        };
        let head = Head::decode(head).unwrap();
        let order = self.order;
        self.check(head.order() > order || head.epoch == 0, || {
            format!("the head went from {order:?} to {:?}", head.order())
        });
        self.order = head.order();
        let writer = *self.writers.entry(head.epoch).or_insert(head.writer);
        self.check(writer == head.writer, || {
            format!("two writers in epoch {}", head.epoch)
        });
        let frames = transaction.puts.iter().filter(|(key, _)| {
            let key = String::from_utf8_lossy(key);
            key.contains("/log/")
        });
        let mut is_renewal = true;
        for (_, frame) in frames {
            self.frame(frame, &head);
            is_renewal = false;
        }
        self.renewals += u64::from(is_renewal);
        let (seq, position) = (self.seq, self.committed.len() as u64);
        self.check((head.seq, head.position.0) == (seq, position), || {
            format!("the head has frame {} but the log {seq}", head.seq)
        });
        if head.snapshot.is_some_and(|it| it.id != self.named) {
            self.named = head.snapshot.map_or(0, |it| it.id);
            self.snapshots += 1;
        }
        if head.change == 0 {
            self.at_epoch.insert(head.epoch, self.state.clone());
        }
    }

    fn frame(&mut self, bytes: &[u8], head: &Head) {
        let frame = Frame::decode(bytes).unwrap();
        let (seq, before) = (self.seq, self.chain);
        self.check(frame.seq == seq + 1, || {
            format!("frame {} was written after frame {seq}", frame.seq)
        });
        self.check(before.is_none_or(|it| it == frame.previous), || {
            format!("frame {} does not continue the chain", frame.seq)
        });
        self.seq = frame.seq;
        self.chain = Some(chain(bytes));
        let chain_is_head = self.chain == Some(head.chain);
        self.check(chain_is_head, || "the chain of the head is wrong".into());
        let Some(body) = self.assembler.accept(&frame).unwrap() else {
            self.parts += 1;
            return;
        };
        let records = records(body, frame.count).unwrap();
        let records: Vec<_> = records.into_iter().map(<[u8]>::to_vec).collect();
        let next = self.committed.len() as u64 + 1;
        self.check(frame.first.0 == next, || {
            format!("record {} was written after {}", frame.first, next - 1)
        });
        for record in records {
            let write = Write::decode(&record).unwrap();
            let last = self.state.last_version;
            self.check(write.version == 0 || write.version > last, || {
                format!("version {} was committed after {last}", write.version)
            });
            self.state.apply(write);
            self.committed.push(record);
        }
    }

    fn committed(&self, position: LogPosition) -> Option<&[u8]> {
        let index = usize::try_from(position.0.checked_sub(1)?).ok()?;
        self.committed.get(index).map(Vec::as_slice)
    }

    /// A follower received a record.
    pub(super) fn replicated(&mut self, position: LogPosition, record: &[u8]) {
        let holds = self.committed(position) == Some(record);
        self.check(holds, || {
            format!("a follower applied another record {position} than was committed")
        });
    }

    /// A host became leader with this state.
    pub(super) fn took_over(&mut self, epoch: u64, state: &State) {
        self.takeovers += 1;
        let expected = self.at_epoch.get(&epoch);
        let holds = expected == Some(state);
        self.check(holds, || {
            format!("the leader of epoch {epoch} has another state than the log")
        });
    }

    /// A leader decides a request.
    pub(super) fn decides(&mut self, epoch: u64) {
        let deciding = self.deciding;
        self.check(epoch >= deciding, || {
            format!("the leader of epoch {epoch} decides after that of epoch {deciding}")
        });
        self.deciding = self.deciding.max(epoch);
    }

    /// The version that a read that is sent now must see.
    pub(super) fn floor(&self, key: u8) -> u64 {
        self.answered.get(&key).copied().unwrap_or(0)
    }

    /// A client received the answer to a write.
    pub(super) fn write_answered(&mut self, write: Write, position: LogPosition, record: &[u8]) {
        self.writes += 1;
        let holds = self.committed(position) == Some(record);
        self.check(holds, || {
            format!("the acknowledged record {position} is lost")
        });
        self.answer(write.key, write.version);
    }

    /// A client received the answer to a read.
    pub(super) fn read_answered(&mut self, key: u8, version: u64, floor: u64) {
        self.reads += 1;
        self.check(version >= floor, || {
            format!("a read of key {key} saw version {version} after version {floor} was answered")
        });
        self.answer(key, version);
    }

    fn answer(&mut self, key: u8, version: u64) {
        let answered = self.answered.entry(key).or_default();
        *answered = version.max(*answered);
    }
}

impl Ledger {
    pub(super) fn add(&mut self, other: &Self) {
        self.joins += other.joins;
        self.snapshots += other.snapshots;
        self.refused += other.refused;
        self.takeovers += other.takeovers;
        self.renewals += other.renewals;
        self.writes += other.writes;
        self.reads += other.reads;
        self.parts += other.parts;
    }

    pub(super) fn summary(&self) -> String {
        format!(
            "joins {}, takeovers {}, snapshots {}, refused {}, renewals {}, writes {}, reads {}, parts {}",
            self.joins,
            self.takeovers,
            self.snapshots,
            self.refused,
            self.renewals,
            self.writes,
            self.reads,
            self.parts
        )
    }
}
