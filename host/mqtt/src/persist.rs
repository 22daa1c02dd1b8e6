//! Records durable state in the embedder's log.
//!
//! The change log collects changes of durable sessions and retained messages under the core's lock,
//! and appends them as one batch before the lock is released. It marks outputs with the batch that
//! their packets depend on: **no packet may leave before the record that it depends on is
//! durable**, or a crash could undo what a client has seen.
//!
//! Durable are sessions whose connection began with a Session Expiry above zero, their messages
//! above QoS 0, and retained messages. Of any other session that sends requests to the service,
//! only the user is recorded. Without a log nothing is recorded and nothing waits.
//!
//! Nothing here may wait for a disk under a lock. While the log is behind, connections that add to
//! it pause between two turns ([`Brake`]). While it has no room, the broker refuses growth of
//! durable state.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::BytesMut;
use statehouse_protocol::{LogPosition, SessionId};

use crate::{
    barrier::{Barrier, BatchNumber},
    change::{Change, Encoder, Part},
    clock::Clock,
    durability_gate::DurabilityGate,
    limits::{BATCH_BYTES, BRAKE_PAUSE_MAX, BRAKE_PAUSE_MIN, BRAKE_TIME_MAX},
    output::{Added, Output},
    session_queue::Queued,
};

/// A log of the embedder.
///
/// Positions rise from call to call, even across restarts. After a crash,
/// [`Recovery::apply`](crate::Recovery::apply) must receive the changes of every released position.
/// It may receive later ones too, but without a gap.
pub trait Persistence: Send + Sync + 'static {
    /// Appends one batch of changes and returns the position of its record. Either all changes of
    /// the batch survive a crash, or none.
    ///
    /// The broker holds its lock and calls this in the order of the changes. The implementation
    /// must copy the bytes and never wait for a disk, or every client waits with it. It must not
    /// call the broker, except for [`Broker::released`](crate::Broker::released), nor wait for a
    /// thread that does.
    fn append(&self, changes: &[u8]) -> LogPosition;

    /// Whether the log has room for more than removals and acknowledgements. While it has none, the
    /// broker refuses growth of its durable state. Called with the broker's lock held, so it must
    /// be cheap.
    fn has_room(&self) -> bool {
        true
    }

    /// Whether every reader of the log knows the change of a subscription with pending retained
    /// messages. If not, a restart forgets these messages.
    fn knows_retained_pending(&self) -> bool {
        true
    }

    /// Whether connections that add to the log should pause. Called before every turn of a
    /// connection, so it must be cheap.
    fn is_behind(&self) -> bool {
        false
    }

    /// Bytes that the calling thread has ever appended, through any caller. The broker compares two
    /// values to find out whether a turn appended anything.
    fn appended_here(&self) -> u64 {
        0
    }

    /// The position up to which everything is durable. The embedder must report later progress with
    /// [`Broker::released`](crate::Broker::released).
    fn released(&self) -> LogPosition;
}

/// Collects changes and appends them in batches.
pub(crate) struct ChangeLog {
    persistence: Option<Arc<dyn Persistence>>,
    durability_gate: Arc<DurabilityGate>,
    clock: Clock,
    changes: Encoder,
    /// The number of changes ever recorded.
    count: u64,
    /// The batch that is being collected.
    batch: BatchNumber,
    /// The last batch that was appended.
    appended: BatchNumber,
    /// Outputs that were marked since the last append.
    marked: Vec<(Arc<Output>, Barrier)>,
}

impl ChangeLog {
    pub(crate) fn new(
        persistence: Option<Arc<dyn Persistence>>,
        durability_gate: Arc<DurabilityGate>,
        clock: Clock,
    ) -> Self {
        Self {
            persistence,
            durability_gate,
            clock,
            changes: Encoder::default(),
            count: 0,
            batch: BatchNumber::default().next(),
            appended: BatchNumber::default(),
            marked: Vec::new(),
        }
    }

    pub(crate) fn is_on(&self) -> bool {
        self.persistence.is_some()
    }

    /// Whether durable state may grow.
    pub(crate) fn has_room(&self) -> bool {
        self.persistence.as_ref().is_none_or(|log| log.has_room())
    }

    /// Whether the log takes searches for retained messages.
    pub(crate) fn can_record_searches(&self) -> bool {
        let log = self.persistence.as_ref();
        log.is_some_and(|log| log.knows_retained_pending() && log.has_room())
    }

    pub(crate) fn clock(&self) -> &Clock {
        &self.clock
    }

    /// Replaces the clock reading that converts times for the records.
    pub(crate) fn set_clock(&mut self, clock: Clock) {
        self.clock = clock;
    }

    /// The number of changes ever recorded. Two values differ if a change was recorded in between.
    pub(crate) fn count(&self) -> u64 {
        self.count
    }

    pub(crate) fn write(&mut self, change: &Change<'_>) {
        if self.is_on() {
            self.count += 1;
            self.changes.write(change);
        }
    }

    /// The barrier of a packet that depends on a change under the present lock, recorded already or
    /// before the lock is released.
    pub(crate) fn barrier_for_this_batch(&self) -> Barrier {
        match self.is_on() {
            true => Barrier::after(self.batch),
            false => Barrier::NONE,
        }
    }

    /// The barrier of a packet that depends on all changes that were recorded so far.
    pub(crate) fn barrier_for_all_changes(&self) -> Barrier {
        let last = match self.changes.is_empty() {
            true => self.appended,
            false => self.batch,
        };
        let barrier = Barrier::after(last);
        match barrier.holds(self.durability_gate.released()) {
            true => barrier,
            false => Barrier::NONE,
        }
    }

    /// Puts a packet into an output behind a barrier. Returns true if the writer must be woken.
    pub(crate) fn put(
        &mut self,
        output: &Arc<Output>,
        barrier: Barrier,
        encode: impl FnOnce(&mut BytesMut),
    ) -> bool {
        let added = output.put(barrier, encode);
        added.is_some_and(|added| self.added(output, barrier, added))
    }

    /// Offers a packet to an output behind a barrier. Returns `None` if the output does not take
    /// it.
    pub(crate) fn offer(
        &mut self,
        output: &Arc<Output>,
        barrier: Barrier,
        packet_bytes: usize,
        encode: impl FnOnce(&mut BytesMut),
    ) -> Option<bool> {
        let added = output.offer(barrier, packet_bytes, encode)?;
        Some(self.added(output, barrier, added))
    }

    fn added(&mut self, output: &Arc<Output>, barrier: Barrier, added: Added) -> bool {
        if added.marked {
            self.marked.push((output.clone(), barrier));
        }
        added.wake
    }

    pub(crate) fn session_log(&mut self, session: SessionId, is_durable: bool) -> SessionLog<'_> {
        SessionLog {
            session,
            is_on: is_durable && self.is_on(),
            change_log: self,
        }
    }

    /// Appends a large batch between two packets, before it grows further.
    pub(crate) fn checkpoint(&mut self) {
        if self.changes.len() >= BATCH_BYTES {
            self.append();
        }
    }

    /// Appends the collected changes. Must be called before the lock is released.
    pub(crate) fn append(&mut self) {
        let Some(persistence) = &self.persistence else {
            return;
        };
        if self.changes.is_empty() && self.marked.is_empty() {
            return;
        }
        let mut appended = None;
        if !self.changes.is_empty() {
            appended = Some((persistence.append(self.changes.bytes()), self.batch));
            self.appended = self.batch;
            self.changes.clear();
        }
        self.batch = self.batch.next();
        self.durability_gate
            .register(appended, persistence.released(), &mut self.marked);
    }
}

/// Writes the changes of one session to the change log, if the session is durable.
pub(crate) struct SessionLog<'a> {
    session: SessionId,
    is_on: bool,
    /// For outputs and room only: records of the session must go through [`SessionLog::write`].
    pub(crate) change_log: &'a mut ChangeLog,
}

impl SessionLog<'_> {
    pub(crate) fn is_on(&self) -> bool {
        self.is_on
    }

    pub(crate) fn write(&mut self, part: Part<'_>) {
        if self.is_on {
            self.change_log.write(&Change::Session(self.session, part));
        }
    }

    pub(crate) fn detached(&mut self, at: Instant) {
        let at_ms = self.change_log.clock.wall_ms(at);
        self.write(Part::Detach(at_ms));
    }

    pub(crate) fn message(&mut self, number: u64, queued: &Queued) {
        if self.is_on {
            let ChangeLog { changes, clock, .. } = &mut *self.change_log;
            changes.message(self.session, number, queued, clock);
            self.change_log.count += 1;
        }
    }

    /// Like [`ChangeLog::barrier_for_this_batch`], and none for a session that is not durable.
    pub(crate) fn barrier_for_this_batch(&self) -> Barrier {
        match self.is_on {
            true => self.change_log.barrier_for_this_batch(),
            false => Barrier::NONE,
        }
    }

    /// Like [`ChangeLog::barrier_for_all_changes`], and none for a session that is not durable.
    pub(crate) fn barrier_for_all_changes(&self) -> Barrier {
        match self.is_on {
            true => self.change_log.barrier_for_all_changes(),
            false => Barrier::NONE,
        }
    }
}

/// Pauses a connection that adds to a log that is behind, between two turns and without a lock.
/// Connections that only read continue. All pauses for one packet together are bounded, however
/// many reads it takes, so that the packet and those behind it are handled in the end.
pub(crate) struct Brake {
    persistence: Option<Arc<dyn Persistence>>,
    /// What the thread had appended when the turn began.
    before: u64,
    /// Whether the last turn appended anything.
    wrote: bool,
    /// How much longer the connection may pause before it handles the next packet.
    left: Duration,
}

impl Brake {
    pub(crate) fn new(persistence: Option<Arc<dyn Persistence>>) -> Self {
        Self {
            persistence,
            before: 0,
            wrote: false,
            left: BRAKE_TIME_MAX,
        }
    }

    /// Waits while the log is behind, if the last turn appended anything or the next packet is
    /// large.
    pub(crate) async fn wait(&mut self, is_large: bool) {
        let Some(log) = &self.persistence else {
            return;
        };
        let mut pause = BRAKE_PAUSE_MIN;
        while (self.wrote || is_large) && !self.left.is_zero() && log.is_behind() {
            self.left = self.left.saturating_sub(pause);
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(BRAKE_PAUSE_MAX);
        }
        self.wrote = false;
    }

    /// A turn begins on this thread.
    pub(crate) fn begin(&mut self) {
        self.before = self.appended_here();
    }

    /// The turn has ended, on the same thread. `has_packets` says whether it decoded a packet.
    pub(crate) fn end(&mut self, has_packets: bool) {
        let wrote = self.appended_here() != self.before;
        self.wrote |= wrote;
        if has_packets || wrote {
            self.left = BRAKE_TIME_MAX;
        }
    }

    fn appended_here(&self) -> u64 {
        let log = self.persistence.as_ref();
        log.map_or(0, |log| log.appended_here())
    }
}
