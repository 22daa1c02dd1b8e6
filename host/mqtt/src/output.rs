//! The output buffer of one connection. Never waits for a socket.
//!
//! A thread that holds the core's lock adds packets. After it releases the lock, it writes them
//! directly if the socket has room, because waking a task costs more than the write. The writer
//! task does the rest: it swaps out the whole buffer and writes it as the socket has room.
//!
//! Above the high-water mark new messages are refused, so that they stay in the session's queue,
//! and the connection's reader pauses.
//!
//! A packet that reports a change whose record is not durable yet is behind a mark. Bytes
//! behind a mark must not reach the socket before that record is released.

use std::{
    collections::VecDeque,
    fmt, io, mem,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use bytes::{Buf, BytesMut};
use tokio::{sync::Notify, time::timeout};

use crate::{
    barrier::{Barrier, BatchNumber},
    limits::{IDLE_BUFFER_BYTES_MAX, OUTPUT_BYTES_FREE, OUTPUT_TOTAL_RETRY_INTERVAL},
};

/// A socket that can be written to without waiting.
pub trait Direct: fmt::Debug + Send + Sync {
    /// Writes the bytes that the socket has room for; `WouldBlock` if it has none. It must not call
    /// the broker.
    fn try_write(&self, bytes: &[u8]) -> io::Result<usize>;

    /// Acknowledges received bytes at once instead of with the next bytes sent.
    fn acknowledge(&self) {}
}

/// The encoded output of all connections together. Outputs up to [`OUTPUT_BYTES_FREE`] are not
/// counted, so that clients that read never touch this shared counter.
#[derive(Debug)]
pub(crate) struct OutputTotal {
    bytes: AtomicUsize,
    bytes_max: usize,
}

impl OutputTotal {
    pub(crate) fn new(bytes_max: usize) -> Self {
        Self {
            bytes: AtomicUsize::new(0),
            bytes_max,
        }
    }

    /// Whether outputs must not grow beyond [`OUTPUT_BYTES_FREE`].
    fn is_over(&self) -> bool {
        self.bytes.load(Ordering::Relaxed) >= self.bytes_max
    }
}

/// The output of one connection.
#[derive(Debug)]
pub(crate) struct Output {
    high_bytes: usize,
    total: Arc<OutputTotal>,
    /// None for streams that only a task can write to.
    direct: Option<Arc<dyn Direct>>,
    state: Mutex<State>,
    /// A copy of the flag in the state, to be read without its lock.
    closing: AtomicBool,
    /// Whether the output was closed because a write failed.
    failed: AtomicBool,
    /// Wakes the writer: there are bytes to write, or the connection is over.
    work: Notify,
    /// Wakes the reader: the buffer is below the high-water mark again.
    room: Notify,
    /// Wakes the reader: the broker closes the connection.
    closed: Notify,
    /// Wakes a connection that took the session over: this connection's reader has handed over its
    /// last request.
    ended: Notify,
}

#[derive(Debug, Default)]
struct State {
    buffer: BytesMut,
    /// The number of bytes ever removed from the buffer: its first stream position.
    taken: u64,
    /// Stream positions that must not be passed before a batch is released; ascending in both
    /// numbers.
    marks: VecDeque<(u64, BatchNumber)>,
    /// Batches up to this one are known to be released.
    released: BatchNumber,
    /// The stream position of the last packet of a closed connection.
    last_packet_at: u64,
    writing_bytes: usize,
    /// The bytes of this output in the total of all outputs.
    counted_bytes: usize,
    writer_sleeps: bool,
    reader_waits: bool,
    /// A message was refused: the writer must ask the core for more.
    starved: bool,
    closing: bool,
    ended: bool,
}

/// The effects of adding a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Added {
    /// The writer sleeps and must be woken.
    pub(crate) wake: bool,
    /// The packet added a mark: the caller must arrange that this output is notified when the batch
    /// is released.
    pub(crate) marked: bool,
}

impl State {
    /// The number of bytes that may be written.
    fn open_bytes(&self) -> usize {
        match self.marks.front() {
            // A mark is never before the start of the buffer, nor behind its end.
            Some((at, _)) => (at - self.taken) as usize,
            None => self.buffer.len(),
        }
    }

    fn end(&self) -> u64 {
        self.taken + self.buffer.len() as u64
    }

    /// The number of bytes that are not written yet.
    fn held_bytes(&self) -> usize {
        self.buffer.len() + self.writing_bytes
    }

    /// Brings the total up to date. Must follow each change of the buffer and of `writing_bytes`.
    fn count(&mut self, total: &OutputTotal) {
        let held = self.held_bytes();
        let now = if held > OUTPUT_BYTES_FREE { held } else { 0 };
        let before = mem::replace(&mut self.counted_bytes, now);
        if now > before {
            total.bytes.fetch_add(now - before, Ordering::Relaxed);
        } else if now < before {
            total.bytes.fetch_sub(before - now, Ordering::Relaxed);
        }
    }
}

/// The next step of the writer.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Work {
    Write,
    /// Nothing to write, but the core must offer the messages again that the total refused.
    Refill,
    /// All bytes are written, nothing waits for a record, and no more will be added.
    Close,
}

impl Output {
    pub(crate) fn new(
        high_bytes: usize,
        total: Arc<OutputTotal>,
        direct: Option<Arc<dyn Direct>>,
    ) -> Self {
        Self {
            high_bytes,
            total,
            direct,
            state: Mutex::default(),
            closing: AtomicBool::new(false),
            failed: AtomicBool::new(false),
            work: Notify::new(),
            room: Notify::new(),
            closed: Notify::new(),
            ended: Notify::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No code under this lock can panic half way.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a packet that must not wait for other packets, only for its barrier. Returns `None` if
    /// the connection is closing.
    pub(crate) fn put(
        &self,
        barrier: Barrier,
        encode: impl FnOnce(&mut BytesMut),
    ) -> Option<Added> {
        let mut state = self.lock();
        (!state.closing).then(|| self.add(&mut state, barrier, encode))
    }

    /// Like [`put`](Self::put), but refuses the packet (`None`) if the buffer is above its mark.
    /// Also refuses it if the total is used up and this output would count in it. After a refusal
    /// the writer will ask the core for more.
    pub(crate) fn offer(
        &self,
        barrier: Barrier,
        packet_bytes: usize,
        encode: impl FnOnce(&mut BytesMut),
    ) -> Option<Added> {
        let mut state = self.lock();
        if state.closing {
            return None;
        }
        if !self.takes(&state, packet_bytes) {
            state.starved = true;
            // A writer with nothing to write must wake up: only then does it retry periodically.
            if state.held_bytes() < self.high_bytes && mem::take(&mut state.writer_sleeps) {
                drop(state);
                self.work.notify_one();
            }
            return None;
        }
        Some(self.add(&mut state, barrier, encode))
    }

    /// Whether a message of this size would be accepted.
    pub(crate) fn has_room(&self, packet_bytes: usize) -> bool {
        let state = self.lock();
        !state.closing && self.takes(&state, packet_bytes)
    }

    fn takes(&self, state: &State, packet_bytes: usize) -> bool {
        let held = state.held_bytes();
        held < self.high_bytes
            && (held + packet_bytes <= OUTPUT_BYTES_FREE || !self.total.is_over())
    }

    fn add(
        &self,
        state: &mut State,
        barrier: Barrier,
        encode: impl FnOnce(&mut BytesMut),
    ) -> Added {
        // A packet behind the mark of a later batch waits long enough already.
        let last = state.marks.back().map(|(_, batch)| *batch);
        let marked = barrier.holds(state.released.max(last.unwrap_or_default()));
        if marked {
            state.marks.push_back((state.end(), barrier.batch()));
        }
        encode(&mut state.buffer);
        state.count(&self.total);
        let wake = state.marks.is_empty() && mem::take(&mut state.writer_sleeps);
        Added { wake, marked }
    }

    /// Whether this connection blocks other connections: the total is used up, and this output
    /// holds a part of it.
    pub(crate) fn blocks_others(&self) -> bool {
        self.total.is_over() && self.lock().counted_bytes > 0
    }

    /// Releases everything up to this batch, which is durable.
    pub(crate) fn release(&self, batch: BatchNumber) {
        let mut state = self.lock();
        state.released = state.released.max(batch);
        let released = state.released;
        while state
            .marks
            .pop_front_if(|(_, batch)| *batch <= released)
            .is_some()
        {}
        // A closing connection may wait with nothing left to write.
        if (state.open_bytes() > 0 || state.closing) && mem::take(&mut state.writer_sleeps) {
            drop(state);
            self.work.notify_one();
        }
    }

    /// Adds a last packet, or none, and refuses all further ones. Wakes both tasks of the
    /// connection.
    pub(crate) fn close(&self, encode: impl FnOnce(&mut BytesMut)) {
        let mut state = self.lock();
        if !state.closing {
            state.last_packet_at = state.end();
            encode(&mut state.buffer);
            state.count(&self.total);
            state.closing = true;
            self.closing.store(true, Ordering::Release);
            drop(state);
            self.work.notify_one();
            self.closed.notify_one();
        }
    }

    /// Closes the output after a write failed: nothing reaches the client any more.
    pub(crate) fn fail(&self) {
        self.mark_failed();
        self.close(|_| {});
    }

    pub(crate) fn mark_failed(&self) {
        self.failed.store(true, Ordering::Release);
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    /// Discards output that waits for a record, on a closed connection: everything behind the first
    /// mark except the last packet, which reports no change.
    ///
    /// If not even the CONNACK has been sent, the last packet is discarded too (section 3.14: no
    /// DISCONNECT before a CONNACK). Returns false if nothing waited.
    pub(crate) fn cut(&self) -> bool {
        let mut state = self.lock();
        if !state.closing || state.marks.is_empty() {
            return false;
        }
        let open = state.open_bytes();
        // The last packet is behind every mark, since nothing is added after it.
        let last = (state.last_packet_at - state.taken) as usize;
        let last = state.buffer.split_off(last);
        state.buffer.truncate(open);
        if state.end() > 0 {
            state.buffer.unsplit(last);
        }
        state.marks.clear();
        state.count(&self.total);
        drop(state);
        self.work.notify_one();
        true
    }

    /// See [`Direct::acknowledge`].
    pub(crate) fn acknowledge(&self) {
        if let Some(direct) = &self.direct {
            direct.acknowledge();
        }
    }

    pub(crate) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }

    pub(crate) fn wake_writer(&self) {
        self.work.notify_one();
    }

    /// Writes the buffer in place of the writer, which sleeps and would be woken otherwise. Wakes
    /// the writer if bytes remain.
    pub(crate) fn write_now(&self) {
        if !self.write_all_now() {
            self.wake_writer();
        }
    }

    /// Returns false if the writer is needed.
    fn write_all_now(&self) -> bool {
        let Some(direct) = &self.direct else {
            return false;
        };
        let mut state = self.lock();
        let open = state.open_bytes();
        // The writer also writes after `Work::Refill`, while another thread was to write for it.
        let is_writing = state.writing_bytes > 0;
        if open == 0 || is_writing || state.starved || state.closing {
            return false;
        }
        // On an error write nothing: the writer will get the same error.
        let written = direct.try_write(&state.buffer[..open]).unwrap_or(0);
        state.taken += written as u64;
        if written == state.buffer.len() {
            state.buffer.clear();
            if state.buffer.capacity() > IDLE_BUFFER_BYTES_MAX {
                state.buffer = BytesMut::new();
            }
        } else {
            state.buffer.advance(written);
        }
        state.count(&self.total);
        if mem::take(&mut state.reader_waits) {
            self.room.notify_one();
        }
        state.writer_sleeps = written == open;
        state.writer_sleeps
    }

    /// Returns after [`close`](Self::close) was called. Supports one waiter.
    pub(crate) async fn closed(&self) {
        self.closed.notified().await;
    }

    /// Returns when the buffer is below its mark.
    pub(crate) async fn room(&self) {
        loop {
            {
                let mut state = self.lock();
                if state.held_bytes() < self.high_bytes {
                    return;
                }
                state.reader_waits = true;
            }
            self.room.notified().await;
        }
    }

    /// Whether the socket has taken everything, so that only the client can make progress.
    pub(crate) fn is_idle(&self) -> bool {
        let state = self.lock();
        state.held_bytes() == 0 && !state.starved
    }

    /// The number of bytes ever given to the writer or the socket.
    pub(crate) fn taken(&self) -> u64 {
        self.lock().taken
    }

    /// Returns after bytes were written. May return early, or late if bytes were written just
    /// before the call.
    pub(crate) async fn progress(&self) {
        self.lock().reader_waits = true;
        self.room.notified().await;
    }

    /// Moves the bytes that may be written into the empty `chunk`; waits if there are none.
    pub(crate) async fn take(&self, chunk: &mut BytesMut) -> Work {
        loop {
            let refused_by_total;
            {
                let mut state = self.lock();
                let open = state.open_bytes();
                if open > 0 {
                    if open == state.buffer.len() {
                        mem::swap(&mut state.buffer, chunk);
                    } else {
                        chunk.extend_from_slice(&state.buffer[..open]);
                        state.buffer.advance(open);
                    }
                    state.taken += open as u64;
                    state.writing_bytes = open;
                    return Work::Write;
                }
                if state.closing && state.buffer.is_empty() && state.marks.is_empty() {
                    return Work::Close;
                }
                state.writer_sleeps = true;
                refused_by_total = state.starved && state.held_bytes() < self.high_bytes;
            }
            if !refused_by_total {
                self.work.notified().await;
            } else if timeout(OUTPUT_TOTAL_RETRY_INTERVAL, self.work.notified())
                .await
                .is_err()
            {
                return Work::Refill;
            }
        }
    }

    /// Reports that the chunk is written. Returns true if the core has messages that waited for
    /// this.
    pub(crate) fn written(&self, chunk: &mut BytesMut) -> bool {
        chunk.clear();
        if chunk.capacity() > IDLE_BUFFER_BYTES_MAX {
            *chunk = BytesMut::new();
        }
        let mut state = self.lock();
        state.writing_bytes = 0;
        state.count(&self.total);
        if mem::take(&mut state.reader_waits) {
            self.room.notify_one();
        }
        mem::take(&mut state.starved)
    }

    /// Reports that the connection has handed over its last request.
    pub(crate) fn end(&self) {
        self.lock().ended = true;
        self.ended.notify_waiters();
    }

    /// Returns after [`end`](Self::end) was called.
    pub(crate) async fn ended(&self) {
        loop {
            // Created before the flag is read, so that a call in between is not missed.
            let notified = self.ended.notified();
            if self.lock().ended {
                return;
            }
            notified.await;
        }
    }

    #[cfg(any(test, feature = "simulation"))]
    pub(crate) fn has_ended(&self) -> bool {
        self.lock().ended
    }

    /// Removes the bytes that may be written, as a writer does that sleeps afterwards.
    #[cfg(any(test, feature = "simulation"))]
    pub(crate) fn drain(&self) -> BytesMut {
        let mut state = self.lock();
        state.writer_sleeps = true;
        let open = state.open_bytes();
        state.taken += open as u64;
        let bytes = state.buffer.split_to(open);
        state.count(&self.total);
        bytes
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        let counted = self.lock().counted_bytes;
        self.total.bytes.fetch_sub(counted, Ordering::Relaxed);
    }
}

#[cfg(test)]
impl Output {
    /// An output that shares its total with no other.
    pub(crate) fn alone(high_bytes: usize, direct: Option<Arc<dyn Direct>>) -> Self {
        Self::new(high_bytes, Arc::new(OutputTotal::new(usize::MAX)), direct)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LARGE: usize = OUTPUT_BYTES_FREE + 1;

    fn offer(output: &Output, bytes: usize) -> bool {
        let packet = |out: &mut BytesMut| out.resize(out.len() + bytes, 0);
        output.offer(Barrier::NONE, bytes, packet).is_some()
    }

    #[test]
    fn full_total_refuses_large_packets_on_every_connection() {
        let total = Arc::new(OutputTotal::new(2 * LARGE));
        let output = || Output::new(1 << 20, total.clone(), None);
        let (silent, reader) = (output(), output());
        assert!(offer(&silent, LARGE) && offer(&silent, LARGE));
        assert!(silent.blocks_others() && !reader.blocks_others());
        assert!(!offer(&silent, 1));
        assert!(!reader.has_room(LARGE) && !offer(&reader, LARGE));
        assert!(
            offer(&reader, OUTPUT_BYTES_FREE),
            "small ones are not counted"
        );
        assert!(!offer(&reader, 1));
        reader.drain();
        assert!(offer(&reader, OUTPUT_BYTES_FREE));
        reader.drain();
        drop(silent);
        assert!(offer(&reader, LARGE));
        reader.drain();
        assert_eq!(total.bytes.load(Ordering::Relaxed), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn writer_retries_packets_that_the_total_refused() {
        let total = Arc::new(OutputTotal::new(LARGE));
        let output = || Output::new(1 << 20, total.clone(), None);
        let (silent, reader) = (output(), output());
        assert!(offer(&silent, LARGE) && !offer(&reader, LARGE));
        let mut chunk = BytesMut::new();
        assert_eq!(reader.take(&mut chunk).await, Work::Refill);
        assert!(reader.written(&mut chunk), "the core must offer it again");
        silent.drain();
        assert!(offer(&reader, LARGE));
        assert_eq!(reader.take(&mut chunk).await, Work::Write);
        assert_eq!(chunk.len(), LARGE);
        assert_eq!(
            total.bytes.load(Ordering::Relaxed),
            LARGE,
            "counted until it is written"
        );
        assert!(!reader.written(&mut chunk));
        assert_eq!(total.bytes.load(Ordering::Relaxed), 0);
    }
}
