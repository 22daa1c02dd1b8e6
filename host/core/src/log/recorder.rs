//! Writes records of what steps did.
//!
//! A recorder must be used under the store's lock, so that records have the order of the steps.

use std::sync::Arc;

use super::record::{self, PolicyRecord};
use super::unreleased::Unreleased;
use super::{Journal, LogPosition, skipped_to_ms};
use crate::clock::Stamp;
use crate::limits;
use crate::policy::Assignment;
use crate::request::Request;
use crate::store::{Change, Effects, Handled, Mode, NewDeadline, State, Write};

/// Writes the records of one store.
pub struct Recorder {
    journal: Arc<dyn Journal>,
    /// Policies by their number in records.
    policies: Vec<PolicyRecord>,
    active: Option<u32>,
    assignment: Option<Assignment>,
    /// The position of the last record.
    last: LogPosition,
    /// How far the wall clock is behind the time of the steps.
    wall_behind_ms: u64,
    /// The version and the time of the last record whose outputs waited for the disk because a
    /// start after a crash might not have skipped the version.
    waited_version_ms: u64,
    waited_now_ms: u64,
    unreleased: Unreleased,
    swept: Vec<u8>,
    watches: Vec<u8>,
    handled: Vec<u8>,
}

impl Recorder {
    /// Continues a log whose records name these policies.
    pub fn new(
        journal: Arc<dyn Journal>,
        policies: Vec<PolicyRecord>,
        active: Option<u32>,
    ) -> Self {
        Self {
            journal,
            policies,
            active,
            assignment: None,
            last: LogPosition(0),
            wall_behind_ms: 0,
            waited_version_ms: 0,
            waited_now_ms: 0,
            unreleased: Unreleased::default(),
            swept: Vec::new(),
            watches: Vec::new(),
            handled: Vec::new(),
        }
    }

    /// The position of the last record.
    pub fn last(&self) -> LogPosition {
        self.last
    }

    /// Sets how far the wall clock is behind the time of the next steps, in milliseconds. After a
    /// crash the records of that time may be lost, and then a start knows only the wall clock.
    pub fn set_wall_behind(&mut self, wall_behind_ms: u64) {
        self.wall_behind_ms = wall_behind_ms;
    }

    /// The log.
    pub fn journal(&self) -> &Arc<dyn Journal> {
        &self.journal
    }

    /// The policies for a snapshot: all of them by number, the number of the active one, and the
    /// assignment.
    pub fn policies(&self) -> (&[PolicyRecord], Option<u32>, Option<&Assignment>) {
        (&self.policies, self.active, self.assignment.as_ref())
    }

    /// Records the start of a run.
    pub fn started(&mut self, run: u32, now_ms: u64, mode: Mode) {
        self.append(|out| record::started(out, run, now_ms, mode));
    }

    /// Records that clients may be sent this Receive Maximum. Every start assumes the default, so
    /// only a higher value is recorded.
    pub fn record_receive_max(&mut self, receive_max: u16) {
        if receive_max > limits::RECEIVE_MAX_REMEMBERED_MIN {
            self.append(|out| record::receive_max(out, receive_max));
        }
    }

    /// Records that the clock was stepped ahead.
    pub fn postponed(&mut self, now_ms: u64, by_ms: u64) {
        self.append(|out| record::postponed(out, now_ms, by_ms));
    }

    /// Records new deadlines of keys, which `state` has already.
    pub fn deadlines(&mut self, now_ms: u64, deadlines: &[NewDeadline], state: &State) {
        if !self.journal.keeps() {
            return;
        }
        if self.journal.knows_deadlines() {
            self.append(|out| record::deadlines(out, now_ms, deadlines));
        } else {
            self.postponed_entries(now_ms, deadlines, state);
        }
        let keys = deadlines.iter().map(|it| (&it.key[..], it.hidden));
        self.unreleased.note(self.last, keys);
    }

    /// Records new deadlines as version 0.1.0 does: by the whole entries.
    fn postponed_entries(&mut self, now_ms: u64, deadlines: &[NewDeadline], state: &State) {
        let clock = state.hlc.last();
        let entries = deadlines.iter().filter_map(|it| {
            let entry = state.part(it.hidden).get(&it.key)?;
            Some(Write {
                hidden: it.hidden,
                ..Write::of(Change::Set(entry.clone()))
            })
        });
        for write in entries {
            self.append(|out| record::swept(out, now_ms, clock, &[write]));
        }
    }

    /// Records the end of a run.
    pub fn stopped(&mut self, now_ms: u64) {
        self.append(|out| record::stopped(out, now_ms));
    }

    /// Records an assignment, which applies from the next request on. Each policy in it must be
    /// among `named` or recorded before, with its module already durable; otherwise recovery could
    /// not load it. The record is urgent.
    pub fn assign(&mut self, named: Vec<PolicyRecord>, assignment: &Assignment) -> LogPosition {
        let mut records = Vec::new();
        for policy in named {
            let known = |it: &PolicyRecord| it.digest == policy.digest;
            if !self.policies.iter().any(known) {
                let mut record = Vec::new();
                record::policy(&mut record, &policy);
                records.push(record);
                self.policies.push(policy);
            }
        }
        let mut record = Vec::new();
        record::assignment(&mut record, assignment);
        records.push(record);
        let active = |it: &PolicyRecord| it.digest == assignment.active.0;
        let active = self.policies.iter().position(active);
        self.active = active.and_then(|it| u32::try_from(it).ok());
        self.assignment = Some(assignment.clone());
        if self.journal.keeps() {
            let records: Vec<&[u8]> = records.iter().map(Vec::as_slice).collect();
            self.last = self.journal.append(&records, true);
        }
        self.last
    }

    /// Records a step. Returns the position that must be durable before the answer is sent.
    pub fn step(
        &mut self,
        request: Option<&Request<'_>>,
        effects: &Effects,
        urgent: bool,
    ) -> LogPosition {
        if !self.journal.keeps() {
            return LogPosition(0);
        }
        let (swept, handled) = (effects.swept.as_ref(), effects.handled.as_ref());
        self.swept.clear();
        self.watches.clear();
        self.handled.clear();
        if let Some(swept) = swept {
            record::swept(&mut self.swept, swept.now_ms, swept.clock, &swept.writes);
        }
        if let Some(watches) = &effects.watches {
            record::watches(&mut self.watches, watches);
        }
        if let (Some(request), Some(handled)) = (request, handled) {
            self.encode(request, handled);
        }
        // The last version of the step. The sweep precedes the request.
        let swept_to = swept.map(|it| (it.clock, it.now_ms));
        let handled_to = handled.map(|it| (it.clock, it.remembered.context.now_ms));
        let is_ahead = (handled_to.or(swept_to))
            .is_some_and(|(version, now_ms)| self.note_ahead(version, now_ms));
        let journal = &self.journal;
        self.unreleased.release(journal.released());
        let mut records = [&self.swept[..], &self.watches, &self.handled];
        // Moves the empty ones to the end and keeps the order.
        records.sort_by_key(|record| record.is_empty());
        let count = records.partition_point(|record| !record.is_empty());
        if count == 0 {
            let payload = request.map_or(&[][..], |request| request.payload);
            return self.unreleased.of(&effects.rests_on, payload, self.last);
        }
        self.last = journal.append(&records[..count], urgent || is_ahead);
        let writes = swept.map(|it| &it.writes).into_iter();
        for writes in writes.chain(handled.map(|it| &it.writes)) {
            let keys = writes.iter().map(|it| (it.key(), it.hidden));
            self.unreleased.note(self.last, keys);
        }
        self.last
    }

    /// Whether the outputs of a step must wait for the disk because of its version: a start after a
    /// crash skips only versions that are little ahead of the wall clock or of what is on the disk.
    /// The store's time does not count, because the records that show it may be lost.
    fn note_ahead(&mut self, version: Stamp, now_ms: u64) -> bool {
        let wall_ms = now_ms.saturating_sub(self.wall_behind_ms);
        let known_ms = self.waited_now_ms.max(wall_ms);
        let is_ahead = version.wall >= skipped_to_ms(self.waited_version_ms, known_ms);
        if is_ahead {
            (self.waited_version_ms, self.waited_now_ms) = (version.wall, now_ms);
        }
        is_ahead
    }

    fn encode(&mut self, request: &Request<'_>, handled: &Handled) {
        let digest = handled.remembered.context.policy;
        let number = self.policies.iter().rposition(|it| it.digest == digest);
        // Every policy is recorded before its first answer.
        let policy = number.and_then(|it| u32::try_from(it).ok()).unwrap_or(0);
        record::handled(&mut self.handled, policy, request, handled);
    }

    fn append(&mut self, encode: impl FnOnce(&mut Vec<u8>)) {
        if self.journal.keeps() {
            let mut record = Vec::new();
            encode(&mut record);
            self.last = self.journal.append(&[&record[..]], false);
        }
    }
}
