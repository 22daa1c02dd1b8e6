//! What outlives the process: the embedder's log, and the recorder that feeds it.
//!
//! In come changes of durable sessions and retained messages, made under the core's lock; out go
//! batches of them to the embedder's log before that lock is given back, and marks into the
//! outputs: **nothing leaves on a connection before the record of what it depends on is durable.**
//! Durable are sessions that began a connection with a Session Expiry above zero, their messages
//! above QoS 0, and retained messages. Nothing here waits for a disk under a lock: while the log is
//! behind, connections that add to it pause between two turns ([`Brake`]), and while it has no
//! room, growth of the durable state is refused. Without a log nothing is recorded and nothing
//! waits.

use std::{fmt, sync::Arc, time::Instant};

use bytes::BytesMut;

use crate::{
    change::{Change, Encoder, Part},
    clock::Clock,
    gate::{BatchNumber, Gate},
    limits::{BATCH_BYTES, BRAKE_PAUSE_MAX, BRAKE_PAUSE_MIN, BRAKE_TIME_MAX},
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
    /// with the broker's lock held, in the order of the changes: it copies the bytes and must never wait for a disk, or
    /// every client would wait with it. It may not call the broker, nor wait for a thread that does; only
    /// [`Broker::released`](crate::Broker::released) is free.
    fn append(&self, changes: &[u8]) -> u64;

    /// Whether the log has room for more than removals and acknowledgements. While it has none, the
    /// broker refuses all growth of its durable state. Called with the broker's lock held, so it
    /// must be cheap.
    fn has_room(&self) -> bool {
        true
    }

    /// Whether connections that add to the log should pause before they add more. Asked before every turn of a connection,
    /// so it must be cheap.
    fn is_behind(&self) -> bool {
        false
    }

    /// Bytes that the calling thread has ever appended, by any caller: to see whether a turn appended something.
    fn appended_here(&self) -> u64 {
        0
    }

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

    /// Whether durable state may grow.
    pub(crate) fn has_room(&self) -> bool {
        self.persistence.as_ref().is_none_or(|log| log.has_room())
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
        packet_bytes: usize,
        encode: impl FnOnce(&mut BytesMut),
    ) -> Option<bool> {
        let added = output.offer(after, packet_bytes, encode)?;
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

    /// Whether the session may record what it could also keep in memory alone.
    pub(crate) fn has_room(&self) -> bool {
        self.recorder.has_room()
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
        packet_bytes: usize,
        encode: impl FnOnce(&mut BytesMut),
    ) -> Option<bool> {
        self.recorder.offer(output, after, packet_bytes, encode)
    }
}

/// Pauses a connection that adds to a log that is behind, between two turns and outside of every lock. Connections that
/// only read go on. A pause is bounded, so that acknowledgements and pings behind it are handled in the end.
pub(crate) struct Brake {
    persistence: Option<Arc<dyn Persistence>>,
    /// What the thread had appended when the turn began.
    before: u64,
    /// The last turn appended something.
    wrote: bool,
}

impl Brake {
    pub(crate) fn new(persistence: Option<Arc<dyn Persistence>>) -> Self {
        Self {
            persistence,
            before: 0,
            wrote: false,
        }
    }

    /// Waits while the log is behind, if the last turn appended something or the next packet is a large one.
    pub(crate) async fn wait(&mut self, is_large: bool) {
        let Some(log) = &self.persistence else {
            return;
        };
        let until = Instant::now() + BRAKE_TIME_MAX;
        let mut pause = BRAKE_PAUSE_MIN;
        while (self.wrote || is_large) && log.is_behind() && Instant::now() < until {
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(BRAKE_PAUSE_MAX);
        }
        self.wrote = false;
    }

    /// A turn begins, on this thread.
    pub(crate) fn begin(&mut self) {
        self.before = self.appended_here();
    }

    /// The turn has ended, on the same thread.
    pub(crate) fn end(&mut self) {
        self.wrote |= self.appended_here() != self.before;
    }

    fn appended_here(&self) -> u64 {
        let log = self.persistence.as_ref();
        log.map_or(0, |log| log.appended_here())
    }
}
