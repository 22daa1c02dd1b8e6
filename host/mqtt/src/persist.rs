//! What outlives the process: the embedder's log, and the recorder that feeds it.
//!
//! In come changes of durable sessions and retained messages, made under the core's lock; out go batches of them to the
//! embedder's log before that lock is given back, and marks into the outputs: **nothing leaves on a connection before the
//! record of what it depends on is durable.** Durable are sessions that began a connection with a Session Expiry above
//! zero, their messages above QoS 0, and retained messages. Waits for no disk itself; a log that is far behind may let an
//! append wait. Without a log nothing is recorded and nothing waits.

use std::{fmt, sync::Arc, time::Instant};

use bytes::BytesMut;

use crate::{
    change::{Change, Encoder, Part},
    clock::Clock,
    gate::{BatchNumber, Gate},
    limits::BATCH_BYTES,
    outbox::Queued,
    output::{Added, Output},
};

/// A log of the embedder.
///
/// Positions rise from call to call and over restarts. After a crash the changes that are given back
/// ([`Recovery::apply`](crate::Recovery::apply)) are those of every released position, and maybe of some more, without
/// a gap.
pub trait Persistence: Send + Sync + 'static {
    /// Takes the changes of one batch, of which all survive or none, and returns the position of their record. Called
    /// with the broker's lock held, in the order of the changes: it should copy the bytes. Where it waits for a disk, every
    /// client waits with it: only so that what is unwritten stays bounded, and not once the process is to end. It may not
    /// call the broker, nor wait for a thread that does; only [`Broker::released`](crate::Broker::released) is free.
    fn append(&self, changes: &[u8]) -> u64;

    /// Everything up to this position is durable. What is released later is told by
    /// [`Broker::released`](crate::Broker::released).
    fn released(&self) -> u64;
}

/// Collects changes and appends them.
pub(crate) struct Recorder {
    persistence: Option<Arc<dyn Persistence>>,
    gate: Arc<Gate>,
    clock: Clock,
    changes: Encoder,
    /// Changes ever recorded.
    count: u64,
    /// The batch that is being collected.
    batch: BatchNumber,
    /// The last one that was appended.
    appended: BatchNumber,
    /// Outputs that got a mark since the last append.
    gated: Vec<(Arc<Output>, BatchNumber)>,
}

impl fmt::Debug for Recorder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recorder")
            .field("batch", &self.batch)
            .finish_non_exhaustive()
    }
}

impl Recorder {
    pub(crate) fn new(
        persistence: Option<Arc<dyn Persistence>>,
        gate: Arc<Gate>,
        clock: Clock,
    ) -> Self {
        Self {
            persistence,
            gate,
            clock,
            changes: Encoder::default(),
            count: 0,
            batch: 1,
            appended: 0,
            gated: Vec::new(),
        }
    }

    pub(crate) fn is_on(&self) -> bool {
        self.persistence.is_some()
    }

    pub(crate) fn clock(&self) -> &Clock {
        &self.clock
    }

    /// What the clocks show by now.
    pub(crate) fn set_clock(&mut self, clock: Clock) {
        self.clock = clock;
    }

    /// How many changes were ever recorded: to see whether something recorded one.
    pub(crate) fn count(&self) -> u64 {
        self.count
    }

    pub(crate) fn write(&mut self, change: &Change<'_>) {
        if self.is_on() {
            self.count += 1;
            self.changes.write(change);
        }
    }

    /// The batch that changes of now belong to. Only for packets of which a change is recorded before the lock is given
    /// back.
    pub(crate) fn current(&self) -> BatchNumber {
        if self.is_on() { self.batch } else { 0 }
    }

    /// The batch that everything recorded so far is released with; 0 where it is already.
    pub(crate) fn latest(&self) -> BatchNumber {
        let latest = if self.changes.is_empty() {
            self.appended
        } else {
            self.batch
        };
        if latest > self.gate.released() {
            latest
        } else {
            0
        }
    }

    /// Puts a packet behind a batch. True where the writer has to be woken.
    pub(crate) fn put(
        &mut self,
        output: &Arc<Output>,
        after: BatchNumber,
        encode: impl FnOnce(&mut BytesMut),
    ) -> bool {
        let added = output.put(after, encode);
        added.is_some_and(|added| self.added(output, after, added))
    }

    /// Offers a packet behind a batch. `None`: it was not taken.
    pub(crate) fn offer(
        &mut self,
        output: &Arc<Output>,
        after: BatchNumber,
        encode: impl FnOnce(&mut BytesMut),
    ) -> Option<bool> {
        let added = output.offer(after, encode)?;
        Some(self.added(output, after, added))
    }

    fn added(&mut self, output: &Arc<Output>, after: BatchNumber, added: Added) -> bool {
        if added.marked {
            self.gated.push((output.clone(), after));
        }
        added.wake
    }

    /// The records of one session.
    pub(crate) fn tape(&mut self, session: u64, is_durable: bool) -> Tape<'_> {
        Tape {
            session,
            is_on: is_durable && self.is_on(),
            recorder: self,
        }
    }

    /// Between two packets: a large batch is appended before it becomes larger.
    pub(crate) fn checkpoint(&mut self) {
        if self.changes.len() >= BATCH_BYTES {
            self.append();
        }
    }

    /// Appends what was collected. Called before the lock is given back.
    pub(crate) fn append(&mut self) {
        let Some(persistence) = &self.persistence else {
            return;
        };
        if self.changes.is_empty() && self.gated.is_empty() {
            return;
        }
        let mut appended = None;
        if !self.changes.is_empty() {
            appended = Some((persistence.append(self.changes.bytes()), self.batch));
            self.appended = self.batch;
            self.changes.clear();
        }
        self.batch += 1;
        self.gate
            .enter(appended, persistence.released(), &mut self.gated);
    }
}

/// Writes the changes of one session, if it is durable.
#[derive(Debug)]
pub(crate) struct Tape<'a> {
    session: u64,
    is_on: bool,
    recorder: &'a mut Recorder,
}

impl Tape<'_> {
    pub(crate) fn is_on(&self) -> bool {
        self.is_on
    }

    pub(crate) fn write(&mut self, part: Part<'_>) {
        if self.is_on {
            self.recorder.write(&Change::Session(self.session, part));
        }
    }

    pub(crate) fn detached(&mut self, at: Instant) {
        let at_ms = self.recorder.clock.wall_ms(at);
        self.write(Part::Detach { at_ms });
    }

    pub(crate) fn message(&mut self, number: u64, queued: &Queued) {
        if self.is_on {
            let Recorder { changes, clock, .. } = &mut *self.recorder;
            changes.message(self.session, number, queued, clock);
            self.recorder.count += 1;
        }
    }

    /// See [`Recorder::current`]; 0 for a session that is not durable.
    pub(crate) fn current(&self) -> BatchNumber {
        if self.is_on {
            self.recorder.current()
        } else {
            0
        }
    }

    /// See [`Recorder::latest`]; 0 for a session that is not durable.
    pub(crate) fn latest(&self) -> BatchNumber {
        if self.is_on {
            self.recorder.latest()
        } else {
            0
        }
    }

    pub(crate) fn put(
        &mut self,
        output: &Arc<Output>,
        after: BatchNumber,
        encode: impl FnOnce(&mut BytesMut),
    ) -> bool {
        self.recorder.put(output, after, encode)
    }

    pub(crate) fn offer(
        &mut self,
        output: &Arc<Output>,
        after: BatchNumber,
        encode: impl FnOnce(&mut BytesMut),
    ) -> Option<bool> {
        self.recorder.offer(output, after, encode)
    }
}
